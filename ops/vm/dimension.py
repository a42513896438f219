"""`warmstart-vm migrate-dimension`: the memories' vectors to the model of settings that are not in use yet.

An api that is configured for vectors which the table does not have is degraded, and a roll-out refuses it. So the
table goes first, by a container of its own that has the new settings; the deploy after it brings them to all others.
Until then searches are by words alone, and saves are queued.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from typing import Any, Final

from .secrets import write
from .stack import SLOTS, Refused, Stack

MAX_STDIN: Final = 65_536
#: Where the settings name none.
DEFAULT_DIM: Final = "384"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "migrate-dimension",
        help="vectors of another model, that of the settings on standard input",
        description=__doc__,
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--plan", action="store_true", help="say what would be done")
    group.add_argument("--rollback", action="store_true", help="back to the vectors of before")
    parser.set_defaults(run=_migrate)


def _migrate(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    release = stack.current()
    if release is None:
        raise Refused("nothing was rolled out on this machine yet: deploy to it")
    settings = sys.stdin.read(MAX_STDIN)
    found = re.search(r'^EMBEDDING_DIM="?(\d+)"?$', settings, re.MULTILINE)
    width = found[1] if found else DEFAULT_DIM
    words = ["--rollback"] if args.rollback else ["--to", width, *(["--plan"] if args.plan else [])]
    with stack.lock("migrate-dimension"):
        path = stack.run_dir / "dimension.env"
        write(path, settings)
        try:
            command = replace(stack, settings_file=path).compose(
                release, "run", "--rm", "--no-deps", "--no-TTY", SLOTS[0], "migrate", "dimension", *words
            )
            return stack.show(command)
        finally:
            path.unlink(missing_ok=True)
