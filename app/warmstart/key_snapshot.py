"""The file that lets known API keys work with Postgres down: hashes, never keys.

    {"version": 1, "confirmed_at": …, "keys": {hash: {…}}, "revoked": {hash: {…}}}

Several processes write it: under a lock, merging, by rename, so that a reader
never sees half of one. `confirmed_at` is when Postgres last said that `keys` are
the active ones. A tombstone in `revoked` always wins over a key.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from warmstart.errors import Conflict, NotFound, StoreUnavailable

log = structlog.get_logger(__name__)

VERSION: Final = 1
MAX_BYTES: Final = 64_000_000
MAX_TOMBSTONES: Final = 10_000
#: Kept well past their use, for a Postgres restored from a backup that has the key active.
TOMBSTONE_DAYS: Final = 90
LOCK_TIMEOUT_S: Final = 2.0
#: A confirmation further in the future than clocks drift is not believed.
MAX_CLOCK_SKEW_S: Final = 300.0
#: Fewer characters of a hash name too many keys.
MIN_HASH_PREFIX: Final = 8

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    key_id: str
    user_id: str
    unlimited: bool


@dataclass(frozen=True, slots=True)
class Tombstone:
    key_id: str
    at: float


@dataclass(slots=True)
class Snapshot:
    confirmed_at: float = 0.0
    keys: dict[str, SnapshotKey] = field(default_factory=dict)
    revoked: dict[str, Tombstone] = field(default_factory=dict)

    def merge(self, other: Snapshot, now: float) -> None:
        """Takes the keys confirmed later, every tombstone, and no key that has one."""
        if self.confirmed_at < other.confirmed_at <= now + MAX_CLOCK_SKEW_S:
            self.confirmed_at, self.keys = other.confirmed_at, other.keys
        self.bury(other.revoked)

    def bury(self, revoked: dict[str, Tombstone]) -> None:
        self.revoked = revoked | self.revoked
        self.keys = {h: key for h, key in self.keys.items() if h not in self.revoked}

    def prune(self, now: float) -> None:
        kept = sorted(self.revoked.items(), key=lambda item: item[1].at)[-MAX_TOMBSTONES:]
        self.revoked = {h: t for h, t in kept if t.at > now - TOMBSTONE_DAYS * 86_400}


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does; None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def load(path: Path) -> Snapshot | None:
    """The snapshot; None without one. One that can't be read is set aside as `….corrupt`."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        with _locked(path):
            try:
                return _read(path)  # somebody may have replaced it just now
            except FileNotFoundError:
                return None
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                aside = path.with_name(path.name + ".corrupt")
                with contextlib.suppress(OSError):
                    path.replace(aside)
                log.warning("keys.snapshot.corrupt", path=str(aside), reason=type(error).__name__)
                return None


def save(path: Path, snapshot: Snapshot, now: float) -> Snapshot:
    """Merges `snapshot` with the file, writes the result durably, and answers it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = load(path)
    with _locked(path):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            there = _read(path)
        merged = Snapshot(snapshot.confirmed_at, snapshot.keys, snapshot.revoked)
        if there is not None:
            merged.merge(there, now)
        merged.prune(now)
        _write(path, merged)
    return merged


def revoke_in_snapshot(path: Path, key: str) -> str:
    """Revokes a key with Postgres down: every process obeys within 10 s, and tells Postgres later.

    `key` is the key's id or the beginning of its hash; answers its id. Raises
    NotFound or Conflict.
    """
    snapshot = load(path)
    if snapshot is None:
        raise NotFound(f"there is no key snapshot {path}: revoke the key once Postgres is back")
    is_hash = len(key) >= MIN_HASH_PREFIX and re.fullmatch(r"[0-9a-f]+", key)
    found = {h: k for h, k in snapshot.keys.items() if k.key_id == key or (is_hash and h.startswith(key))}
    if len(found) > 1:
        ids = ", ".join(sorted(k.key_id for k in found.values()))
        raise Conflict(f"several keys begin like this, name one by its id: {ids}")
    if not found:
        for tombstone in snapshot.revoked.values():
            if tombstone.key_id == key:
                return key
        raise NotFound(f"there is no key with the id {key[:70]!r} in the snapshot")
    key_hash, entry = found.popitem()
    now = time.time()
    save(path, Snapshot(revoked={key_hash: Tombstone(entry.key_id, now)}), now)
    return entry.key_id


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock of all writers; bounded, since one of them may be frozen."""
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"{path} is locked by another process that does not go on") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> Snapshot:
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError("too large")
    data = json.loads(raw)
    if data["version"] != VERSION:
        raise ValueError("of another version")
    keys = {
        h: SnapshotKey(str(k["key_id"]), str(k["user_id"]), k["unlimited"] is True) for h, k in data["keys"].items()
    }
    revoked = {h: Tombstone(str(t["key_id"]), float(t["at"])) for h, t in data["revoked"].items()}
    if not all(map(_HASH.fullmatch, [*keys, *revoked])):
        raise ValueError("not a hash")
    return Snapshot(float(data["confirmed_at"]), {h: k for h, k in keys.items() if h not in revoked}, revoked)


def _write(path: Path, snapshot: Snapshot) -> None:
    data: dict[str, Any] = {"version": VERSION} | asdict(snapshot)
    fresh = path.with_name(path.name + ".new")  # only the holder of the lock writes it
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
