"""export, import."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import click

from warmstart.cli import output
from warmstart.cli.connection import run
from warmstart.cli.progress import Progress
from warmstart.client import MemoryClient
from warmstart.errors import Problem, ServerUnreachable, WarmstartError
from warmstart.exchange import Format, ImportResult
from warmstart.importers import own

#: A request that meets a restart, a limit or a broken line is made again so often.
TRIES: Final = 8
LONGEST_WAIT_S: Final = 30.0
_STDIO: Final = "-"

T = TypeVar("T")


@click.command()
@click.argument("file", metavar="[FILE]", default=_STDIO, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["ndjson", "json"]), help="ndjson where FILE does not end in .json."
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@output.json_option
def export(file: Path, form: Format | None, force: bool, as_json: bool) -> None:
    """Write all memories to a file.

    The trash and earlier versions, too. Without FILE, to stdout. docs/export.schema.json describes the format.
    """
    form = form or ("json" if file.suffix == ".json" else "ndjson")
    if str(file) == _STDIO:
        if as_json:
            raise click.UsageError("--json tells about a FILE; stdout is taken by the export itself")
        run(lambda client: _copy(client.export(form), form, sys.stdout.buffer))
        sys.stdout.buffer.flush()
        return
    if file.exists() and not force:
        raise click.UsageError(f"{file} is there already: name another file, or add --force")
    with _placed(file) as target:
        count = run(lambda client: _copy(client.export(form), form, target))
        size = target.tell()
    if as_json:
        output.print_json({"file": str(file), "format": form, "memories": count, "bytes": size})
    else:
        click.echo(f"{count:,} memories, {size:,} bytes, in {file}")


async def _copy(chunks: AsyncIterator[bytes], form: Format, target: BinaryIO) -> int:
    """How many memories there were; raises ServerUnreachable where the export was cut short."""
    head, lines, last, count = b"", 0, b"", -1
    # one memory a line in both forms, beside a header; JSON has an end, too
    others = 2 if form == "json" else 1
    with Progress() as progress:
        async for chunk in chunks:
            if count < 0:
                head += chunk
                if b"\n" in head:
                    count = own.count_in(head.split(b"\n", 1)[0])
            lines, last = lines + chunk.count(b"\n"), chunk[-1:]
            target.write(chunk)
            if count >= 0:
                progress("export", min(count, max(0, lines - 1)), count)
    if lines - others != count or last != b"\n":
        raise ServerUnreachable(f"the export was cut short after {max(0, lines - 1):,} memories: try again")
    return count


@contextmanager
def _placed(path: Path) -> Iterator[BinaryIO]:
    """A file that is there whole, on the disk for good, or not at all."""
    try:
        made = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
    except OSError as error:
        raise WarmstartError(f"can't write to {path.parent}: {error.strerror}") from None
    fresh = Path(made.name)
    try:
        with made as file:
            yield file  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise WarmstartError(f"can't write {path}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def import_own(file: Path, *, dry_run: bool, as_json: bool) -> None:
    """An export of Warmstart's. What is there already is passed over, so that it can be run again."""
    with nullcontext(sys.stdin.buffer) if str(file) == _STDIO else file.open("rb") as source:
        opened = own.read(source)
        if dry_run:
            for _ in opened.chunks:
                pass
            total = ImportResult()
        else:
            total = run(lambda client: _send(client, opened))
    if as_json:
        output.print_json(total.model_dump() | {"memories": opened.count, "dry_run": dry_run})
        return
    if dry_run:
        click.echo(f"{opened.count:,} memories; nothing was sent")
        return
    _tell(total)


async def _send(client: MemoryClient, opened: own.Opened) -> ImportResult:
    total, done = ImportResult(), 0
    with Progress() as progress:
        for chunk in opened.chunks:
            try:
                total.add(await persistently(lambda: client.import_lines(chunk.lines)))  # noqa: B023
            except WarmstartError as error:
                _placed_in_file(error, chunk, done, opened.count)
                raise
            done += chunk.memories
            progress("import", done, opened.count)
    return total


def _placed_in_file(error: WarmstartError, chunk: own.Chunk, done: int, count: int) -> None:
    """Say where in the file the fault is, and how far the import came."""
    went = f"{done:,} of {count:,} memories are done; run the same command again to go on"
    if isinstance(error, Problem):
        line = error.extra.pop("line", None)
        where = f"memory {chunk.first + line - 1}" if line else f"memories from {chunk.first} on"
        if line and chunk.line:
            where = f"line {chunk.line + line - 1}"
        detail = error.detail.removeprefix(f"line {line}: ")
        for fault in error.extra.get("errors", []):
            fault["field"] = f"{where}, {fault.get('field') or 'memory'}"
        error.detail = f"{where}: {detail}. {went}"
        error.args = (error.detail,)
    else:
        error.args = (f"{error}. {went}",)


async def persistently(call: Callable[[], Awaitable[T]]) -> T:
    """`call`, made again while the server is busy, restarts or can't be reached: for calls that may be repeated."""
    for attempt in range(1, TRIES + 1):
        try:
            return await call()
        except (Problem, ServerUnreachable) as error:
            retriable = isinstance(error, ServerUnreachable) or "retry_after" in error.extra
            if not retriable or attempt == TRIES:
                raise
            asked = float(error.extra["retry_after"]) if isinstance(error, Problem) else 0.0
            await asyncio.sleep(min(max(asked, 0.25 * 2**attempt), LONGEST_WAIT_S))
    raise AssertionError("unreachable")


def _tell(total: ImportResult) -> None:
    click.echo(f"{total.created:,} memories imported; their vectors are made by and by")
    if total.renamed:
        click.echo(f"{total.renamed:,} of them with a new id: another tenant of this server has theirs")
    if total.unchanged:
        click.echo(f"{total.unchanged:,} were there already")
    if total.duplicates:
        click.echo(f"{total.duplicates:,} left out: another memory has their content")
    if total.differing:
        click.echo(f"{total.differing:,} left as they are here: changed since the export")
    for note in total.notes:
        click.echo(f"  {note.id} {note.outcome}{f': {note.other}' if note.other else ''}", err=True)
