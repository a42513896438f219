"""database migrate, check: the schema of the bookkeeping, for roll-outs and the way back from one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from warmstart.cli import output
from warmstart.config import Settings, load
from warmstart.errors import BookkeepingUnavailable, ServerUnreachable

if TYPE_CHECKING:
    from warmstart.store.database import Database
    from warmstart.store.migrations import Applied, State


@click.group()
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@click.pass_context
def database(ctx: click.Context, allow_root: bool) -> None:
    """Bring the database up to date, or check that it fits.

    That of DATABASE_URL, else the home's own. A server migrates by itself when it starts.
    """
    output.log_quietly()
    ctx.obj = (load(), allow_root)


@database.command()
@output.json_option
@click.pass_obj
def migrate(obj: tuple[Settings, bool], as_json: bool) -> None:
    """Apply the migrations that the database lacks.

    Each is made whole or not at all, and gives way to a server that uses its table.
    """
    applied, newer, schema = asyncio.run(_migrate(*obj))
    if as_json:
        output.print_json({"applied": _listed(applied), "schema": schema, "newer": _listed(newer)})
        return
    for migration in applied:
        click.echo(f"applied {_described(migration)}")
    for migration in newer:
        click.echo(f"newer than this version: {_described(migration)}")
    click.echo(f"schema {schema}" + ("" if applied else ": nothing to apply"))


@database.command()
@output.json_option
@click.pass_obj
def check(obj: tuple[Settings, bool], as_json: bool) -> None:
    """Exit 0 if this version can run on the database as it is, else 1.

    Changes nothing. A newer schema fits where all of its migrations say so.
    """
    found = asyncio.run(_check(*obj))
    pending = [migration.applied for migration in found.pending]
    reason = found.refused
    if not reason and pending:
        reason = f"it lacks {', '.join(map(str, pending))}: run `warmstart database migrate`"
    if as_json:
        output.print_json({
            "ok": not reason, "reason": reason, "schema": found.schema, "known": found.known,
            "pending": _listed(pending), "newer": _listed(found.newer),
        })  # fmt: skip
    else:
        click.echo(f"schema {found.schema}, this version knows {found.known}")
        for word, migrations in (("pending", pending), ("newer", found.newer)):
            for migration in migrations:
                click.echo(f"{word}: {_described(migration)}")
    if reason:
        click.echo(f"Error: {reason}", err=True)
        raise SystemExit(output.EXIT_ERROR)


async def _migrate(settings: Settings, allow_root: bool) -> tuple[list[Applied], list[Applied], int]:
    async with _opened(settings, allow_root) as opened:
        made = [migration.applied for migration in await opened.migrate()]
        after = await opened.schema()
    return made, list(after.newer), after.schema


async def _check(settings: Settings, allow_root: bool) -> State:
    async with _opened(settings, allow_root) as opened:
        return await opened.schema()


@asynccontextmanager
async def _opened(settings: Settings, allow_root: bool) -> AsyncIterator[Database]:
    from warmstart.cli.database import database as found
    from warmstart.store.database import Database
    from warmstart.store.migrations import MigrationFailed

    try:
        async with found(settings, allow_root=allow_root) as dsn:
            yield Database(dsn)
    except MigrationFailed:
        raise
    except BookkeepingUnavailable as error:
        raise ServerUnreachable(f"Postgres can't be used now: {error}. Check DATABASE_URL, or try again") from None


def _listed(migrations: Iterable[Applied]) -> list[dict[str, Any]]:
    return [
        {"version": m.version, "name": m.name, "compatible": bool(m.compatible), "reason": m.reason or ""}
        for m in migrations
    ]


def _described(migration: Applied) -> str:
    if migration.compatible:
        return f"{migration}, earlier versions can go on"
    return f"{migration}, earlier versions can't go on" + (f": {migration.reason}" if migration.reason else "")
