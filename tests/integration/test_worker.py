"""The worker over the real queue: poison, backoff, races, the trash, compaction."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from integration.service import App, Tenant, down, until
from warmstart import pace
from warmstart import worker as worker_module
from warmstart.errors import EmbeddingError, StoreUnavailable
from warmstart.store import maintenance
from warmstart.store.changes import BackfillWriter
from warmstart.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

POISON = "zzpoisonzz"


async def statuses(tenant: Tenant) -> dict[str, str]:
    page = await tenant.get("/v1/memories", include_deleted="true", limit=200)
    return {m["content"]: m["embedding_status"] for m in page["memories"]}


async def bookkept(app: App, memory_id: str) -> dict[str, Any] | None:
    """The status row, once nothing waits to be written."""
    await app.written_behind()
    dsn = app.runtime.settings.database_url.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        found = await conn.execute(
            "SELECT status, attempts, next_attempt_at, reason, space FROM memory_status WHERE memory_id = %s",
            (memory_id,),
        )
        row = await found.fetchone()
    return dict(zip(("status", "attempts", "next_attempt_at", "reason", "space"), row, strict=True)) if row else None


async def run_until(app: App, condition: Any) -> None:
    """The running worker, until `condition` holds."""
    work = asyncio.create_task(Worker(app.runtime).run())
    try:
        await until(condition)
    finally:
        work.cancel()
        await asyncio.wait({work})


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(worker_module, "POLL_S", 0.02)


# -- the queue


async def test_the_queue_is_embedded_in_requests_of_the_providers_size(app: App, alice: Tenant) -> None:
    assert app.provider is not None
    await alice.batch(*(f"queued {i}" for i in range(100)))
    app.provider.max_batch = 32
    app.provider.requests.clear()
    await app.embed_all()
    assert set((await statuses(alice)).values()) == {"ready"}
    assert max(len(r.texts) for r in app.provider.requests) == 32
    assert sorted(app.provider.texts) == sorted(f"queued {i}" for i in range(100))


async def test_a_save_wakes_the_worker(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "POLL_S", 3600)  # it doesn't look by itself

    async def ready() -> bool:
        return set((await statuses(alice)).values()) == {"ready"}

    work = asyncio.create_task(Worker(app.runtime).run())
    try:
        for time_of_its_sleep in ("the first", "the second"):
            await asyncio.sleep(0.2)
            await alice.batch(f"wake up, {time_of_its_sleep} time")
            await until(ready)
    finally:
        work.cancel()
        await asyncio.wait({work})


async def test_each_tenant_gets_its_turn(app: App, alice: Tenant, bob: Tenant) -> None:
    await alice.batch(*(f"of alice {i}" for i in range(100)))
    await bob.batch(*(f"of bob {i}" for i in range(100)))
    worker = Worker(app.runtime)
    for _ in range(2):
        await worker.backfill()
    for tenant in (alice, bob):
        assert list((await statuses(tenant)).values()).count("ready") == 32
    await app.embed_all()


async def test_what_is_in_the_trash_waits_until_it_is_restored(app: App, alice: Tenant) -> None:
    assert app.provider is not None
    [gone] = await alice.batch("in the trash")
    await alice.delete(f"/v1/memories/{gone}")
    app.provider.requests.clear()
    await app.embed_all()
    assert app.provider.texts == []
    await alice.post(f"/v1/memories/{gone}/restore", None)
    await app.embed_all()
    assert await statuses(alice) == {"in the trash": "ready"}


async def test_bookkeeping_says_what_became_of_it(app: App, alice: Tenant) -> None:
    [queued] = await alice.batch("queued")
    assert (await bookkept(app, queued) or {})["status"] == "queued"
    await app.embed_all()
    row = await bookkept(app, queued)
    assert row is not None
    assert (row["status"], row["attempts"], row["reason"]) == ("ready", 0, None)
    assert row["space"]["model"] == "test-model"
    await alice.delete(f"/v1/memories/{queued}", hard="true")
    assert await bookkept(app, queued) is None


# -- poison


async def test_poison_ends_failed_with_its_reason_and_is_retried_on_request(
    app: App, alice: Tenant, no_backoff: None
) -> None:
    assert app.provider is not None
    app.provider.mode, app.provider.only_for = "status-422", POISON
    contents = [f"good {i}" for i in range(6)]
    made = await alice.batch(*contents[:3], f"the {POISON}", *contents[3:])
    poison = made[3]

    with capture_logs() as logs:

        def given_up() -> list[str]:
            return [e["reason"] for e in logs if e["event"] == "worker.embedding.given_up"]

        async def settled() -> bool:
            return bool(given_up()) and "queued" not in (await statuses(alice)).values()

        await run_until(app, settled)
    assert await statuses(alice) == dict.fromkeys(contents, "ready") | {f"the {POISON}": "failed"}
    row = await bookkept(app, poison)
    assert row is not None
    assert (row["status"], row["attempts"], row["next_attempt_at"]) == ("failed", 5, None)
    assert row["reason"] == "status-422"
    assert given_up() == ["status-422"]
    health = await alice.get("/v1/health")
    assert (health["queued"], health["failed"]) == (0, 1)
    assert (await alice.get(f"/v1/memories/{poison}"))["embedding_status"] == "failed"
    assert poison in await alice.found(POISON)

    asked = len(app.provider.requests)
    await app.embed_all()
    assert len(app.provider.requests) == asked  # given up means left alone
    app.provider.mode = "ok"
    assert await Worker(app.runtime).retry_failed() >= 1
    await app.embed_all()
    assert (await statuses(alice))[f"the {POISON}"] == "ready"


@pytest.mark.parametrize("mode", ["status-500", "nan", "zero", "reset"])
async def test_one_bad_text_keeps_no_other_from_its_vector(
    app: App, alice: Tenant, mode: Any, no_backoff: None
) -> None:
    assert app.provider is not None
    app.provider.mode, app.provider.only_for = mode, POISON
    await alice.batch(f"{POISON} {mode}", *(f"good {mode} {i}" for i in range(8)))

    async def good_are_ready() -> bool:
        found = await statuses(alice)
        return all(status == "ready" for content, status in found.items() if content.startswith("good"))

    await run_until(app, good_are_ready)


async def test_poison_in_one_tenant_holds_up_no_other(
    app: App, alice: Tenant, bob: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row waits for its next try; the others' rows don't."""
    assert app.provider is not None
    first, second = sorted((alice, bob), key=lambda t: t.user_id)
    app.provider.mode, app.provider.only_for = "status-422", POISON
    await first.batch(f"the {POISON} again")
    worker = Worker(app.runtime)
    await worker.backfill()
    await second.batch(*(f"of the other {i}" for i in range(40)))
    for _ in range(12):  # other tests' tenants have their turns too
        await worker.backfill()
    assert set((await statuses(second)).values()) == {"ready"}


async def test_tries_are_further_and_further_apart(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.provider is not None
    app.provider.mode, app.provider.only_for = "status-422", POISON
    [poison] = await alice.batch(f"the {POISON} of the clock")
    clock, today = time.monotonic(), datetime.now(UTC)
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(worker_module, "now", lambda: today)
    worker = Worker(app.runtime)

    async def tried() -> bool:
        """In one round of the tenants: others' memories have their turns too."""
        assert app.provider is not None
        app.provider.requests.clear()
        for _ in range(20):
            await worker.backfill()
        return any("of the clock" in text for text in app.provider.texts)

    waits = []
    for attempts in range(1, 6):
        assert await tried()
        row = await bookkept(app, poison)
        assert row is not None
        assert (row["attempts"], row["reason"]) == (attempts, "status-422")
        if attempts < 5:
            wait = (row["next_attempt_at"] - today).total_seconds()
            waits.append(wait)
            clock += wait - 1
            assert not await tried()
            clock += 1
    assert waits == [4, 8, 16, 32]
    assert await statuses(alice) == {f"the {POISON} of the clock": "failed"}


async def test_a_provider_that_is_down_is_nobodys_fault(app: App, alice: Tenant) -> None:
    assert app.provider is not None
    [queued] = await alice.batch("not its fault")
    worker = Worker(app.runtime)
    with down(app.provider):
        for _ in range(8):
            with pytest.raises(EmbeddingError):
                await worker.backfill()
    row = await bookkept(app, queued)
    assert row is not None
    assert (row["status"], row["attempts"]) == ("queued", 0)

    async def ready() -> bool:
        return await statuses(alice) == {"not its fault": "ready"}

    await run_until(app, ready)


# -- races


async def test_two_workers_at_once_do_no_harm(app: App, alice: Tenant, bob: Tenant) -> None:
    await alice.batch(*(f"both {i}" for i in range(100)))
    await bob.batch(*(f"both {i}" for i in range(50)))

    async def ready() -> bool:
        return {status for t in (alice, bob) for status in (await statuses(t)).values()} == {"ready"}

    workers = [asyncio.create_task(Worker(app.runtime).run()) for _ in range(2)]
    try:
        await until(ready)
        assert not [w for w in workers if w.done()]
    finally:
        for work in workers:
            work.cancel()
        await asyncio.wait(workers)
    assert len(await statuses(alice)) == 100
    assert (await alice.get("/v1/memories/counts"))["active"] == 100
    assert (await alice.search("both 7"))["hits"][0]["content"] == "both 7"


@pytest.mark.parametrize("race", ["edit", "delete", "trash", "edit and back"])
async def test_a_vector_that_comes_too_late_is_not_written(app: App, alice: Tenant, race: str) -> None:
    """The row changes while the provider is at work on what it was."""
    assert app.provider is not None
    [row] = await alice.batch(f"before the {race}")
    path = f"/v1/memories/{row}"
    app.provider.requests.clear()
    app.provider.held = True
    backfill = asyncio.create_task(Worker(app.runtime).backfill())

    async def asked() -> bool:
        return len(app.provider.requests) > 0  # type: ignore[union-attr]

    await until(asked)
    if race == "delete":
        await alice.delete(path, hard="true")
    elif race == "trash":
        await alice.delete(path)
    else:
        await alice.patch(path, {"content": f"after the {race}"})
        if race == "edit and back":
            await alice.patch(path, {"content": f"before the {race}"})
    app.provider.held = False
    await backfill
    if race == "delete":
        await alice.get(path, 404)
    elif race == "edit":
        assert (await alice.get(path))["embedding_status"] == "queued"
        await app.embed_all()
    read = await statuses(alice)
    expected = {"delete": {}, "edit": {"after the edit": "ready"}}
    assert read == expected.get(race, {f"before the {race}": "ready"})
    if race == "edit":
        [hit] = (await alice.search("after the edit"))["hits"]
        assert hit["ranks"] == {"vector": 1, "text": 1}


async def test_what_was_embedded_while_a_write_failed_is_embedded_again(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch, no_backoff: None
) -> None:
    """The next batch is in hand when the write before it fails: neither may be forgotten."""
    await alice.batch(*(f"batch of many {i}" for i in range(100)))
    write, failures = BackfillWriter.set_vectors, [StoreUnavailable("the disk is away")]

    async def fails_first(self: BackfillWriter, *arguments: Any) -> list[str]:
        if failures:
            raise failures.pop()
        return await write(self, *arguments)

    monkeypatch.setattr(BackfillWriter, "set_vectors", fails_first)

    async def ready() -> bool:
        return set((await statuses(alice)).values()) == {"ready"}

    await run_until(app, ready)
    assert not failures


async def test_an_edit_under_a_worker_at_work_ends_with_the_new_vector(app: App, alice: Tenant) -> None:
    made = await alice.batch(*(f"version 0 of {i}" for i in range(10)))

    async def ready() -> bool:
        return set((await statuses(alice)).values()) == {"ready"}

    work = asyncio.create_task(Worker(app.runtime).run())
    try:
        for version in range(1, 4):
            await asyncio.gather(
                *(
                    alice.patch(f"/v1/memories/{m}", {"content": f"version {version} of {i}"})
                    for i, m in enumerate(made)
                )
            )
        await until(ready)
    finally:
        work.cancel()
        await asyncio.wait({work})
    assert sorted(await statuses(alice)) == [f"version 3 of {i}" for i in range(10)]
    rows = await (
        app.runtime.table.lance.query()
        .where(f"user_id = '{alice.user_id}'")
        .select(["id", "content", "embedding"])
        .to_list()
    )
    for row in rows:
        [expected] = await app.runtime.embedder.embed_documents([row["content"]], 2.0)
        assert row["embedding"] == pytest.approx(expected, abs=1e-6)


# -- the table


async def test_compaction_comes_while_writes_do(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "COMPACT_CHECK_S", 0.05)
    monkeypatch.setattr(maintenance, "MAX_UNINDEXED_ROWS", 10)
    work = asyncio.create_task(Worker(app.runtime).run())
    try:
        for i in range(40):
            await alice.save(f"one after another {i}")

        async def compacted() -> bool:
            return (await app.runtime.maintenance.state()).unindexed_rows < 12

        await until(compacted)
    finally:
        work.cancel()
        await asyncio.wait({work})
    assert len(await alice.page(limit=200)) == 40
    assert len(await alice.found("another", limit=50)) == 40
    assert app.metric("worker_optimize_seconds_count", table="memories") >= 1


async def test_compaction_rests_the_longer_the_longer_it_takes(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_UNINDEXED_ROWS", 10)
    monkeypatch.setattr(maintenance, "MAX_UNINDEXED_SHARE", 0)
    await app.runtime.maintenance.optimize()
    clock = time.monotonic()
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock))
    really = app.runtime.maintenance.optimize

    async def slow() -> float:
        await really()
        return 2.0

    monkeypatch.setattr(app.runtime.maintenance, "optimize", slow)
    worker = Worker(app.runtime)

    async def compacted(after_s: float, saved: int) -> bool:
        nonlocal clock
        if saved:
            await alice.batch(*[f"one of {saved} after {after_s} {clock} {i}" for i in range(saved)])
        clock += after_s
        before = app.metric("worker_optimize_seconds_count", table="memories")
        await worker.compact_if_due()
        return app.metric("worker_optimize_seconds_count", table="memories") > before

    assert not await compacted(1, saved=9)
    assert await compacted(1, saved=1)  # nobody knows yet what one takes
    assert not await compacted(60, saved=11)
    assert await compacted(40, saved=0)  # fifty times two seconds
    assert not await compacted(24, saved=40)
    assert await compacted(1.1, saved=0)  # four times as many rows: a fourth
    assert not await compacted(299, saved=1)
    assert await compacted(1, saved=0)  # at the latest
    assert not await compacted(599, saved=0)
    assert (await app.runtime.maintenance.state()).versions > 1


async def test_old_versions_go_when_nobody_writes_any_more(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.runtime.maintenance, "_retention", timedelta(seconds=0.5))
    clock = time.monotonic()
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock))
    worker = Worker(app.runtime)
    for number in range(5):
        await alice.save(f"one of several commits {number}")
    clock += 300
    await worker.compact_if_due()
    assert (await app.runtime.maintenance.state()).versions > 1
    await asyncio.sleep(0.6)
    clock += 599
    await worker.compact_if_due()
    assert (await app.runtime.maintenance.state()).versions > 1
    clock += 1
    for _ in range(3):  # what a compaction finds to do makes a version
        await worker.compact_if_due()
        await asyncio.sleep(0.6)
        clock += 600
    assert (await app.runtime.maintenance.state()).versions == 1
    before = app.metric("worker_optimize_seconds_count", table="memories")
    clock += 1_000
    await worker.compact_if_due()
    assert app.metric("worker_optimize_seconds_count", table="memories") == before
    assert len(await alice.found("commits", limit=50)) == 5


async def test_what_waits_is_measured(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long by the worker's own clock: what was imported may be years old."""
    clock = time.monotonic() + 1_000
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock))
    worker = Worker(app.runtime)
    await alice.batch("waits for its vector")
    await worker.compact_if_due()
    assert app.metric("queue_age_seconds") == 0
    assert app.metric("compaction_lag_seconds") == 0
    clock += 100
    await alice.batch("and another")
    await worker.compact_if_due()
    assert app.metric("queue_age_seconds") == pytest.approx(100)
    assert app.metric("compaction_lag_seconds") == pytest.approx(100)
    await app.embed_all()
    clock += app.runtime.settings.optimize_after_s
    await worker.compact_if_due()
    assert app.metric("queue_age_seconds") == 0
    await worker.compact_if_due()
    assert app.metric("compaction_lag_seconds") == 0


async def test_a_long_queue_is_told_with_its_end(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WORTH_TELLING", 1)
    monkeypatch.setattr(pace, "TELL_EVERY_S", 0.0)
    batch = app.runtime.settings.embed_batch_size
    await alice.batch(*(f"note {number}" for number in range(batch + 2)))
    worker = Worker(app.runtime)
    assert await worker.backfill() == batch
    with capture_logs() as logs:
        await worker.compact_if_due()
    [told] = [entry for entry in logs if entry["event"] == "worker.backfill.progress"]
    assert (told["left"], told["done"]) == (2, batch)
    assert told["left_s"] >= 0


async def test_a_job_that_fails_is_tried_again(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "SWEEP_S", 0.05)
    calls = 0

    async def fail(self: Worker) -> int:
        nonlocal calls
        calls += 1
        raise RuntimeError("no luck")

    monkeypatch.setattr(Worker, "sweep", fail)

    async def thrice() -> bool:
        return calls >= 3

    with capture_logs() as logs:
        await run_until(app, thrice)
    assert [e["job"] for e in logs if e["event"] == "worker.job.failed"][:2] == ["sweep", "sweep"]
