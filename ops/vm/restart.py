"""`warmstart-vm restart SERVICE`: its container starts anew, and is ready when this ends."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from .changes import wanted
from .gate import Failed, Gate, Signals
from .progress import phase, say
from .stack import SLOTS, UP, Refused, Stack, VmError


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "restart", help="start a service's container anew, also one that hangs, or make it where it is missing"
    )
    parser.add_argument("service", help="`api` is the slot that has the traffic")
    parser.set_defaults(run=_restart)


def _restart(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    release = stack.current()
    if release is None:
        raise Refused("nothing was rolled out on this machine yet: deploy to it")
    name = stack.serving() if args.service == SLOTS[0] else args.service
    if name not in (known := wanted(stack, release)):
        raise Refused(f"there is no service {args.service!r}; there are {', '.join(sorted(known))}")
    with stack.lock("restart"), phase(name) as done:
        found = stack.container(args.service)
        if found is None or found.detached:
            stack.run(stack.compose(release, *UP, "--force-recreate", name))
            done.append("made" if found is None else "made anew")
        else:
            if found.state == "paused":
                stack.run(["docker", "unpause", found.id])
            stack.run(["docker", "restart", found.id])
            done.append("started anew")
        _wait(stack, args.service)
    return 0


def _wait(stack: Stack, service: str) -> None:
    found = stack.container(service)
    if found is None:
        raise VmError(f"{service} is not there after its start")
    try:
        Gate(stack, Signals()).wait_ready(found.id, found.restarts)
    except Failed:
        say(f"The last lines of {found.name}:")
        with suppress(VmError):
            say("\n".join(f"  {line}" for line in stack.log(found).splitlines()))
        raise
