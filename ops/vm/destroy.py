"""`destroy`: everything of the stack off this machine. SSH's and the firewall's settings stay: they harm nobody."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from .host import names
from .stack import Refused, Stack

UNITS: Final = Path("etc/systemd/system")
TOOL: Final = Path("usr/local/bin/warmstart-vm")
BACKUPS: Final = Path("var/backups/warmstart")
TIMEOUT_S: Final = 180.0


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    destroy = commands.add_parser("destroy", help="remove the stack and all its data")
    destroy.add_argument("--confirm", metavar="HOST", required=True, help="the name it is deployed to by")
    destroy.add_argument("--backups", action="store_true", help="the backups on this machine as well")
    destroy.set_defaults(run=_destroy)


def _destroy(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    if args.confirm not in (known := names(stack)):
        raise Refused(f"{args.confirm!r} is not this machine, which is known as {', '.join(sorted(known))}")
    with stack.lock("destroy"):
        print("timers", flush=True)
        _remove_units(stack)
        print("containers, networks and volumes", flush=True)
        _remove_containers(stack)
        print("files", flush=True)
        for folder in (stack.opt, stack.etc, stack.state, *([stack.root / BACKUPS] if args.backups else [])):
            shutil.rmtree(folder, ignore_errors=True)
        (stack.root / TOOL).unlink(missing_ok=True)
    kept = "" if args.backups or not (stack.root / BACKUPS).exists() else f"; the backups are still in /{BACKUPS}"
    print(f"Everything of Warmstart is gone{kept}. Images go with `docker image prune --all`.")
    return 0


def _remove_units(stack: Stack) -> None:
    # the firewall stays up: what it guards may be more than this
    units = [unit for unit in (stack.root / UNITS).glob("warmstart-*") if "firewall" not in unit.name]
    if not units:
        return
    subprocess.run(["systemctl", "disable", "--now", *(u.name for u in units if u.suffix == ".timer")], check=False)
    for unit in units:
        unit.unlink()
    subprocess.run(["systemctl", "daemon-reload"], check=False)


def _remove_containers(stack: Stack) -> None:
    """By their labels, so that it works with any release, and with none."""
    label = f"label=com.docker.compose.project={stack.project}"
    for kind, remove in (
        ("ps --all", "rm --force --volumes"),
        ("network ls", "network rm"),
        ("volume ls", "volume rm"),
    ):
        if found := stack.run(["docker", *kind.split(), "--quiet", "--filter", label]).split():
            stack.run(["docker", *remove.split(), *found], timeout_s=TIMEOUT_S)
