"""The application over a fake runtime, as a client sees it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from fakes.memory_api import KEY, FakeRuntime
from warmstart.web.app import create_app

URL = "http://127.0.0.1:8484"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def serving(runtime: FakeRuntime, *, key: str | None = KEY, address: str = "127.0.0.1") -> Iterator[TestClient]:
    """`address` is where requests come from."""
    headers = bearer(key) if key else {}
    app = create_app(runtime.open)
    with TestClient(
        app, URL, headers=headers, client=(address, 50000), raise_server_exceptions=False, follow_redirects=False
    ) as client:
        yield client


@contextmanager
def listening(runtime: FakeRuntime) -> Iterator[str]:
    """The application on a real socket, in a thread of its own; gives the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(runtime.open), log_config=None, access_log=False, proxy_headers=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@asynccontextmanager
async def asgi(runtime: FakeRuntime) -> AsyncIterator[Any]:
    """The application as an ASGI callable with its lifespan running, for httpx's own transport."""
    app = create_app(runtime.open)
    async with app.router.lifespan_context(app) as state:

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"] = dict(state or {})
            await app(scope, receive, send)

        yield call
