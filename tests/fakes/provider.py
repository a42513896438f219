"""An embedding provider on loopback that can be told, at run time, to misbehave.

    with FakeProvider() as provider:
        embedder = Embedder(settings, cache, base_url=provider.url)
        provider.mode = "nan"

Vectors are sums of one random direction a word, so texts that share words are
similar. It speaks HTTP by itself, since no web framework lets a connection be
cut off in the middle.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import random
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any, Literal, Self

Mode = Literal[
    "ok",  # as asked for: base64 or float
    "floats",  # lists of numbers, whatever was asked for
    "out-of-order",
    "wrong-width",
    "wrong-count",
    "empty",
    "nan",
    "infinite",
    "zero",
    "html",  # with status 200
    "not-json",
    "no-index",
    "huge",  # an endless answer
    "reset",
    "reset-mid-body",
    "status-400",
    "status-401",
    "status-404",
    "status-413",
    "status-422",
    "status-429",
    "status-500",
    "status-503",
]


@functools.lru_cache(maxsize=4096)
def _direction(word: str, dim: int) -> tuple[float, ...]:
    seed = random.Random(hashlib.sha256(word.encode()).digest())
    return tuple(seed.gauss(0, 1) for _ in range(dim))


def vector_of(text: str, dim: int) -> list[float]:
    """The vector, not of unit length, that the provider gives for a text (with its prefix)."""
    words = text.lower().split() or [""]
    return [sum(column) for column in zip(*(_direction(word, dim) for word in words), strict=True)]


@dataclass(frozen=True)
class Received:
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def texts(self) -> list[str]:
        return list(self.body["input"])


class FakeProvider:
    """`mode` and the others may be changed at any time, from any thread."""

    def __init__(self, dim: int = 384) -> None:
        self.dim = dim
        self.mode: Mode = "ok"
        #: Only requests with this in one of their texts meet `mode`; the others are answered.
        self.only_for: str | None = None
        self.delay_s = 0.0
        #: For each text of a request.
        self.delay_each_s = 0.0
        #: Requests are received, and answered once this is false again.
        self.held = False
        self.retry_after: str | None = None
        #: More texts than these in one request are refused with 413.
        self.max_batch = 10_000
        self.requests: list[Received] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """The /v1 base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def texts(self) -> list[str]:
        """Every text received so far, in order."""
        return [text for request in self.requests for text in request.texts]

    def __enter__(self) -> Self:
        self._thread.start()
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def up(self) -> None:
        """Listen (again), on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(5)

    def down(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: the one of asyncio.start_server complains where it is cancelled.
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False where the connection ends."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if not head[0].startswith("POST /v1/embeddings "):
            writer.write(_response(404, b"{}"))
            return True
        request = Received(headers, json.loads(body))
        self.requests.append(request)
        struck = self.only_for is None or any(self.only_for in text for text in request.texts)
        mode: Mode = self.mode if struck else "ok"
        if struck and self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.delay_each_s:
            await asyncio.sleep(self.delay_each_s * len(request.texts))
        while struck and self.held:  # noqa: ASYNC110 - it is let go from another thread
            await asyncio.sleep(0.005)
        return await self._answer(mode, request, writer)

    async def _answer(self, mode: Mode, request: Received, writer: asyncio.StreamWriter) -> bool:
        if mode == "reset":
            _reset(writer)
            return False
        if mode == "reset-mid-body":
            whole = _response(200, self._body(mode, request))
            writer.write(whole[: len(whole) // 2])
            await writer.drain()
            _reset(writer)
            return False
        if mode == "huge":
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
                await writer.drain()
        if len(request.texts) > self.max_batch:
            mode = "status-413"
        if mode.startswith("status-"):
            status = int(mode.removeprefix("status-"))
            writer.write(_response(status, b'{"error": {"message": "no"}}', self.retry_after))
        else:
            writer.write(_response(200, self._body(mode, request)))
        await writer.drain()
        return True

    def _body(self, mode: Mode, request: Received) -> bytes:
        if mode == "html":
            return b"<!doctype html><title>Please log in</title>"
        if mode == "not-json":
            return b'{"data": [{"index": 0, "embed'
        dim = self.dim + 1 if mode == "wrong-width" else self.dim
        as_base64 = request.body.get("encoding_format") == "base64" and mode != "floats"
        data = []
        for index, text in enumerate(request.texts):
            vector = vector_of(text, dim)
            if self.only_for is None or self.only_for in text:
                if mode == "nan":
                    vector[7] = float("nan")
                if mode == "infinite":
                    vector[7] = float("inf")
                if mode == "zero":
                    vector = [0.0] * dim
            encoded = base64.b64encode(struct.pack(f"<{dim}f", *vector)).decode() if as_base64 else vector
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        if mode == "out-of-order":
            data.reverse()
        if mode == "wrong-count":
            data.append(data[0])
        if mode == "empty":
            data = []
        if mode == "no-index":
            data = [{"embedding": item["embedding"]} for item in data]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return json.dumps({"object": "list", "data": data, "model": "fake", "usage": usage}).encode()


def _response(status: int, body: bytes, retry_after: str | None = None) -> bytes:
    extra = f"retry-after: {retry_after}\r\n" if retry_after is not None else ""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """A TCP reset, instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
