"""MCP over stdio, for one client on this machine."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final

import anyio
import anyio.from_thread
import anyio.lowlevel
from mcp.server.stdio import stdio_server
from mcp.shared._stream_protocols import ReadStream, WriteStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from warmstart.mcp_server.json_text import mended
from warmstart.mcp_server.server import build_server
from warmstart.memory import MemoryAPI

logger = logging.getLogger(__name__)

#: A line longer than this ends the session; the largest valid message is far smaller.
MAX_LINE_BYTES: Final = 16 * 1_048_576
#: How long answers may still be on their way after the client closed its end.
DRAIN_S: Final = 5
_CHUNK: Final = 65_536
_STDIN: Final = 0


async def run_stdio(api: MemoryAPI) -> None:
    """Serve until the client closes stdin, or SIGINT or SIGTERM comes.

    Only JSON-RPC reaches stdout: the transport points fd 1 at stderr and keeps
    the real one for itself. A write under way is finished before this returns;
    a second signal ends the process at once.
    """
    server = build_server(lambda ctx: api)
    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(_cancel_on_signal, tg.cancel_scope)
            lines: Any = _lines(_STDIN)
            async with stdio_server(stdin=lines) as (read, write):
                pending = _Pending()
                incoming, outgoing = _Incoming(read, pending), _Outgoing(write, pending)
                await server.run(incoming, outgoing, server.create_initialization_options())
            tg.cancel_scope.cancel()
    except* (BrokenPipeError, ConnectionResetError):
        logger.info("the client closed its end before the last answer")


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break
    scope.cancel()


async def _lines(fd: int) -> AsyncIterator[str]:
    """Lines of `fd`, read by a daemon thread: one blocked in read() can't be cancelled, only left behind."""
    loop_token = anyio.lowlevel.current_token()
    send, receive = anyio.create_memory_object_stream[bytes](0)
    threading.Thread(target=_pump, args=(fd, send, loop_token), daemon=True, name="stdin").start()
    rest = bytearray()
    async with receive:
        async for chunk in receive:
            rest += chunk
            *lines, tail = rest.split(b"\n")
            rest = tail
            for line in lines:
                if line.strip():
                    yield mended(bytes(line)).decode("utf-8", errors="replace")
            if len(rest) > MAX_LINE_BYTES:
                logger.error("a message is longer than %d bytes: ending the session", MAX_LINE_BYTES)
                return


def _pump(fd: int, send: Any, token: Any) -> None:
    try:
        while chunk := os.read(fd, _CHUNK):
            anyio.from_thread.run(send.send, chunk, token=token)
        anyio.from_thread.run_sync(send.close, token=token)
    except (OSError, RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        # stdin is gone, or the loop that wanted its lines
        pass


class _Pending:
    """Requests that have no answer yet."""

    def __init__(self) -> None:
        self._ids: set[int | str] = set()
        self._none = anyio.Event()

    def came(self, item: SessionMessage | Exception) -> None:
        message = item.message if isinstance(item, SessionMessage) else None
        if isinstance(message, JSONRPCRequest):
            self._ids.add(message.id)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._answered((message.params or {}).get("requestId"))

    def went(self, item: SessionMessage) -> None:
        if isinstance(item.message, JSONRPCResponse | JSONRPCError):
            self._answered(item.message.id)

    def _answered(self, request_id: Any) -> None:
        self._ids.discard(request_id)
        if not self._ids:
            self._none.set()

    async def drain(self) -> None:
        """Until each request has its answer: a script that pipes its requests in wants them all."""
        with anyio.move_on_after(DRAIN_S):
            while self._ids:
                self._none = anyio.Event()
                await self._none.wait()


class _Incoming:
    def __init__(self, inner: ReadStream[SessionMessage | Exception], pending: _Pending) -> None:
        self._inner, self._pending = inner, pending

    async def receive(self) -> SessionMessage | Exception:
        try:
            item = await self._inner.receive()
        except anyio.EndOfStream:
            await self._pending.drain()
            raise
        self._pending.came(item)
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> _Incoming:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> _Incoming:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


class _Outgoing:
    def __init__(self, inner: WriteStream[SessionMessage], pending: _Pending) -> None:
        self._inner, self._pending = inner, pending

    async def send(self, item: SessionMessage, /) -> None:
        await self._inner.send(item)
        self._pending.went(item)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> _Outgoing:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
