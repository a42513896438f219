"""save, get, list, delete, restore, counts."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

from warmstart.cli import output
from warmstart.cli.connection import run
from warmstart.client import MemoryClient
from warmstart.errors import Invalid
from warmstart.memory import (
    MAX_CONTENT,
    MEMORY_TYPES,
    Counts,
    HistoryRequest,
    ListRequest,
    Memory,
    NewMemory,
    Page,
    Version,
    parse,
)

#: A character has at most 4 bytes; one more character is enough to be refused.
MAX_STDIN_BYTES: Final = (MAX_CONTENT + 1) * 4


@click.command()
@click.argument("text")
@click.option("--title", help="Short title; the first line is taken where none is given.")
@click.option("--type", "type_", type=click.Choice(MEMORY_TYPES), help="Kind of memory; fact where not given.")
@click.option("-n", "--namespace", help="Project or topic; default where not given.")
@click.option("--tag", "tags", multiple=True, help="May be given several times.")
@click.option("--fact", "facts", multiple=True, help="Short bullet; may be given several times.")
@click.option("--entity", "entities", multiple=True, help="Name of a person, service, file; several times.")
@click.option("--importance", type=float, help="0 to 1; 0.5 where not given.")
@click.option("--source", help="Who wrote it; cli where not given.")
@click.option("--metadata", metavar="JSON", help="A JSON object.")
@click.option("--supersedes", metavar="ID", help="The outdated memory that this replaces in search.")
@click.option("--occurred-at", metavar="TIME", help="When it happened, ISO 8601; now where not given.")
@output.json_option
def save(text: str, as_json: bool, type_: str | None, metadata: str | None, **fields: Any) -> None:
    """Save a memory.

    TEXT is kept byte for byte; `-` reads it from stdin.
    """
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items() if value}
    if fields["importance"] is not None:
        given["importance"] = fields["importance"]
    if metadata is not None:
        given["metadata"] = _json_object(metadata)
    if type_:
        given["type"] = type_
    new = parse(NewMemory, {"source": "cli", "content": _stdin() if text == "-" else text} | given)
    saved = run(lambda memory: memory.save(new))
    if as_json:
        output.print_json(saved)
    elif saved.duplicate:
        click.echo(f"{saved.id} is there already, with this content")
    else:
        waits = "" if saved.embedding_status == "ready" else f" (vector {saved.embedding_status})"
        click.echo(f"{saved.id} saved in {saved.namespace}{waits}")


@click.command()
@click.argument("memory_id", metavar="ID")
@click.option("--history", "with_history", is_flag=True, help="Also what it was before its edits.")
@output.json_option
def get(memory_id: str, with_history: bool, as_json: bool) -> None:
    """Show one memory whole."""

    async def read(client: MemoryClient) -> tuple[Memory, list[Version]]:
        return await client.get(memory_id), await _versions(client, memory_id) if with_history else []

    memory, versions = run(read)
    if as_json:
        told = memory.model_dump(mode="json")
        if with_history:
            told["history"] = [version.model_dump(mode="json") for version in versions]
        output.print_json(told)
        return
    click.echo(output.heading(memory.title))
    for name, value in _details(memory):
        click.echo(f"{name}: {output.safe(value)}")
    click.echo()
    click.echo(output.safe(memory.content))
    for fact in memory.facts:
        click.echo(f"- {output.safe(fact)}")
    for version in versions:
        click.echo()
        click.echo(
            output.heading(f"Version {version.version}, of {version.updated_at:%Y-%m-%d %H:%M}: {version.title}")
        )
        click.echo(output.safe(version.content))
        for fact in version.facts:
            click.echo(f"- {output.safe(fact)}")
    if with_history and not versions:
        click.echo("\nIt was never edited.")


async def _versions(client: MemoryClient, memory_id: str) -> list[Version]:
    """All there are: the server keeps a bounded number."""
    found: list[Version] = []
    request = HistoryRequest()
    while True:
        page = await client.history(memory_id, request)
        found += page.versions
        if page.next_cursor is None:
            return found
        request = HistoryRequest(cursor=page.next_cursor)


@click.command(name="list")
@click.option("-n", "--namespace", help="Only this one.")
@click.option("--type", "type_", type=click.Choice(MEMORY_TYPES), help="Only this type.")
@click.option("--tag", help="Only with this tag.")
@click.option("--source", help="Only of this source.")
@click.option("--trash", is_flag=True, help="Only what was deleted.")
@click.option("--limit", type=int, help="Memories a page, 1 to 200; 50 where not given.")
@click.option("--cursor", help="Go on where the page before ended.")
@click.option("--all", "all_pages", is_flag=True, help="All pages.")
@output.json_option
def list_(as_json: bool, type_: str | None, trash: bool, all_pages: bool, **filters: Any) -> None:
    """List memories, newest first."""
    given = {name: value for name, value in filters.items() if value is not None}
    if type_:
        given["type"] = type_
    if trash:
        given["only_deleted"] = True
    request = parse(ListRequest, given)

    async def pages(client: MemoryClient) -> Page:
        """Shows each page as it comes; answers the last, or all in one for JSON."""
        seen: list[Memory] = []
        asked = request
        while True:
            page = await client.list(asked)
            if as_json:
                seen += page.memories
            else:
                _show_rows(page.memories)
            if not (all_pages and page.next_cursor):
                return Page(memories=seen, next_cursor=page.next_cursor)
            # a copy keeps the fields that were set, which are those that travel
            asked = asked.model_copy(update={"cursor": page.next_cursor})

    last = run(pages)
    if as_json:
        output.print_json(last)
    elif last.next_cursor:
        click.echo(f"More: --cursor {last.next_cursor}, or --all", err=True)


@click.command()
@click.argument("memory_id", metavar="ID")
@click.option("--hard", is_flag=True, help="At once and for good, instead of to the trash.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@output.json_option
def delete(memory_id: str, hard: bool, yes: bool, as_json: bool) -> None:
    """Put a memory in the trash.

    From there it can be restored for 30 days.
    """
    if hard and not yes:
        confirm(f"Remove {memory_id} for good?")
    run(lambda client: client.delete(memory_id, hard=hard))
    if as_json:
        output.print_json({"id": memory_id, "deleted": True, "hard": hard})
    else:
        click.echo(f"{memory_id} removed for good" if hard else f"{memory_id} is in the trash")


@click.command()
@click.argument("memory_id", metavar="ID")
@click.option("--version", type=click.IntRange(1), help="Edit it back to this version of `get --history` instead.")
@output.json_option
def restore(memory_id: str, version: int | None, as_json: bool) -> None:
    """Take a memory out of the trash.

    Or bring an earlier version of it back, which is an edit like any other.
    """
    memory = run(lambda client: client.restore_version(memory_id, version) if version else client.restore(memory_id))
    if as_json:
        output.print_json(memory)
    elif version:
        click.echo(f"{memory.id} is version {version} again")
    else:
        click.echo(f"{memory.id} restored to {memory.namespace}")


@click.command()
@output.json_option
def counts(as_json: bool) -> None:
    """Count memories by state, namespace and type."""
    found: Counts = run(lambda client: client.counts())
    if as_json:
        output.print_json(found)
        return
    rows: list[tuple[str, str, int]] = [("state", "active", found.active), ("state", "trashed", found.trashed)]
    rows += [("namespace", name, n) for name, n in sorted(found.namespaces.items())]
    rows += [("type", name, n) for name, n in sorted(found.types.items())]
    output.table(("by", "name", "memories"), rows)


def confirm(question: str) -> None:
    """Asks on stderr; without a terminal nobody can answer, so it says what to do."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can be asked here: add --yes to do it")
    click.confirm(question, abort=True, err=True)


def _stdin() -> str:
    raw = sys.stdin.buffer.read(MAX_STDIN_BYTES)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        if len(raw) == MAX_STDIN_BYTES:  # cut within a character; too long in any case
            return raw.decode(errors="ignore")
        raise click.UsageError(f"stdin is not UTF-8 text (byte {error.start})") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--metadata is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Invalid('metadata: must be a JSON object such as {"ticket": 7}', field="metadata")
    return value


def _details(memory: Memory) -> list[tuple[str, str]]:
    rows = [
        ("id", memory.id),
        ("namespace", memory.namespace),
        ("type", memory.type),
        ("importance", f"{memory.importance:g}"),
        ("tags", ", ".join(memory.tags)),
        ("entities", ", ".join(memory.entities)),
        ("source", memory.source),
        ("metadata", json.dumps(memory.metadata, ensure_ascii=False) if memory.metadata else ""),
        ("occurred", f"{memory.occurred_at:%Y-%m-%d %H:%M}"),
        ("created", f"{memory.created_at:%Y-%m-%d %H:%M}"),
        ("supersedes", memory.supersedes or ""),
        ("superseded by", memory.superseded_by or ""),
        ("vector", memory.embedding_status),
        ("in the trash until", f"{memory.expires_at:%Y-%m-%d %H:%M}" if memory.expires_at else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _show_rows(memories: list[Memory]) -> None:
    output.table(
        ("id", "created", "namespace", "type", "title"),
        [(m.id, f"{m.created_at:%Y-%m-%d %H:%M}", m.namespace, m.type, m.title) for m in memories],
    )
