"""tenants create, list, delete."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import click

from warmstart.cli import output
from warmstart.config import Settings, load
from warmstart.errors import Conflict, Invalid

#: A revoked key is refused by every process within that time.
REVOKED_S: Final = 10.0


@click.group()
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@click.pass_context
def tenants(ctx: click.Context, allow_root: bool) -> None:
    """Make, list and delete tenants.

    Each has memories and keys of its own.
    """
    output.log_quietly()
    ctx.obj = (load(), allow_root)


@tenants.command()
@click.argument("name")
@output.json_option
@click.pass_obj
def create(obj: tuple[Settings, bool], name: str, as_json: bool) -> None:
    """Make a tenant and print its id."""
    tenant_id = asyncio.run(_create(*obj, name))
    if as_json:
        output.print_json({"id": tenant_id, "name": name})
    else:
        click.echo(tenant_id)


@tenants.command(name="list")
@output.json_option
@click.pass_obj
def list_(obj: tuple[Settings, bool], as_json: bool) -> None:
    """List tenants."""
    found = asyncio.run(_list(*obj))
    if as_json:
        output.print_json({"tenants": found})
    else:
        output.table(("id", "name", "created_at"), [list(row.values()) for row in found])


@tenants.command()
@click.argument("tenant_id")
@click.option("--yes", is_flag=True, help="Without a question.")
@output.json_option
@click.pass_obj
def delete(obj: tuple[Settings, bool], tenant_id: str, yes: bool, as_json: bool) -> None:
    """Delete a tenant for good, by its id, and show that nothing of it is left.

    Its keys, memories, trash, status rows and events go, and the table's older versions and indices, which may hold
    them still, are made anew; beside a running server, whose writes wait meanwhile. Backups are not reached from
    here. Done again, it looks again. Exit code 1 where something is left.
    """
    if not re.fullmatch(r"usr_[0-9a-f]{20}", tenant_id):
        raise Invalid("a tenant is deleted by its id, usr_…: `warmstart tenants list` shows it", field="tenant_id")
    if not yes:
        click.confirm(f"All memories of {tenant_id} will be gone for good. Delete them?", abort=True)
    done = asyncio.run(_delete(*obj, tenant_id))
    if as_json:
        output.print_json(done)
    else:
        table, rows = done["table"], done["bookkeeping"]
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in rows.items())
        click.echo(f"deleted: memories {table['rows']}, {counts}")
        since = datetime.fromtimestamp(table["since"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        click.echo(f"left: memories {table['left']}, rows in Postgres {done['left']}")
        click.echo(f"files of the table: {table['files']}, of them {table['older_files']} older than {since}, "
                   "when the memories had gone")  # fmt: skip
    if not done["ok"]:
        click.echo("Error: something of it is left: run this again", err=True)
        raise SystemExit(output.EXIT_ERROR)


async def _delete(settings: Settings, allow_root: bool, tenant_id: str) -> dict[str, Any]:
    from warmstart.cli.database import bookkeeping
    from warmstart.store.erasure import erase, refuse_copies
    from warmstart.store.maintenance import Maintenance
    from warmstart.store.table import open_table
    from warmstart.store.writer import Writer

    refuse_copies(settings.lancedb)
    async with bookkeeping(settings, allow_root=allow_root) as books:
        if await books.revoke_tenant(tenant_id):
            await asyncio.sleep(REVOKED_S)
        table = await open_table(settings.lancedb, settings.space)
        writer = Writer(table, None)
        writer.start()
        try:
            care = Maintenance(table, writer, settings.vector_index_min_rows, settings.version_retention_s)
            erased = await erase(table, writer, care, tenant_id)
        finally:
            await writer.close()
        removed = await books.forget_tenant(tenant_id)
        left = await books.rows_of_tenant(tenant_id)
    ok = not (erased.left or erased.older_files or left)
    return {"ok": ok, "id": tenant_id, "table": asdict(erased), "bookkeeping": removed, "left": left}


async def _create(settings: Settings, allow_root: bool, name: str) -> str:
    from warmstart.cli.database import bookkeeping

    async with bookkeeping(settings, allow_root=allow_root) as books:
        # the database doesn't mind two of one name, but whoever names one would
        if any(name == tenant.name for tenant in await books.tenants()):
            raise Conflict(f"there is a tenant {name[:64]!r} already: choose another name")
        return await books.create_tenant(name)


async def _list(settings: Settings, allow_root: bool) -> list[dict[str, Any]]:
    from warmstart.cli.database import bookkeeping

    async with bookkeeping(settings, allow_root=allow_root) as books:
        found = await books.tenants()
    return [{"id": t.id, "name": t.name, "created_at": t.created_at.isoformat(timespec="seconds")} for t in found]
