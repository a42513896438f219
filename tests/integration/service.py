"""The whole service as its users have it, and switches for everything under it that can fail.

LanceDB and Postgres are the real ones; the embedding provider and the Upstash
endpoint speak their real protocols over real sockets and can be told to
misbehave. Tests that share an `App` keep apart by tenant.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import psycopg
from starlette.types import Receive, Scope, Send

from fakes.provider import FakeProvider
from fakes.upstash_server import UpstashServer
from warmstart.config import Settings
from warmstart.context import count_tokens
from warmstart.errors import EmbeddingError
from warmstart.local_cache import LocalCache
from warmstart.runtime import Runtime, open_runtime
from warmstart.web.app import create_app
from warmstart.worker import Worker

URL = "http://127.0.0.1:8484"
DIM = 16
MISSING = "mem_" + "0" * 26

_numbers = itertools.count()

T = TypeVar("T")

with warnings.catch_warnings():
    # the tokenizer reads its data in a way that the standard library deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    count_tokens("")


def settings_for(home: Path, dsn: str, provider: FakeProvider | None, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "warmstart_home": home,
        "database_url": dsn,
        "openai_base_url": provider.url if provider else "http://127.0.0.1:9/v1",
        "embed_model": "test-model",
        "embedding_dim": DIM,
    }
    return Settings.model_validate(values | changes)


async def fresh_database(server_dsn: str) -> str:
    """An empty database on the server; it goes with the server."""
    name = f"test_{uuid4().hex}"
    async with await psycopg.AsyncConnection.connect(server_dsn, autocommit=True) as conn:
        await conn.execute(f"CREATE DATABASE {name}")
    return server_dsn.replace("/postgres?", f"/{name}?")


@dataclass
class Tenant:
    """One tenant and its key, over REST and over MCP."""

    app: App
    user_id: str
    key: str
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        return _body(await self.http.post(path, json=body), status)

    async def get(self, path: str, status: int = 200, **params: Any) -> Any:
        return _body(await self.http.get(path, params=params), status)

    async def patch(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        return _body(await self.http.patch(path, json=body, headers=headers), status)

    async def delete(self, path: str, status: int = 204, **params: Any) -> Any:
        return _body(await self.http.delete(path, params=params), status)

    async def save(self, content: str, status: int = 201, **fields: Any) -> Any:
        return await self.post("/v1/memories", {"content": content, **fields}, status)

    async def batch(self, *memories: Any) -> list[str]:
        """The ids of contents, or of whole objects."""
        items = [{"content": m} if isinstance(m, str) else m for m in memories]
        answer = await self.post("/v1/memories/batch", {"memories": items})
        return [r["id"] for r in answer["results"]]

    async def search(self, query: str, status: int = 200, **fields: Any) -> Any:
        return await self.post("/v1/search", {"query": query, **fields}, status)

    async def found(self, query: str, **fields: Any) -> list[str]:
        return [hit["id"] for hit in (await self.search(query, **fields))["hits"]]

    async def page(self, **params: Any) -> list[str]:
        return [m["id"] for m in (await self.get("/v1/memories", **params))["memories"]]

    async def mcp(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The result of a tool call, as JSON."""
        return await self.rpc("tools/call", {"name": tool, "arguments": arguments})

    async def rpc(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """The answer's `result`, or its `error`."""
        response = await self.http.post(
            "/mcp",
            json={"jsonrpc": "2.0", "id": 1, "method": method, "params": params},
            headers={"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-11-25"},
        )
        assert response.status_code == 200, response.text
        text = response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            text = next(line[6:] for line in text.splitlines() if line.startswith("data: {"))
        message = json.loads(text)
        return dict(message.get("result") or message["error"])


def _body(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, (response.status_code, response.text[:1000])
    return response.json() if response.content else None


@dataclass
class App:
    runtime: Runtime
    asgi: Callable[[Scope, Receive, Send], Awaitable[None]]
    provider: FakeProvider | None = None
    upstash: UpstashServer | None = None
    _clients: list[httpx.AsyncClient] = field(default_factory=list)

    def client(self, key: str | None = None, address: str = "127.0.0.1") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.asgi, client=(address, 50_000))
        client = httpx.AsyncClient(transport=transport, base_url=URL, headers=headers, timeout=30)
        self._clients.append(client)
        return client

    async def tenant(self, *, unlimited: bool = True) -> Tenant:
        bookkeeping = self.runtime.bookkeeping
        user_id = await bookkeeping.create_tenant(f"tenant {next(_numbers)}")
        key = await bookkeeping.create_key(user_id, "test", unlimited=unlimited)
        return Tenant(self, user_id, key, self.client(key))

    def same_tenant(self, tenant: Tenant) -> Tenant:
        """`tenant` as this application, over the same data, serves it."""
        return Tenant(self, tenant.user_id, tenant.key, self.client(tenant.key))

    async def embed_all(self) -> None:
        """What the worker does with its queue, until nothing waits; an open circuit is waited for, as it does."""
        worker = Worker(self.runtime)

        async def nothing_waits() -> bool:
            try:
                return not await worker.backfill()
            except EmbeddingError as error:
                if error.reason != "circuit-open":
                    raise
                return False

        await until(nothing_waits, 60, every_s=0)

    async def written_behind(self) -> None:
        """Waits until Postgres has what is written to it behind the answers."""

        async def nothing_waits() -> bool:
            return self.runtime.bookkeeping.waiting == 0

        await until(nothing_waits)

    async def forget(self) -> None:
        """The cache as after a loss."""
        cache = self.upstash.cache if self.upstash else self.runtime.cache
        assert isinstance(cache, LocalCache)
        await cache.close()

    async def compact(self) -> None:
        """As the worker would; without it each save makes every later call slower."""
        if (await self.runtime.maintenance.state()).small_fragments > 30:
            await self.runtime.maintenance.optimize()

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.metrics.registry.get_sample_value(f"warmstart_{name}", labels) or 0.0

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


@asynccontextmanager
async def running(
    settings: Settings, provider: FakeProvider | None = None, upstash: UpstashServer | None = None
) -> AsyncIterator[App]:
    """The service of `settings`, without a worker."""
    async with open_runtime(settings) as runtime:
        app = create_app(lambda: nullcontext(runtime))
        async with app.router.lifespan_context(app) as state:

            async def call(scope: Scope, receive: Receive, send: Send) -> None:
                await app({**scope, "state": dict(state or {})}, receive, send)

            made = App(runtime, call, provider, upstash)
            try:
                yield made
            finally:
                await made.close()


@contextmanager
def down(provider: FakeProvider) -> Iterator[None]:
    """The provider refuses connections."""
    provider.down()
    try:
        yield
    finally:
        provider.up()


def well(provider: FakeProvider) -> None:
    """Whatever a test told it."""
    provider.mode, provider.only_for, provider.delay_s, provider.retry_after = "ok", None, 0.0, None
    provider.held = False
    provider.max_batch = 10_000
    provider.requests.clear()


@asynccontextmanager
async def hosted(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """`context` entered and left by one task of its own, as what is inside it requires."""
    opened: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    end = asyncio.Event()

    async def host() -> None:
        try:
            async with context as made:
                opened.set_result(made)
                await end.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    task = asyncio.create_task(host())
    try:
        yield await opened
    finally:
        end.set()
        await task


async def until(condition: Callable[[], Awaitable[Any]], timeout_s: float = 60.0, every_s: float = 0.02) -> Any:
    """The first true answer of `condition`; how soon it comes is the machine's affair."""
    deadline = time.monotonic() + timeout_s
    while not (answer := await condition()):
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        await asyncio.sleep(every_s)
    return answer


def problem_type(body: Any) -> str:
    return str(body["type"]).rsplit("/", 1)[1]
