"""Schemas that are older and newer than the release, and migrations beside a service that runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from structlog.testing import capture_logs

from warmstart.cli import main
from warmstart.errors import ConfigError
from warmstart.store import migrations
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.store.migrations import Migration, MigrationFailed

FIRST = migrations.shipped()
ADDS = Migration(101, "adds", "-- Adds.\nALTER TABLE jobs ADD COLUMN note text;")
DROPS = Migration(102, "drops", "-- compatible: no, drops jobs.note\nALTER TABLE jobs DROP COLUMN note;")


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[AsyncConnection[Any]]:
    async with await AsyncConnection.connect(dsn, autocommit=True, row_factory=dict_row) as conn:
        yield conn


async def migrate(dsn: str, *more: Migration) -> list[Migration]:
    async with connected(dsn) as conn:
        return await migrations.migrate(conn, (*FIRST, *more))


async def state(dsn: str, *more: Migration) -> migrations.State:
    async with connected(dsn) as conn:
        return await migrations.state(conn, (*FIRST, *more))


async def command(dsn: str, *arguments: str) -> Result:
    environ = {"DATABASE_URL": dsn, "DATABASE_URL_FILE": "", "WARMSTART_ALLOW_ROOT": ""}
    return await asyncio.to_thread(CliRunner().invoke, main, ["database", *arguments], env=environ)


def last_line(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


# -- what a release makes of a schema that is newer than itself


async def test_the_release_before_an_addition_starts_and_says_so(dsn: str) -> None:
    assert await migrate(dsn, ADDS) == [*FIRST, ADDS]
    books = Bookkeeping(dsn)
    with capture_logs() as logs:
        await books.open()
    assert books.healthy
    await books.close()
    said = [entry for entry in logs if entry["event"] == "bookkeeping.schema.newer"]
    assert [(entry["log_level"], entry["schema"], entry["known"]) for entry in said] == [("info", 101, len(FIRST))]


async def test_the_release_before_a_removal_is_refused_with_its_name(dsn: str) -> None:
    await migrate(dsn, ADDS, DROPS)
    with pytest.raises(ConfigError, match=r"migration 0102 \(drops\) shuts older ones out: drops jobs.note"):
        await Bookkeeping(dsn).open()
    # the release that knows the addition is before the removal as well
    assert "0102" in (await state(dsn, ADDS)).refused
    assert (await state(dsn, ADDS, DROPS)).refused == ""


async def test_a_process_that_runs_goes_on_when_a_removal_comes(dsn: str, bookkeeping: Bookkeeping) -> None:
    await migrate(dsn, ADDS, DROPS)
    await bookkeeping.create_tenant("later")
    async with connected(dsn) as conn:
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert [tenant.name for tenant in await bookkeeping.tenants()] == ["later"]


async def test_what_was_made_before_compatibility_was_kept_is_migrated_on(dsn: str) -> None:
    async with connected(dsn) as conn:
        # as the releases before made it
        await conn.execute(
            "CREATE TABLE schema_migrations (version integer PRIMARY KEY, name text NOT NULL,"
            " checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        await conn.execute(FIRST[0].sql.encode())
        insert = "INSERT INTO schema_migrations (version, name, checksum) VALUES (%s, %s, %s)"
        await conn.execute(insert, (1, FIRST[0].name, FIRST[0].checksum))
    assert (await state(dsn)).refused == ""
    assert await migrate(dsn) == list(FIRST[1:])
    assert await migrate(dsn, ADDS) == [ADDS]
    async with connected(dsn) as conn:
        # what those releases ask
        rows = await (await conn.execute("SELECT version, checksum FROM schema_migrations")).fetchall()
        kept = await (await conn.execute("SELECT compatible FROM schema_migrations WHERE version = 101")).fetchall()
    assert {row["version"]: row["checksum"] for row in rows} == {m.version: m.checksum for m in (*FIRST, ADDS)}
    assert kept == [{"compatible": True}]


async def test_a_newer_migration_that_says_nothing_is_refused(dsn: str, bookkeeping: Bookkeeping) -> None:
    async with connected(dsn) as conn:
        await conn.execute("INSERT INTO schema_migrations (version, name, checksum) VALUES (9999, 'later', 'x')")
    found = (await state(dsn)).refused
    assert "9999 (later) shuts older ones out: it does not say that older ones can go on" in found


# -- migrations beside a service that runs


async def test_a_migration_gives_way_and_comes_when_it_can(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(migrations, "LOCK_PAUSE_S", 0.1)
    await migrate(dsn)
    async with connected(dsn) as busy:
        async with busy.transaction():
            await busy.execute("SELECT * FROM jobs")
            migrating = asyncio.create_task(migrate(dsn, ADDS))
            await asyncio.sleep(0.5)
            assert not migrating.done()
            # between its tries nobody waits behind it
            async with connected(dsn) as other, asyncio.timeout(2):
                await other.execute("INSERT INTO jobs (name, last_run_at) VALUES ('other', now())")
        assert await migrating == [ADDS]


async def test_a_migration_that_gets_no_lock_says_so_and_changes_nothing(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(migrations, "LOCK_PAUSE_S", 0.01)
    await migrate(dsn)
    async with connected(dsn) as busy, busy.transaction():
        await busy.execute("SELECT * FROM jobs")
        with pytest.raises(MigrationFailed, match=r"no lock within 0.05 s in 10 tries"):
            await migrate(dsn, ADDS)
    assert (await state(dsn, ADDS)).pending == [ADDS]


async def test_a_statement_that_takes_too_long_is_undone(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "STATEMENT_TIMEOUT_S", 0.2)
    await migrate(dsn)
    slow = Migration(101, "slow", "ALTER TABLE jobs ADD COLUMN note text; SELECT pg_sleep(30);")
    with pytest.raises(MigrationFailed, match=r"migration 0101 \(slow\) was undone: .* longer than 0.2 s"):
        await migrate(dsn, slow)
    async with connected(dsn) as conn:
        with pytest.raises(psycopg.errors.UndefinedColumn):
            await conn.execute("SELECT note FROM jobs")
        # the limits were the transaction's alone
        shown = await (await conn.execute("SHOW statement_timeout")).fetchone()
    assert shown == {"statement_timeout": "0"}


# -- the commands


async def test_check_and_migrate_over_a_deploy_and_the_way_back(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = await command(dsn, "check", "--json")
    assert fresh.exit_code == 1
    assert [m["version"] for m in last_line(fresh)["pending"]] == [m.version for m in FIRST]
    assert "warmstart database migrate" in fresh.stderr
    made = await command(dsn, "migrate", "--json")
    assert made.exit_code == 0, made.output
    assert [m["version"] for m in last_line(made)["applied"]] == [m.version for m in FIRST]
    again = await command(dsn, "migrate")
    assert (again.exit_code, again.stdout) == (0, f"schema {len(FIRST)}: nothing to apply\n")

    with monkeypatch.context() as newer:
        newer.setattr(migrations, "shipped", lambda: (*FIRST, ADDS))
        made = await command(dsn, "migrate")
        assert (made.exit_code, made.stdout) == (0, "applied 0101 (adds), earlier versions can go on\nschema 101\n")
        assert (await command(dsn, "check")).exit_code == 0
    back = await command(dsn, "check", "--json")
    assert back.exit_code == 0, back.output
    assert last_line(back) == {
        "ok": True, "reason": "", "schema": 101, "known": len(FIRST), "pending": [],
        "newer": [{"version": 101, "name": "adds", "compatible": True, "reason": ""}],
    }  # fmt: skip
    assert (await command(dsn, "migrate")).exit_code == 0

    await migrate(dsn, ADDS, DROPS)
    refused = await command(dsn, "check", "--json")
    assert refused.exit_code == 1
    assert not last_line(refused)["ok"]
    assert last_line(refused)["newer"][1]["reason"] == "drops jobs.note"
    assert "migration 0102 (drops) shuts older ones out: drops jobs.note" in refused.stderr
    assert (await command(dsn, "migrate")).exit_code == 2


async def test_a_migration_that_fails_and_a_database_that_is_not_there_are_told_apart(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "shipped", lambda: (*FIRST, Migration(101, "bad", "SELECT 1 / 0;")))
    failed = await command(dsn, "migrate", "--json")
    assert failed.exit_code == 1
    assert failed.stderr == "Error: migration 0101 (bad) was undone: division by zero\n"
    for name in ("migrate", "check"):
        gone = await command("postgresql://nobody:secret@127.0.0.1:9/none", name)
        assert gone.exit_code == 5, gone.output
        assert "Postgres can't be used now" in gone.stderr
        assert "secret" not in gone.output
