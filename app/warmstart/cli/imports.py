"""import: from an export of this memory, or from another one."""

from __future__ import annotations

from pathlib import Path

import click

from warmstart.cli import output, transfer
from warmstart.cli.connection import run
from warmstart.cli.progress import Progress
from warmstart.client import MemoryClient
from warmstart.importers import MODULES, OWN, read
from warmstart.importers.carry import Carried, carry
from warmstart.importers.items import memories
from warmstart.memory import Namespace, Request, parse


class _Target(Request):
    namespace: Namespace


@click.command(name="import")
@click.argument("path", type=click.Path(exists=True, allow_dash=True, path_type=Path))
@click.option("--from", "source", type=click.Choice([OWN, *MODULES]), default=OWN, help="Whose format PATH is in.")
@click.option("-n", "--namespace", help="Where to put the memories of another one; its project, where not given.")
@click.option("--dry-run", is_flag=True, help="Read, count, and write nothing.")
@output.json_option
def import_(path: Path, source: str, namespace: str | None, dry_run: bool, as_json: bool) -> None:
    """Bring memories in.

    From an export of Warmstart, or from what another memory keeps. An export comes back as it was: ids, times, trash,
    earlier versions. Running an import again makes nothing twice, so one that was cut off is run again.
    """
    if source == OWN:
        if namespace is not None:
            raise click.UsageError("an export keeps its namespaces: leave out --namespace")
        transfer.import_own(path, dry_run=dry_run, as_json=as_json)
        return
    if namespace is not None:
        parse(_Target, {"namespace": namespace})
    carried = Carried()
    news = memories(read(source, path, namespace, carried.report), source, carried.report)

    async def work(client: MemoryClient) -> None:
        with Progress() as progress:
            await carry(
                client, news, source, carried, dry_run=dry_run, save=transfer.persistently,
                progress=lambda done: progress("import", done, done),
            )  # fmt: skip

    run(work)
    if as_json:
        output.print_json(carried.to_dict() | {"from": source, "dry_run": dry_run})
    else:
        _tell(carried, dry_run=dry_run)


def _tell(carried: Carried, *, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    click.echo(f"{carried.created:,} memories {would}imported")
    if carried.known:
        click.echo(f"{carried.known:,} are known from an earlier import")
    if carried.changed:
        click.echo(f"{carried.changed:,} of these have changed at their source since; they stay as they are here")
    if carried.duplicates:
        click.echo(f"{carried.duplicates:,} left out: another memory has their content")
    if carried.report.left:
        click.echo("Not carried over:")
        output.table(("count", "what"), [(count, what) for what, count in carried.report.left.most_common()])
