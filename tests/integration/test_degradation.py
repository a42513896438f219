"""Every dependency down, slow and wrong, under every operation; then well again, by itself."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from lancedb.query import AsyncQueryBase
from structlog.testing import capture_logs

from fakes.provider import FakeProvider
from fakes.upstash_server import Mode, UpstashServer
from integration.conftest import TestServer, quicken
from integration.service import (
    DIM,
    App,
    Tenant,
    down,
    fresh_database,
    hosted,
    problem_type,
    running,
    settings_for,
    until,
)
from warmstart.search import MAX_ARMS
from warmstart.store.database import CALL_BUDGET_S
from warmstart.store.resident import MAX_LOADS
from warmstart.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(postgres_session: TestServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """The service with an Upstash endpoint of its own."""
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider, pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        async with UpstashServer(delay_s=2.0) as upstash:
            settings = settings_for(
                tmp_path_factory.mktemp("home"), dsn, provider,
                upstash_redis_rest_url=upstash.url, upstash_redis_rest_token=upstash.token,
            )  # fmt: skip
            async with hosted(running(settings, provider, upstash)) as opened:
                yield opened


def unknown_key() -> str:
    """Another each time: that one is unknown is remembered."""
    return "ws_sk_" + secrets.token_urlsafe(32)


async def statuses(tenant: Tenant) -> dict[str, str]:
    page = await tenant.get("/v1/memories", limit=200)
    assert page["next_cursor"] is None
    contents = [m["content"] for m in page["memories"]]
    assert len(set(contents)) == len(contents)
    return {m["content"]: m["embedding_status"] for m in page["memories"]}


async def is_hybrid(tenant: Tenant) -> Any:
    answer = await tenant.search(f"walrus {time.monotonic_ns()}")
    return answer if (answer["mode"], answer["degraded"]) == ("hybrid", []) else None


async def is_well(tenant: Tenant) -> bool:
    """A request that outlived its caller may still fail after the first that does not."""
    await is_hybrid(tenant)
    return not await down_in_health(tenant)


async def down_in_health(tenant: Tenant) -> dict[str, str]:
    health = await tenant.get("/v1/health")
    return {d["name"]: d["detail"] for d in health["dependencies"] if d["status"] == "down"}


@contextmanager
def broken(provider: FakeProvider, fault: str) -> Iterator[None]:
    if fault == "down":
        with down(provider):
            yield
        return
    if fault == "slow":
        provider.delay_s = 3.0
    else:
        provider.mode = fault  # type: ignore[assignment]
    try:
        yield
    finally:
        provider.mode, provider.delay_s = "ok", 0.0


# -- the embedder

FAULTS = [
    "down", "slow", "wrong-width", "nan", "html", "reset", "status-429", "status-500",
    *(
        pytest.param(fault, marks=pytest.mark.slow)
        for fault in (
            "wrong-count", "zero", "not-json", "reset-mid-body", "huge", "status-401", "status-404", "status-503",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_embedder_takes_nothing_but_the_vector_arm(app: App, alice: Tenant, fault: str) -> None:
    assert app.provider is not None
    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    await app.forget()  # vectors of the same contents
    with broken(app.provider, fault), capture_logs() as logs:
        started = time.monotonic()
        answer = await alice.search("walrus")
        assert time.monotonic() - started < 2.5
        assert (answer["mode"], answer["degraded"]) == ("keyword", ["embedding"])
        assert [hit["id"] for hit in answer["hits"]] == [walrus]

        started = time.monotonic()
        saved = await alice.save("saved meanwhile")
        assert time.monotonic() - started < 3.0
        assert saved["embedding_status"] == "queued"
        await alice.batch("batched meanwhile", "and another")
        edited = await alice.patch(f"/v1/memories/{walrus}", {"content": "the walrus, edited meanwhile"})
        assert edited["embedding_status"] == "queued"

        started = time.monotonic()
        context = await alice.post("/v1/context", {"query": "walrus"})
        assert time.monotonic() - started < 2.0
        assert (context["ids"], context["mode"]) == ([walrus], "keyword")
        assert list(await down_in_health(alice)) == ["embedding"]
        ready = await alice.get("/readyz")
        assert (ready["status"], list(ready["degraded"])) == ("degraded", ["embedding"])
    assert "search.embedding.degraded" in {e["event"] for e in logs}

    await until(lambda: is_hybrid(alice))
    await app.embed_all()
    assert await statuses(alice) == dict.fromkeys(
        ["the walrus, edited meanwhile", "saved meanwhile", "batched meanwhile", "and another"], "ready"
    )
    await until(lambda: is_well(alice))
    health = await alice.get("/v1/health")
    assert (health["status"], health["mode"], health["queued"]) == ("ok", "hybrid", 0)
    assert (await alice.search("saved meanwhile"))["hits"][0]["ranks"] == {"vector": 1, "text": 1}


async def test_the_worker_waits_for_a_provider_that_is_down(app: App, alice: Tenant) -> None:
    """The running worker, not one step of it: the queue is embedded once the provider is back."""
    assert app.provider is not None
    await alice.batch("before", "it came back")
    with down(app.provider), capture_logs() as logs:
        work = asyncio.create_task(Worker(app.runtime).run())
        await asyncio.sleep(0.5)
    try:

        async def all_ready() -> bool:
            return set((await statuses(alice)).values()) == {"ready"}

        await until(all_ready)
    finally:
        work.cancel()
        await asyncio.wait({work})
    # a provider that is down is said a few times, not a few times a second
    assert 1 <= len([e for e in logs if e["event"] == "worker.backfill.paused"]) <= 3


# -- time budgets


@contextmanager
def slow_reads(seconds: float, running_now: list[int] | None = None) -> Iterator[None]:
    """Every query of the table takes `seconds` longer; `running_now` becomes [now, most] of those for a tenant."""
    original = AsyncQueryBase.to_batches
    counts = running_now if running_now is not None else [0, 0]

    async def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted = "user_id = " in str(self._inner.to_query_request().filter)  # who looks after the queue asks for all
        counts[0] += counted
        counts[1] = max(counts)
        try:
            await asyncio.sleep(seconds)
            return await original(self, *args, **kwargs)
        finally:
            counts[0] -= counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncQueryBase, "to_batches", slow)
        yield


async def test_past_its_budget_a_search_answers_with_what_it_has(app: App, alice: Tenant) -> None:
    await alice.batch("the walrus")
    await app.embed_all()
    with slow_reads(5.0):
        started = time.monotonic()
        answer = await alice.search("walrus")
        assert time.monotonic() - started < 4.0
    assert answer["degraded"]
    assert set(answer["degraded"]) <= {"text", "vector", "scan", "budget"}
    assert await until(lambda: is_hybrid(alice))


async def test_a_store_that_is_slow_leaves_an_empty_context(app: App, alice: Tenant) -> None:
    await alice.batch("the walrus")
    with slow_reads(3.0):
        started = time.monotonic()
        answer = await alice.post("/v1/context", {"query": "walrus"})
        assert time.monotonic() - started < 2.0
        assert (answer["context"], answer["ids"]) == ("", [])
        assert 0 < answer["latency_ms"] < 2000


@pytest.mark.parametrize("budget_ms", [1, 5, 50])
async def test_a_context_keeps_to_the_budget_it_is_given(alice: Tenant, budget_ms: int) -> None:
    await alice.batch("the walrus")
    started = time.monotonic()
    answer = await alice.post("/v1/context", {"query": "walrus", "budget_ms": budget_ms})
    assert time.monotonic() - started < budget_ms / 1000 + 1.0
    assert answer["ids"] == [] or "the walrus" in answer["context"]


async def test_a_store_that_fails_leaves_an_empty_context(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError("lance error: input/output error")

    await alice.batch("the walrus")
    monkeypatch.setattr(AsyncQueryBase, "to_batches", fail)
    answer = await alice.post("/v1/context", {"query": "walrus"})
    assert (answer["context"], answer["ids"]) == ("", [])
    for path in ("/v1/memories", "/v1/recall"):
        problem = await alice.get(path, status=503)
        assert problem_type(problem) == "store-unavailable"
        assert "input/output" not in problem["detail"]
    assert problem_type(await alice.save("not now", status=503)) == "store-unavailable"


async def test_stragglers_are_bounded(app: App, alice: Tenant) -> None:
    await alice.batch("the walrus")
    await app.embed_all()
    counts = [0, 0]
    with slow_reads(6.0, counts):
        started = time.monotonic()
        answers = await asyncio.gather(*(alice.search(f"walrus {i}") for i in range(100)))
        assert time.monotonic() - started < 6.0
        assert all(answer["degraded"] for answer in answers)
        assert MAX_ARMS / 2 < counts[1] <= MAX_ARMS + MAX_LOADS

        async def ended() -> bool:
            return counts[0] == 0

        await until(ended)
    assert await until(lambda: is_hybrid(alice))


# -- Postgres


async def timed(call: Any, within_s: float = CALL_BUDGET_S * 0.9) -> Any:
    """In less time than one call of a Postgres that doesn't answer takes."""
    started = time.monotonic()
    answer = await call
    assert time.monotonic() - started < within_s
    return answer


async def in_snapshot(tenant: Tenant) -> bool:
    path = tenant.app.runtime.settings.warmstart_home / "keys.json"
    return path.exists() and tenant.user_id in path.read_text()


async def rows_in_postgres(app: App, tenant: Tenant) -> dict[str, str]:
    dsn = app.runtime.settings.database_url.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        found = await conn.execute("SELECT memory_id, status FROM memory_status WHERE user_id = %s", (tenant.user_id,))
        return dict(await found.fetchall())


async def rows_in_lancedb(tenant: Tenant) -> dict[str, str]:
    page = await tenant.get("/v1/memories", include_deleted="true", limit=200)
    return {m["id"]: m["embedding_status"] for m in page["memories"]}


async def test_a_frozen_postgres_is_never_waited_for(app: App, alice: Tenant, postgres_session: TestServer) -> None:
    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    await until(lambda: in_snapshot(alice))
    stranger = app.client(unknown_key())
    postgres_session.freeze()
    try:
        for i in range(3):
            assert (await timed(alice.search("walrus")))["mode"] == "hybrid"
            saved = await timed(alice.save(f"saved while frozen {i}"))
            assert saved["embedding_status"] == "ready"
            await timed(alice.patch(f"/v1/memories/{walrus}", {"importance": i / 10}))
            assert (await timed(alice.mcp("memory_search", query="walrus")))["isError"] is False
        await timed(alice.batch("batched while frozen"))
        await timed(alice.delete(f"/v1/memories/{saved['id']}", hard="true"))
        await timed(alice.delete(f"/v1/memories/{walrus}"))
        await timed(app.embed_all(), 2.0)  # the worker needs it as little
        refused = await timed(stranger.get("/v1/memories"))
        assert (refused.status_code, problem_type(refused.json())) == (503, "auth-unavailable")
        assert int(refused.headers["retry-after"]) >= 1

        async def noticed() -> bool:
            return "postgres" in await timed(down_in_health(alice))

        await until(noticed)
        ready = await timed(alice.get("/readyz"))
        assert (ready["status"], list(ready["degraded"])) == ("degraded", ["postgres"])
        assert (await timed(alice.search("saved while frozen")))["mode"] == "hybrid"
    finally:
        postgres_session.thaw()

    async def arrived() -> bool:
        return await rows_in_postgres(app, alice) == await rows_in_lancedb(alice)

    await until(arrived)
    assert set((await rows_in_postgres(app, alice)).values()) == {"ready"}

    async def unknown_again() -> bool:
        return (await stranger.get("/v1/memories")).status_code == 401

    await until(unknown_again)
    assert (await alice.get("/v1/health"))["status"] == "ok"


async def test_a_killed_postgres_is_found_again(app: App, alice: Tenant, postgres_session: TestServer) -> None:
    await until(lambda: in_snapshot(alice))
    await postgres_session.kill()
    try:
        assert (await timed(alice.search("walrus")))["mode"] == "hybrid"
        await timed(alice.save("saved while there was none"))
        assert (await timed(app.client(unknown_key()).get("/v1/memories"))).status_code == 503
    finally:
        await postgres_session.heal()

    async def arrived() -> bool:
        healthy = app.runtime.bookkeeping.healthy
        return healthy and await rows_in_postgres(app, alice) == await rows_in_lancedb(alice)

    await until(arrived)


async def test_what_postgres_lost_is_rebuilt_from_lancedb(app: App, alice: Tenant, bob: Tenant) -> None:
    await alice.batch("one", "two", "three")
    await app.embed_all()
    [gone] = await alice.batch("in the trash")
    await alice.delete(f"/v1/memories/{gone}")
    await bob.batch("of bob")
    dsn = app.runtime.settings.database_url.get_secret_value()
    before = await rows_in_lancedb(alice)

    async def arrived() -> bool:
        return await rows_in_postgres(app, alice) == before

    await until(arrived)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute("TRUNCATE memory_status")
        await conn.execute(
            "INSERT INTO memory_status (memory_id, user_id, status, updated_at)"
            " VALUES ('mem_of_nobody', %s, 'ready', now() - interval '1 hour')",
            (alice.user_id,),
        )
    await Worker(app.runtime).reconcile_if_due()
    assert await rows_in_postgres(app, alice) == before
    assert await rows_in_postgres(app, bob) == await rows_in_lancedb(bob)


async def test_known_keys_work_from_the_snapshot_at_a_start_without_postgres(
    postgres_session: TestServer, tmp_path: Path
) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider:
        settings = settings_for(tmp_path, dsn, provider)
        async with running(settings, provider) as app:
            tenant = await app.tenant()
            saved = await tenant.save("the walrus")
            await until(lambda: in_snapshot(tenant))
            assert tenant.key not in (tmp_path / "keys.json").read_text()
        async with running(settings_for(tmp_path, NOWHERE, provider), provider) as app:
            again = app.same_tenant(tenant)
            assert await again.found("walrus") == [saved["id"]]
            await again.save("another")
            refused = await app.client(unknown_key()).get("/v1/memories")
            assert refused.status_code == 503
            assert list(await down_in_health(again)) == ["postgres"]


# -- Redis behind its Upstash endpoint

HARMLESS = (Mode.OK, Mode.BASE64, Mode.BASE64_UPSTASH, Mode.NO_PONG)
CACHE_FAULTS = [
    mode
    if mode in (Mode.SLOW, Mode.ERROR_500, Mode.HTML, Mode.WRONG_TYPE, Mode.RESET)
    else pytest.param(mode, marks=pytest.mark.slow)
    for mode in Mode
    if mode not in HARMLESS
]


async def is_given(tenant: Tenant, memory_id: str, conversation_id: str) -> bool:
    """Whether a context has it; a machine that is busy beyond the context's budget gives an empty one."""
    context = await timed(tenant.post("/v1/context", {"query": "walrus", "conversation_id": conversation_id}))
    return memory_id in context["ids"]


@pytest.mark.parametrize("mode", CACHE_FAULTS, ids=lambda mode: mode.name)
async def test_a_faulty_cache_costs_nothing_but_time(app: App, alice: Tenant, mode: Mode) -> None:
    assert app.upstash is not None
    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    app.upstash.mode = mode
    try:
        for i in range(5):
            answer = await timed(alice.search("walrus"))
            assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
            assert answer["hits"][0]["id"] == walrus
            assert (await timed(alice.save(f"saved {i}")))["embedding_status"] == "ready"
        await until(lambda: is_given(alice, walrus, f"{mode.name} {time.monotonic_ns()}"))
        if mode not in (Mode.WRONG_TYPE,):  # well formed, and only of no use
            assert list(await down_in_health(alice)) == ["redis"]
    finally:
        app.upstash.mode = Mode.OK

    async def well() -> bool:
        await alice.search("walrus")
        return not await down_in_health(alice)

    await until(well)
    # what a conversation was given is remembered again
    await until(lambda: is_given(alice, walrus, "c2"))
    assert not await is_given(alice, walrus, "c2")


async def test_a_cache_that_is_back_is_found_with_nobody_asking(app: App, alice: Tenant) -> None:
    assert app.upstash is not None
    app.upstash.mode = Mode.RESET
    try:
        await alice.search("walrus")
        assert "redis" in app.runtime.rung()[0]
    finally:
        app.upstash.mode = Mode.OK

    async def well() -> bool:
        return "redis" not in app.runtime.rung()[0]

    await until(well)


async def test_limits_go_on_in_process_without_the_cache(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.upstash is not None
    monkeypatch.setattr(app.runtime.limiter, "_clock", lambda: 1_800_000_000.0)
    client = app.client("not a key", address="192.0.2.77")
    answers = []
    for mode in (Mode.OK, Mode.RESET, Mode.OK):
        app.upstash.mode = mode
        for _ in range(21):
            answers.append((await client.get("/v1/memories")).status_code)
    assert answers[:42] == [401] * 42
    # what was counted while the cache was away is not forgotten by this process, nor by the next window's start
    app.upstash.mode = Mode.RESET
    codes = [(await client.get("/v1/memories")).status_code for _ in range(3)]
    app.upstash.mode = Mode.OK
    assert codes == [429] * 3


async def test_a_cached_vector_of_no_use_is_a_miss(app: App, alice: Tenant) -> None:
    """Whatever is under a key: the provider is asked, and nothing of another width is compared."""
    assert app.upstash is not None
    assert app.provider is not None
    await alice.batch("the walrus")
    await app.embed_all()
    stored = app.upstash.cache
    before = set(stored._entries)

    async def written() -> str | None:
        await alice.search("walrus of the cache")
        return next((k for k in set(stored._entries) - before if k.startswith("ws:q:")), None)

    # the answer doesn't wait for the cache, whose circuit may still be open from a test before
    key = await until(written, every_s=0.2)
    for value in ("", "AAAA", "not base64!", "A" * 10_000):
        stored.execute("SET", key, value)
        asked = len(app.provider.requests)
        answer = await alice.search("walrus of the cache")
        assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
        assert len(app.provider.requests) == asked + 1


# -- all at once


async def test_with_everything_down_a_memory_is_saved_and_found(
    app: App, alice: Tenant, postgres_session: TestServer
) -> None:
    assert app.provider is not None
    assert app.upstash is not None
    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    await until(lambda: in_snapshot(alice))
    postgres_session.freeze()
    app.upstash.mode = Mode.RESET
    try:
        with down(app.provider):
            for i in range(2):
                saved = await timed(alice.save(f"saved in the dark {i}"))
                assert saved["embedding_status"] == "queued"
                answer = await timed(alice.search(f"the walrus, or what was saved in the dark {i}"))
                assert (answer["mode"], answer["degraded"]) == ("keyword", ["embedding"])
                assert {walrus, saved["id"]} <= {hit["id"] for hit in answer["hits"]}
            await timed(alice.batch("batched in the dark"))
            assert (await timed(alice.mcp("memory_recall")))["isError"] is False
    finally:
        app.upstash.mode = Mode.OK
        postgres_session.thaw()
    await until(lambda: is_hybrid(alice))
    await app.embed_all()

    async def whole() -> bool:
        await alice.search("walrus")
        health = await alice.get("/v1/health")
        return health["status"] == "ok" and await rows_in_postgres(app, alice) == await rows_in_lancedb(alice)

    await until(whole)
    assert set((await statuses(alice)).values()) == {"ready"}
    assert len(await statuses(alice)) == 4
