"""`warmstart-vm secrets`: those that are missing are made here, and stay here.

What an operator gives comes as JSON by standard input, {"given": {…}, "must_be_given": […]}, since a command line is
for everybody to read. A later operator who gives none leaves those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .stack import Refused, Stack, VmError

FILE: Final = "secrets.env"
#: Names of those that an operator gave: they are changed where they are kept, not here.
GIVEN_FILE: Final = "secrets-given.json"
MADE: Final = ("REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD")
DATABASE_URL: Final = "DATABASE_URL"
OWN_DATABASE: Final = "postgresql://warmstart:{password}@postgres:5432/warmstart"
BYTES: Final = 24
#: Of Compose's env files: neither quoted nor expanded.
PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@,+=?&%~!*()-]*")


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("secrets", help="make those that are missing; rotate")
    parser.add_argument("--pending", action="store_true", help="only name those that would be written")
    parser.set_defaults(run=_ensure)
    actions = parser.add_subparsers(dest="action")
    rotate = actions.add_parser("rotate", help="new ones, brought into use without a failed request")
    rotate.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MADE))
    rotate.set_defaults(run=_rotate)


def _ensure(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    try:
        wanted = json.loads(text or "{}")
        given, needed = dict(wanted.get("given", {})), list(wanted.get("must_be_given", []))
    except (ValueError, AttributeError, TypeError):
        # the text isn't said again: it may hold a secret
        raise Refused('standard input is not JSON of the form {"given": {…}, "must_be_given": […]}') from None
    if args.pending:
        print("\n".join(changed(read(stack.etc / FILE), complete(stack, given, needed))))
        return 0
    with stack.lock("secrets"):
        before, after = read(stack.etc / FILE), complete(stack, given, needed)
        names = changed(before, after)
        if names:
            write(stack.etc / FILE, render(after))
        note_given(stack, given)
    print(f"{', '.join(names)} written" if names else "all there")
    return 0


# -- what there is to be


def complete(stack: Stack, given: Mapping[str, str], needed: Sequence[str]) -> dict[str, str]:
    """All of them: given, kept, or new. Raises Refused where one can be neither made nor kept."""
    there = read(stack.etc / FILE)
    values = {**there, **given}
    if lacking := [name for name in needed if not values.get(name)]:
        raise Refused(
            f"{', '.join(lacking)}: of another service, so not to be made here, and this machine has none yet: "
            "name in `secrets` of the inventory where yours is"
        )
    for name in MADE:
        if not values.get(name):
            values[name] = secrets.token_hex(BYTES)
    if DATABASE_URL not in needed and DATABASE_URL not in given and DATABASE_URL not in given_names(stack):
        values[DATABASE_URL] = OWN_DATABASE.format(password=values["POSTGRES_PASSWORD"])
    return values


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name, value in after.items() if before.get(name) != value)


# -- the file


def read(path: Path) -> dict[str, str]:
    """Of an env file, secrets or settings, the quotes around values taken off; empty where there is none."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    found = re.findall(r"^([A-Z][A-Z0-9_]*)=(.*)$", text, re.MULTILINE)
    return {name: value[1:-1] if re.fullmatch(r"'.*'|\".*\"", value) else value for name, value in found}


def render(values: Mapping[str, str]) -> str:
    """For Compose, which reads it back as it was. Raises Refused for what such a file can't hold."""
    lines = []
    for name, value in sorted(values.items()):
        if "\n" in value or "'" in value or value.endswith("\\"):
            raise Refused(
                f"{name} has a line break, a single quote or a backslash at its end: its file can't hold that"
            )
        lines.append(f"{name}={value}" if PLAIN.fullmatch(value) else f"{name}='{value}'")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """In one step, for root alone, and on the disk when it returns."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def given_names(stack: Stack) -> set[str]:
    path = stack.etc / GIVEN_FILE
    return set(json.loads(path.read_text())) if path.exists() else set()


def note_given(stack: Stack, given: Mapping[str, str]) -> None:
    before = given_names(stack)
    if not set(given) <= before:
        write(stack.etc / GIVEN_FILE, json.dumps(sorted(before | set(given))) + "\n")


# -- rotation


def _rotate(args: argparse.Namespace) -> int:
    from .rotate import rotate

    stack = Stack.from_environment()
    names = list(args.names or (name for name in MADE if name not in given_names(stack)))
    if unknown := sorted(set(names) - set(MADE)):
        raise Refused(f"{', '.join(unknown)} can't be made here; there are {', '.join(MADE)}")
    if kept := sorted(set(names) & given_names(stack)):
        raise Refused(f"{', '.join(kept)} came from an operator: change it where it is kept, and deploy")
    with stack.lock("secrets rotate"):
        before = read(stack.etc / FILE)
        if not before:
            raise VmError("there are no secrets on this machine yet: deploy to it")
        rotate(stack, before, names)
    return 0
