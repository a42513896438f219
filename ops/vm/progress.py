"""What a command tells while it works: a line a phase, with its seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:  # the connection is gone, the work is not
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def phase(name: str) -> Iterator[list[str]]:
    """One line at its end: seconds, name, and what was put into the list."""
    started, done = time.monotonic(), list[str]()
    try:
        yield done
    except BaseException:
        done.append("failed")
        raise
    finally:
        say(f"{time.monotonic() - started:6.1f} s  {name}: {', '.join(done) or 'nothing to do'}")
