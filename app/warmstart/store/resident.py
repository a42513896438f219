"""Tenants held in memory: their active rows and vectors, always as current as the last acknowledged write.

A flat scan pays for reading scattered vectors and many columns, not for the
distances: held as one matrix, a tenant's vectors are compared in well under a
millisecond, and exactly. Memory is bounded; who was searched longest ago goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from warmstart.store import predicates as where
from warmstart.store.journal import JournalReader
from warmstart.store.reads import Candidate, Reader
from warmstart.store.schema import SHOWN, Row
from warmstart.store.table import Table

log = structlog.get_logger(__name__)

#: How long a search waits for its tenant to be read; past it the table itself is asked.
LOAD_WAIT_S: Final = 0.15
#: A table of rows costs about this much beside what Arrow counts.
_ROW_OVERHEAD: Final = 120

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tenant's active rows at one moment; never changed once made."""

    rows: pa.Table
    index: dict[str, int]
    #: Unit vectors of the rows that have one, and where these rows stand in `rows`.
    vectors: Matrix
    with_vector: npt.NDArray[np.int64]
    created_us: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: pa.Table) -> Snapshot:
        """`rows` have the columns SHOWN, `search_text` and `embedding`."""
        rows = rows.combine_chunks()
        column = rows["embedding"]
        having = np.flatnonzero(np.asarray(pc.is_valid(column)))
        flat = pc.drop_null(column).combine_chunks()
        vectors = flat.flatten().to_numpy().reshape(-1, column.type.list_size).astype(np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return cls(
            rows=rows.drop_columns(["embedding"]),
            index={memory_id: i for i, memory_id in enumerate(rows["id"].to_pylist())},
            vectors=vectors / np.maximum(lengths, 1e-12),
            with_vector=having,
            created_us=rows["created_at"].cast(pa.int64()).to_numpy(),
        )

    @property
    def size(self) -> int:
        return int(self.vectors.nbytes + self.rows.nbytes + self.rows.num_rows * _ROW_OVERHEAD)

    def nearest(self, query: Sequence[float], depth: int) -> list[Candidate]:
        """The `depth` nearest by cosine: best first, then the newer, then the id."""
        if not len(self.with_vector):
            return []
        wanted = np.asarray(query, dtype=np.float32)
        scores = self.vectors @ (wanted / max(float(np.linalg.norm(wanted)), 1e-12))
        if len(scores) > depth:
            least = np.partition(scores, -depth)[-depth]
            chosen = np.flatnonzero(scores >= least)
        else:
            chosen = np.arange(len(scores))
        ids = self.rows["id"].take(self.with_vector[chosen]).to_pylist()
        created = self.created_us[self.with_vector[chosen]].tolist()
        found = [
            Candidate(i, s, c, self.vectors[n])
            for i, s, c, n in zip(ids, scores[chosen].tolist(), created, chosen.tolist(), strict=True)
        ]
        found.sort(key=lambda c: c.order)
        return found[:depth]

    def text_candidates(self, matches: Sequence[tuple[str, float]], depth: int) -> list[Candidate] | None:
        """The `depth` best of `matches` (id, BM25; one more than `depth`), best first.

        None where the held rows can't tell: a tie across the cut, or a row newer than the snapshot.
        """
        if len(matches) > depth and matches[depth - 1][1] == matches[depth][1]:
            return None
        places = [self.index.get(memory_id, -1) for memory_id, _ in matches]
        if -1 in places:
            return None
        texts = self.rows["search_text"].take(pa.array(places, pa.int64())).to_pylist()
        created = [int(self.created_us[p]) for p in places]
        found = [Candidate(i, s, c, t) for (i, s), c, t in zip(matches, created, texts, strict=True)]
        found.sort(key=lambda c: c.order)
        return found[:depth]

    def get(self, ids: Sequence[str]) -> dict[str, Row]:
        places = [self.index[i] for i in ids if i in self.index]
        return {row["id"]: row for row in self.rows.select(SHOWN).take(pa.array(places, pa.int64())).to_pylist()}

    def changed(self, ids: set[str], fresh: pa.Table) -> Snapshot:
        """With the rows of `ids` as they are in `fresh`; those that aren't in it are gone."""
        keep = np.ones(self.rows.num_rows, dtype=bool)
        keep[[self.index[i] for i in ids if i in self.index]] = False
        added = Snapshot.of(fresh)
        rows = pa.concat_tables([self.rows.filter(pa.array(keep)), added.rows]).combine_chunks()
        kept = keep[self.with_vector]
        place = np.cumsum(keep) - 1  # where a kept row stands now
        return Snapshot(
            rows=rows,
            index={memory_id: i for i, memory_id in enumerate(rows["id"].to_pylist())},
            vectors=np.concatenate([self.vectors[kept], added.vectors]),
            with_vector=np.concatenate([place[self.with_vector[kept]], added.with_vector + int(keep.sum())]),
            created_us=np.concatenate([self.created_us[keep], added.created_us]),
        )


@dataclass(slots=True)
class _Held:
    snapshot: Snapshot | None = None
    stale: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Residents:
    """The tenants in memory, at most `max_bytes` of them. How large one may be is the caller's to know."""

    def __init__(self, table: Table, max_bytes: int) -> None:
        self._table = table
        self._max_bytes = max_bytes
        directory = table.directory
        self._journal = JournalReader(directory) if directory else None
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._loads: set[asyncio.Task[Snapshot | None]] = set()

    async def get(self, user_id: str) -> Snapshot | None:
        """The tenant as of every write acknowledged before this call; None: ask the table."""
        if not self._follow():
            return None
        held = self._held.get(user_id)
        if held is None:
            held = self._held[user_id] = _Held()
        self._held.move_to_end(user_id)
        if (snapshot := self._current(held)) is not None:
            return snapshot
        task = asyncio.create_task(self._bring_up(user_id, held))
        self._loads.add(task)
        task.add_done_callback(self._loaded)
        done, _ = await asyncio.wait({task}, timeout=LOAD_WAIT_S)
        return task.result() if done else None

    def peek(self, user_id: str) -> Snapshot | None:
        """The tenant where it is held and current now; loads nothing."""
        held = self._held.get(user_id) if self._follow() else None
        return self._current(held) if held else None

    @staticmethod
    def _current(held: _Held) -> Snapshot | None:
        return None if held.stale or held.lock.locked() else held.snapshot

    def _follow(self) -> bool:
        if self._journal is None:
            return False
        for rows in self._journal.poll():
            if rows is None:
                self._held.clear()
                continue
            for tenant, ids in rows.items():
                if (held := self._held.get(tenant)) is None:
                    continue
                if ids is None:
                    del self._held[tenant]
                else:
                    held.stale.update(ids)
        return self._journal.usable

    def _loaded(self, task: asyncio.Task[Snapshot | None]) -> None:
        self._loads.discard(task)
        if not task.cancelled():
            task.exception()

    async def _bring_up(self, user_id: str, held: _Held) -> Snapshot | None:
        async with held.lock:
            # what is noted from here on is seen by the read below, or by the next call
            stale, held.stale = held.stale, set()
            reader = Reader(self._table, user_id)
            try:
                if held.snapshot is None:
                    rows = await reader.whole([where.active()])
                    held.snapshot = await asyncio.to_thread(Snapshot.of, rows)
                elif stale:
                    fresh = await reader.whole([where.one_of("id", sorted(stale)), where.active()])
                    held.snapshot = held.snapshot.changed(stale, fresh)
            except BaseException:
                held.stale |= stale
                raise
            snapshot = held.snapshot
        self._evict()
        return snapshot

    def _evict(self) -> None:
        size = sum(h.snapshot.size for h in self._held.values() if h.snapshot)
        while size > self._max_bytes and self._held:
            _, gone = self._held.popitem(last=False)
            size -= gone.snapshot.size if gone.snapshot else 0

    async def close(self) -> None:
        for task in list(self._loads):
            task.cancel()
