"""Opening the `memories` table: creation, indices, its space, and repair after a power cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import lancedb
import pyarrow as pa
import structlog
from lancedb import AsyncConnection
from lancedb.index import FTS, BTree
from lancedb.query import AsyncQuery
from lancedb.table import AsyncTable

from warmstart.config import Space
from warmstart.errors import DiskFull, Migrating, Problem, StoreUnavailable
from warmstart.store import marker
from warmstart.store import predicates as where
from warmstart.store.history_table import HistoryTable, repair_history
from warmstart.store.journal import JournalWriter
from warmstart.store.lock import FileLock, WriteLock
from warmstart.store.repair import drop_damaged_indices, go_back_to_whole_version, has_damaged_index, has_version
from warmstart.store.schema import BTREE_COLUMNS, FTS_OPTIONS, SPACE_KEY, TABLE, schema

log = structlog.get_logger(__name__)

#: Each commit makes new entries, and the old ones go only where there is no room: both caches are full in time.
_INDEX_CACHE_BYTES: Final = 64 << 20
_METADATA_CACHE_BYTES: Final = 32 << 20
#: Seconds after which a writer may ask whether a migration is over.
MIGRATING_RETRY_S: Final = 10


def local_directory(uri: str) -> Path | None:
    """The directory of a local store; None for an object store."""
    return None if "://" in uri and not uri.startswith("file://") else Path(uri.removeprefix("file://"))


class Table:
    """An open table with its lock. `space` is the one its vectors belong to, not the configured one.

    Both `space` and `migration` are as of the last `refresh`. The handle stays
    good over a migration, which is a new version of the same table.
    """

    def __init__(
        self,
        uri: str,
        connection: AsyncConnection,
        lance: AsyncTable,
        lock: WriteLock,
        space: Space,
        repaired: list[str],
    ) -> None:
        self.uri = uri
        self.directory = local_directory(uri)
        self.lance = lance
        self._connection = connection
        self.history = HistoryTable(connection, self.directory)
        self.lock = lock
        self.space = space
        #: Files that were moved aside because they could not be read.
        self.repaired = repaired
        #: Where writers say which rows they touched; None on an object store.
        self.journal = JournalWriter(self.directory) if self.directory else None
        #: The migration whose marker stands.
        self.migration: marker.Migration | None = None
        self._seen: marker.Fingerprint = (None, None)

    async def pinned(self) -> AsyncTable:
        """A handle that stays at the newest version there is now."""
        version = await self.lance.version()
        pinned = await self._connection.open_table(TABLE)
        await pinned.checkout(version)
        return pinned

    async def refresh(self) -> None:
        """Learn what a migrator, another process, did meanwhile. Costs two `stat` where that is nothing."""
        if self.directory is None or (seen := marker.fingerprint(self.directory)) == self._seen:
            return
        migration = marker.standing(self.directory)
        with translated("read its schema"):
            space = space_of(await self.lance.schema())
        self.migration, self.space, self._seen = migration, space or self.space, seen

    @property
    def is_migrating(self) -> bool:
        """Whether writes are refused: from before the dump until the rows are verified."""
        return self.migration is not None or (self.directory is not None and marker.migrator_lives(self.directory))

    def refuse_while_migrating(self) -> None:
        if self.is_migrating:
            raise Migrating(
                "the memories are being moved to another embedding model or width; nothing was written, try again",
                retry_after=MIGRATING_RETRY_S,
            )

    async def share_back(self) -> float | None:
        """How much of the table can be read while the marker stands, 0 to 1; None where none does."""
        await self.refresh()
        if (migration := self.migration) is None:  # it may end while the rows are counted
            return None
        with translated("count"):
            rows = await self.lance.count_rows()
        return round(min(1.0, rows / migration.rows), 4) if migration.rows else 1.0


async def open_table(uri: str, space: Space, index_cache_bytes: int = _INDEX_CACHE_BYTES) -> Table:
    """The table at `uri`, made with `space` and all its indices where there is none.

    Raises StoreUnavailable, DiskFull, or Migrating where there is none since a
    migration was cut off. A table that a power cut left unopenable goes back one
    version; the file at fault is kept beside it.
    """
    directory = local_directory(uri)
    if directory is None:
        raise StoreUnavailable(f"LANCEDB_URI {uri!r}: only local directories have a write lock so far")
    with translated("open"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(directory)
        session = lancedb.Session(
            index_cache_size_bytes=index_cache_bytes, metadata_cache_size_bytes=_METADATA_CACHE_BYTES
        )
        connection = await lancedb.connect_async(
            str(directory), read_consistency_interval=timedelta(0), session=session
        )
        async with lock.hold():
            repaired = go_back_to_whole_version(directory) + repair_history(directory)
            # never opened by a schema: a table of another width must open too
            if has_version(directory):
                lance = await connection.open_table(TABLE)
            elif marker.standing(directory):
                raise Migrating(
                    "a migration was cut off before the table was made anew: run `warmstart migrate dimension` again, "
                    "as before; its dump is whole",
                    retry_after=MIGRATING_RETRY_S,
                )
            else:
                lance = await connection.create_table(TABLE, schema=schema(space), exist_ok=True)
            # reads what was deleted of each fragment, which a plain count doesn't
            await lance.count_rows(where.compare("embedding_status", ">", "").sql)
            if has_damaged_index(directory):
                await drop_damaged_indices(lance)
            await _ensure_indices(lance)
            # a chain that begins here: what happened before is nobody's to assume
            version = await lance.version()
            JournalWriter(directory).append(version, version, None)
            table = Table(uri, connection, lance, lock, space_of(await lance.schema()) or space, repaired)
            await table.history.check()
        await table.refresh()
    return table


def space_of(kept: pa.Schema) -> Space | None:
    """The space of a table's vectors: the column's setting, where a change of the model left one, else the table's."""
    column = kept.field("embedding").metadata or {}
    text = column.get(SPACE_KEY) or (kept.metadata or {}).get(SPACE_KEY)
    return Space.from_json(text.decode()) if text else None


async def open_read_only(uri: str) -> Table:
    """The table at `uri` for reads alone: takes no lock, repairs nothing, writes nothing.

    Raises StoreUnavailable where there is none, or it can't be opened as it is.
    """
    directory = local_directory(uri)
    if directory is None or not has_version(directory):
        raise StoreUnavailable(
            f"there is no memory table in {uri!r}: set LANCEDB_URI or WARMSTART_HOME to where one is"
        )
    with translated("open"):
        connection = await lancedb.connect_async(str(directory))
        lance = await connection.open_table(TABLE)
        space = space_of(await lance.schema())
    if space is None:
        raise StoreUnavailable(f"the memory table in {uri!r} does not say of which model its vectors are")
    return Table(uri, connection, lance, FileLock(directory), space, [])


def query_of(lance: AsyncTable) -> AsyncQuery:
    """A query of `lance`. Its own would first ask for the schema, to find blobs, of which no table here has any: a
    seventh of the time of a full-text query."""
    return AsyncQuery(lance._inner.query())


async def rewrite(lance: AsyncTable, rows: pa.Table) -> None:
    """`rows`, whole ones that were read from the table, in the place of those with their ids: one commit."""
    # a row that waits for its vector has none, which is a bad one for the engine
    await lance.merge_insert("id").when_matched_update_all().execute(rows, on_bad_vectors="null")


def index_configs() -> dict[str, BTree | FTS]:
    """Of each column that has an index from the first row on."""
    return {column: BTree() for column in BTREE_COLUMNS} | {"search_text": FTS(**FTS_OPTIONS)}


async def _ensure_indices(lance: AsyncTable) -> None:
    have = {tuple(i.columns) for i in await lance.list_indices()}
    for column, config in index_configs().items():
        if (column,) not in have:
            await lance.create_index(column, config=config)


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
