"""`compose …`, `keys …`, `first-key`: the stack's own tools, with the right files and the right container."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Final

from .stack import Refused, Stack, VmError, last_json

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
    keys = commands.add_parser("keys", help="`warmstart keys` in the api's container", **as_they_are)
    keys.add_argument("words", nargs=argparse.REMAINDER)
    keys.set_defaults(run=_keys)
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


def _keys(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    container = stack.container("api")
    if container is None or not container.running:
        raise VmError("the api does not run: `warmstart-vm status` shows what does")
    words = ["docker", "exec", container.id, "warmstart", "keys", *args.words]
    os.execvp(words[0], words)


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
