"""What others see of a migration: the API and the worker before, during and after it, in their own processes."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from fakes.migrations import Command, contents, make_store, migrated, rows_of, space
from fakes.provider import FakeProvider
from fakes.upstash_server import UpstashServer
from integration.conftest import TestServer
from integration.service import App, Tenant, fresh_database, problem_type, running, settings_for, until
from integration.test_migrate import Killed, migrator
from warmstart.config import load
from warmstart.memory import ListRequest, SearchRequest
from warmstart.store import marker
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.worker import Worker

MODEL = "test-model"
OLD_DIM, NEW_DIM = 16, 8
START_S = 120.0


# -- answers while the marker stands


async def half_back(app: App, command: Command) -> None:
    """A migration that died in the middle of its reload, with the service running."""

    def progress(step: str, done: int, total: int) -> None:
        if step == "reload" and done:
            raise Killed

    with pytest.raises(Killed):
        await migrator(command, progress).migrate(command.dim)


async def test_answers_are_of_what_is_back_and_say_so(tmp_path: Path, postgres_session: TestServer) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(OLD_DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            alice = await app.tenant()
            known: list[str] = []
            for start in range(0, 700, 100):
                ids = await alice.batch(*(f"walrus number {n}" for n in range(start, start + 100)))
                known += ids
            await app.embed_all()
            assert (await alice.search("walrus number 699"))["mode"] == "hybrid"
            await half_back(app, Command(tmp_path, NEW_DIM, MODEL))
            await answers_half_back(app, alice, known)
            # a process that starts now sees the same
            async with running(settings_for(tmp_path, dsn, provider, embedding_dim=NEW_DIM), provider) as second:
                await answers_half_back(second, second.same_tenant(alice), known)
                provider.dim = NEW_DIM
                assert (await migrator(Command(tmp_path, NEW_DIM, MODEL)).migrate(NEW_DIM)).resumed
                await second.embed_all()
                found = await second.same_tenant(alice).search("walrus number 699")
                assert (found["mode"], found["degraded"], "migrated" in found) == ("hybrid", [], False)
                assert found["hits"][0]["ranks"]["vector"] == 1
            # the one that was started with the old model is of another space now, and mixes nothing
            found = await alice.search("walrus number 699")
            assert (found["mode"], found["degraded"]) == ("keyword", ["space"])
            assert (await alice.save("saved by the old one"))["embedding_status"] == "queued"


async def answers_half_back(app: App, tenant: Tenant, ids: list[str]) -> None:
    """`ids`: all that there were, the oldest batch first."""
    newest, oldest = ids[-1], ids[0]
    share = round(500 / 700, 4)
    found = await tenant.search("walrus number 699")
    assert (found["mode"], found["degraded"], found["migrated"]) == ("keyword", ["migrating"], share)
    assert found["hits"][0]["id"] == newest
    page = await tenant.get("/v1/memories", limit=5)
    assert (page["degraded"], page["migrated"], page["memories"][0]["id"] in ids[-100:]) == (["migrating"], share, True)
    for path in ("/v1/recall", "/v1/memories/counts", "/v1/namespaces"):
        told = await tenant.get(path)
        assert (told["degraded"], told["migrated"]) == (["migrating"], share), path
    assert (await tenant.get(f"/v1/memories/{newest}"))["embedding_status"] == "queued"
    missing = await tenant.http.get(f"/v1/memories/{oldest}")  # it is not gone: it is not back yet
    assert (missing.status_code, problem_type(missing.json())) == (503, "migrating")
    context = await tenant.post("/v1/context", {"query": "walrus number 699"})
    assert newest in context["ids"]
    await writes_are_refused(tenant, newest)
    health = await tenant.get("/v1/health")
    assert health["status"] == "degraded"
    assert "migrating" in health["degraded"]
    ready = await tenant.get("/readyz")
    assert (ready["status"], "71%" in ready["degraded"]["migrating"]) == ("degraded", True)
    called = await tenant.mcp("memory_search", query="walrus number 699")
    assert called["structuredContent"]["degraded"] == ["migrating"]
    refused = await tenant.mcp("memory_save", content="over MCP")
    assert refused["isError"]
    assert await Worker(app.runtime).backfill() == 0


async def writes_are_refused(tenant: Tenant, memory_id: str) -> None:
    path = f"/v1/memories/{memory_id}"
    for request in (
        tenant.http.post("/v1/memories", json={"content": "x"}),
        tenant.http.post("/v1/memories/batch", json={"memories": [{"content": "x"}]}),
        tenant.http.patch(path, json={"title": "x"}),
        tenant.http.delete(path),
        tenant.http.delete(path, params={"hard": "true"}),
        tenant.http.post(f"{path}/restore"),
        tenant.http.patch("/v1/namespaces/default", json={"name": "other"}),
        tenant.http.delete("/v1/namespaces/default"),
    ):
        answer = await request
        assert (answer.status_code, problem_type(answer.json())) == (503, "migrating"), answer.text
        assert int(answer.headers["retry-after"]) > 0


async def test_while_it_is_dumped_all_is_answered_and_nothing_written(
    tmp_path: Path, postgres_session: TestServer
) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(OLD_DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            alice = await app.tenant()
            saved = await alice.save("the walrus")
            with marker.only_migrator(tmp_path / "lancedb"):
                found = await alice.search("walrus")
                assert (found["mode"], found["degraded"], len(found["hits"])) == ("hybrid", [], 1)
                await writes_are_refused(alice, saved["id"])
                assert (await alice.get("/v1/health"))["degraded"] == ["migrating"]
            # killed before there was a marker: as if nothing had been
            await alice.save("the carpenter")
            assert (await alice.get("/v1/health"))["status"] == "ok"


# -- the embedding cache


async def test_a_cached_vector_of_the_old_width_never_comes_back(tmp_path: Path, postgres_session: TestServer) -> None:
    """The same model name, whose endpoint gives another width by now; the cache outlives the migration."""
    dsn = await fresh_database(postgres_session.dsn)
    texts = [f"walrus number {n}" for n in range(20)]
    async with UpstashServer() as upstash:
        cached = {"upstash_redis_rest_url": upstash.url, "upstash_redis_rest_token": upstash.token}
        with FakeProvider(OLD_DIM) as provider:
            async with running(settings_for(tmp_path, dsn, provider, **cached), provider, upstash) as app:
                alice = await app.tenant()
                await alice.batch(*texts)
                await app.embed_all()
                await app.runtime.embedder.embed_documents(texts, 5)
                old = app.runtime.embedder
                old_values = await app.runtime.cache.pipeline(
                    *(("GET", key) for key in (old._key("ws:e:", "", _sha(text)) for text in texts))
                )
                assert all(old_values)
            await migrator(Command(tmp_path, NEW_DIM, MODEL)).migrate(NEW_DIM)
            provider.dim = NEW_DIM
            provider.requests.clear()
            new_settings = settings_for(tmp_path, dsn, provider, embedding_dim=NEW_DIM, **cached)
            async with running(new_settings, provider, upstash) as app:
                # even one that lies under the new key, as a provider's change behind the same settings leaves it
                poisoned = app.runtime.embedder._key("ws:e:", "", _sha(texts[0]))
                await app.runtime.cache.pipeline(("SET", poisoned, old_values[0]))
                await app.embed_all()
                assert sorted(t for t in provider.texts if t in texts) == sorted(texts)
                found = await app.same_tenant(alice).search(texts[0])
                assert (found["mode"], found["degraded"]) == ("hybrid", [])
    vectors = [row["embedding"] for row in await contents(tmp_path / "lancedb")]
    assert {len(vector) for vector in vectors} == {NEW_DIM}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def test_an_endpoint_that_still_gives_the_old_width_fills_nothing(
    tmp_path: Path, postgres_session: TestServer
) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    await make_store(tmp_path / "lancedb", rows_of(9, OLD_DIM), space(OLD_DIM, MODEL))
    await migrator(Command(tmp_path, NEW_DIM, MODEL)).migrate(NEW_DIM)
    with FakeProvider(OLD_DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider, embedding_dim=NEW_DIM), provider) as app:
            worker = Worker(app.runtime)
            for _ in range(4):
                with pytest.raises(Exception, match="width"):
                    await worker.backfill()
    assert all(row["embedding"] is None for row in await contents(tmp_path / "lancedb"))


# -- real processes


class Processes:
    """A server and a worker as the stack runs them, on one store."""

    def __init__(self, command: Command, provider: FakeProvider) -> None:
        self.environ = command.environ | {"OPENAI_BASE_URL": provider.url, "LOG_FORMAT": "json"}
        self.logs = command.home / "logs.txt"
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, port: str = "") -> None:
        environ = self.environ | {"PORT": port or self.url.rsplit(":", 1)[1]}
        with self.logs.open("ab") as log:
            command = [sys.executable, "-m", "warmstart.cli", *arguments]
            self._running.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))

    def unexpected(self) -> list[str]:
        """What the logs have of errors that are nobody's."""
        return [line for line in self.logs.read_text().splitlines() if "Traceback" in line or "http.unexpected" in line]

    def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            assert process.wait(30) in (0, -signal.SIGTERM), self.logs.read_text()[-3_000:]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def processes(command: Command, provider: FakeProvider) -> Iterator[Processes]:
    made = Processes(command, provider)
    try:
        yield made
    finally:
        made.end()


class Load:
    """Requests without a pause, and what became of each."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30)
        self.seen: Counter[tuple[str, int, str]] = Counter()
        self.shares: list[float] = []
        self.saved: list[str] = []
        self.ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended = True
        await self.http.aclose()

    async def read(self, name: str, method: str, path: str, body: Any = None) -> None:
        while not self.ended:
            answer = await self.http.request(method, path, json=body)
            told = answer.json()
            if "migrated" in told:
                self.shares.append(told["migrated"])
            self.seen[name, answer.status_code, ",".join(told.get("degraded", []))] += 1

    async def write(self) -> None:
        n = 0
        while not self.ended:
            answer = await self.http.post("/v1/memories", json={"content": f"written meanwhile {n}"})
            kind = problem_type(answer.json()) if answer.status_code >= 400 else ""
            self.seen["save", answer.status_code, kind] += 1
            if answer.status_code == 201:
                self.saved.append(answer.json()["id"])
            n += 1
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [NEW_DIM, OLD_DIM])
async def test_a_server_and_a_worker_go_on(tmp_path: Path, postgres_session: TestServer, dim: int) -> None:
    """Of their requests during a migration none is an error but those the contract names."""
    dsn = await fresh_database(postgres_session.dsn)
    books = Bookkeeping(dsn)
    await books.open()
    tenant = await books.create_tenant("alice")
    key = await books.create_key(tenant, "test", unlimited=True)
    await books.close()
    rows = [row | {"user_id": tenant} for row in rows_of(1_700, OLD_DIM)]
    await make_store(tmp_path / "lancedb", rows, space(OLD_DIM))
    command = Command(tmp_path, dim, "test-model", DATABASE_URL=dsn)
    with FakeProvider(dim) as provider, processes(command, provider) as running_ones:
        running_ones.start("serve", "--no-worker")
        running_ones.start("worker", port=str(_free_port()))
        async with Load(running_ones.url, key) as load:

            async def up() -> bool:
                try:
                    return (await load.http.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(up, START_S)
            some = rows[1]["id"]
            work = [
                asyncio.create_task(load.read("search", "POST", "/v1/search", {"query": "walrus Brot 漢字"})),
                asyncio.create_task(load.read("list", "GET", "/v1/memories?limit=20")),
                asyncio.create_task(load.read("get", "GET", f"/v1/memories/{some}")),
                asyncio.create_task(load.read("health", "GET", "/v1/health")),
                asyncio.create_task(load.write()),
            ]
            await asyncio.sleep(1.0)
            done = await asyncio.to_thread(command.run, "--to", str(dim))
            await asyncio.sleep(1.0)
            load.ended = True
            await asyncio.gather(*work)
            assert done["outcome"] == "migrated"
            statuses = {(name, status) for name, status, _ in load.seen}
            allowed = {
                ("search", 200),
                ("list", 200),
                ("get", 200),
                ("get", 503),
                ("health", 200),
                ("save", 201),
                ("save", 503),
            }
            assert statuses <= allowed, (load.seen, running_ones.unexpected())
            assert {kind for name, status, kind in load.seen if (name, status) == ("save", 503)} == {"migrating"}
            assert load.seen["search", 200, "migrating"]
            assert load.seen["list", 200, "migrating"]
            assert load.shares
            assert all(0 <= share <= 1 for share in load.shares)
            # everything came back, and what was answered 201 is there once
            found = await contents(command.store)
            assert sorted(r["id"] for r in found) == sorted([*(r["id"] for r in rows), *load.saved])
            kept = {r["id"]: r for r in migrated(rows)}
            assert all(
                kept[r["id"]] == r | {"embedding": None, "embedding_status": "queued"} for r in found if r["id"] in kept
            )

            async def embedded() -> bool:
                health = (await load.http.get("/v1/health")).json()
                return bool(health["queued"] == 0 and health["status"] == "ok")

            await until(embedded, 120, 0.5)

            async def hybrid() -> bool:
                answer = (await load.http.post("/v1/search", json={"query": "walrus Brot"})).json()
                return bool((answer["mode"], answer["degraded"]) == ("hybrid", []))

            await until(hybrid)  # a busy machine may take longer than an arm's budget
            assert running_ones.unexpected() == []


# -- a real model


async def test_from_the_shipped_model_to_a_wider_one(tmp_path: Path, postgres_session: TestServer) -> None:
    """384 wide by the embedder that ships, to 512 of another provider, and back."""
    dsn = await fresh_database(postgres_session.dsn)
    shipped = load({"WARMSTART_HOME": str(tmp_path), "DATABASE_URL": dsn})
    texts = ["The invoice numbers come from a sequence", "Der Walross schläft am Strand", "ビルドはキャッシュを使う"]
    async with running(shipped) as app:
        alice = await app.tenant()
        await alice.batch(*texts)
        await app.embed_all()
        before = await contents(tmp_path / "lancedb")
        assert {len(row["embedding"]) for row in before} == {384}
        assert (await alice.search("where do invoice numbers come from?"))["hits"][0]["content"] == texts[0]
    with FakeProvider(512) as provider:
        wider = settings_for(tmp_path, dsn, provider, embedding_dim=512)
        assert (await migrator(Command(tmp_path, 512, MODEL)).migrate(512)).source == shipped.space
        async with running(wider, provider) as app:
            await app.embed_all()
            assert {len(row["embedding"]) for row in await contents(tmp_path / "lancedb")} == {512}
    back = Command(tmp_path, 384, shipped.embed_model)
    assert (await migrator(back).rollback()).target == shipped.space
    async with running(shipped) as app:
        await app.embed_all()
        # what the same model says of the same text is the same vector
        assert await contents(tmp_path / "lancedb") == before


def migrate_apart(command: Command) -> None:
    asyncio.run(migrator(command).migrate(command.dim))


@pytest.mark.slow
async def test_searches_across_many_migrations(tmp_path: Path, postgres_session: TestServer) -> None:
    """Each begins and ends somewhere in a migration: it is answered, and what is missing is said."""
    dsn = await fresh_database(postgres_session.dsn)
    rows = [row | {"user_id": "alice"} for row in rows_of(60, OLD_DIM)]
    await make_store(tmp_path / "lancedb", rows, space(OLD_DIM, MODEL))
    with FakeProvider(OLD_DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            alice = app.runtime.service("alice")
            ended = False

            async def search() -> None:
                while not ended:
                    found = await alice.search(SearchRequest(query="walrus Brot"))
                    assert found.mode == "hybrid" or found.degraded
                    assert ("migrating" in found.degraded) == (found.migrated is not None)
                    page = await alice.list(ListRequest())
                    assert len(page.memories) == 50 or page.degraded

            searches = [asyncio.create_task(search()) for _ in range(6)]
            for dim in [NEW_DIM, OLD_DIM] * 5:
                # in a thread of its own, so that both go on at once as two processes do
                await asyncio.to_thread(migrate_apart, Command(tmp_path, dim, MODEL))
            ended = True
            await asyncio.gather(*searches)
