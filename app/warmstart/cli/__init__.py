"""The command line: `main` and one module a command group.

A module is imported when one of its commands runs: `mcp` and `healthcheck` must
start fast, and what a client's machine runs never needs the server's packages.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

import click

from warmstart import __version__
from warmstart.cli import output
from warmstart.errors import WarmstartError

#: In the order of `--help`.
COMMANDS: Final = {
    "serve": "serve", "worker": "worker", "mcp": "mcp",
    "save": "memories", "search": "search", "context": "search", "get": "memories", "list": "memories:list_",
    "delete": "memories", "restore": "memories", "index": "index", "counts": "memories", "namespaces": "namespaces",
    "export": "transfer", "import": "imports:import_", "keys": "keys", "tenants": "tenants", "migrate": "migrate",
    "database": "schema", "store": "inventory", "smoke": "smoke",
    "hook": "hook", "install": "install",
    "health": "doctor", "doctor": "doctor", "healthcheck": "healthcheck", "redis-rest": "redis_rest",
}  # fmt: skip


class Commands(click.Group):
    """Finds a command in its module, and turns each error into lines and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, function = COMMANDS[name].partition(":")
        found = importlib.import_module(f"warmstart.cli.{module}")
        command: click.Command = getattr(found, function or name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WarmstartError as error:
            ctx.exit(output.report(error, as_json=output.wants_json(ctx)))
        except (click.ClickException, click.exceptions.Exit, click.Abort, OSError):
            raise  # click says these itself; an EPIPE it passes over
        except Exception as error:
            ctx.exit(output.report_unexpected(error, as_json=output.wants_json(ctx)))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 error, 2 usage or configuration, 3 not found, 4 conflict, "
    "5 no server reached, or it can't serve now (try again), 6 the API key is refused.",
)
@click.version_option(__version__, prog_name="warmstart")
def main() -> None:
    """One long-term memory for coding agents.

    Commands of a client use the server of WARMSTART_URL (with WARMSTART_API_KEY); without one, the
    server of this machine's own memory (WARMSTART_HOME), which they start where none runs.
    """
    # files made here hold memories and keys
    os.umask(os.umask(0o077) | 0o077)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
