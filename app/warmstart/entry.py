"""The command `warmstart`: a hook goes its own fast way, all else to the command line."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["hook"] and len(sys.argv) == 3 and not sys.argv[2].startswith("-"):
        from warmstart import hooks

        hooks.main(sys.argv[2:])
    from warmstart.cli import main as command_line

    command_line()
