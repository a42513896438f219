"""A tenant's end in the tables: its rows, and every copy of them that older versions, compaction and indices keep.

A delete alone only marks rows. Here the rows of the others are written anew, the indices are made anew, and the
versions before are removed, so that each file which is left was written when the tenant's rows had gone. That is
also the proof.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from lancedb.index import FTS, BTree
from lancedb.table import AsyncTable

from warmstart.errors import Conflict
from warmstart.store import marker
from warmstart.store import predicates as where
from warmstart.store.history_table import INDEXED
from warmstart.store.maintenance import Maintenance
from warmstart.store.repair import has_set_aside
from warmstart.store.schema import HISTORY, TABLE
from warmstart.store.table import Table, index_configs, local_directory, translated
from warmstart.store.writer import Writer

#: Reads that began on a version before have that long to end; their budget is 2 s.
READERS_S: Final = 5.0
#: Folders of the table whose files hold what rows hold.
_FOLDERS: Final = ("data", "_indices", "_deletions")
#: File systems stamp with a clock of their own, which is a little behind.
_CLOCK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Erased:
    """`rows` went now; what is left afterwards must be 0. `since`: Unix time from which on nothing holds them."""

    rows: int
    left: int
    since: float
    files: int
    #: Files of the table that are older than `since`.
    older_files: int


def refuse_copies(uri: str) -> None:
    """Raises Conflict where memories lie beside the table, in places that are an operator's to empty."""
    directory = local_directory(uri)
    if directory is None:
        return
    dumps = sorted(path.name for path in (directory / marker.DUMPS).glob("*"))
    if dumps:
        raise Conflict(
            f"{directory / marker.DUMPS} has dumps of migrations ({', '.join(dumps[:5])}), with memories of all "
            "tenants: remove them first. Nothing was deleted"
        )
    if has_set_aside(directory):
        raise Conflict(
            f"{directory / 'set-aside'} has versions of the table that a repair moved there, and the files they name "
            "are kept: remove them first. Nothing was deleted"
        )


async def erase(table: Table, writer: Writer, maintenance: Maintenance, user_id: str) -> Erased:
    """All of the tenant's memories with their history, and everything that holds them. Done again, it does it again."""
    mine = where.tenant(user_id).sql
    history = await table.history.find()
    tables = [table.lance] if history is None else [table.lance, history]

    async def delete() -> int:
        if history is not None:
            await history.checkout_latest()  # type: ignore[no-untyped-call]
        rows = int(await table.lance.count_rows(mine))
        for lance in tables:
            if await lance.count_rows(mine):
                await lance.delete(mine)
        return rows

    async def rewrite() -> None:
        for lance in tables:
            await lance.update(updates_sql=where.unchanged("content"))

    async def clean() -> None:
        for lance in tables:
            await lance.optimize(cleanup_older_than=timedelta(seconds=READERS_S / 2), delete_unverified=True)

    rows = await writer.change(delete, {user_id: None})
    since = time.time()
    await writer.change(rewrite, None)
    for index in _indices(table.lance, history):
        await writer.change(index, {})
    if await maintenance.has_vector_index():
        await maintenance.rebuild_vector_index()
    await asyncio.sleep(READERS_S)
    await writer.change(clean, {})
    with translated("count"):
        left = sum([int(await lance.count_rows(mine)) for lance in tables])
    written = await asyncio.to_thread(_times, table.directory)
    return Erased(rows, left, since, len(written), sum(at < since - _CLOCK_S for at in written))


def _indices(memories: AsyncTable, history: AsyncTable | None) -> list[Callable[[], Awaitable[None]]]:
    """Each of full-text and scalars, made anew."""

    def anew(lance: AsyncTable, column: str, config: BTree | FTS) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await lance.create_index(column, config=config, replace=True)

        return run

    own = [anew(memories, column, config) for column, config in index_configs().items()]
    return [*own, *([] if history is None else [anew(history, INDEXED, BTree())])]


def _times(directory: Path | None) -> list[float]:
    if directory is None:
        return []
    folders = (directory / f"{table}.lance" / name for table in (TABLE, HISTORY) for name in _FOLDERS)
    return [path.stat().st_mtime for folder in folders for path in folder.rglob("*") if path.is_file()]
