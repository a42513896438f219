"""tenants create, list."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from warmstart.cli import output
from warmstart.config import Settings, load
from warmstart.errors import Conflict


@click.group()
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@click.pass_context
def tenants(ctx: click.Context, allow_root: bool) -> None:
    """Make and list tenants.

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
