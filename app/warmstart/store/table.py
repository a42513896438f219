"""Opening the `memories` table: creation, indices, its space, and repair after a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import lancedb
import structlog
from lancedb.index import FTS, BTree
from lancedb.table import AsyncTable

from warmstart.config import Space
from warmstart.errors import DiskFull, Problem, StoreUnavailable
from warmstart.store.lock import FileLock, WriteLock
from warmstart.store.schema import BTREE_COLUMNS, FTS_OPTIONS, SPACE_KEY, TABLE, schema

log = structlog.get_logger(__name__)

_INDEX_CACHE_BYTES: Final = 256 << 20
_METADATA_CACHE_BYTES: Final = 64 << 20
_MAGIC: Final = b"LANC"
#: A power cut spoils at most the newest manifests; more than this is another fault.
_MAX_REPAIRS: Final = 3


def local_directory(uri: str) -> Path | None:
    """The directory of a local store; None for an object store."""
    return None if "://" in uri and not uri.startswith("file://") else Path(uri.removeprefix("file://"))


class Table:
    """An open table with its lock. `space` is the one its vectors belong to, not the configured one."""

    def __init__(self, uri: str, lance: AsyncTable, lock: WriteLock, space: Space, repaired: list[str]) -> None:
        self.uri = uri
        self.lance = lance
        self.lock = lock
        self.space = space
        #: Files that were moved aside because they could not be read.
        self.repaired = repaired

    @property
    def directory(self) -> Path | None:
        return local_directory(self.uri)


async def open_table(uri: str, space: Space) -> Table:
    """The table at `uri`, made with `space` and all its indices where there is none.

    Raises StoreUnavailable or DiskFull. A table that a power cut left unopenable
    goes back one version; the file at fault is kept beside it.
    """
    directory = local_directory(uri)
    if directory is None:
        raise StoreUnavailable(f"LANCEDB_URI {uri!r}: only local directories have a write lock so far")
    with translated("open"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory)
        session = lancedb.Session(
            index_cache_size_bytes=_INDEX_CACHE_BYTES, metadata_cache_size_bytes=_METADATA_CACHE_BYTES
        )
        connection = await lancedb.connect_async(
            str(directory), read_consistency_interval=timedelta(0), session=session
        )
        async with lock.hold():
            repaired: list[str] = []
            while True:
                try:
                    lance = await connection.create_table(TABLE, schema=schema(space), exist_ok=True)
                    await _verify(lance, directory)
                    break
                except Exception as error:
                    moved = _set_aside_newest_manifest(directory, error) if len(repaired) < _MAX_REPAIRS else None
                    if moved is None:
                        raise
                    repaired.append(moved)
            await _ensure_indices(lance)
            metadata = (await lance.schema()).metadata or {}
    kept = metadata.get(SPACE_KEY)
    return Table(uri, lance, lock, Space.from_json(kept.decode()) if kept else space, repaired)


async def _verify(lance: AsyncTable, directory: Path) -> None:
    """Reads everything where a file was cut short; a table that was closed in peace costs a look at file ends."""
    await lance.count_rows()
    files = (directory / f"{TABLE}.lance").rglob("*.lance")
    if all(_is_whole(path) for path in files):
        return
    batches = await lance.query().to_batches()
    async for _ in batches:
        pass
    for index in await lance.list_indices():
        await lance.prewarm_index(index.name)


def _is_whole(path: Path) -> bool:
    """Whether the file has its end: Lance writes its magic word last."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_MAGIC)))
        return file.read() == _MAGIC


def _set_aside_newest_manifest(directory: Path, error: Exception) -> str | None:
    """Go back one version where the newest can't be read; None where that is not what is wrong."""
    versions = directory / f"{TABLE}.lance" / "_versions"
    manifests = sorted(versions.glob("*.manifest")) if versions.is_dir() else []
    if len(manifests) < 2:
        return None
    newest = manifests[0]  # names count down from the largest number
    whole = all(_is_whole(path) for path in versions.parent.rglob("*.lance"))
    if _is_whole(newest) and whole:
        return None
    aside = directory / "set-aside"
    aside.mkdir(exist_ok=True, mode=0o700)
    target = aside / newest.name
    newest.rename(target)
    log.error(
        "store.repaired",
        reason=str(error)[:300],
        set_aside=str(target),
        meaning="the newest version of the table was cut short and is left out; what was not yet answered may be missing",
    )
    return str(target)


async def _ensure_indices(lance: AsyncTable) -> None:
    have = {tuple(i.columns) for i in await lance.list_indices()}
    for column in BTREE_COLUMNS:
        if (column,) not in have:
            await lance.create_index(column, config=BTree())
    if ("search_text",) not in have:
        await lance.create_index("search_text", config=FTS(**FTS_OPTIONS))


@contextlib.contextmanager
def translated(operation: str) -> Iterator[None]:
    """Faults of the engine and the disk, as the problems a caller can act on."""
    try:
        yield
    except Problem:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise store_problem(operation, error) from error


def store_problem(operation: str, error: BaseException) -> Problem:
    text = str(error)
    if "No space left on device" in text or "os error 28" in text or "Disk quota exceeded" in text:
        return DiskFull("the disk of the memory store is full; nothing was written. Free space, then try again")
    log.warning("store.failed", operation=operation, error=text[:500])
    return StoreUnavailable(f"the memory store could not {operation}; nothing was lost, try again", retry_after=5)
