"""migrate dimension: the memories' vectors to another width or model."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import click

from warmstart.allocation import limit_allocators, limit_read_ahead
from warmstart.cli import output
from warmstart.cli.progress import Progress
from warmstart.config import Settings, Space, load
from warmstart.home import Home, refuse_root

if TYPE_CHECKING:
    from warmstart.migrate import Plan, Result
    from warmstart.store.bookkeeping import Bookkeeping


@click.group()
def migrate() -> None:
    """Move the memories to another embedding model or width."""


@migrate.command()
@click.option("--to", type=click.IntRange(1, 8192), metavar="N", help="Width to migrate to; that of EMBEDDING_DIM.")
@click.option(
    "--plan", "only_plan", is_flag=True, help="Show what would be done and the disk it needs; change nothing."
)
@click.option("--rollback", is_flag=True, help="Undo a migration that was cut off, or else the last one.")
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@output.json_option
def dimension(to: int | None, only_plan: bool, rollback: bool, allow_root: bool, as_json: bool) -> None:
    """Make all vectors anew for the configured model, N numbers wide.

    Set EMBEDDING_DIM, EMBED_MODEL and EMBED_REVISION to the new model first; the same width with another model works
    too. The rows are dumped and the dump is proven before anything is changed. Meanwhile searches answer from what is
    back and writes are refused for a while; afterwards the worker embeds all memories again. Cut off anywhere: run the
    same command again.
    """
    if rollback == (to is not None) or (rollback and only_plan):
        raise click.UsageError("say either --to N (with --plan or without) or --rollback")
    output.log_quietly()
    limit_allocators()
    limit_read_ahead()
    settings = load()
    refuse_root(allow_root)
    Home(settings.warmstart_home).check_version()
    try:
        asyncio.run(_dimension(settings, allow_root, to, only_plan=only_plan, as_json=as_json))
    except KeyboardInterrupt:
        click.echo("Interrupted: run the same command again, and it goes on where it was", err=True)
        raise SystemExit(output.EXIT_ERROR) from None


async def _dimension(settings: Settings, allow_root: bool, to: int | None, *, only_plan: bool, as_json: bool) -> None:
    from warmstart.migrate import Migrator

    @asynccontextmanager
    async def books() -> AsyncIterator[Bookkeeping]:
        from warmstart.cli.database import bookkeeping

        async with bookkeeping(settings, allow_root=allow_root) as opened:
            yield opened

    with Progress() as progress:
        migrator = Migrator(settings, books, progress)
        if to is None:
            done: Plan | Result = await migrator.rollback()
        elif only_plan:
            done = await migrator.plan(to)
        else:
            done = await migrator.migrate(to)
    if as_json:
        output.print_json(done.to_dict())
    if only_plan:
        _tell_plan(done, quiet=as_json)  # type: ignore[arg-type]
    elif not as_json:
        _tell(done, settings)  # type: ignore[arg-type]


def _tell_plan(plan: Plan, *, quiet: bool) -> None:
    if not quiet:
        click.echo(f"from {_named(plan.source)}\nto   {_named(plan.target)}")
        click.echo(f"do   {_ACTIONS[plan.action]}\nrows {plan.rows:,}")
        if plan.action != "nothing":
            click.echo(
                f"disk {plan.needed_bytes:,} bytes needed (dump {plan.dump_bytes:,}, table {plan.table_bytes:,}, "
                f"vectors {plan.vector_bytes:,}, and to spare), {plan.free_bytes:,} free\n"
                f"memory {plan.memory_bytes:,} bytes needed, {plan.allowed_bytes:,} allowed"
            )
    if not plan.disk_fits:
        click.echo("Error: the disk is too small: free space first", err=True)
    if not plan.memory_fits:
        click.echo("Error: too little memory is allowed: raise the container's limit (API_MEMORY) first", err=True)
    if not plan.fits:
        raise SystemExit(output.EXIT_ERROR)


_ACTIONS: Final = {
    "nothing": "nothing: the memories are there already",
    "recreate": "dump, make the table anew, reload, index, verify; the worker embeds",
    "reset": "dump, take the vectors out of the rows, index, verify; the worker embeds",
    "resume": "go on with the migration that was cut off; its dump is there",
}


def _tell(result: Result, settings: Settings) -> None:
    if result.outcome == "nothing":
        click.echo(f"nothing to do: {result.rows:,} memories are at {_named(result.target)}")
        click.echo(f"{result.queued:,} wait for their vector")
        return
    word = "back at" if result.outcome == "rolled-back" else "now at"
    click.echo(f"{result.rows:,} memories are {word} {_named(result.target)}, verified against the dump, "
               f"{result.seconds:.1f} s")  # fmt: skip
    if result.queued:
        click.echo(f"{result.queued:,} wait for their vector: the worker embeds them; `warmstart health` counts them")
    if result.statuses is None and result.queued:
        click.echo("Postgres was not reached: the worker sets its status rows right")
    if result.dump:
        click.echo(f"the dump stays in {result.dump}; once you are sure: rm -r {shlex.quote(result.dump)}")
    if result.target != settings.space:
        click.echo(f"set EMBED_MODEL={result.target.model}, EMBED_REVISION={result.target.revision} and "
                   f"EMBEDDING_DIM={result.target.dim} again: until then search is text only")  # fmt: skip


def _named(space: Space) -> str:
    return f"{space.model} ({space.revision or 'no revision'}), {space.dim} wide"
