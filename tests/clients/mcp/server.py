"""The MCP server over an in-memory tenant: `server.py stdio`, or `server.py http` on a free port.

Over HTTP it prints one line, `<url> <key>`, and asks for that key as the service does.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakes.memory_api import KEY, FakeRuntime, InMemoryAPI
from warmstart.errors import Unauthorized
from warmstart.mcp_server import run_stdio, streamable_http


def guarded(app: Any, runtime: FakeRuntime) -> Any:
    """`app` at /mcp and /mcp/ behind the bearer keys of `runtime`."""

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        key = dict(scope["headers"]).get(b"authorization", b"").decode().removeprefix("Bearer ")
        try:
            user = await runtime.keys.identify(key)
        except Unauthorized:
            return await refuse(send, 401, (b"www-authenticate", b'Bearer realm="warmstart"'))
        if scope["path"] not in ("/mcp", "/mcp/"):
            return await refuse(send, 404)
        return await app({**scope, "user": user}, receive, send)

    return guard


async def refuse(send: Any, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def serve_http() -> None:
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    runtime = FakeRuntime()
    async with streamable_http(runtime) as app:
        config = uvicorn.Config(guarded(app, runtime), lifespan="off", log_level="warning", timeout_graceful_shutdown=2)
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp {KEY}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])


async def serve_stdio() -> None:
    await run_stdio(InMemoryAPI())


if __name__ == "__main__":
    anyio.run(serve_stdio if sys.argv[1] == "stdio" else serve_http)
