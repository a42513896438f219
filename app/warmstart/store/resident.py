"""Tenants held in memory: snapshots, always as current as the last acknowledged write.

Memory is bounded; who was searched longest ago goes first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import structlog

from warmstart.allocation import give_back
from warmstart.errors import TenantAssertion
from warmstart.store import predicates as where
from warmstart.store.journal import MAX_IDS, JournalReader
from warmstart.store.reads import Reader
from warmstart.store.snapshot import OVERHEAD, Snapshot
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
#: After tenants were read, which takes twice their memory for a moment, what is free goes back to the system.
GIVE_BACK_AFTER_S: Final = 1.0


@dataclass(slots=True)
class _Held:
    snapshot: Snapshot | None = None
    stale: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: It alone would fill the memory there is: read again only once much of it has changed.
    too_large: bool = False

    @property
    def size(self) -> int:
        return self.snapshot.size if self.snapshot else OVERHEAD


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
        self._giving_back: asyncio.Task[None] | None = None

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
                    self._give_back_soon()
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

    def _give_back_soon(self) -> None:
        async def run() -> None:
            await asyncio.sleep(GIVE_BACK_AFTER_S)
            await asyncio.to_thread(give_back)

        if self._giving_back is None or self._giving_back.done():
            self._giving_back = asyncio.create_task(run())

    async def close(self) -> None:
        for task in [*self._loads, *([self._giving_back] if self._giving_back else [])]:
            task.cancel()
        if self._journal:
            self._journal.close()
