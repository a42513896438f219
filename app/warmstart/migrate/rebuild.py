"""The steps that change the table. Each may be cut off anywhere, and done again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import lancedb
import pyarrow as pa

from warmstart.allocation import give_back
from warmstart.config import Space
from warmstart.migrate import dump
from warmstart.migrate.dump import KEPT, Manifest, Report, Tally
from warmstart.store import predicates as where
from warmstart.store.changes import assignments
from warmstart.store.journal import JournalWriter, Rows
from warmstart.store.lock import FileLock, sync_filesystem
from warmstart.store.maintenance import VECTOR_INDEX
from warmstart.store.repair import has_version, mark_synced
from warmstart.store.schema import SPACE_KEY, TABLE, schema
from warmstart.store.table import Table, index_configs, translated

#: A table comes back in so many commits, since each leaves a file that every read opens until it is compacted;
#: in more of them where they would be larger than this, which bounds the memory.
_COMMITS: Final = 20
_COMMIT_BYTES: Final = 16 << 20
#: For the journal: no row is other than before.
_NOTHING: Final[Rows] = {}


@asynccontextmanager
async def changing(table: Table, touched: Rows | None) -> AsyncIterator[None]:
    """Under the write lock; what was changed is on the disk and in the journal when this ends."""
    directory, journal = table.directory, table.journal
    if directory is None or journal is None:
        raise TypeError("only the store of a local directory is migrated")
    async with table.lock.hold():
        await table.lance.checkout_latest()  # type: ignore[no-untyped-call]
        before = await table.lance.version()
        yield
        after = await table.lance.version()
        await asyncio.to_thread(sync_filesystem, directory)
        mark_synced(directory, after)
        journal.append(before, after, touched)


async def recreate(directory: Path, target: Space) -> None:
    """An empty table for `target`.

    Drop and recreation are one commit, a version of the same table: there is
    no moment without a table, and whoever has it open goes on with the new one.
    """
    with translated("be made anew"):
        connection = await lancedb.connect_async(str(directory))
        async with FileLock(directory).hold():
            mode = "overwrite" if has_version(directory) else "create"
            lance = await connection.create_table(TABLE, schema=schema(target), mode=mode)  # type: ignore[arg-type]
            version = await lance.version()
            await asyncio.to_thread(sync_filesystem, directory)
            mark_synced(directory, version)
            JournalWriter(directory).append(version, version, None)


async def reload(table: Table, folder: Path, rows: int, report: Report) -> None:
    """The rows of the dump behind those that are there: only the migrator writes, in the dump's order."""
    done = await table.lance.count_rows()
    report(done, rows)
    for commit in _commits(table.space, folder, done, max(dump.BATCH, rows // _COMMITS)):
        with translated("reload"):
            async with changing(table, None):
                await table.lance.add(commit)
        done += commit.num_rows
        report(done, rows)
    give_back()


def _commits(space: Space, folder: Path, done: int, rows: int) -> Iterator[pa.Table]:
    """The rows behind the first `done` ones, as they wait for their vectors, some `rows` of them at a time."""
    batches: list[pa.Table] = []
    for batch in dump.rows_behind(folder, done):
        fresh = [row | {"embedding": None, "embedding_status": "queued"} for row in batch]
        batches.append(pa.Table.from_pylist(fresh, schema=schema(space)))
        if sum(b.num_rows for b in batches) >= rows or sum(b.nbytes for b in batches) >= _COMMIT_BYTES:
            yield pa.concat_tables(batches)
            batches = []
    if batches:
        yield pa.concat_tables(batches)


async def reset(table: Table, target: Space) -> None:
    """Every vector out, every row queued, and `target` as the vectors' space; no row is ever absent."""
    with translated("reset"):
        async with changing(table, None):
            for index in await table.lance.list_indices():
                if index.name == VECTOR_INDEX:
                    await table.lance.drop_index(VECTOR_INDEX)
            await table.lance.update_field_metadata(
                {"path": "embedding", "metadata": {SPACE_KEY.decode(): target.to_json()}}
            )
            await table.lance.update(
                where=_unlike_queued(), updates_sql=assignments({"embedding": None, "embedding_status": "queued"})
            )


def _unlike_queued() -> str:
    return (where.is_not_null("embedding") | where.none_of("embedding_status", ["queued"])).sql


async def index(table: Table) -> None:
    """Each index anew, over all rows; compaction is left to the worker.

    The one step whose memory grows with the table: the text index is put together in memory, 1 to 1.7 KB a row.
    """
    for column, config in index_configs().items():
        with translated("index"):
            async with changing(table, _NOTHING):
                await table.lance.create_index(column, config=config, replace=True)
        give_back()


async def is_whole(table: Table, manifest: Manifest, report: Report) -> bool:
    """Whether the table's rows are those of the dump, once each."""
    tally = Tally()
    with translated("verify"):
        lance = await table.pinned()
        rows = await lance.count_rows()
        for start in range(0, rows, dump.BATCH):  # a scan reads ahead as far as memory lets it
            wanted = list(range(start, min(rows, start + dump.BATCH)))
            for row in (await lance.take_offsets(wanted).select(KEPT).to_arrow()).to_pylist():
                tally.add(row)
            report(tally.rows, manifest.rows)
    return (tally.rows, tally.digest) == (manifest.rows, manifest.digest)


async def is_queued(table: Table) -> bool:
    """Whether no row has a vector, and each waits for one."""
    with translated("verify"):
        return await table.lance.count_rows(_unlike_queued()) == 0
