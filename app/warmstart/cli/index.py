"""index: a repository's code, as memories."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from warmstart.cli import output
from warmstart.cli.connection import find, log_to_files
from warmstart.client import MemoryClient
from warmstart.errors import ConfigError, Problem, ServerUnreachable, WarmstartError
from warmstart.memory import ListRequest, parse

if TYPE_CHECKING:
    from warmstart.indexer.repository import Repository
    from warmstart.indexer.run import Result
    from warmstart.indexer.upload import Progress

EXIT_INTERRUPTED: Final = 130
#: All of them go into the log.
SHOWN_PROBLEMS: Final = 20
_PHASES: Final = {"look": "Looking at files", "upload": "Bringing memories up to date"}


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-n", "--namespace", help="Where its memories go; code-NAME, after the directory, where not given.")
@click.option("--dry-run", is_flag=True, help="Say what would change; send, ask and write nothing.")
@output.json_option
def index(path: Path | None, namespace: str | None, dry_run: bool, as_json: bool) -> None:
    """Remember a repository's code: a memory for each symbol.

    PATH is its directory; where not given, the repository around the current one. What is stored is derived: paths,
    signatures, comments, what calls what, and the prose of Markdown files; never a body. The next run touches only
    what changed, and a run that was ended is gone on with.
    """
    _need_packages()
    from warmstart.indexer.repository import find as find_repository

    repository = find_repository(path)
    if namespace is not None:
        parse(ListRequest, {"namespace": namespace})
        repository = dataclasses.replace(repository, namespace=namespace)
    log_to_files("index")
    try:
        result = asyncio.run(_run(repository, dry_run=dry_run, take_over=namespace is not None))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Interrupted. What was acknowledged is kept: run the same command again to go on.", err=True)
        raise SystemExit(EXIT_INTERRUPTED) from None
    _show_problems(result.problems)
    if as_json:
        output.print_json(result.summary)
        return
    if dry_run:
        _show_plan(result)
    _show_summary(result, repository.namespace, dry_run=dry_run)


def _need_packages() -> None:
    try:
        import betterleaks  # noqa: F401
        import pathspec  # noqa: F401
        import tree_sitter  # noqa: F401
    except ImportError as error:
        raise ConfigError([f"{error.name} is not installed here: install warmstart[index]"]) from None


async def _run(repository: Repository, *, dry_run: bool, take_over: bool) -> Result:
    from warmstart.indexer.run import index as run_index
    from warmstart.indexer.upload import Server

    if dry_run:
        with _progress() as progress:
            return await run_index(repository, None, progress)
    server = Server(_connect, _say_pause)
    try:
        # before the bars, since a server that starts has a spinner of its own
        await server.open()
        with _progress() as progress:
            return await run_index(repository, server, progress, take_over=take_over)
    except (Problem, ServerUnreachable) as error:
        raise _with_advice(error) from None
    finally:
        await server.close()


async def _connect() -> MemoryClient:
    target = await asyncio.to_thread(find)
    return MemoryClient(target.url, target.api_key)


def _with_advice(error: WarmstartError) -> WarmstartError:
    """Of what passes: that nothing is lost."""
    advice = "; what was acknowledged is kept: run the same command again to go on"
    if isinstance(error, ServerUnreachable):
        return ServerUnreachable(f"{error}{advice}")
    if isinstance(error, Problem) and int(error.extra.get("status", error.status)) in (429, 503, 507):
        error.args = (f"{error.detail}{advice}",)
        error.detail = error.args[0]
    return error


def _say_pause(seconds: float, error: WarmstartError) -> None:
    click.echo(f"Waiting {seconds:.0f} s: {output.excerpt(str(error))}", err=True)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on a terminal, on stderr."""
    if not sys.stderr.isatty():
        yield lambda phase, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {phase: bars.add_task(text, total=None, visible=False) for phase, text in _PHASES.items()}
        yield lambda phase, done, total: bars.update(tasks[phase], completed=done, total=total, visible=total > 0)


def _show_problems(problems: dict[str, str]) -> None:
    for number, (path, problem) in enumerate(sorted(problems.items())):
        logging.getLogger(__name__).info("%s: %s", path, problem)
        if number == SHOWN_PROBLEMS:
            click.echo(f"… and {len(problems) - SHOWN_PROBLEMS} more files: see ~/.warmstart/logs", err=True)
        if number < SHOWN_PROBLEMS:
            click.echo(f"{output.safe(path)}: {output.safe(problem)}", err=True)


def _show_plan(result: Result) -> None:
    plan = result.plan
    lines = [(w.path, "+", w.memory.title or w.name) for w in plan.new]
    lines += [(p.wanted.path, "~", p.wanted.memory.title or p.wanted.name) for p in plan.changed]
    lines += [(row.path, "-", row.name) for _, row in plan.gone]
    for path, mark, title in sorted(lines):
        click.echo(output.safe(f"{mark} {path}  {title}"))


def _show_summary(result: Result, namespace: str, *, dry_run: bool) -> None:
    found, tokens = result.summary, result.summary.tokens
    would = "would be " if dry_run else ""
    click.echo(f"{output.heading(namespace)}: {found.files:,} files, {found.symbols:,} symbols ({found.seconds:.1f} s)")
    click.echo(f"{would}new {found.new:,}, {would}changed {found.changed:,}, {would}gone {found.gone:,}")
    click.echo(
        f"tokens a symbol ({tokens.tokenizer}): mean {tokens.mean:g}, median {tokens.median:g}, p90 {tokens.p90:,}, "
        f"max {tokens.max:,}; of all files whole: {tokens.files:,}"
    )
