"""namespaces list, rename, delete."""

from __future__ import annotations

import click

from warmstart.cli import output
from warmstart.cli.connection import run
from warmstart.cli.memories import confirm
from warmstart.memory import RenameNamespace, parse


@click.group()
def namespaces() -> None:
    """List, rename and delete namespaces."""


@namespaces.command(name="list")
@output.json_option
def list_(as_json: bool) -> None:
    """List namespaces with what they hold."""
    found = run(lambda memory: memory.namespaces())
    if as_json:
        output.print_json(found)
    else:
        rows = [(n.name, n.active, n.trashed) for n in found.namespaces]
        output.table(("namespace", "active", "in the trash"), rows)


@namespaces.command()
@click.argument("name")
@click.argument("to")
@output.json_option
def rename(name: str, to: str, as_json: bool) -> None:
    """Rename a namespace in place; TO must not exist yet."""
    target = parse(RenameNamespace, {"name": to}).name
    done = run(lambda memory: memory.rename_namespace(name, target))
    if as_json:
        output.print_json(done)
    else:
        click.echo(f"{name} is {done.name} now, {done.memories} memories")


@namespaces.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Don't ask.")
@output.json_option
def delete(name: str, yes: bool, as_json: bool) -> None:
    """Put all memories of a namespace in the trash."""
    if not yes:
        confirm(f"Put all memories of {name} in the trash?")
    done = run(lambda memory: memory.delete_namespace(name))
    if as_json:
        output.print_json(done)
    else:
        click.echo(f"{done.memories} memories of {name} are in the trash")
