"""`compose`, `warmstart`, `keys`, `logs`, `first-key`: the tools of stack and service, with the right container."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Final

from .stack import SLOTS, Refused, Stack, last_json

#: The tenant that an operator's keys belong to where none is named.
TENANT: Final = "default"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    # with no sign that begins an option, all words are handed on
    as_they_are: Any = {"prefix_chars": "\0", "add_help": False}
    compose = commands.add_parser(
        "compose", help="docker compose, with the files of the release that runs", **as_they_are
    )
    compose.add_argument("words", nargs=argparse.REMAINDER)
    compose.set_defaults(run=_compose)
    for name, before in (("warmstart", ()), ("keys", ("keys",))):
        words = " ".join(("warmstart", *before))
        service = commands.add_parser(name, help=f"`{words}` in the api's container", **as_they_are)
        service.add_argument("words", nargs=argparse.REMAINDER)
        service.set_defaults(run=_warmstart, before=before)
    logs = commands.add_parser("logs", help="what the containers said last")
    logs.add_argument("service", nargs="?", default="", help="of this one alone; `api` is the slot with the traffic")
    logs.add_argument("--lines", type=int, default=200)
    logs.add_argument("--follow", action="store_true")
    logs.set_defaults(run=_logs)
    first = commands.add_parser("first-key", help="make an API key where there is none; --check: is there one?")
    first.add_argument("--check", action="store_true")
    first.set_defaults(run=_first_key)


def _compose(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    release = stack.current()
    if release is None:
        raise Refused("nothing was rolled out on this machine yet: make deploy")
    command = stack.compose(release, *args.words)
    os.execvp(command[0], command)


def _warmstart(args: argparse.Namespace) -> int:
    """In the api's container; with none that runs, in one of its own, since that may be what is looked into."""
    stack = Stack.from_environment()
    words = [*args.before, *args.words]
    container = stack.container(SLOTS[0])
    if container is not None and container.running:
        command = ["docker", "exec", container.id, "warmstart", *words]
    elif release := stack.current():
        command = stack.compose(release, "run", "--rm", "--no-deps", "--no-TTY", "--quiet-pull", SLOTS[0], *words)
    else:
        raise Refused("nothing was rolled out on this machine yet: make deploy")
    os.execvp(command[0], command)


def _logs(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    words = [f"--tail={args.lines}", *(["--follow"] if args.follow else [])]
    if not args.service:
        return _compose(argparse.Namespace(words=["--profile", "*", "logs", *words]))
    container = stack.container(args.service)
    if container is None:
        known = sorted({c.service for c in stack.containers()})
        raise Refused(f"there is no container of {args.service!r}; there are {', '.join(known) or 'none'}")
    # both streams of the container as one, so that they can be searched
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    os.execvp("docker", ["docker", "logs", *words, container.id])
    return 0  # not reached


def _first_key(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    there = _has_key(stack)
    if args.check:
        print(json.dumps({"exists": there}))
        return 0
    if there:
        raise Refused("there are keys already: `warmstart-vm keys list` shows them, `keys create NAME` makes another")
    if TENANT not in _tenants(stack):
        stack.exec("api", "warmstart", "tenants", "create", TENANT, "--json")
    made = last_json(stack.exec("api", "warmstart", "keys", "create", "first", "--tenant", TENANT, "--json"))
    sys.stdout.write(made["key"] + "\n")
    return 0


def _tenants(stack: Stack) -> set[str]:
    return {
        tenant["name"] for tenant in last_json(stack.exec("api", "warmstart", "tenants", "list", "--json"))["tenants"]
    }


def _has_key(stack: Stack) -> bool:
    """Of an operator: the canary's is the deploy's own. A revoked one was somebody's, too."""
    if TENANT not in _tenants(stack):
        return False
    return bool(last_json(stack.exec("api", "warmstart", "keys", "list", "--tenant", TENANT, "--json"))["keys"])
