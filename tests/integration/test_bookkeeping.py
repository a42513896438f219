from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from warmstart.config import Space
from warmstart.errors import BookkeepingUnavailable, ConfigError, Conflict, Invalid, NotFound
from warmstart.store import bookkeeping as module
from warmstart.store import migrations, outbox
from warmstart.store.bookkeeping import Bookkeeping, hash_key
from warmstart.store.database import CALL_BUDGET_S
from warmstart.store.reconcile import Reconciled

SPACE = Space("model", "rev", 384, "passage: ", "query: ").to_json()

Server = Any


async def query(dsn: str, statement: str, *args: object) -> list[dict[str, Any]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        cursor = await conn.execute(statement.encode(), args)
        return await cursor.fetchall() if cursor.description else []


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in its time"
        await asyncio.sleep(0.02)


async def settled(books: Bookkeeping) -> None:
    await until(lambda: books.waiting == 0)


async def batches(rows: list[tuple[str, str, str]], size: int = 2) -> AsyncIterator[list[tuple[str, str, str]]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# -- the schema


async def test_no_column_can_hold_what_a_memory_says(bookkeeping: Bookkeeping, dsn: str) -> None:
    rows = await query(
        dsn,
        "SELECT table_name || '.' || column_name AS name FROM information_schema.columns"
        " WHERE table_schema = 'public' AND data_type NOT IN"
        " ('boolean', 'integer', 'bigint', 'uuid', 'timestamp with time zone')",
    )
    assert {row["name"] for row in rows} == {
        "tenants.id", "tenants.name",
        "api_keys.id", "api_keys.tenant_id", "api_keys.name", "api_keys.hash", "api_keys.prefix",
        "memory_status.memory_id", "memory_status.user_id", "memory_status.status", "memory_status.reason",
        "memory_status.space",
        "jobs.name", "jobs.last_error",
        "audit.actor", "audit.action", "audit.subject", "audit.detail",
        "events.id", "events.user_id", "events.kind", "events.hash",
        "schema_migrations.name", "schema_migrations.checksum", "schema_migrations.reason",
    }  # fmt: skip


async def test_processes_that_start_at_once_migrate_once(dsn: str) -> None:
    opened = [Bookkeeping(dsn) for _ in range(4)]
    await asyncio.gather(*(b.open() for b in opened))
    assert all(b.healthy for b in opened)
    await asyncio.gather(*(b.close() for b in opened))
    rows = await query(dsn, "SELECT version, name, checksum FROM schema_migrations ORDER BY version")
    assert [(r["version"], r["name"], r["checksum"]) for r in rows] == [
        (m.version, m.name, m.checksum) for m in migrations.shipped()
    ]


async def test_a_changed_migration_is_refused(bookkeeping: Bookkeeping, dsn: str) -> None:
    await query(dsn, "UPDATE schema_migrations SET checksum = 'other' WHERE version = 1")
    with pytest.raises(ConfigError, match=r"migration 0001 .* is not the one of this version"):
        await Bookkeeping(dsn).open()


async def test_a_migration_that_fails_leaves_no_half(dsn: str) -> None:
    bad = migrations.Migration(1, "bad", "CREATE TABLE half (n int); SELECT 1 / 0;")
    good = replace(bad, name="good", sql="CREATE TABLE whole (n int);")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        with pytest.raises(migrations.MigrationFailed, match=r"0001 \(bad\) was undone: division by zero"):
            await migrations.migrate(conn, (bad,))
        await migrations.migrate(conn, (good,))
    tables = await query(dsn, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
    assert [t["tablename"] for t in tables] == ["schema_migrations", "whole"]


def test_a_dsn_that_is_none_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Bookkeeping("postgresql://user:pa ss?word@host:port:1/x=%zz")
    assert "pa ss" not in str(caught.value)


# -- what is noted


async def test_the_latest_state_of_a_memory_is_written(bookkeeping: Bookkeeping, dsn: str) -> None:
    later = datetime.now(UTC) + timedelta(minutes=5)
    bookkeeping.note("mem_a", "usr_1", "queued")
    bookkeeping.note("mem_a", "usr_1", "queued", attempts=2, next_attempt_at=later, reason="timeout")
    bookkeeping.note("mem_b", "usr_1", "ready", space=SPACE)
    bookkeeping.note("mem_c", "usr_2", "failed", attempts=5, reason="x" * 10_000 + "\x00\ud800")
    await settled(bookkeeping)
    rows = {r["memory_id"]: r for r in await query(dsn, "SELECT * FROM memory_status")}
    assert (rows["mem_a"]["attempts"], rows["mem_a"]["next_attempt_at"], rows["mem_a"]["reason"]) == (
        2,
        later,
        "timeout",
    )
    assert Space(**rows["mem_b"]["space"]).to_json() == SPACE
    assert len(rows["mem_c"]["reason"]) == outbox.MAX_REASON
    assert await bookkeeping.status_counts("usr_1") == {"queued": 1, "ready": 1}
    assert (await bookkeeping.attempts(["mem_a", "mem_zz"]))["mem_a"].attempts == 2
    bookkeeping.note_gone(["mem_a", "mem_never"])
    assert await bookkeeping.attempts(["mem_a"]) == {}  # though it still waits to be written
    await settled(bookkeeping)
    assert await bookkeeping.status_counts("usr_1") == {"ready": 1}


async def test_an_older_state_of_another_process_does_not_win(bookkeeping: Bookkeeping, dsn: str) -> None:
    bookkeeping.note("mem_a", "usr_1", "ready", space=SPACE)
    await settled(bookkeeping)
    past = datetime.now(UTC) - timedelta(seconds=30)
    bookkeeping._put("mem_a", outbox.State("usr_1", "queued", 0, None, None, None, past))
    bookkeeping._put("mem_b", outbox.Gone(past))
    await settled(bookkeeping)
    assert await bookkeeping.status_counts("usr_1") == {"ready": 1}


async def test_a_bad_entry_stops_no_other(bookkeeping: Bookkeeping) -> None:
    for i in range(40):
        bookkeeping.note(f"mem_{i}", "usr_1", "queued")
    bookkeeping.note("mem_bad", "usr_1", "no such status")
    bookkeeping.note("mem_worse", "usr_1", "ready", space="not JSON")
    await settled(bookkeeping)
    assert await bookkeeping.status_counts("usr_1") == {"queued": 40}
    assert bookkeeping.dropped == 2
    assert bookkeeping.needs_reconcile
    assert bookkeeping.healthy


async def test_a_full_queue_drops_and_says_so(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING", 3)
    monkeypatch.setattr(outbox, "MAX_AUDIT_PENDING", 2)
    books = Bookkeeping(dsn)
    for i in range(5):
        books.note(f"mem_{i}", "usr_1", "queued")
        books.audit("usr_1", "memory.save", f"mem_{i}")
    books.note("mem_0", "usr_1", "ready")  # a newer state of one that waits needs no room
    assert (books.waiting, books.dropped, books.needs_reconcile) == (5, 5, True)
    await books.open()
    await settled(books)
    assert await books.status_counts("usr_1") == {"queued": 2, "ready": 1}
    truth = [(f"mem_{i}", "usr_1", "queued") for i in range(5)]
    assert await books.reconcile(batches(truth), SPACE) == Reconciled(2, 1, 0)
    assert not books.needs_reconcile
    await books.close()


async def test_audit_never_holds_what_a_memory_says(bookkeeping: Bookkeeping, dsn: str) -> None:
    secret = "the launch code is 4711"
    detail = dict.fromkeys(outbox.PRIVATE_FIELDS, secret) | {"hard": True, "n": 3, "namespace": "x" * 999}
    bookkeeping.audit("usr_1", "memory.delete", "mem_a\x00", detail)
    await settled(bookkeeping)
    (row,) = await query(dsn, "SELECT actor, action, subject, detail FROM audit")
    assert row == {
        "actor": "usr_1", "action": "memory.delete", "subject": "mem_a",
        "detail": {"hard": True, "n": 3, "namespace": "x" * outbox.MAX_NAME},
    }  # fmt: skip


async def test_what_waits_is_written_at_close(dsn: str) -> None:
    books = Bookkeeping(dsn)
    await books.open()
    books.note("mem_a", "usr_1", "queued")
    await books.close()
    assert len(await query(dsn, "SELECT * FROM memory_status")) == 1


# -- reconcile


async def test_reconcile_makes_the_rows_agree_with_the_truth(bookkeeping: Bookkeeping, dsn: str) -> None:
    for memory_id, status in (("same", "ready"), ("stale", "queued"), ("gone", "ready"), ("dead", "queued")):
        bookkeeping.note(memory_id, "usr_1", status, attempts=3, reason="why", space=SPACE)
    await settled(bookkeeping)
    truth = [
        ("same", "usr_1", "ready"), ("stale", "usr_1", "ready"), ("dead", "usr_1", "failed"),
        ("new", "usr_2", "queued"), ("new2", "usr_2", "ready"), ("new2", "usr_2", "ready"),
    ]  # fmt: skip
    assert await bookkeeping.reconcile(batches(truth), SPACE) == Reconciled(inserted=2, updated=2, deleted=1)
    rows = {r["memory_id"]: r for r in await query(dsn, "SELECT * FROM memory_status")}
    assert {i: r["status"] for i, r in rows.items()} == {
        "same": "ready", "stale": "ready", "dead": "failed", "new": "queued", "new2": "ready"
    }  # fmt: skip
    assert (rows["stale"]["attempts"], rows["stale"]["reason"]) == (0, None)
    assert (rows["dead"]["attempts"], rows["dead"]["reason"]) == (3, "why")
    assert rows["new"]["space"] is None
    assert Space(**rows["new2"]["space"]).to_json() == SPACE
    assert await bookkeeping.reconcile(batches(truth), SPACE) == Reconciled(0, 0, 0)
    assert await bookkeeping.reconcile(batches([]), SPACE) == Reconciled(0, 0, 5)


async def test_what_is_noted_during_a_reconcile_stays(bookkeeping: Bookkeeping) -> None:
    bookkeeping.note("both", "usr_1", "queued")
    await settled(bookkeeping)

    async def truth() -> AsyncIterator[list[tuple[str, str, str]]]:
        yield [("both", "usr_1", "queued")]
        bookkeeping.note("both", "usr_1", "ready", space=SPACE)
        bookkeeping.note("fresh", "usr_1", "queued")
        await settled(bookkeeping)

    assert await bookkeeping.reconcile(truth(), SPACE) == Reconciled(0, 0, 0)
    assert await bookkeeping.status_counts("usr_1") == {"ready": 1, "queued": 1}


async def test_a_reconcile_that_is_broken_off_changes_nothing(bookkeeping: Bookkeeping) -> None:
    bookkeeping.note("mem_a", "usr_1", "ready")
    await settled(bookkeeping)

    async def truth() -> AsyncIterator[list[tuple[str, str, str]]]:
        yield [("mem_b", "usr_1", "queued")]
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError, match="went away"):
        await bookkeeping.reconcile(truth(), SPACE)
    assert await bookkeeping.status_counts("usr_1") == {"ready": 1}


# -- jobs, tenants, keys


async def test_jobs_and_purge(bookkeeping: Bookkeeping, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PURGE_BATCH", 2)
    await bookkeeping.job_ran("sweep", "disk full")
    await bookkeeping.job_ran("sweep")
    (row,) = await query(dsn, "SELECT last_error, now() - last_run_at < interval '5 s' AS recent FROM jobs")
    assert row == {"last_error": None, "recent": True}
    await query(
        dsn,
        "INSERT INTO audit (id, at, actor, action, subject)"
        " SELECT gen_random_uuid(), now() - make_interval(days => d), 'a', 'b', 'c' FROM unnest(%s::int[]) d",
        [91, 91, 91, 89],
    )
    await query(
        dsn,
        "INSERT INTO events (id, user_id, kind, hash, created_at) SELECT 'e' || d, 'usr', 'prompt', 'h',"
        " now() - make_interval(days => d) FROM unnest(%s::int[]) d",
        [31, 32, 33, 34, 29],
    )
    assert await bookkeeping.purge() == 7
    assert len(await query(dsn, "SELECT id FROM audit")) == len(await query(dsn, "SELECT id FROM events")) == 1


async def test_tenants_and_keys(bookkeeping: Bookkeeping, dsn: str) -> None:
    tenant = await bookkeeping.create_tenant("Zoë's laptop")
    assert [(t.id, t.name) for t in await bookkeeping.tenants()] == [(tenant, "Zoë's laptop")]
    key = await bookkeeping.create_key(tenant, "cli", unlimited=True)
    assert re.fullmatch(r"ws_sk_[A-Za-z0-9_-]{43}", key)
    (listed,) = await bookkeeping.list_keys(tenant)
    assert (listed.prefix, listed.unlimited, listed.revoked_at) == (key[:10], True, None)
    found = await bookkeeping.find_key(hash_key(key))
    assert found is not None
    assert (found.key_id, found.tenant_id, found.unlimited) == (listed.id, tenant, True)
    assert await bookkeeping.find_key(hash_key(key + "x")) is None
    assert await bookkeeping.active_keys(10) == [found]
    for rows in (await query(dsn, "SELECT * FROM api_keys"), await query(dsn, "SELECT * FROM audit")):
        assert key[10:] not in str(rows)
    with pytest.raises(NotFound):
        await bookkeeping.create_key("usr_none", "cli")
    for name in ("", "x" * 201, "a\x00b"):
        with pytest.raises(Invalid):
            await bookkeeping.create_tenant(name)
    await bookkeeping.touch_keys({listed.id: datetime(2030, 1, 2, tzinfo=UTC)})
    await bookkeeping.touch_keys({listed.id: datetime(2030, 1, 1, tzinfo=UTC)})
    assert (await bookkeeping.list_keys())[0].last_used_at == datetime(2030, 1, 2, tzinfo=UTC)
    before = await bookkeeping.keys_fingerprint()
    assert await bookkeeping.revoke_key(key[:10]) == listed.id
    assert await bookkeeping.keys_fingerprint() != before
    assert await bookkeeping.find_key(hash_key(key)) is None
    assert await bookkeeping.revoke_key(listed.id) == listed.id, "again is no fault"
    with pytest.raises(NotFound):
        await bookkeeping.revoke_key(listed.id, tenant_id="usr_other")


async def test_a_shared_prefix_names_no_key(bookkeeping: Bookkeeping, dsn: str) -> None:
    tenant = await bookkeeping.create_tenant("t")
    for name in ("a", "b"):
        await bookkeeping.create_key(tenant, name)
    await query(dsn, "UPDATE api_keys SET prefix = 'ws_sk_same'")
    with pytest.raises(Conflict, match=r"key_.*, key_"):
        await bookkeeping.revoke_key("ws_sk_same")
    assert len(await bookkeeping.active_keys(10)) == 2


# -- Postgres frozen, killed, absent


async def test_frozen_nothing_blocks_and_all_arrives_after_healing(postgres: Server, dsn: str) -> None:
    books = Bookkeeping(dsn)
    await books.open()
    postgres.freeze()
    begun = time.monotonic()
    for i in range(20_000):
        books.note(f"mem_{i:05}", f"usr_{i % 3}", "queued")
        books.note(f"mem_{i:05}", f"usr_{i % 3}", "ready", space=SPACE)
    assert time.monotonic() - begun < CALL_BUDGET_S  # what one that waited would take
    begun = time.monotonic()
    with pytest.raises(BookkeepingUnavailable):
        await books.status_counts("usr_0")
    assert time.monotonic() - begun < CALL_BUDGET_S + 1.0
    await until(lambda: not books.healthy)
    begun = time.monotonic()
    with pytest.raises(BookkeepingUnavailable, match=r"did not answer|does not answer"):
        await books.tenants()
    assert time.monotonic() - begun < CALL_BUDGET_S / 2  # known to be down: no second wait
    assert (books.waiting, books.dropped) == (20_000, 0)
    assert books.reason
    postgres.thaw()
    await until(lambda: books.healthy)
    await settled(books)
    counts = [await books.status_counts(f"usr_{n}") for n in range(3)]
    assert sum(c["ready"] for c in counts) == 20_000
    assert (books.reason, books.needs_reconcile) == ("", False)
    await books.close()


async def test_frozen_in_the_middle_of_a_call_it_ends_in_time_and_so_does_close(postgres: Server, dsn: str) -> None:
    books = Bookkeeping(dsn)
    await books.open()
    async with books.connection() as conn:
        await conn.execute("SELECT 1")
        postgres.freeze()
        begun = time.monotonic()
        call = asyncio.create_task(conn.execute("SELECT 2"))
        await asyncio.sleep(0.05)
        call.cancel()  # as a client that goes away does
        await asyncio.wait({call})
        assert time.monotonic() - begun < CALL_BUDGET_S / 2
        assert conn.closed
    books.note("mem_a", "usr_1", "queued")
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    await books.close()
    assert time.monotonic() - begun < 2.0


async def test_it_opens_with_postgres_frozen_and_heals_by_itself(postgres: Server, dsn: str) -> None:
    postgres.freeze()
    books = Bookkeeping(dsn)
    begun = time.monotonic()
    await books.open()
    assert time.monotonic() - begun < 3.5
    assert not books.healthy
    books.note("mem_a", "usr_1", "queued")
    postgres.thaw()
    await until(lambda: books.healthy)  # migrated too
    await settled(books)
    await books.close()
    assert len(await query(dsn, "SELECT * FROM memory_status")) == 1


async def test_killed_and_started_again_it_heals(postgres: Server, dsn: str) -> None:
    books = Bookkeeping(dsn)
    await books.open()
    books.note("mem_a", "usr_1", "queued")
    await settled(books)
    await postgres.kill()
    with pytest.raises(BookkeepingUnavailable):
        await books.status_counts("usr_1")
    books.note("mem_b", "usr_1", "queued")
    await until(lambda: not books.healthy)
    assert (datetime.now(UTC) - books.since).total_seconds() < 5
    await postgres.start()
    await until(lambda: books.healthy)
    await settled(books)
    assert await books.status_counts("usr_1") == {"queued": 2}
    await books.close()


async def test_sessions_that_the_server_ended_are_replaced_unseen(bookkeeping: Bookkeeping, dsn: str) -> None:
    for _ in range(3):
        await query(
            dsn,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'warmstart'",
        )
        assert await bookkeeping.tenants() == []
    assert bookkeeping.healthy


async def test_without_a_server_it_opens_says_why_and_shows_no_password() -> None:
    books = Bookkeeping("postgresql://someone:very-secret@127.0.0.1:1/none")
    await books.open()
    assert not books.healthy
    assert "refused" in books.reason
    assert "very-secret" not in books.reason
    with pytest.raises(BookkeepingUnavailable, match="refused"):
        await books.find_key("0" * 64, 0.2)
    await books.close()
