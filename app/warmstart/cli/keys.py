"""keys create, list, revoke."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from warmstart.cli import output
from warmstart.config import Settings, load
from warmstart.errors import BookkeepingUnavailable, NotFound
from warmstart.home import FIRST_TENANT


@click.group()
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@click.pass_context
def keys(ctx: click.Context, allow_root: bool) -> None:
    """Make, list and revoke API keys.

    Where the memory's database is: beside a running server, or without one.
    """
    output.log_quietly()
    ctx.obj = (load(), allow_root)


@keys.command()
@click.argument("name", default="cli")
@click.option("--tenant", default=FIRST_TENANT, show_default=True, help="Its name or id.")
@click.option("--unlimited", is_flag=True, help="Without a rate limit.")
@output.json_option
@click.pass_obj
def create(obj: tuple[Settings, bool], name: str, tenant: str, unlimited: bool, as_json: bool) -> None:
    """Make a key called NAME and print it: it can't be shown again."""
    key = asyncio.run(_create(*obj, name, tenant, unlimited))
    if as_json:
        output.print_json({"key": key, "name": name, "tenant": tenant, "unlimited": unlimited})
        return
    click.echo(key)
    click.echo("Keep it: only its hash is stored.", err=True)


@keys.command(name="list")
@click.option("--tenant", help="Only this one's keys, by name or id.")
@output.json_option
@click.pass_obj
def list_(obj: tuple[Settings, bool], tenant: str | None, as_json: bool) -> None:
    """List keys; of each, only its beginning is known."""
    found = asyncio.run(_list(*obj, tenant))
    if as_json:
        output.print_json({"keys": found})
        return
    columns = ("id", "prefix", "name", "tenant_id", "created_at", "last_used_at", "state")
    output.table(columns, [[str(row[column] or "-")[:40] for column in columns] for row in found])


@keys.command()
@click.argument("key", metavar="ID_OR_PREFIX")
@output.json_option
@click.pass_obj
def revoke(obj: tuple[Settings, bool], key: str, as_json: bool) -> None:
    """Revoke a key: within 10 s no process takes it any more. Works with the database down."""
    key_id, recorded = asyncio.run(_revoke(*obj, key))
    if as_json:
        output.print_json({"id": key_id, "revoked": True, "recorded": recorded})
        return
    click.echo(f"{key_id} is revoked")
    if recorded == "snapshot":
        click.echo("The database does not answer: it is told when it is back.", err=True)


async def _create(settings: Settings, allow_root: bool, name: str, tenant: str, unlimited: bool) -> str:
    from warmstart.cli.database import bookkeeping

    async with bookkeeping(settings, allow_root=allow_root) as books:
        if tenant == FIRST_TENANT and not await books.tenants():
            tenant_id = await books.create_tenant(FIRST_TENANT)
        else:
            tenant_id = await _tenant_id(books, tenant)
        return await books.create_key(tenant_id, name, unlimited=unlimited)


async def _list(settings: Settings, allow_root: bool, tenant: str | None) -> list[dict[str, Any]]:
    from warmstart.cli.database import bookkeeping

    async with bookkeeping(settings, allow_root=allow_root) as books:
        found = await books.list_keys(await _tenant_id(books, tenant) if tenant else None)
    return [
        {
            "id": key.id,
            "prefix": key.prefix,
            "name": key.name,
            "tenant_id": key.tenant_id,
            "unlimited": key.unlimited,
            "created_at": _time(key.created_at),
            "last_used_at": _time(key.last_used_at),
            "revoked_at": _time(key.revoked_at),
            "state": "revoked" if key.revoked_at else "active",
        }
        for key in found
    ]


async def _revoke(settings: Settings, allow_root: bool, key: str) -> tuple[str, str]:
    from warmstart.cli.database import bookkeeping
    from warmstart.keys import revoke_in_snapshot
    from warmstart.store.bookkeeping import SHOWN_CHARS, hash_key

    whole = len(key) > SHOWN_CHARS and key.startswith("ws_sk_")
    try:
        async with bookkeeping(settings, allow_root=allow_root) as books:
            return await books.revoke_key(key[:SHOWN_CHARS] if whole else key), "database"
    except BookkeepingUnavailable:
        snapshot = settings.warmstart_home / "keys.json"
        return await asyncio.to_thread(revoke_in_snapshot, snapshot, hash_key(key) if whole else key), "snapshot"


async def _tenant_id(books: Any, tenant: str) -> str:
    tenants = await books.tenants()
    for found in tenants:
        if tenant in (found.id, found.name):
            return str(found.id)
    names = ", ".join(sorted(t.name for t in tenants)[:10]) or "none yet"
    raise NotFound(f"there is no tenant {tenant[:64]!r} (there are: {names}): `warmstart tenants create` makes one")


def _time(at: Any) -> str | None:
    return at.isoformat(timespec="seconds") if at else None
