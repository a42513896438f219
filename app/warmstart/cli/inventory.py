"""store inventory, compact: what a memory store holds, whether a copy holds the same; its files put in order."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click

from warmstart.cli import output
from warmstart.config import Settings, load
from warmstart.errors import BookkeepingUnavailable, ConfigError, ServerUnreachable
from warmstart.home import refuse_root


@click.group()
def store() -> None:
    """Look into a store of memories, running or not, or compact it.

    That of LANCEDB_URI, else the home's.
    """
    output.log_quietly()


@store.command()
@click.option("--search", is_flag=True, help="Search once for each tenant, for words of a memory of its own.")
@click.option("--against", metavar="FILE", help="The --json of an earlier one (- for stdin), to compare with.")
@output.json_option
def inventory(search: bool, against: str | None, as_json: bool) -> None:
    """Count and check what a store holds; reads only.

    Each content is checked against its hash; with DATABASE_URL, tenants and status rows too. Exit
    code 1 where something is wrong, or differs from --against.
    """
    before = _read(against) if against else None
    taken = asyncio.run(_take(load(), before, search=search))
    if as_json:
        output.print_json(taken)
    else:
        click.echo(f"{taken['rows']} memories, table version {taken['version']}, {taken['bytes'] / 1e6:.1f} MB")
        rows = [(name, t["active"], t["trashed"], _counts(t["by_status"])) for name, t in taken["tenants"].items()]
        output.table(("tenant", "active", "trashed", "vectors"), rows)
        for name in ("search", "postgres"):
            if taken[name]:
                click.echo(f"{name}: {_counts(taken[name])}")
    for fault in taken["faults"] + taken["differences"]:
        click.echo(f"Error: {fault}", err=True)
    if not taken["ok"]:
        raise SystemExit(output.EXIT_ERROR)


@store.command()
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@output.json_option
def compact(allow_root: bool, as_json: bool) -> None:
    """Put the store's files in order now: few large ones, every row in the indices, old versions gone.

    The worker does this by itself; beside it and a running server it does no harm.
    """
    refuse_root(allow_root)
    done = asyncio.run(_compact(load()))
    if as_json:
        output.print_json(done)
    else:
        click.echo(
            f"compacted in {done['seconds']:.1f} s: {done['fragments_before']} fragments before, "
            f"{done['fragments']} now; {done['unindexed_rows']} rows in no index"
        )


async def _compact(settings: Settings) -> dict[str, Any]:
    from warmstart.store.maintenance import Maintenance
    from warmstart.store.table import open_table
    from warmstart.store.writer import Writer

    table = await open_table(settings.lancedb, settings.space)
    writer = Writer(table, None)
    writer.start()
    try:
        care = Maintenance(table, writer, settings.vector_index_min_rows, settings.version_retention_s)
        before = await care.state()
        seconds = await care.optimize()
        after = await care.state()
    finally:
        await writer.close()
    return {
        "seconds": round(seconds, 3), "fragments_before": before.fragments, "fragments": after.fragments,
        "unindexed_rows": after.unindexed_rows,
    }  # fmt: skip


async def _take(settings: Settings, before: dict[str, Any] | None, *, search: bool) -> dict[str, Any]:
    from warmstart.store.inventory import differences, take

    try:
        taken = await take(settings.lancedb, settings.database_url.get_secret_value(), search=search)
    except BookkeepingUnavailable as error:
        raise ServerUnreachable(f"Postgres can't be used now: {error}. Check DATABASE_URL, or try again") from None
    if before is not None:
        taken["differences"] = differences(before, taken)
        taken["ok"] = taken["ok"] and not taken["differences"]
    return taken


def _read(name: str) -> dict[str, Any]:
    from warmstart.store.inventory import FORMAT

    try:
        found = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"--against {name}: it can't be read as JSON: {str(error)[:200]}"]) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(
            [f"--against {name}: it must be what `warmstart store inventory --json` of this version prints"]
        )
    return found


def _counts(counted: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in counted.items())
