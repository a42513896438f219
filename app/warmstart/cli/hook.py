"""hook: what a coding agent runs at a prompt; the command itself goes past this, see `warmstart.entry`."""

from __future__ import annotations

import click


@click.command()
@click.argument("event", type=click.Choice(("prompt", "session-end")))
def hook(event: str) -> None:
    """Print what the memory knows about a prompt (for hooks).

    Reads on stdin the event that Claude Code (UserPromptSubmit, SessionEnd) or Kiro gives its hooks.
    Silent where nothing is found, the server is down, or 600 ms are over; always ends with 0.
    `warmstart install claude-code --hooks` sets it up.
    """
    from warmstart import hooks

    hooks.run(event)
