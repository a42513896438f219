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

from warmstart.errors import TenantAssertion
from warmstart.store import predicates as where
from warmstart.store.journal import MAX_IDS, JournalReader
from warmstart.store.reads import Candidate, Reader
from warmstart.store.schema import SHOWN, Row
from warmstart.store.table import Table

log = structlog.get_logger(__name__)

#: How long a search waits for its tenant to be read; past it the table itself is asked.
LOAD_WAIT_S: Final = 0.15
#: How long for what changed in a tenant that is held: on a busy machine the table would only take longer.
CHANGES_WAIT_S: Final = 0.8
#: Tenants being read at once; those that wait for it ask the table.
MAX_LOADS: Final = 2
#: Searches that wait for a tenant, or gave up waiting while it is still read.
MAX_WAITING: Final = 256
#: What is held costs about this much beside what Arrow and numpy count: its own objects, and for each row
#: its id, its place and its numbers.
_OVERHEAD: Final = 16_384
_ROW_OVERHEAD: Final = 200

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
    #: About how many bytes of memory it takes.
    size: int

    @classmethod
    def of(cls, rows: pa.Table) -> Snapshot:
        """`rows` have the columns SHOWN, `search_text` and `embedding`."""
        column = rows["embedding"]
        having = np.flatnonzero(np.asarray(pc.is_valid(column)))
        flat = pc.drop_null(column).combine_chunks()
        vectors = flat.flatten().to_numpy().reshape(-1, column.type.list_size).astype(np.float32)
        lengths = np.linalg.norm(vectors, axis=1)
        some = lengths > 0  # a vector of zeros is near nothing
        # copies: any column of a batch, as it came from the engine, keeps all of the batch in memory
        kept = rows.drop_columns(["embedding"]).take(pa.array(np.arange(rows.num_rows))).combine_chunks()
        created_us = kept["created_at"].cast(pa.int64()).to_numpy()
        return cls._of(kept, vectors[some] / lengths[some, np.newaxis], having[some], created_us)

    @classmethod
    def _of(
        cls, rows: pa.Table, vectors: Matrix, with_vector: npt.NDArray[np.int64], created_us: npt.NDArray[np.int64]
    ) -> Snapshot:
        index = {memory_id: i for i, memory_id in enumerate(rows["id"].to_pylist())}
        size = vectors.nbytes + rows.nbytes + len(index) * _ROW_OVERHEAD + _OVERHEAD
        return cls(rows, index, vectors, with_vector, created_us, int(size))

    def nearest(self, query: Sequence[float], depth: int) -> list[Candidate]:
        """The `depth` nearest by cosine: best first, then the newer, then the id."""
        wanted = np.asarray(query, dtype=np.float32)
        length = float(np.linalg.norm(wanted))
        if not len(self.with_vector) or not length > 0:
            return []
        # row by row, so that equal vectors have equal scores; as a product their place would matter
        scores = np.einsum("ij,j->i", self.vectors, wanted / length)
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

    def vectors_of(self, ids: Sequence[str]) -> dict[str, Matrix]:
        """The unit vectors of those of `ids` that have one."""
        places = {i: self.index[i] for i in ids if i in self.index}
        rows = {i: int(np.searchsorted(self.with_vector, place)) for i, place in places.items()}
        return {
            i: self.vectors[row]
            for i, row in rows.items()
            if row < len(self.with_vector) and self.with_vector[row] == places[i]
        }

    def text_candidates(self, matches: Sequence[tuple[str, float]], depth: int) -> list[Candidate] | None:
        """The `depth` best of `matches` (id, BM25; more than `depth` where there are more), best first.

        None where the held rows can't tell: a tie that goes on behind them, or a row newer than the snapshot.
        """
        if len(matches) > depth and matches[depth - 1][1] == matches[-1][1]:
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
        return Snapshot._of(
            rows,
            np.concatenate([self.vectors[kept], added.vectors]),
            np.concatenate([place[self.with_vector[kept]], added.with_vector + int(keep.sum())]),
            np.concatenate([self.created_us[keep], added.created_us]),
        )


@dataclass(slots=True)
class _Held:
    snapshot: Snapshot | None = None
    stale: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: It alone would fill the memory there is: read again only once much of it has changed.
    too_large: bool = False

    @property
    def size(self) -> int:
        return self.snapshot.size if self.snapshot else _OVERHEAD


class Residents:
    """The tenants in memory, at most `max_bytes` of them. How large one may be is the caller's to know."""

    def __init__(self, table: Table, max_bytes: int) -> None:
        self._table = table
        self._max_bytes = max_bytes
        directory = table.directory
        self._journal = JournalReader(directory) if directory else None
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._loads: set[asyncio.Task[Snapshot | None]] = set()
        self._loading = asyncio.Semaphore(MAX_LOADS)

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
        if held.too_large or len(self._loads) >= MAX_WAITING:
            return None
        task = asyncio.create_task(self._bring_up(user_id, held))
        self._loads.add(task)
        task.add_done_callback(self._loaded)
        done, _ = await asyncio.wait({task}, timeout=CHANGES_WAIT_S if held.snapshot else LOAD_WAIT_S)
        if not done:
            return None
        try:
            return task.result()
        except TenantAssertion:
            raise
        except Exception as error:
            log.warning("resident.load.failed", tenant=user_id, reason=str(error)[:300])
            return None

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
                    if len(held.stale) > MAX_IDS:  # reading them would be no cheaper than all
                        del self._held[tenant]
        return self._journal.usable

    def _loaded(self, task: asyncio.Task[Snapshot | None]) -> None:
        self._loads.discard(task)
        if not task.cancelled():
            task.exception()

    async def _bring_up(self, user_id: str, held: _Held) -> Snapshot | None:
        async with held.lock:
            if held.too_large:
                return None
            # what is noted from here on is seen by the read below, or by the next call
            stale, held.stale = held.stale, set()
            reader = Reader(self._table, user_id)
            try:
                if held.snapshot is None:
                    async with self._loading:
                        rows = await reader.whole([where.active()])
                        held.snapshot = await asyncio.to_thread(Snapshot.of, rows)
                elif stale:
                    fresh = await reader.whole([where.one_of("id", sorted(stale)), where.active()])
                    held.snapshot = await asyncio.to_thread(held.snapshot.changed, stale, fresh)
            except BaseException:
                held.stale |= stale
                raise
            snapshot = held.snapshot
            if snapshot is not None and snapshot.size > self._max_bytes:
                held.snapshot, held.too_large = None, True
        self._evict()
        return snapshot

    def _evict(self) -> None:
        size = sum(h.size for h in self._held.values())
        while size > self._max_bytes and self._held:
            size -= self._held.popitem(last=False)[1].size

    async def close(self) -> None:
        for task in list(self._loads):
            task.cancel()
        if self._journal:
            self._journal.close()
