"""What a migration of the vectors leaves in the store's directory, for every process to see.

    <store>/
      migration.lock   held while a migrator lives; the kernel frees it when it dies
      migration.json   the marker: stands from before the first change until all rows are verified
      migrated.json    the last migration that ended, for the way back
      migrations/      the dumps, one folder each

While the marker stands, or a migrator that has not yet written it lives, nobody
else writes to the table.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from warmstart.config import Space
from warmstart.errors import Conflict, StoreUnavailable

DUMPS: Final = "migrations"
_LOCK: Final = "migration.lock"
_MARKER: Final = "migration.json"
_RECORD: Final = "migrated.json"
#: Writers look at the lock by taking it for a moment.
_LOCK_PATIENCE_S: Final = 1.0
_POLL_S: Final = 0.01

#: What is to be done next: with another width recreate and reload, with the same one reset; then index, verify.
Step = Literal["recreate", "reload", "reset", "index", "verify"]
Fingerprint = tuple[object, object]


@dataclass(frozen=True, slots=True)
class Migration:
    """The marker's and the record's content."""

    step: Step
    source: Space
    target: Space
    #: The dump's folder, as seen from the store's directory.
    dump: str
    rows: int
    #: The way back from a migration from `target` to `source`.
    rollback: bool
    started_at: str

    @classmethod
    def from_json(cls, text: str) -> Migration:
        content: dict[str, Any] = json.loads(text)
        return cls(**content | {name: Space(**content[name]) for name in ("source", "target")})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def fingerprint(directory: Path) -> Fingerprint:
    """Differs from an earlier one where a migration began, went a step on, or ended in between."""
    return _identity(os.path.join(directory, _MARKER)), _identity(os.path.join(directory, _RECORD))


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return None
    return there.st_ino, there.st_mtime_ns, there.st_size


def standing(directory: Path) -> Migration | None:
    """The marker."""
    return _read(directory / _MARKER)


def last(directory: Path) -> Migration | None:
    """The last migration that ended."""
    return _read(directory / _RECORD)


def _read(path: Path) -> Migration | None:
    try:
        return Migration.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreUnavailable(
            f"{path} says that a migration is under way, but can't be read ({error}): make it readable, "
            "or restore a backup",
            retry_after=60,
        ) from None


def put(directory: Path, migration: Migration) -> None:
    """Place the marker, or move it on; durable when this returns."""
    write_durably(directory / _MARKER, migration.to_json())


def end(directory: Path, migration: Migration) -> None:
    """Keep the record, then remove the marker."""
    write_durably(directory / _RECORD, migration.to_json())
    withdraw(directory)


def withdraw(directory: Path) -> None:
    """Remove the marker of a migration that changed nothing, or is done."""
    (directory / _MARKER).unlink(missing_ok=True)
    sync(directory)


def write_durably(path: Path, text: str) -> None:
    """By rename, so that a reader, or a power cut, sees all of it or nothing new."""
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    fresh.replace(path)
    sync(path.parent)


def sync(directory: Path) -> None:
    """The names in `directory` are on the disk when this returns."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def only_migrator(directory: Path) -> Iterator[None]:
    """Holds the migration's lock; raises Conflict where another process goes on holding it."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while not _taken(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise Conflict(
                    f"another migration of this store is running (pid {os.pread(fd, 20, 0).decode() or 'unknown'}): "
                    "wait until it ends"
                )
            time.sleep(_POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def migrator_lives(directory: Path) -> bool:
    try:
        fd = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _taken(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _taken(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
