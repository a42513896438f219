"""Locks on files, which are waited for. The kernel frees what a killed process held."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

POLL_S: Final = 0.2


def take(path: Path, what: str, timeout_s: float) -> int:
    """A descriptor that holds the lock until it is closed; `what` is told to others who wait for it.

    Raises TimeoutError, whose text tells who holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not wait(fd, timeout_s):
            raise TimeoutError(_holder(path))
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"what": what, "pid": os.getpid(), "since": time.time()}).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def wait(fd: int, timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Whether `fd` could be locked within this time."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        seconds = time.time() - found["since"]
        return f"{found['what']}, process {found['pid']}, for {seconds:.0f} s"
    except (OSError, ValueError, KeyError):
        return "unknown"
