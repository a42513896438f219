"""Plain SQL migrations: `sql/NNNN_name.sql`, applied once each, in order, never changed after."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from psycopg import AsyncConnection

from warmstart.errors import ConfigError

#: The advisory lock that lets one process migrate at a time; any number would do.
LOCK_KEY: Final = 7_226_001


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def shipped() -> tuple[Migration, ...]:
    """The migrations of this version of the package."""
    files = [f for f in (resources.files("warmstart.store") / "sql").iterdir() if f.name.endswith(".sql")]
    found = []
    for file in sorted(files, key=lambda f: f.name):
        version, _, name = file.name.removesuffix(".sql").partition("_")
        found.append(Migration(int(version), name, file.read_text(encoding="utf-8")))
    return tuple(found)


async def pending(conn: AsyncConnection[Any], migrations: tuple[Migration, ...]) -> list[Migration]:
    """Those `conn`'s database lacks; raises ConfigError where it is not one this version can use."""
    rows: list[dict[str, Any]] = []
    found = await conn.execute("SELECT 1 FROM pg_class WHERE oid = to_regclass('schema_migrations')")
    if await found.fetchone():
        rows = await (await conn.execute("SELECT version, checksum FROM schema_migrations")).fetchall()
    applied = {row["version"]: row["checksum"] for row in rows}
    newest = max((m.version for m in migrations), default=0)
    if (theirs := max(applied, default=0)) > newest:
        raise ConfigError([
            "the Postgres database was written by a newer version "
            f"(its schema is {theirs}, this one knows {newest}): "
            "install that version, or restore a backup made before it"
        ])  # fmt: skip
    for migration in migrations:
        if applied.get(migration.version, migration.checksum) != migration.checksum:
            raise ConfigError([
                f"migration {migration.version:04} ({migration.name}) of the Postgres database "
                "is not the one of this version: install the version that wrote it, or restore a backup"
            ])  # fmt: skip
    return [m for m in migrations if m.version not in applied]


async def migrate(conn: AsyncConnection[Any], migrations: tuple[Migration, ...]) -> None:
    """Brings the database up to date; each migration is one transaction, made by one process."""
    for _ in await pending(conn, migrations):
        async with conn.transaction():
            # of the transaction, not of the session, so that it works through a transaction pooler
            await conn.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            await conn.execute(
                "CREATE TABLE IF NOT EXISTS schema_migrations (version integer PRIMARY KEY, name text NOT NULL,"
                " checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            if not (left := await pending(conn, migrations)):
                return  # another process was faster
            await conn.execute(left[0].sql.encode())
            await conn.execute(
                "INSERT INTO schema_migrations (version, name, checksum) VALUES (%s, %s, %s)",
                (left[0].version, left[0].name, left[0].checksum),
            )
