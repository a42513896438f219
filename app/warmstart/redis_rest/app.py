"""The endpoint over HTTP: who may ask, what is served, and the shapes of the answers."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import uvicorn
from redis.exceptions import ResponseError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from warmstart.errors import ConfigError
from warmstart.redis_rest.link import Command, RedisLink, RedisUnavailable, Reply
from warmstart.redis_rest.scripts import Scripts

MAX_BODY_BYTES: Final = 8 * 2**20
MAX_COMMANDS: Final = 1_000
MAX_ARGUMENTS: Final = 10_000
MAX_ARGUMENT_BYTES: Final = 2**20
MAX_REQUESTS_AT_ONCE: Final = 128
#: For a request's body to arrive, and for Redis to answer it.
BODY_TIMEOUT_S: Final = 10.0
REDIS_TIMEOUT_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 1.0
#: Longer than clients keep an idle connection, so that it is never us who close one just used again.
KEEPALIVE_S: Final = 75

METHODS: Final = ["GET", "HEAD", "POST", "PUT"]

_ALLOWED: Final = """
PING ECHO TIME DBSIZE
DEL UNLINK EXISTS TOUCH TYPE EXPIRE PEXPIRE EXPIREAT PEXPIREAT EXPIRETIME PEXPIRETIME PERSIST TTL PTTL
GET SET SETEX PSETEX SETNX GETSET GETDEL GETEX GETRANGE STRLEN MGET MSET MSETNX
INCR INCRBY INCRBYFLOAT DECR DECRBY
HGET HSET HMSET HSETNX HMGET HGETALL HDEL HEXISTS HINCRBY HINCRBYFLOAT HKEYS HVALS HLEN HSTRLEN
LPUSH LPUSHX RPUSH RPUSHX LPOP RPOP LRANGE LINDEX LLEN LREM LSET LTRIM LINSERT LPOS
SADD SREM SMEMBERS SISMEMBER SMISMEMBER SCARD SPOP
ZADD ZREM ZCARD ZCOUNT ZINCRBY ZSCORE ZMSCORE ZRANK ZREVRANK ZRANGE ZREVRANGE ZRANGEBYSCORE
ZREVRANGEBYSCORE ZREMRANGEBYRANK ZREMRANGEBYSCORE ZPOPMIN ZPOPMAX
EVAL EVALSHA EVAL_RO EVALSHA_RO SCRIPT
"""
#: Nothing here blocks, walks the whole keyspace, reaches past this database's data, makes a value longer
#: than its argument (SETBIT at 2^32 would be 512 MB) or an answer longer than the data (SRANDMEMBER).
ALLOWED: Final = frozenset(_ALLOWED.split())
ALLOWED_SCRIPT: Final = frozenset({"LOAD", "EXISTS"})


class Refused(Exception):
    """Answered with this status and `{"error": …}`."""

    def __init__(self, status: int, error: str) -> None:
        self.status = status
        self.error = error
        super().__init__(error)


class Endpoint:
    def __init__(self, redis_url: str, token: str, timeout_s: float) -> None:
        if not token:
            raise ConfigError(["UPSTASH_REDIS_REST_TOKEN is not set: the endpoint needs a token to ask for"])
        self.redis = RedisLink(redis_url, timeout_s)
        self._token = token.encode()
        self._scripts = Scripts()
        self._running = 0

    async def health(self, request: Request) -> JSONResponse:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.redis.exchange([(b"PING",)])
        except (RedisUnavailable, TimeoutError):
            return JSONResponse({"status": "redis-unavailable"}, 503)
        return JSONResponse({"status": "ok"})

    async def serve(self, request: Request) -> JSONResponse:
        if self._running >= MAX_REQUESTS_AT_ONCE:
            return _refusal(Refused(503, f"ERR more than {MAX_REQUESTS_AT_ONCE} requests at once"))
        self._running += 1
        try:
            return await self._serve(request)
        except Refused as refused:
            return _refusal(refused)
        except RedisUnavailable as error:
            return _refusal(Refused(504 if error.timed_out else 503, f"ERR {error}"))
        finally:
            self._running -= 1

    async def _serve(self, request: Request) -> JSONResponse:
        if request.method not in METHODS:
            raise Refused(405, f"ERR method {request.method} is not served; use one of {', '.join(METHODS)}")
        query = _query(request)
        self._authenticate(request, query)
        if request.headers.get("upstash-response-format", "json").lower() != "json":
            raise Refused(400, "ERR Upstash-Response-Format can only be json here")
        in_base64 = request.headers.get("upstash-encoding", "").lower() == "base64"
        path = [unquote_to_bytes(part) for part in request.scope["raw_path"].lstrip(b"/").split(b"/")]
        body = await _body(request)
        if path in ([b"pipeline"], [b"multi-exec"]):
            if request.method not in ("POST", "PUT"):
                raise Refused(405, "ERR pipelines and transactions are sent by POST")
            run = self._pipeline if path == [b"pipeline"] else self._transaction
            return JSONResponse(await run(_commands(body), in_base64))
        if path == [b""]:
            command = _command(_json(body))
        else:
            command = tuple(path + ([body] if body else []) + _extra_arguments(query))
        result = await self._single(command, in_base64)
        return JSONResponse(result, 400 if "error" in result else 200)

    def _authenticate(self, request: Request, query: list[tuple[bytes, bytes]]) -> None:
        scheme, _, given = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            given = next((value for name, value in query if name == b"_token"), b"")
        if not hmac.compare_digest(given.strip(), self._token):
            raise Refused(401, "Unauthorized")

    async def _single(self, command: Command, in_base64: bool) -> dict[str, Any]:
        if fault := _fault(command):
            return {"error": fault}
        (reply,) = await self._run([command])
        return self._answer(command, reply, in_base64)

    async def _pipeline(self, commands: list[Command], in_base64: bool) -> list[dict[str, Any]]:
        faults = [_fault(command) for command in commands]
        served = [c for c, fault in zip(commands, faults, strict=True) if not fault]
        replies = iter(await self._run(served) if served else [])
        return [
            {"error": fault} if fault else self._answer(command, next(replies), in_base64)
            for command, fault in zip(commands, faults, strict=True)
        ]

    async def _transaction(self, commands: list[Command], in_base64: bool) -> list[dict[str, Any]]:
        for command in commands:
            if fault := _fault(command):
                raise Refused(400, f"EXECABORT Transaction discarded because of: {fault}")
        *queued, results = await self._run([(b"MULTI",), *commands, (b"EXEC",)])
        if not isinstance(results, list):
            cause = next((reply for reply in queued if isinstance(reply, ResponseError)), results)
            raise Refused(400, f"EXECABORT Transaction discarded because of: {_text(cause)}")
        return [self._answer(c, result, in_base64) for c, result in zip(commands, results, strict=True)]

    async def _run(self, commands: Sequence[Command]) -> list[Reply]:
        """Each command's reply, scripts put into the form that Redis takes."""
        if keys := self._scripts.unknown(commands):
            (known,) = await self.redis.exchange([(b"MGET", *keys)])
            self._scripts.remember(keys, known)
        adapted = [self._scripts.adapt(command) for command in commands]
        learned = self._scripts.learned()
        replies = await self.redis.exchange([*learned, *adapted])
        return replies[len(learned) :]

    def _answer(self, command: Command, reply: Reply, in_base64: bool) -> dict[str, Any]:
        reply = self._scripts.reply(command, reply)
        if isinstance(reply, ResponseError):
            return {"error": _text(reply)}
        # Upstash leaves a plain OK as it is
        return {"result": "OK" if reply == b"OK" else _value(reply, in_base64)}


def _refusal(refused: Refused) -> JSONResponse:
    return JSONResponse({"error": refused.error}, refused.status)


def _query(request: Request) -> list[tuple[bytes, bytes]]:
    # by way of latin-1, so that any byte survives
    text = request.scope["query_string"].decode("latin-1")
    pairs = parse_qsl(text, keep_blank_values=True, encoding="latin-1")
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def _extra_arguments(query: list[tuple[bytes, bytes]]) -> list[bytes]:
    """`?EX=100&NX` after the value in the body."""
    return [part for name, value in query if name != b"_token" for part in (name, value) if part]


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise Refused(413, f"ERR max request size exceeded. Limit: {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise Refused(408, f"ERR the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except ClientDisconnect:
        raise Refused(400, "ERR the connection ended before the body did") from None
    return bytes(body)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _json(body: bytes) -> Any:
    try:
        # numbers stay as they are written: 1.0 is not 1, and 2^63 not a float
        return json.loads(body, parse_int=str, parse_float=str, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Refused(400, "ERR failed to parse the body: it is not JSON") from None


def _commands(body: bytes) -> list[Command]:
    value = _json(body)
    if not isinstance(value, list) or not value:
        raise Refused(400, 'ERR the body must be a JSON array of commands, such as [["GET", "key"]]')
    if len(value) > MAX_COMMANDS:
        raise Refused(413, f"ERR at most {MAX_COMMANDS} commands a request; this has {len(value)}")
    return [_command(part) for part in value]


def _command(value: Any) -> Command:
    if not isinstance(value, list) or not value:
        raise Refused(400, 'ERR a command must be a JSON array, such as ["SET", "key", "value"]')
    return tuple(_argument(part) for part in value)


def _argument(value: Any) -> bytes:
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if not isinstance(value, str):
        raise Refused(400, "ERR an argument must be a string, a number or a boolean")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Refused(400, "ERR an argument holds a lone surrogate, which is no text") from None


def _fault(command: Command) -> str | None:
    """Why this command is not served."""
    name = _text(command[0])[:64].upper()
    if name not in ALLOWED:
        return f"ERR Command is not available: '{name}'. Only data commands and scripts are served here"
    if name == "SCRIPT" and (len(command) < 2 or _text(command[1]).upper() not in ALLOWED_SCRIPT):
        return "ERR Command is not available: of SCRIPT, only LOAD and EXISTS are served here"
    if len(command) > MAX_ARGUMENTS:
        return f"ERR at most {MAX_ARGUMENTS} arguments; this command has {len(command)}"
    if (longest := max(map(len, command))) > MAX_ARGUMENT_BYTES:
        return f"ERR an argument has at most {MAX_ARGUMENT_BYTES} bytes; one here has {longest}"
    return None


def _value(reply: Reply, in_base64: bool) -> Any:
    if isinstance(reply, list):
        return [_value(part, in_base64) for part in reply]
    if isinstance(reply, bytes) and in_base64:
        return base64.b64encode(reply).decode()
    return _text(reply) if isinstance(reply, bytes | ResponseError) else reply


def _text(reply: Reply) -> str:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    # redis-py takes the code off the front of an error's text; clients look for it ("NOSCRIPT …")
    code = getattr(reply, "status_code", None)
    return f"{code} {reply}" if code else str(reply)


def create_app(redis_url: str, token: str, *, timeout_s: float = REDIS_TIMEOUT_S) -> Starlette:
    """The endpoint as an ASGI app; Redis need not be there yet.

    ConfigError without a token or with a URL that is none.
    """
    endpoint = Endpoint(redis_url, token, timeout_s)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await endpoint.redis.close()

    routes = [
        Route("/health", endpoint.health, methods=["GET"]),
        Route("/healthz", endpoint.health, methods=["GET"]),
        # no `methods`: what is not served gets its 405 in Upstash's shape
        Route("/{path:path}", _Everything(endpoint)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class _Everything:
    """An ASGI app, since a route of a function answers other methods by itself, in plain text."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._endpoint.serve(Request(scope, receive))
        await response(scope, receive, send)


def run(host: str, port: int, redis_url: str, token: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    uvicorn.run(
        create_app(redis_url, token),
        host=host,
        port=port,
        # an access log would show the token of `?_token=`
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=5,
    )
