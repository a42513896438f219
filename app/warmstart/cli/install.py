"""install: write the lines that a coding agent needs into its own configuration."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from warmstart.cli import hosts, output
from warmstart.cli.hosts import Change

HOSTS: Final = ("claude-code", "cursor", "vscode", "codex")
_KEY: Final = re.compile(r"(ws_sk_[A-Za-z0-9_-]{4})[A-Za-z0-9_-]+")


@click.command()
@click.argument("host", type=click.Choice(HOSTS))
@click.option("--hooks", is_flag=True, help="Also ask the memory at each prompt (Claude Code).")
@click.option("--undo", is_flag=True, help="Take out what an installation wrote, hooks included.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@output.json_option
def install(host: str, hooks: bool, undo: bool, yes: bool, as_json: bool) -> None:
    """Connect a coding agent to the memory.

    Shows what will change in the agent's configuration, asks, and keeps all else that is there. With
    WARMSTART_URL and WARMSTART_API_KEY set the agent goes to that server, else to this machine's own memory.
    """
    if hooks and host != "claude-code":
        raise click.UsageError(
            f"{host} has no hook that can add to a prompt: leave --hooks out; the agent asks the memory over MCP"
        )
    changes = [hosts.hosts(os.environ, Path.home())[host]]
    if host == "claude-code" and (hooks or undo):
        changes.append(hosts.claude_hooks(os.environ, Path.home()))
    planned = [(change, *_texts(change, undo=undo)) for change in changes]
    altered = [plan for plan in planned if plan[1] != plan[2]]
    for change, before, after in altered:
        _show(change.path, before, after, to_stderr=as_json)
    if altered and not yes:
        _ask(as_json=as_json)
    for change, before, after in altered:
        (hosts.undo if undo else hosts.write)(change.path, after, before)
    _report([c.path for c, *_ in planned], [c.path for c, *_ in altered], undo=undo, as_json=as_json)
    if hooks and not undo and not as_json:
        click.echo("At each prompt its text goes to the memory's server, which takes secrets out and keeps none of it.")
        if os.environ.get("WARMSTART_URL"):
            click.echo(
                "Hooks find WARMSTART_URL and WARMSTART_API_KEY in the environment that Claude Code is started in."
            )


def _texts(change: Change, *, undo: bool) -> tuple[str, str]:
    before = hosts.read(change.path)
    return before, (change.remove if undo else change.install)(before, change.path)


def _show(path: Path, before: str, after: str, *, to_stderr: bool) -> None:
    """The difference, keys cut."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="", n=2)
    colors = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        shown = output.safe(_KEY.sub(r"\1…", line))
        click.echo(click.style(shown, fg=colors.get(line[:1])), err=to_stderr)


def _ask(*, as_json: bool) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nothing was written: say --yes to write it")
    click.confirm("Write this?", abort=True, default=True, err=as_json)


def _report(paths: list[Path], altered: list[Path], *, undo: bool, as_json: bool) -> None:
    if as_json:
        files: list[dict[str, Any]] = [{"path": str(path), "changed": path in altered} for path in paths]
        output.print_json({"undone" if undo else "installed": True, "files": files})
        return
    for path in paths:
        backup = hosts.backup_of(Path(os.path.realpath(path)))
        kept = f", as it was before: {backup}" if path in altered and not undo and backup.exists() else ""
        click.echo(f"{path}: {'written' + kept if path in altered else 'nothing to change'}")
    if altered and not undo:
        click.echo("Start the agent anew, then `warmstart doctor` checks the rest.")
