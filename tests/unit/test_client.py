"""The client against the application, and against servers that are none or not there."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import httpx
import pytest

from fakes.memory_api import KEY, FakeRuntime
from fakes.web import asgi
from warmstart.client import MemoryClient
from warmstart.errors import (
    PROBLEMS,
    Duplicate,
    Expired,
    Invalid,
    NotFound,
    Problem,
    RateLimited,
    ServerUnreachable,
    Stale,
    Unauthorized,
)
from warmstart.local_cache import LocalCache
from warmstart.memory import (
    Batch,
    ContextRequest,
    ListRequest,
    MemoryPatch,
    NewMemory,
    RecallRequest,
    SearchRequest,
)
from warmstart.ratelimit import RateLimiter

URL = "http://127.0.0.1:8484"
NOTE = NewMemory(content="use uv, not pip")
SAVED = {
    "id": "mem_" + "0" * 26, "namespace": "default", "type": "fact", "title": "t", "content": "c", "facts": [],
    "tags": [], "entities": [], "importance": 0.5, "source": "", "metadata": {}, "content_hash": "h",
    "embedding_status": "ready", "occurred_at": "2026-01-01T00:00:00Z", "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z",
}  # fmt: skip


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@asynccontextmanager
async def connected(runtime: FakeRuntime) -> AsyncIterator[MemoryClient]:
    """No fixture, since the application's task group must end in the task it began in."""
    async with asgi(runtime) as app, MemoryClient(URL, KEY, transport=httpx.ASGITransport(app)) as client:
        yield client


def answering(handler: Callable[[httpx.Request], httpx.Response]) -> MemoryClient:
    return MemoryClient(URL, KEY, transport=httpx.MockTransport(handler))


async def test_every_method_of_the_memory(runtime: FakeRuntime) -> None:
    async with connected(runtime) as client:
        everything = NewMemory(
            content="naïve 記憶 \U0001f600",
            title="t",
            namespace="work",
            type="gotcha",
            facts=["f"],
            tags=["x"],
            entities=["uv"],
            importance=0.9,
            source="test",
            metadata={"a": None, "b": [1, {"c": "d"}]},
            occurred_at=datetime(2025, 6, 1, tzinfo=UTC),
        )
        saved = await client.save(everything)
        assert not saved.duplicate
        given = everything.model_dump()
        assert {name: getattr(saved, name) for name in given} == given
        assert (await client.save(everything)).duplicate
        batch = await client.save_batch(Batch(memories=[everything, NOTE]))
        assert [r.status for r in batch.results] == ["duplicate", "created"]

        (hit,) = (await client.search(SearchRequest(query="記憶", type=["gotcha"], limit=5))).hits
        assert (hit.id, hit.ranks.text, hit.ranks.vector) == (saved.id, 1, None)
        assert (await client.context(ContextRequest(query="uv"))).ids == [batch.results[1].id]
        since = datetime(2025, 1, 1, tzinfo=UTC)
        recalled = await client.recall(RecallRequest(order="importance", limit=1, since=since))
        assert [m.id for m in recalled.memories] == [saved.id]
        rest = await client.recall(RecallRequest(order="importance", cursor=recalled.next_cursor))
        assert [m.id for m in rest.memories] == [batch.results[1].id]

        read = await client.get(saved.id)
        edited = await client.update(saved.id, MemoryPatch(importance=0.1), if_match=read.etag)
        assert edited.importance == 0.1
        with pytest.raises(Stale):
            await client.update(saved.id, MemoryPatch(importance=0.2), if_match=read.etag)

        await client.delete(saved.id)
        trash = await client.list(ListRequest(only_deleted=True, tag="x", limit=10))
        assert [m.id for m in trash.memories] == [saved.id]
        assert (await client.restore(saved.id)).deleted_at is None
        assert (await client.counts()).namespaces == {"default": 1, "work": 1}
        assert (await client.rename_namespace("work", "play")).memories == 1
        assert (await client.delete_namespace("play")).memories == 1
        assert {n.name: n.trashed for n in (await client.namespaces()).namespaces} == {"default": 0, "play": 1}
        await client.delete(saved.id, hard=True)
        with pytest.raises(NotFound):
            await client.get(saved.id)
        assert (await client.health()).status == "ok"


async def test_a_patch_sends_only_what_is_given(runtime: FakeRuntime) -> None:
    async with connected(runtime) as client:
        saved = await client.save(NewMemory(content="a", tags=["x"], importance=0.9))
        await client.update(saved.id, MemoryPatch(title="new"))
        after = await client.get(saved.id)
        assert (after.title, after.tags, after.importance) == ("new", ["x"], 0.9)


async def test_problems_come_back_as_what_they_were(runtime: FakeRuntime) -> None:
    async with connected(runtime) as client:
        first = await client.save(NOTE)
        second = await client.save(NewMemory(content="other"))
        with pytest.raises(Duplicate) as duplicate:
            await client.update(second.id, MemoryPatch(content=NOTE.content))
        assert duplicate.value.extra == {"id": first.id}
        await client.delete(first.id)
        runtime.service("alice").forget_trash(31)
        with pytest.raises(Expired):
            await client.restore(first.id)
        with pytest.raises(Invalid) as invalid:
            await client.list(ListRequest(cursor="nonsense"))
        assert invalid.value.extra["field"] == "cursor"


async def test_parts_of_a_path_are_quoted() -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={"name": "x", "memories": 0})

    async with answering(handler) as client:
        await client.delete_namespace("a/b?c#d é%")
    assert seen == [b"/v1/namespaces/a%2Fb%3Fc%23d%20%C3%A9%25"]


@pytest.mark.parametrize("name", [*PROBLEMS, "internal", "of-a-newer-server"])
async def test_each_type_of_problem(name: str) -> None:
    cls = PROBLEMS.get(name, Problem)
    sent = {
        "type": f"https://warmstart.invalid/problems/{name}", "title": "t", "status": cls.status,
        "detail": "what to do", "retry_after": 7, "self": "odd", "field": "content",
    }  # fmt: skip

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(cls.status, json=sent, headers={"Content-Type": "application/problem+json"})

    async with answering(handler) as client:
        with pytest.raises(Problem) as raised:
            await client.counts()
    assert type(raised.value) is cls
    assert raised.value.detail == "what to do"
    assert raised.value.extra == {"retry_after": 7, "self": "odd", "field": "content"}


async def test_the_rate_limit_of_the_server(runtime: FakeRuntime) -> None:
    runtime.settings = runtime.settings.model_copy(update={"rate_limit_per_minute": 1})
    runtime.limiter = RateLimiter(LocalCache(), clock=lambda: 1_000_000_000.0)
    async with connected(runtime) as client:
        await client.counts()
        with pytest.raises(RateLimited) as limited:
            await client.counts()
    assert 1 <= limited.value.extra["retry_after"] <= 60


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(502, html="<h1>Bad Gateway</h1>"), ["proxy", "502", URL]),
        (
            httpx.Response(308, headers={"Location": "https://memory.example/"}),
            ["https://memory.example/", "WARMSTART_URL"],
        ),
        (httpx.Response(404, html="<h1>nginx</h1>"), ["404", "WARMSTART_URL"]),
        (httpx.Response(200, html="<h1>Welcome</h1>"), ["200", "version"]),
        (httpx.Response(200, json={"active": "many"}), ["version"]),
        (httpx.Response(500, text="{", headers={"Content-Type": "application/problem+json"}), ["500"]),
        (httpx.Response(500, json=[], headers={"Content-Type": "application/problem+json"}), ["500"]),
    ],
)
async def test_what_is_no_answer_of_ours(response: httpx.Response, words: list[str]) -> None:
    async with answering(lambda request: response) as client:
        with pytest.raises(ServerUnreachable) as raised:
            await client.counts()
    assert [w for w in words if w not in str(raised.value)] == []
    assert KEY not in str(raised.value)


async def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with MemoryClient(f"http://127.0.0.1:{port}", KEY) as client:
        with pytest.raises(ServerUnreachable, match=r"nothing answers at .*warmstart serve.*WARMSTART_URL"):
            await client.save(NOTE)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server_of(serve: Serve) -> AsyncIterator[str]:
    """A raw server, to break the protocol with; every connection is over when it ends."""
    connections = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(run(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*connections)


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            await reader.readexactly(int(line.split(b":")[1]))


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Flaky:
    """Drops so many connections once it has the request, before it answers."""

    def __init__(self, drops: int, body: bytes = b"") -> None:
        self.drops, self.body, self.requests, self.connections = drops, body, 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                await read_request(reader)
                self.requests += 1
                if self.requests <= self.drops:
                    writer.transport.abort()
                    return
                writer.write(ok(self.body))


async def test_what_may_be_repeated_is_tried_once_more() -> None:
    saved = json.dumps(SAVED).encode()
    result = b'{"results": [], "created": 0, "duplicates": 0}'
    calls = [
        (lambda c: c.get(SAVED["id"]), saved),
        (lambda c: c.save(NOTE), saved),
        (lambda c: c.save_batch(Batch(memories=[NOTE])), result),
    ]
    for call, body in calls:
        flaky = Flaky(1, body)
        async with server_of(flaky) as url, MemoryClient(url, KEY) as client:
            await call(client)
        assert flaky.requests == 2


async def test_but_not_for_ever() -> None:
    flaky = Flaky(9)
    async with server_of(flaky) as url, MemoryClient(url, KEY) as client:
        with pytest.raises(ServerUnreachable, match="broke twice"):
            await client.save(NOTE)
    assert flaky.requests == 2


@pytest.mark.parametrize("method", ["update", "delete", "restore", "rename_namespace", "delete_namespace"])
async def test_what_may_not_be_repeated_is_sent_once(method: str) -> None:
    arguments = {"update": ("mem_1", MemoryPatch(title="t")), "rename_namespace": ("a", "b")}
    flaky = Flaky(9)
    async with server_of(flaky) as url, MemoryClient(url, KEY) as client:
        with pytest.raises(ServerUnreachable, match="may or may not have been made"):
            await getattr(client, method)(*arguments.get(method, ("mem_1",)))
    assert flaky.requests == 1


async def test_a_server_that_does_not_answer_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server_of(silent) as url, MemoryClient(url, KEY, timeout_s=0.1) as client:
        with pytest.raises(ServerUnreachable, match=r"within 0\.1 s"):
            await client.counts()


async def test_connections_are_kept() -> None:
    server = Flaky(0, b'{"namespaces": []}')
    async with server_of(server) as url, MemoryClient(url, KEY) as client:
        for _ in range(3):
            await client.namespaces()
    assert (server.connections, server.requests) == (1, 3)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectTimeout(""), "nothing answers at"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get issuer"), "SSL_CERT_FILE"),
        (httpx.PoolTimeout(""), "try again"),
        (httpx.ProxyError("407"), "nothing answers at"),
    ],
)
async def test_each_fault_of_a_connection_says_what_to_do(error: httpx.TransportError, words: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    async with answering(handler) as client:
        with pytest.raises(ServerUnreachable, match=words):
            await client.save(NOTE)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8484", "ftp://a", "http://", "warmstart", "http://a:port"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ServerUnreachable, match="WARMSTART_URL"):
        MemoryClient(url, KEY)


@pytest.mark.parametrize("key", ["", "  ", "ws_sk_a b", "ws_sk_ä", "ws_sk_a\r\nX: y"])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(Unauthorized) as raised:
        MemoryClient(URL, key)
    assert not key.strip() or key not in str(raised.value)


async def test_a_password_in_the_url_is_not_repeated() -> None:
    client = MemoryClient("http://user:hunter22@127.0.0.1:1/", f" {KEY}\n")
    assert client.url == "http://127.0.0.1:1"
    assert KEY not in repr(vars(client))
    with pytest.raises(ServerUnreachable) as raised:
        await client.counts()
    assert "hunter22" not in str(raised.value)
    await client.close()


async def test_a_proxy_of_the_environment_is_not_asked_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with server_of(Flaky(0, b'{"namespaces": []}')) as url:
        for name in (url, url.replace("127.0.0.1", "localhost")):
            async with MemoryClient(name, KEY) as client:
                assert (await client.namespaces()).namespaces == []


def test_a_client_imports_nothing_of_the_server() -> None:
    heavy = ["starlette", "uvicorn", "lancedb", "pyarrow", "numpy", "psycopg", "prometheus_client", "redis", "mcp"]
    code = (
        "import sys, warmstart.client, warmstart.logs\n"
        f"print([m for m in {heavy!r} if m in sys.modules])\n"
        "print([m for m in sys.modules if m.startswith(('warmstart.web', 'warmstart.store', 'warmstart.service'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
