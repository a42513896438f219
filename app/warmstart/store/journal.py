"""Which rows each commit touched, so that what is held in memory is known to be current.

A writer appends a line to `journal` in the store's directory before it answers
anyone, still under the write lock. So whoever has read the file to its end
knows of every acknowledged write, of all processes, for the price of a `stat`.

A line is `[from, to, rows]`: the table's versions before and after the group,
and `{tenant: [id, …] | null}` (null: any of its rows) or null (any row at all).
A group that changed nothing has a line too, since what it answered may be what
a writer committed that was killed before its own line: the version that no line
covers shows as a gap in the chain, and everything held is dropped.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

Rows = Mapping[str, Sequence[str] | None]

#: The file is begun anew above this size; readers then drop what they hold.
MAX_BYTES: Final = 1 << 20
#: A larger file isn't ours, one long line above MAX_BYTES included.
_MAX_READ: Final = 16 << 20
#: More ids of one tenant in one commit are noted as any of its rows.
MAX_IDS: Final = 1_000


def merge(into: dict[str, Sequence[str] | None], rows: Rows) -> None:
    """Add `rows` to what `into` notes."""
    for tenant, ids in rows.items():
        known = into.get(tenant, ())
        both = None if ids is None or known is None else [*known, *ids]
        into[tenant] = None if both is None or len(both) > MAX_IDS else both


class JournalWriter:
    """Used under the write lock only."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal"

    def append(self, before: int, after: int, rows: Rows | None) -> None:
        """Note a group of commits. Where that fails the journal is removed: nobody may trust it."""
        line = json.dumps([before, after, None if rows is None else dict(rows)]).encode() + b"\n"
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # a file cut to nothing is begun anew as well: its readers must not take it for the old one
                if not 0 < os.fstat(fd).st_size <= MAX_BYTES - len(line):
                    self._begin_anew(line)
                elif os.write(fd, line) != len(line):
                    self._path.unlink()
            finally:
                os.close(fd)
        except OSError:
            self._path.unlink(missing_ok=True)

    def _begin_anew(self, line: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(line)
        fresh.replace(self._path)


class JournalReader:
    """Reads what came since it last looked.

    The file stays open in between: while it is, no other file can get its inode.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal"
        self._fd = -1
        self._offset = 0
        self._version = -1

    @property
    def usable(self) -> bool:
        """False where there is no journal to trust: nothing may be held."""
        return self._fd >= 0

    def poll(self) -> list[Rows | None]:
        """The rows of each new line, in order; None: drop everything."""
        try:
            there = self._path.stat()
            dropped: list[Rows | None] = []
            if not self.usable or there.st_size < self._offset or not os.path.samestat(there, os.fstat(self._fd)):
                self._begin_anew()
                dropped = [None]
            elif there.st_size == self._offset:
                return []
            size = os.fstat(self._fd).st_size
            if size > _MAX_READ:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self._path))
            whole = os.pread(self._fd, size - self._offset, self._offset)
        except OSError:
            self.close()
            return [None]
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        return dropped + [self._follow(line) for line in whole.splitlines()]

    def _begin_anew(self) -> None:
        self.close()
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.usable:
            os.close(self._fd)
        self._fd, self._offset, self._version = -1, 0, -1

    def _follow(self, line: bytes) -> Rows | None:
        try:
            before, after, rows = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            self._version = -1
            return None
        chained = before == self._version
        self._version = after
        return rows if chained and isinstance(rows, dict) else None
