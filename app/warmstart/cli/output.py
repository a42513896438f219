"""What the commands print: people read lines, programs one JSON object as the last line."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from warmstart.errors import PROBLEM_BASE, ConfigError, Problem, ServerUnreachable, WarmstartError

if TYPE_CHECKING:
    from pydantic import BaseModel

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 5
#: By the status of a problem.
EXIT_CODES: Final = {
    400: EXIT_USAGE, 413: EXIT_USAGE, 415: EXIT_USAGE, 422: EXIT_USAGE, 404: 3, 409: 4, 412: 4,
    429: EXIT_UNREACHABLE, 503: EXIT_UNREACHABLE, 401: 6, 403: 6,
}  # fmt: skip
EXCERPT_CHARS: Final = 300
_JSON: Final = "warmstart.json"
#: Escape sequences in somebody's memory must not reach a terminal.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """`--json`, which errors obey too."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    option = click.option(
        "--json", "as_json", is_flag=True, callback=remember, is_eager=True,
        help="Print one JSON object as the last line.",
    )  # fmt: skip
    return option(command)


def wants_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(_JSON))


def print_json(value: BaseModel | dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value.model_dump_json()
    click.echo(text)


def safe(text: str) -> str:
    """`text` as a terminal may show it; other readers get it as it is."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text


def excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT_CHARS else flat[: EXCERPT_CHARS - 1] + "…"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on a terminal, tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(str(cell).replace("\t", " ").replace("\n", " ") for cell in row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(safe(str(cell))) for cell in row))
    Console(highlight=False).print(shown)


def heading(text: str) -> str:
    return click.style(safe(text), bold=True)


def report(error: WarmstartError, *, as_json: bool) -> int:
    """Prints what was wrong and what to do; the exit code."""
    if as_json:
        print_json({"error": _as_problem(error)})
    for line in _lines(error):
        click.echo(f"Error: {line}", err=True)
    if isinstance(error, Problem):
        # one rebuilt from an answer of a newer server knows its status only from there
        return EXIT_CODES.get(int(error.extra.get("status", error.status)), EXIT_ERROR)
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, ServerUnreachable) else EXIT_ERROR


def report_unexpected(error: Exception, *, as_json: bool) -> int:
    """A fault of ours: one line, and the traceback for the log file."""
    logging.getLogger(__name__).debug("unexpected", exc_info=error)
    line = f"something failed that should not: {type(error).__name__}: {str(error)[:300]}"
    return report(WarmstartError(line), as_json=as_json)


def log_quietly() -> None:
    """For commands that speak for themselves: of the parts they use, errors only."""
    from warmstart import logs

    logs.configure("error", "console")


def _as_problem(error: WarmstartError) -> dict[str, Any]:
    if isinstance(error, Problem):
        return error.to_dict()
    kind = {ConfigError: "config", ServerUnreachable: "server-unreachable"}.get(type(error), "error")
    return {"type": PROBLEM_BASE + kind, "title": "The command failed", "detail": str(error)}


def _lines(error: WarmstartError) -> list[str]:
    if isinstance(error, ConfigError):
        return error.faults
    faults = error.extra.get("errors") if isinstance(error, Problem) else None
    if not isinstance(faults, list):
        return [str(error)]
    return [_fault_line(fault) for fault in faults]


def _fault_line(fault: dict[str, Any]) -> str:
    """The field, what was wrong, what was allowed, what was given."""
    line = f"{str(fault.get('field', '')).replace('_', '-') or 'request'}: {fault.get('problem')}"
    given = [f"{name} {fault[name]}" for name in ("limit", "size") if name in fault]
    return f"{line} ({', '.join(given)})" if given else line
