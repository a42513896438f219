"""MCP over streamable HTTP, inside the service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from warmstart.config import Settings
from warmstart.errors import MethodNotAllowed, TenantAssertion
from warmstart.mcp_server.json_text import mended
from warmstart.mcp_server.server import Context, build_server
from warmstart.memory import MemoryAPI

#: A larger message is answered 413.
MAX_MESSAGE_BYTES: Final = 1_048_576
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Runtime(Protocol):
    @property
    def settings(self) -> Settings: ...
    @property
    def metrics(self) -> Any: ...
    def service(self, user_id: str) -> MemoryAPI: ...


@asynccontextmanager
async def streamable_http(runtime: Runtime) -> AsyncIterator[ASGIApp]:
    """The ASGI app for `/mcp`: POST only, no sessions, both protocol generations.

    Whoever mounts it has authenticated the request: `scope["user"]` is the Identity.
    """

    def api_for(ctx: Context | None) -> MemoryAPI:
        return runtime.service(ctx.request.scope["user"].user_id)  # type: ignore[union-attr] # HTTP has a request

    def noted(error: Exception) -> None:
        # over REST the error itself reaches who counts it
        if isinstance(error, TenantAssertion):
            runtime.metrics.tenant_assertion()

    manager = StreamableHTTPSessionManager(
        app=build_server(api_for, noted),
        stateless=True,
        security_settings=_security(runtime.settings),
        max_request_body_size=MAX_MESSAGE_BYTES,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _refuse_method(scope["method"], send)
            return
        await manager.asgi_app(scope, _mended(receive), _unbuffered(send))

    async with manager.run():
        yield app


def _security(settings: Settings) -> TransportSecuritySettings:
    """Host and Origin must be loopback or a configured name, with or without a port."""
    names = [*_LOOPBACK, settings.host, *settings.allowed_hosts]
    hosts = [form for name in names for form in (name, f"{name}:*")]
    origins = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
    return TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=origins)


async def _refuse_method(method: str, send: Send) -> None:
    problem = MethodNotAllowed(f"{method} is not served: there is no session to read or end; use POST")
    headers = [(b"allow", b"POST"), (b"content-type", b"application/problem+json")]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(problem.to_dict()).encode()})


def _mended(receive: Receive) -> Receive:
    """The body in one piece, so that it can be mended; one too large goes on as it is, to be refused."""
    body: bytearray | None = bytearray()

    async def receiving() -> MutableMapping[str, Any]:
        nonlocal body
        while body is not None:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if not more or len(body) > MAX_MESSAGE_BYTES:
                whole, body = bytes(body), None
                return {"type": "http.request", "body": whole if more else mended(whole), "more_body": more}
        return await receive()

    return receiving


def _unbuffered(send: Send) -> Send:
    """Proxies that collect a response before they pass it on would hold back an event stream."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"x-accel-buffering"]
            message = {**message, "headers": [*headers, (b"x-accel-buffering", b"no")]}
        await send(message)

    return sending
