"""What backup, drill and restore have in common: one at a time, lines for who waits, and a record of the result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from . import locks
from .progress import say
from .stack import Refused, Stack, VmError

#: How long to wait for another one that is under way.
LOCK_TIMEOUT_S: Final = 60.0


@contextlib.contextmanager
def only_one(stack: Stack, what: str) -> Iterator[None]:
    """Backup, drill and restore exclude one another. Raises Refused."""
    try:
        lock = locks.take(stack.run_dir / "backup.lock", what, LOCK_TIMEOUT_S)
    except TimeoutError as holder:
        raise Refused(f"under way already: {holder}. Try again when it has ended") from None
    # a unit that is stopped must clean up, too
    before = signal.signal(signal.SIGTERM, lambda *_: _stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(lock)


def stay_in_background() -> None:
    """Requests come first: what is started from here, too, takes what they leave of processor and disk."""
    os.nice(10)
    # the idle class
    subprocess.run(["ionice", "--class", "3", "--pid", str(os.getpid())], check=False)


def _stop() -> None:
    raise VmError("stopped by a signal")


def record(path: Path, result: Mapping[str, Any]) -> None:
    """The result, with the last that was good beside it as `last_success`; a reader never sees half of it."""
    success = None if result["ok"] else last_success(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**result, "last_success": dict(result) if result["ok"] else success}) + "\n")
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


@contextlib.contextmanager
def recorded(path: Path, progress: Progress) -> Iterator[dict[str, Any]]:
    """What the block finds out and how it ended, kept at `path`. One that fails, in whatever way, raises nothing."""
    result: dict[str, Any] = {"ok": False, "began_at": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        yield result
        result["ok"] = True
    except Exception as error:  # it must be known by the record that there is no good one
        reason = str(error) if isinstance(error, VmError) else f"{type(error).__name__}: {error}"
        result |= {"part": progress.part, "reason": reason}
    result |= {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": progress.seconds}
    record(path, result)
    if not result["ok"]:
        progress.done(f"FAILED at {result['part']}: {result['reason']}")


def last_success(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] | None = json.loads(path.read_text())["last_success"]
    except (OSError, ValueError, KeyError):
        return None
    return found


class Progress:
    """Lines with the seconds since the beginning, for a person who waits."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        #: what is being done
        self.part = ""

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def begin(self, part: str) -> None:
        self.part = part

    def done(self, line: str) -> None:
        say(f"{self.seconds:7.1f} s  {line}")


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def ago(seconds: float) -> str:
    minutes = int(max(0, seconds)) // 60
    if minutes < 1:
        return f"{max(0, seconds):.0f} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"
