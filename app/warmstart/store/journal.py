"""Which rows each commit touched, so that what is held in memory is known to be current.

A writer appends a line to `journal` in the store's directory before it answers
anyone, still under the write lock. So whoever has read the file to its end
knows of every acknowledged write, of all processes, for the price of a `stat`.

A line is `[from, to, rows]`: the table's versions before and after the group,
and `{tenant: [id, …] | null}` (null: any of its rows) or null (any row at all).
A version that no line covers, as a writer killed on the way leaves, shows as a
gap in the chain, and everything held is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

Rows = Mapping[str, Sequence[str] | None]

#: The file is begun anew above this size; readers then drop what they hold.
MAX_BYTES: Final = 1 << 20
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
                if os.fstat(fd).st_size + len(line) > MAX_BYTES:
                    self._begin_anew(line)
                elif os.write(fd, line) != len(line):
                    self._path.unlink()
            finally:
                os.close(fd)
        except OSError:
            self._path.unlink(missing_ok=True)

    def _begin_anew(self, line: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(line)
        fresh.replace(self._path)


class JournalReader:
    """Reads what came since it last looked."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "journal"
        self._inode = -1
        self._offset = 0
        self._version = -1
        #: False where there is no journal to trust: nothing may be held.
        self.usable = False

    def poll(self) -> Iterator[Rows | None]:
        """The rows of each new line, in order; None: drop everything."""
        try:
            status = self._path.stat()
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._version = status.st_ino, 0, -1
                yield None
            self.usable = True
            if status.st_size == self._offset:
                return
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self._inode:
                    self.usable = False  # replaced this moment: the next look begins anew
                    return
                file.seek(self._offset)
                whole = file.read(status.st_size - self._offset)
        except OSError:
            self._inode, self.usable = -1, False
            yield None
            return
        whole = whole[: whole.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield self._follow(line)

    def _follow(self, line: bytes) -> Rows | None:
        try:
            before, after, rows = json.loads(line)
        except ValueError:
            self._version = -1
            return None
        chained = before == self._version
        self._version = after
        return rows if chained else None
