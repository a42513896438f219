"""Stands in for the image of Text Embeddings Inference 1.9: its API, limits, settings and error bodies.

The model is the same (multilingual-e5-small), at 4 bits. It puts e5's prefixes on by itself, so
those that the client put there are taken off first. Faults are switched on at a second port that
the real one does not have:

    PUT    :9000/fault     {"kind": "slow", "seconds": 3}   (kinds: see FAULTS)
    DELETE :9000/fault
    GET    :9000/requests  the last bodies, as they came over the wire
"""

from __future__ import annotations

import asyncio
import base64
import collections
import hmac
import ipaddress
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from warmstart.local_embedder_server import MAX_CHARS, Model, split_prefix

MAX_INPUT_LENGTH: Final = 512
ADMIN_PORT: Final = 9000
EVERYWHERE: Final = "0.0.0.0"  # noqa: S104
KEPT_REQUESTS: Final = 200
THREADS: Final = 2
OPEN_PATHS: Final = frozenset({"/", "/health", "/ping", "/metrics", "/info"})
FAULTS: Final = frozenset({"slow", "wrong-width", "html", "429", "500", "reset", "memory"})
#: Taken at once and again, until the container's limit is passed.
GREED_BYTES: Final = 32 << 20
Handler = Callable[[Request], Awaitable[Response]]


class Failure(Exception):
    def __init__(self, status: int, kind: str, message: str) -> None:
        self.status, self.kind, self.message = status, kind, message


class Settings:
    """The real one's environment, its defaults included."""

    def __init__(self) -> None:
        env = os.environ
        self.model_id = env.get("MODEL_ID", "")
        self.revision = env.get("REVISION")
        self.batch = int(env.get("MAX_CLIENT_BATCH_SIZE", "32"))
        self.batch_tokens = int(env.get("MAX_BATCH_TOKENS", "16384"))
        self.concurrent = int(env.get("MAX_CONCURRENT_REQUESTS", "512"))
        self.payload = int(env.get("PAYLOAD_LIMIT", "2000000"))
        self.truncate = _boolean("AUTO_TRUNCATE", default=True)
        self.api_key = env.get("API_KEY", "")
        self.port = int(env.get("PORT", "80"))
        try:
            self.host = str(ipaddress.ip_address(env.get("HOSTNAME", EVERYWHERE)))
        except ValueError:
            self.host = EVERYWHERE
        if not Path(self.model_id).is_dir():
            offline = "offline" if env.get("HF_HUB_OFFLINE") == "1" else "no way to the hub from here"
            sys.exit(f"Error: Could not download model artifacts: {self.model_id!r} is no folder ({offline})")
        if not (Path(self.model_id) / "config.json").is_file():
            sys.exit("Error: `config.json` not found")


def _boolean(name: str, *, default: bool) -> bool:
    value = os.environ.get(name)
    if value not in (None, "true", "false"):
        sys.exit(f"error: invalid value {value!r} for {name} [possible values: true, false]")
    return default if value is None else value == "true"


class Weights(Model):
    def tokens(self, prefixed: str) -> int:
        is_query, text = split_prefix(prefixed)
        # the limit is passed long before
        return int(self._model.token_count(text.replace("\0", "")[:MAX_CHARS], is_query))


class StandIn:
    def __init__(self, settings: Settings, weights: Weights) -> None:
        self._settings, self._weights = settings, weights
        self._permits = settings.concurrent
        self._pool = ThreadPoolExecutor(THREADS)
        self.fault: dict[str, Any] = {}
        self.requests: collections.deque[Any] = collections.deque(maxlen=KEPT_REQUESTS)
        self._served = self._failed = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/embeddings", self._guarded(self.openai, _openai_error), methods=["POST"]),
            Route("/embeddings", self._guarded(self.openai, _openai_error), methods=["POST"]),
            Route("/embed", self._guarded(self.native, _native_error), methods=["POST"]),
            Route("/info", self.info),
            Route("/metrics", self.metrics),
            *(Route(path, self.health) for path in ("/", "/health", "/ping")),
        ]
        return Starlette(routes=routes)

    def admin(self) -> Starlette:
        async def set_fault(request: Request) -> Response:
            wanted = await request.json() if request.method == "PUT" else {}
            if wanted and wanted.get("kind") not in FAULTS:
                return PlainTextResponse(f"kind is one of {sorted(FAULTS)}", 422)
            self.fault = wanted
            if wanted.get("kind") == "memory":
                threading.Thread(target=_take_all_memory, daemon=True).start()
            return Response(status_code=204)

        async def seen(request: Request) -> Response:
            return JSONResponse(list(self.requests))

        return Starlette(routes=[
            Route("/fault", set_fault, methods=["PUT", "DELETE"]),
            Route("/requests", seen),
        ])  # fmt: skip

    # -- what the real one answers

    async def health(self, request: Request) -> Response:
        return Response()

    async def info(self, request: Request) -> Response:
        s = self._settings
        return JSONResponse({
            "model_id": s.model_id, "model_sha": s.revision, "model_dtype": "int4",
            "model_type": {"embedding": {"pooling": "mean"}}, "max_concurrent_requests": s.concurrent,
            "max_input_length": MAX_INPUT_LENGTH, "max_batch_tokens": s.batch_tokens, "tokenization_workers": THREADS,
            "max_batch_requests": None, "max_client_batch_size": s.batch, "auto_truncate": s.truncate,
            "version": "stand-in", "sha": None, "docker_label": "stand-in",
        })  # fmt: skip

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            f"# TYPE te_request_count counter\nte_request_count {self._served + self._failed}\n"
            f"# TYPE te_request_success counter\nte_request_success {self._served}\n"
            f"# TYPE te_request_failure counter\nte_request_failure {self._failed}\n"
        )

    async def openai(self, request: Request, body: dict[str, Any]) -> Response:
        encoding = body.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            return _not_deserialized(f"encoding_format: unknown variant `{encoding}`")
        vectors, tokens = await self._embed(_texts(body.get("input")), self._settings.truncate)
        data = [
            {"object": "embedding", "embedding": _encoded(v, encoding == "base64"), "index": i}
            for i, v in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self._settings.model_id, "usage": usage})

    async def native(self, request: Request, body: dict[str, Any]) -> Response:
        truncate = body.get("truncate")
        vectors, _ = await self._embed(
            _texts(body.get("inputs")), self._settings.truncate if truncate is None else truncate
        )
        return JSONResponse([_encoded(v, False) for v in vectors])

    async def _embed(self, texts: list[str], truncate: bool) -> tuple[list[Any], int]:
        if not texts or not all(texts):
            raise Failure(400, "Empty", "`inputs` cannot be empty")
        if len(texts) > self._settings.batch:
            limit = self._settings.batch
            raise Failure(422, "Validation", f"batch size {len(texts)} > maximum allowed batch size {limit}")
        if self._permits < len(texts):
            raise Failure(429, "Overloaded", "Model is overloaded")
        self._permits -= len(texts)
        try:
            loop = asyncio.get_running_loop()
            if not truncate:
                for text in texts:
                    count = await loop.run_in_executor(self._pool, self._weights.tokens, text)
                    if count > MAX_INPUT_LENGTH:
                        limit = f"`inputs` must have less than {MAX_INPUT_LENGTH} tokens. Given: {count}"
                        raise Failure(422, "Validation", f"Input validation error: {limit}")
            done = await asyncio.gather(
                *(loop.run_in_executor(self._pool, self._weights.embed, text) for text in texts)
            )
        finally:
            self._permits += len(texts)
        return [vector for vector, _ in done], sum(count for _, count in done)

    # -- around it: the key, the body's limits, the faults

    def _guarded(
        self, handler: Callable[[Request, dict[str, Any]], Awaitable[Response]], error: Callable[[Failure], Response]
    ) -> Handler:
        async def serve(request: Request) -> Response:
            key = self._settings.api_key
            given = request.headers.get("authorization", "")
            if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return Response(status_code=401)
            body = await self._body(request)
            if isinstance(body, Response):
                return body
            self.requests.append(body)
            try:
                response = await self._with_fault(request, body, handler)
            except Failure as failure:
                self._failed += 1
                return error(failure)
            self._served += 1
            return response

        return serve

    async def _body(self, request: Request) -> dict[str, Any] | Response:
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > self._settings.payload:
                return PlainTextResponse("Failed to buffer the request body: length limit exceeded", 413)
        if not request.headers.get("content-type", "").startswith("application/json"):
            return PlainTextResponse("Expected request with `Content-Type: application/json`", 415)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return PlainTextResponse("Failed to parse the request body as JSON", 400)
        return body if isinstance(body, dict) else _not_deserialized("expected an object")

    async def _with_fault(self, request: Request, body: dict[str, Any], handler: Any) -> Response:
        fault = self.fault
        match fault.get("kind"):
            case "slow":
                await asyncio.sleep(float(fault.get("seconds", 3)))
            case "html":
                return HTMLResponse("<html><body><h1>Welcome</h1></body></html>")
            case "429":
                raise Failure(429, "Overloaded", "Model is overloaded")
            case "500":
                raise Failure(500, "Unhealthy", "Internal error")
            case "reset":
                return _Cut()
            case "wrong-width":
                answer = json.loads((await handler(request, {**body, "encoding_format": "float"})).body)
                for item in answer["data"]:
                    item["embedding"] = item["embedding"][:-1]
                return JSONResponse(answer)
        return await handler(request, body)  # type: ignore[no-any-return]


def _take_all_memory() -> None:
    taken = []
    while True:
        taken.append(bytearray(b"x") * GREED_BYTES)


class _Cut(Response):
    """Half of an answer, and then the end of the connection."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"4096")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"object":"list","data":[', "more_body": True})


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise Failure(422, "Validation", "the stand-in takes a text or a list of texts, no token ids")


def _encoded(vector: Any, as_base64: bool) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else [float(x) for x in vector]


def _not_deserialized(why: str) -> Response:
    return PlainTextResponse(f"Failed to deserialize the JSON body into the target type: {why}", 422)


def _openai_error(failure: Failure) -> Response:
    return JSONResponse({"message": failure.message, "code": failure.status, "type": failure.kind}, failure.status)


def _native_error(failure: Failure) -> Response:
    return JSONResponse({"error": failure.message, "error_type": failure.kind}, failure.status)


async def serve(settings: Settings) -> None:
    # both ports open only now, with the model warm
    stand_in = StandIn(settings, Weights())
    main = uvicorn.Server(uvicorn.Config(
        stand_in.app(), host=settings.host, port=settings.port, log_level="warning", timeout_graceful_shutdown=5,
    ))  # fmt: skip
    admin = uvicorn.Server(uvicorn.Config(
        stand_in.admin(), host=EVERYWHERE, port=ADMIN_PORT, log_level="warning", timeout_graceful_shutdown=1,
    ))  # fmt: skip
    beside = asyncio.create_task(admin._serve())
    print(json.dumps({"level": "INFO", "message": "Ready", "stand_in": True}), flush=True)
    await main.serve()
    admin.should_exit = True
    await beside


if __name__ == "__main__":
    asyncio.run(serve(Settings()))
