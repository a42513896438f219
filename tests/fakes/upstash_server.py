"""The Upstash REST protocol on loopback, over a LocalCache, with faults that can be switched while it runs.

It runs in the caller's event loop and speaks HTTP by hand, since half of its
faults are things a web framework would not do.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from enum import Enum
from typing import Any, Self

from warmstart.errors import CacheUnavailable
from warmstart.local_cache import LocalCache


class Mode(Enum):
    OK = "as Upstash"
    BASE64 = "every string in base64, OK too, as serverless-redis-http does"
    BASE64_UPSTASH = "every string in base64, but not OK"
    SLOW = "answers after `delay_s`"
    ERROR_500 = "500 with a problem in JSON"
    HTML = "200 with a page"
    TOO_MANY = "429"
    REDIRECT = "302"
    NOT_JSON = "200 with half a JSON document"
    DEEP = "200 with JSON nested 100,000 deep"
    WRONG_SHAPE = "a single result where a list is due"
    WRONG_COUNT = "one result too few"
    WRONG_ENTRY = "entries without result or error"
    WRONG_TYPE = "objects and infinities as results"
    NO_PONG = "another answer to PING"
    COMMAND_ERROR = "an error for the last command"
    RESET = "closes with a reset before it answers"
    RESET_MID_BODY = "closes with a reset in the middle of the body"
    ENDLESS = "a body without an end"


class UpstashServer:
    """`async with UpstashServer() as server`: `url`, `token`; set `mode` at any time."""

    def __init__(self, *, delay_s: float = 1.0) -> None:
        self.token = "a-token"
        self.delay_s = delay_s
        self.mode = Mode.OK
        self.cache = LocalCache()
        self.requests: list[tuple[dict[str, str], list[list[Any]]]] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    @property
    def commands(self) -> list[list[Any]]:
        """All commands that were sent, without the client's own PINGs."""
        return [command for _, pipeline in self.requests for command in pipeline if command != ["PING"]]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:-2])}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"null")
        if head[0].split(" ")[:2] != ["POST", "/pipeline"]:
            await _send(writer, 404, {"error": "not found"})
        elif headers.get("authorization") != f"Bearer {self.token}":
            await _send(writer, 401, {"error": "Unauthorized"})
        else:
            self.requests.append((headers, body))
            return await self._answer(writer, body)
        return True

    async def _answer(self, writer: asyncio.StreamWriter, commands: list[list[Any]]) -> bool:
        match self.mode:
            case Mode.SLOW:
                await asyncio.sleep(self.delay_s)
            case Mode.ERROR_500:
                return await _send(writer, 500, {"error": "ERR internal"})
            case Mode.HTML:
                return await _send(writer, 200, b"<html>Bad gateway</html>", "text/html")
            case Mode.TOO_MANY:
                return await _send(writer, 429, {"error": "ERR max requests limit exceeded"})
            case Mode.REDIRECT:
                return await _send(writer, 302, {}, extra=f"location: {self.url}/pipeline\r\n")
            case Mode.NOT_JSON:
                return await _send(writer, 200, b'[{"result": ')
            case Mode.DEEP:
                return await _send(writer, 200, b"[" * 100_000)
            case Mode.WRONG_SHAPE:
                return await _send(writer, 200, {"result": "OK"})
            case Mode.WRONG_ENTRY:
                return await _send(writer, 200, [{"value": 1} for _ in commands])
            case Mode.RESET:
                return _reset(writer)
            case Mode.RESET_MID_BODY:
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n[{"result"')
                await writer.drain()
                return _reset(writer)
            case Mode.ENDLESS:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                while True:
                    writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
                    await writer.drain()
        return await _send(writer, 200, self._results(commands))

    def _results(self, commands: list[list[Any]]) -> list[dict[str, Any]]:
        results = [self._execute(command) for command in commands]
        if self.mode is Mode.WRONG_COUNT:
            results.pop()
        elif self.mode is Mode.COMMAND_ERROR:
            results[-1] = {"error": "OOM command not allowed when used memory > 'maxmemory'."}
        elif self.mode is Mode.WRONG_TYPE:
            wrong: list[dict[str, Any]] = [{"result": {}}, {"result": float("inf")}]
            results = [r if r == {"result": "PONG"} else wrong[i % 2] for i, r in enumerate(results)]
        elif self.mode is Mode.NO_PONG:
            results[0] = {"result": "hello"}
        return results

    def _execute(self, command: list[Any]) -> dict[str, Any]:
        try:
            return {"result": self._encoded(self.cache.execute(*command))}
        except CacheUnavailable as error:
            return {"error": str(error)}

    def _encoded(self, value: Any) -> Any:
        if self.mode not in (Mode.BASE64, Mode.BASE64_UPSTASH):
            return value
        if isinstance(value, list):
            return [self._encoded(part) for part in value]
        if not isinstance(value, str) or (value == "OK" and self.mode is Mode.BASE64_UPSTASH):
            return value
        return base64.b64encode(value.encode()).decode()


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    body: Any,
    media_type: str = "application/json",
    extra: str = "",
) -> bool:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: {media_type}\r\ncontent-length: {len(content)}\r\n{extra}"
    writer.write(head.encode() + b"\r\n" + content)
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> bool:
    # with a linger time of 0 a close is a RST instead of a FIN
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
