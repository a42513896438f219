"""Index care and disk use: compaction, old versions, the vector index."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import structlog
from lancedb.index import IvfSq

from warmstart.allocation import give_back
from warmstart.store.reads import Inspector
from warmstart.store.repair import has_set_aside
from warmstart.store.schema import TABLE, TEXT_INDEX
from warmstart.store.table import Table, translated
from warmstart.store.writer import Writer

log = structlog.get_logger(__name__)

#: Latency follows the number of fragments: at 101 it is some four times that of one.
MAX_SMALL_FRAGMENTS: Final = 100
#: Full-text search reads rows that are in no index one by one: some 3 ms for 100 of them, of 4 without.
MAX_UNINDEXED_ROWS: Final = 100
#: But a compaction writes the whole table, in 0.2 s for a thousand rows and 3 s for 100,000.
MAX_UNINDEXED_SHARE: Final = 0.02
#: Each compaction adds a segment to a vector index; above this it is built anew.
MAX_INDEX_SEGMENTS: Final = 15
#: Versions keep their own time; who removes orphans holds the lock, so no writer is at work on one.
_ORPHAN_AGE: Final = timedelta(days=7)
VECTOR_INDEX: Final = "embedding_idx"


@dataclass(frozen=True, slots=True)
class TableState:
    rows: int
    fragments: int
    small_fragments: int
    unindexed_rows: int
    version: int
    #: Versions kept on disk.
    versions: int

    @property
    def pressure(self) -> float:
        """How much reads would gain by a compaction; from 1 on it pays."""
        unindexed = max(MAX_UNINDEXED_ROWS, self.rows * MAX_UNINDEXED_SHARE)
        return max(self.small_fragments / MAX_SMALL_FRAGMENTS, self.unindexed_rows / unindexed)


class Maintenance:
    def __init__(self, table: Table, writer: Writer, vector_index_min_rows: int, retention_s: int) -> None:
        self._table = table
        self._lance = table.lance
        self._writer = writer
        self._min_rows = vector_index_min_rows
        self._retention = timedelta(seconds=retention_s)
        self._history_version = -1

    async def state(self) -> TableState:
        with translated("read its state"):
            stats: Any = await self._lance.stats()
            index = await self._lance.index_stats(TEXT_INDEX)
            fragments = stats["fragment_stats"]
            return TableState(
                rows=stats["num_rows"],
                fragments=fragments["num_fragments"],
                small_fragments=fragments["num_small_fragments"],
                unindexed_rows=index.num_unindexed_rows if index else stats["num_rows"],
                version=await self._lance.version(),
                versions=self._versions_on_disk(),
            )

    def _versions_on_disk(self) -> int:
        directory = self._table.directory
        return len(list((directory / f"{TABLE}.lance" / "_versions").glob("*.manifest"))) if directory else 0

    async def optimize(self) -> float:
        """Compact, fold new rows into the indices, drop old versions, of history too; the seconds it took."""

        async def run() -> float:
            started = time.perf_counter()
            await self._lance.optimize(cleanup_older_than=self._retention)
            await self._optimize_history()
            return time.perf_counter() - started

        try:
            return await self._writer.change(run, {})
        finally:
            await asyncio.to_thread(give_back)

    async def _optimize_history(self) -> None:
        history = await self._table.history.find()
        if history is not None and await history.version() != self._history_version:
            await history.optimize(cleanup_older_than=self._retention)
            self._history_version = await history.version()

    async def remove_orphans(self) -> None:
        """Files that no version names: writers that were killed leave them.

        Not beside a manifest that was set aside: they may be what it names.
        """
        if self._table.directory and has_set_aside(self._table.directory):
            return

        async def run() -> None:
            for table in (self._lance, await self._table.history.find()):
                if table is not None:
                    await table.optimize(cleanup_older_than=_ORPHAN_AGE, delete_unverified=True)

        await self._writer.change(run, {})

    async def care_for_vector_index(self) -> str | None:
        """Make, rebuild or leave the vector index; what was done.

        Below `vector_index_min_rows` of the largest tenant there is none, and
        search is exact.
        """
        segments = await self._vector_segments()
        if segments is None:
            if await Inspector(self._table).largest_tenant() <= self._min_rows:
                return None
            action = "built"
        elif segments <= MAX_INDEX_SEGMENTS:
            return None
        else:
            action = "rebuilt"
        await self.rebuild_vector_index()
        return action

    async def rebuild_vector_index(self) -> None:
        async def run() -> None:
            await self._lance.create_index("embedding", config=IvfSq(distance_type="cosine"), replace=True)  # type: ignore[arg-type]

        await self._writer.change(run, {})

    async def has_vector_index(self) -> bool:
        return await self._vector_segments() is not None

    async def _vector_segments(self) -> int | None:
        with translated("read its indices"):
            for index in await self._lance.list_indices():
                if index.name == VECTOR_INDEX:
                    return int(index.num_segments or 1)
        return None
