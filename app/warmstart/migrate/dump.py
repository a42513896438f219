"""The dump of a table: one JSON object a row, newest first, without vectors; and the proof that it is whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lancedb.table import AsyncTable

from warmstart.config import Space
from warmstart.errors import DiskFull, StoreUnavailable
from warmstart.store import marker
from warmstart.store.schema import COLUMNS, TIMESTAMP, Row, schema

#: Rows read, written and reloaded at once: they bound the memory of a migration.
BATCH: Final = 500
FORMAT: Final = 1
KEPT: Final = [c for c in COLUMNS if c != "embedding"]
_TIMES: Final = [f.name for f in schema(Space("", "", 1, "", "")) if f.type == TIMESTAMP]
_ROWS: Final = "memories.ndjson"
_MANIFEST: Final = "manifest.json"

#: Rows done, rows in all.
Report = Callable[[int, int], None]


def encode(row: Row) -> bytes:
    """One line; equal rows give equal bytes."""
    values = {c: v.isoformat(timespec="microseconds") if isinstance(v := row[c], datetime) else v for c in KEPT}
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Row:
    row: Row = json.loads(line)
    for column in _TIMES:
        if row[column] is not None:
            row[column] = datetime.fromisoformat(row[column])
    return row


@dataclass(slots=True)
class Tally:
    """How many rows there are, and a digest of what they say, whatever their order and vectors."""

    rows: int = 0
    _sum: int = 0

    def add(self, row: Row) -> None:
        self.rows += 1
        self._sum += int.from_bytes(hashlib.sha256(encode(row | {"embedding_status": "queued"})).digest())

    @property
    def digest(self) -> str:
        # a sum, not an exclusive or: a row that is there twice must not cancel itself
        return f"{self._sum % (1 << 256):064x}"


@dataclass(frozen=True, slots=True)
class Manifest:
    rows: int
    bytes: int
    #: Of the file.
    sha256: str
    #: Of the rows, as `Tally` has it.
    digest: str
    #: Of the table that was dumped.
    version: int
    taken_at: str
    format: int = FORMAT


@dataclass(slots=True)
class _File:
    """The file as it is written or read: its size, its hash, its rows."""

    size: int = 0
    sha: hashlib._Hash = field(default_factory=hashlib.sha256)
    tally: Tally = field(default_factory=Tally)

    def add(self, line: bytes, row: Row) -> None:
        self.size += len(line)
        self.sha.update(line)
        self.tally.add(row)

    def manifest(self, version: int, taken_at: str) -> Manifest:
        return Manifest(self.tally.rows, self.size, self.sha.hexdigest(), self.tally.digest, version, taken_at)


async def write(lance: AsyncTable, folder: Path, taken_at: str, report: Report) -> Manifest:
    """All rows of `lance` into the new `folder`, on the disk and read back when this returns.

    Whatever goes wrong, the folder is gone again. Raises DiskFull.
    """
    version = await lance.version()
    _make(folder)
    try:
        with _create(folder / _ROWS) as file:
            written = _File()
            async for rows, total in newest_first(lance):
                for row in rows:
                    line = encode(row)
                    file.write(line)
                    written.add(line, row)
                report(written.tally.rows, total)
            _flush(file)
        manifest = written.manifest(version, taken_at)
        check(folder, manifest)
        marker.write_durably(folder / _MANIFEST, json.dumps(asdict(manifest), indent=2))
        marker.sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                "the disk is full: the dump was removed again and nothing was changed. Free space, then try again"
            ) from error
        raise
    return manifest


async def newest_first(lance: AsyncTable) -> AsyncIterator[tuple[list[Row], int]]:
    """Batches of rows without their vectors, and how many rows there are in all.

    Of the whole table only a time and a number for each row are held, 16 bytes.
    """
    numbers = await _row_numbers(lance)
    for start in range(0, len(numbers), BATCH):
        wanted = numbers[start : start + BATCH].tolist()
        taken = (await lance.take_row_ids(wanted).select(KEPT).with_row_id().to_arrow()).to_pylist()
        found = {row.pop("_rowid"): row for row in taken}  # in the order of the table
        yield [found[number] for number in wanted], len(numbers)


async def _row_numbers(lance: AsyncTable) -> npt.NDArray[np.uint64]:
    times: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    numbers: list[npt.NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    async for batch in await lance.query().select(["created_at"]).with_row_id().to_batches():
        times.append(batch["created_at"].cast(pa.int64()).to_numpy())
        numbers.append(batch["_rowid"].to_numpy())
    # the row written last first, where several have one time
    order = np.argsort(np.concatenate(times), kind="stable")[::-1]
    ordered: npt.NDArray[np.uint64] = np.concatenate(numbers)[order]
    return ordered


def check(folder: Path, manifest: Manifest) -> None:
    """Raises StoreUnavailable where the file is not what was written, or does not give the same rows again."""
    read = _File()
    with (folder / _ROWS).open("rb") as file:
        _forget_cached(file)
        for line in file:
            try:
                row = decode(line)
                same = encode(row) == line
            except (ValueError, TypeError, KeyError):
                same = False
            if not same:
                raise _damaged(folder, f"line {read.tally.rows + 1} does not give its row again")
            read.add(line, row)
    if read.manifest(manifest.version, manifest.taken_at) != manifest:
        raise _damaged(folder, f"{read.tally.rows} rows of {manifest.rows} were read, or not the same ones")


def manifest_of(folder: Path) -> Manifest:
    try:
        return Manifest(**json.loads((folder / _MANIFEST).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, f"its manifest can't be read ({error})") from None


def rows_behind(folder: Path, done: int) -> Iterator[list[Row]]:
    """The rows behind the first `done` ones, in batches."""
    with (folder / _ROWS).open("rb") as file:
        lines = islice(file, done, None)
        while batch := [decode(line) for line in islice(lines, BATCH)]:
            yield batch


def remove_unfinished(dumps: Path) -> None:
    """Dumps of migrators that were killed before they had a manifest; only under the migration's lock."""
    for folder in dumps.iterdir() if dumps.is_dir() else ():
        if folder.is_dir() and not (folder / _MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _damaged(folder: Path, reason: str) -> StoreUnavailable:
    return StoreUnavailable(f"the dump {folder} is damaged: {reason}", retry_after=60)


def _make(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True, mode=0o700)
    folder.mkdir(mode=0o700)
    marker.sync(folder.parent.parent)


def _create(path: Path) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _forget_cached(file: BinaryIO) -> None:
    """So that it is read from the disk; where there is no such call, from memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
