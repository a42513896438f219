"""Plain SQL migrations: `sql/NNNN_name.sql`, applied once each, in order, never changed after.

A comment line at the head of a file says whether releases that ran on the
schema before it still can, which a roll-out (both run at once) and the way back
from one stand on:

    -- compatible: yes                                         it only adds; so where nothing is said
    -- compatible: no, drops memory_status.reason, which they write

The database keeps that, so a release knows it of migrations that are newer than itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from psycopg.errors import DeadlockDetected, LockNotAvailable, QueryCanceled

from warmstart.errors import BookkeepingUnavailable, ConfigError

#: The advisory lock that lets one process migrate at a time; any number would do.
LOCK_KEY: Final = 7_226_001
#: What waits for a table's lock holds up all who come after it, so a migration waits for less than
#: a call of the service does (CALL_BUDGET_S), gives way, and tries again.
LOCK_TIMEOUT_S: Final = 1.0
LOCK_TRIES: Final = 10
LOCK_PAUSE_S: Final = 2.0
#: The longest one statement of a migration may hold the locks it got.
STATEMENT_TIMEOUT_S: Final = 20.0
#: Connecting not included; other processes that migrate are waited for within it.
MIGRATE_BUDGET_S: Final = 60.0
MAX_REASON: Final = 200

_HEADER: Final = re.compile(r"-- compatible: (?:(?P<yes>yes)|no, (?P<reason>\S.*))")


class MigrationFailed(BookkeepingUnavailable):
    """Postgres answers, but a migration can't be made: it is undone, and the one before stands."""


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()

    @cached_property
    def incompatible(self) -> str:
        """Why earlier releases can't go on after it; empty where they can."""
        for line in self.sql.splitlines():
            if not line.startswith("--"):
                break
            if line.startswith("-- compatible"):
                found = _HEADER.fullmatch(line.rstrip())
                if found is None or len(found["reason"] or "") > MAX_REASON:
                    form = f"`-- compatible: yes` or `-- compatible: no, REASON` (at most {MAX_REASON} characters)"
                    raise ValueError(f"migration {self}: {line[:80]!r} must be {form}")
                return found["reason"] or ""
        return ""

    @property
    def applied(self) -> Applied:
        return Applied(self.version, self.name, self.checksum, not self.incompatible, self.incompatible)

    def __str__(self) -> str:
        return f"{self.version:04} ({self.name})"


@dataclass(frozen=True, slots=True)
class Applied:
    """A migration as a database keeps it. `compatible` is None where it was made before that was kept."""

    version: int
    name: str
    checksum: str
    compatible: bool | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.version:04} ({self.name})"


@dataclass(frozen=True, slots=True)
class State:
    """A database's schema as a release sees it."""

    known: int
    schema: int
    pending: Sequence[Migration]
    newer: Sequence[Applied]
    #: Why this release can't use the database, whatever is applied; empty where it can.
    refused: str

    def check(self) -> None:
        """Raises ConfigError where this release can't use the database."""
        if self.refused:
            raise ConfigError([self.refused])


@cache
def shipped() -> tuple[Migration, ...]:
    """The migrations of this version of the package."""
    files = [f for f in (resources.files("warmstart.store") / "sql").iterdir() if f.name.endswith(".sql")]
    found = []
    for file in sorted(files, key=lambda f: f.name):
        version, _, name = file.name.removesuffix(".sql").partition("_")
        found.append(Migration(int(version), name, file.read_text(encoding="utf-8")))
    return tuple(found)


async def state(conn: AsyncConnection[Any], migrations: Sequence[Migration]) -> State:
    """What `conn`'s database has of `migrations` and beyond; changes nothing."""
    applied = {row.version: row for row in await _applied(conn)}
    known = max((m.version for m in migrations), default=0)
    newer = [row for version, row in sorted(applied.items()) if version > known]
    return State(
        known=known,
        schema=max(applied, default=0),
        pending=[m for m in migrations if m.version not in applied],
        newer=newer,
        refused=_changed(applied, migrations) or _too_new(newer, known),
    )


async def migrate(conn: AsyncConnection[Any], migrations: Sequence[Migration]) -> list[Migration]:
    """Brings the database up to date; each migration is one transaction, made by one process.

    Answers those that were made here. Raises ConfigError, or MigrationFailed.
    """
    made: list[Migration] = []
    before = await state(conn, migrations)
    before.check()
    for _ in before.pending:
        for attempt in range(1, LOCK_TRIES + 1):
            try:
                one = await _migrate_one(conn, migrations)
                break
            except (LockNotAvailable, DeadlockDetected):
                if attempt == LOCK_TRIES:
                    raise MigrationFailed(
                        f"a migration got no lock within {LOCK_TIMEOUT_S:g} s in {LOCK_TRIES} tries, and nothing was "
                        "changed: a long transaction holds the table (see pg_stat_activity). End it, then try again"
                    ) from None
                await asyncio.sleep(LOCK_PAUSE_S)
        if one is None:
            break  # another process was faster
        made.append(one)
    return made


async def _migrate_one(conn: AsyncConnection[Any], migrations: Sequence[Migration]) -> Migration | None:
    async with conn.transaction():
        # both of the transaction, not of the session, so that it works through a transaction pooler;
        # another process that migrates is waited for, so the short timeout is for what comes after
        await conn.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
        now = await state(conn, migrations)
        now.check()
        if not now.pending:
            return None
        await _set_timeouts(conn)
        await _prepare_table(conn)
        todo = now.pending[0]
        try:
            await conn.execute(todo.sql.encode())
        except (LockNotAvailable, DeadlockDetected):
            raise
        except QueryCanceled:
            raise MigrationFailed(
                f"migration {todo} was undone: a statement of it took longer than {STATEMENT_TIMEOUT_S:g} s, "
                "and held up who uses its table"
            ) from None
        except psycopg.Error as error:
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                raise
            raise MigrationFailed(f"migration {todo} was undone: {' '.join(str(error).split())[:300]}") from error
        await conn.execute(
            "INSERT INTO schema_migrations (version, name, checksum, compatible, reason) VALUES (%s, %s, %s, %s, %s)",
            (todo.version, todo.name, todo.checksum, not todo.incompatible, todo.incompatible),
        )
        return todo


async def _set_timeouts(conn: AsyncConnection[Any]) -> None:
    for name, seconds in (("lock_timeout", LOCK_TIMEOUT_S), ("statement_timeout", STATEMENT_TIMEOUT_S)):
        await conn.execute("SELECT set_config(%s, %s, true)", (name, f"{seconds * 1000:.0f}ms"))


async def _prepare_table(conn: AsyncConnection[Any]) -> None:
    """Where the migrations are kept; older releases made it without the last two columns, and read only the first."""
    await conn.execute(
        "CREATE TABLE IF NOT EXISTS schema_migrations (version integer PRIMARY KEY, name text NOT NULL,"
        " checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), compatible boolean, reason text)"
    )
    await conn.execute(
        "ALTER TABLE schema_migrations ADD COLUMN IF NOT EXISTS compatible boolean,"
        " ADD COLUMN IF NOT EXISTS reason text"
    )


async def _applied(conn: AsyncConnection[Any]) -> list[Applied]:
    found = await conn.execute("SELECT 1 FROM pg_class WHERE oid = to_regclass('schema_migrations')")
    if not await found.fetchone():
        return []
    # through JSON, in which a column that an older release did not make is null
    rows = await conn.execute(
        "SELECT version, name, checksum, to_jsonb(m) -> 'compatible' AS compatible, to_jsonb(m) ->> 'reason' AS reason"
        " FROM schema_migrations m"
    )
    return [Applied(**row) for row in await rows.fetchall()]


def _changed(applied: dict[int, Applied], migrations: Iterable[Migration]) -> str:
    for migration in migrations:
        row = applied.get(migration.version)
        if row is not None and row.checksum != migration.checksum:
            return (
                f"migration {migration} of the Postgres database is not the one of this version: "
                "install the version that wrote it, or restore a backup"
            )
    return ""


def _too_new(newer: Iterable[Applied], known: int) -> str:
    for row in newer:
        if not row.compatible:
            why = "it does not say that older ones can go on" if row.compatible is None else row.reason
            return (
                f"the Postgres database was written by a newer version (this one knows schema {known}), "
                f"and its migration {row} shuts older ones out: {why}. "
                "Install that version, or restore a backup made before it"
            )
    return ""
