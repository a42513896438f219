"""`warmstart-vm <command>`: one module a command, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Final

if not __package__:
    # started by its folder, /opt/warmstart/releases/<id>/vm, whose modules are one package
    folder = Path(__file__).resolve().parent
    sys.path[0] = str(folder.parent)
    __package__ = folder.name
    importlib.import_module(__package__)

#: Command → its module. `add_parser(subparsers)` of a module adds its commands and sets `run(args) -> int` on them.
COMMANDS: Final = {
    "services": "rollout", "migrate": "rollout", "rollout": "rollout", "rollback": "rollout", "pending": "rollout",
    "smoke": "smoke", "status": "status", "secrets": "secrets", "backup": "backup", "drill": "drill",
    "restore": "restore", "metrics": "metrics", "prune": "prune", "alerts": "alerts",
    "restart": "restart", "migrate-dimension": "dimension", "destroy": "destroy",
    "compose": "access", "warmstart": "access", "logs": "access", "keys": "access", "first-key": "access",
}  # fmt: skip


def main(arguments: list[str]) -> int:
    stack = importlib.import_module(".stack", __package__)
    parser = argparse.ArgumentParser("warmstart-vm", description="The stack of this machine.")
    parser.add_argument("command", choices=[*COMMANDS], metavar="command", help=", ".join(COMMANDS))
    known, _ = parser.parse_known_args(arguments[:1])
    chosen = argparse.ArgumentParser("warmstart-vm")
    importlib.import_module(f".{COMMANDS[known.command]}", __package__).add_parser(
        chosen.add_subparsers(dest="command", required=True)
    )
    args = chosen.parse_args(arguments)
    try:
        return int(args.run(args))
    except stack.Refused as error:
        print(f"Refused: {error}", file=sys.stderr)
        return 2
    except stack.VmError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
