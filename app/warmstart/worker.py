"""Work that nobody waits for: vectors for queued memories, the trash, compaction, bookkeeping.

The queue is the table itself (`embedding_status`), so this goes on with Postgres
down; there are no claims to give back, since a vector is written only where the
row still waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

import structlog

from warmstart.errors import BookkeepingUnavailable, EmbeddingError, WarmstartError
from warmstart.pace import Pace
from warmstart.runtime import Runtime
from warmstart.store import predicates as where
from warmstart.store.changes import BackfillWriter, TenantWriter, Vector
from warmstart.store.history import kept_ids
from warmstart.store.links import links_of
from warmstart.store.maintenance import TableState
from warmstart.store.reads import Inspector, Reader
from warmstart.store.schema import TABLE, Row, now

log = structlog.get_logger(__name__)

POLL_S: Final = 1.0
#: How often jobs look whether a migration is over.
MIGRATING_POLL_S: Final = 5.0
STUCK_S: Final = 180.0
#: Time for one batch; a provider that is slow for queries may still serve this.
EMBED_TIMEOUT_S: Final = 60.0
PAUSE_S: Final = (1.0, 30.0)
RETRY_S: Final = (2.0, 300.0)
#: Rows that failed and wait for their next try; more are tried again early.
MAX_DEFERRED: Final = 2_000
SWEEP_S: Final = 600.0
SWEEP_ROWS: Final = 500
COMPACT_CHECK_S: Final = 5.0
#: Between two compactions, of what one takes: writes wait meanwhile, and each leaves a table's worth of old files.
#: The more reads would gain, the shorter.
COMPACT_PAUSE: Final = 50.0
RECONCILE_CHECK_S: Final = 5.0
RECONCILE_S: Final = 3_600.0
ORPHANS_S: Final = 86_400.0
LINKS_S: Final = 3_600.0
#: Memories whose replacement seems gone; no more are dealt with at once.
MAX_SUSPECTS: Final = 1_000
PURGE_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class _Deferred:
    attempts: int
    until: float


@dataclass(frozen=True, slots=True)
class _Batch:
    tenant: str
    rows: list[Row]


class Worker:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._inspector = Inspector(runtime.table)
        self._writes = BackfillWriter(runtime.table, runtime.writer, runtime.settings.embedding_dim)
        self._deferred: dict[str, _Deferred] = {}
        #: Rows that are being embedded or written.
        self._in_flight: set[str] = set()
        self._pace = Pace()
        self._tenant = ""
        self._pause_s = PAUSE_S[0]
        self._turned_at = time.monotonic()
        self._optimized_version = -1
        #: What the last one took.
        self._optimize_s = 0.0
        self._optimized_at = time.monotonic()
        #: A memory that waited longest when it was first seen, and since when it is known to wait.
        self._waiter: str | None = None
        self._waiter_since = 0.0
        self._uncompacted_since: float | None = None
        self._reconciled_at = float("-inf")
        self._reconciled_up_since: datetime | None = None
        self._suspects: dict[str, tuple[str, str]] = {}
        self._migrating = False

    @property
    def is_alive(self) -> bool:
        """Whether the queue was looked at lately; a batch and a pause fit between two looks."""
        return time.monotonic() - self._turned_at < STUCK_S

    async def run(self) -> None:
        """Until cancelled. A job that fails is logged, and tried again at its next time."""
        async with asyncio.TaskGroup() as jobs:
            jobs.create_task(self._backfill_forever())
            for name, every_s, job in (
                ("sweep", SWEEP_S, self.sweep),
                ("compact", COMPACT_CHECK_S, self.compact_if_due),
                ("reconcile", RECONCILE_CHECK_S, self.reconcile_if_due),
                ("orphans", ORPHANS_S, self._runtime.maintenance.remove_orphans),
                ("history", ORPHANS_S, self.remove_history_of_nothing),
                ("links", LINKS_S, self.release_from_nothing),
                ("purge", PURGE_S, self._runtime.bookkeeping.purge),
            ):
                jobs.create_task(self._every(name, every_s, job))

    async def _every(self, name: str, every_s: float, job: Callable[[], Awaitable[object]]) -> None:
        while True:
            pause = every_s
            try:
                if await self._is_migrating():
                    pause = min(every_s, MIGRATING_POLL_S)
                else:
                    await job()
            except BookkeepingUnavailable:
                pass  # said once by the bookkeeping itself
            except Exception as error:
                log.warning("worker.job.failed", job=name, error=str(error)[:300])
            await asyncio.sleep(pause)

    async def _is_migrating(self) -> bool:
        """While a migration runs nothing may be written, and bookkeeping must not follow a table that is half back."""
        table = self._runtime.table
        await table.refresh()
        migrating = table.is_migrating
        if migrating != self._migrating:
            self._migrating = migrating
            self._reconciled_at = float("-inf")  # the status rows are all other ones afterwards
            log.info("worker.migration", running=migrating)
        return migrating

    # -- backfill

    async def _backfill_forever(self) -> None:
        wrote = self._runtime.writer.wrote
        writing: asyncio.Task[None] | None = None
        while True:
            self._turned_at = time.monotonic()
            wrote.clear()
            pause = 0.0
            try:
                batch = await self._next_batch()
                answers = await self._embed(batch) if batch else []
                if writing:
                    await writing
                # the next batch is embedded while this one is written
                writing = asyncio.create_task(self._write(batch, answers)) if batch else None
                if batch:
                    self._pause_s = PAUSE_S[0]
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wrote.wait(), POLL_S)
            except EmbeddingError as error:
                log.info("worker.backfill.paused", reason=error.reason, seconds=self._pause_s)
                self._runtime.metrics.worker_failed(error.reason)
                pause, self._pause_s = self._pause_s, min(self._pause_s * 2, PAUSE_S[1])
            except Exception as error:
                log.warning("worker.job.failed", job="backfill", error=str(error)[:300])
                # what was embedded when the write before it failed is nobody's now: to be taken from the queue again
                self._in_flight.clear()
                writing, pause = None, POLL_S
            await asyncio.sleep(pause)

    async def backfill(self) -> int:
        """One batch of the next tenant in turn; how many rows it dealt with.

        Raises EmbeddingError where the provider, not a text, is at fault.
        """
        batch = await self._next_batch()
        if batch is None:
            return 0
        await self._write(batch, await self._embed(batch))
        return len(batch.rows)

    async def _next_batch(self) -> _Batch | None:
        if await self._is_migrating() or self._runtime.search.vectors_off:
            return None
        tenant = await self._inspector.next_queued_tenant(self._tenant)
        if tenant is None and self._tenant:
            tenant = await self._inspector.next_queued_tenant("")
        if tenant is None:
            return None
        self._tenant = tenant
        rows = await self._waiting(tenant)
        if replaced := [row["id"] for row in rows if links_of(row["metadata"]).superseded_by]:
            # a migration queues every row
            await self._writes.settle(tenant, replaced)
            return await self._next_batch()
        return _Batch(tenant, rows) if rows else None

    async def _embed(self, batch: _Batch) -> list[list[float] | EmbeddingError]:
        self._in_flight.update(row["id"] for row in batch.rows)
        answers = await self._runtime.embedder.embed_each([r["content"] for r in batch.rows], EMBED_TIMEOUT_S)
        faults = [a for a in answers if isinstance(a, EmbeddingError)]
        if len(faults) == len(answers) and not any(f.text_at_fault for f in faults):
            self._in_flight.difference_update(row["id"] for row in batch.rows)
            raise faults[0]
        return answers

    async def _write(self, batch: _Batch, answers: list[list[float] | EmbeddingError]) -> None:
        vectors, failures = [], []
        for row, answer in zip(batch.rows, answers, strict=True):
            if isinstance(answer, EmbeddingError):
                failures.append((row, answer))
            else:
                vectors.append(Vector(row["id"], batch.tenant, row["content_hash"], answer))
        try:
            written = await self._writes.set_vectors(batch.tenant, vectors) if vectors else []
            self._note_ready(batch.tenant, written)
            await self._defer(batch.tenant, failures)
        finally:
            self._in_flight.difference_update(row["id"] for row in batch.rows)
        self._runtime.metrics.worker_embedded(len(written))
        self._pace.add(len(written))

    async def _waiting(self, tenant: str) -> list[Row]:
        at = time.monotonic()
        self._deferred = {i: d for i, d in self._deferred.items() if d.attempts and d.until > at - RETRY_S[1]}
        held = [*self._in_flight, *(i for i, d in self._deferred.items() if d.until > at)][: where.MAX_VALUES]
        filters = [where.equals("embedding_status", "queued"), where.active()]
        if held:
            filters.append(where.none_of("id", held))
        reader = Reader(self._runtime.table, tenant)
        return await reader.page(filters, "recency", None, self._settings.embed_batch_size)

    def _note_ready(self, tenant: str, ids: list[str]) -> None:
        space = self._runtime.table.space.to_json()
        for memory_id in ids:
            self._deferred.pop(memory_id, None)
            self._runtime.bookkeeping.note(memory_id, tenant, "ready", space=space)

    async def _defer(self, tenant: str, failures: list[tuple[Row, EmbeddingError]]) -> None:
        """Try again later; a text that failed alone too often is given up."""
        given_up: dict[str, str] = {}
        for row, error in failures:
            before = self._deferred.get(row["id"])
            attempts = (before.attempts if before else 0) + (1 if error.text_at_fault else 0)
            wait = min(RETRY_S[0] * 2**attempts, RETRY_S[1])
            last = attempts >= self._settings.embed_max_attempts
            if last:
                given_up[row["id"]] = row["content_hash"]
                self._deferred.pop(row["id"], None)
            elif len(self._deferred) < MAX_DEFERRED:
                self._deferred[row["id"]] = _Deferred(max(1, attempts), time.monotonic() + wait)
            self._runtime.metrics.worker_failed(error.reason)
            self._runtime.bookkeeping.note(
                row["id"],
                tenant,
                "failed" if last else "queued",
                attempts=attempts,
                next_attempt_at=None if last else now() + timedelta(seconds=wait),
                reason=error.reason,
            )
        if given_up:
            await self._writes.set_failed(tenant, given_up)
            log.warning("worker.embedding.given_up", memories=len(given_up), reason=failures[0][1].reason)

    # -- the trash

    async def sweep(self) -> int:
        """Remove what has been in the trash for its whole time; how many."""
        removed = 0
        while True:
            at = now()
            ids = await self._inspector.expired_ids(at, SWEEP_ROWS)
            if not ids:
                break
            await self._writes.purge(ids, at)
            self._runtime.bookkeeping.note_gone(ids)
            removed += len(ids)
        if removed:
            self._runtime.metrics.worker_swept(removed)
            log.info("worker.swept", memories=removed)
        return removed

    async def remove_history_of_nothing(self) -> int:
        """An older release removes a memory and leaves its history; of how many it was removed here."""
        removed = 0
        async for ids in kept_ids(self._runtime.table.history):
            there = await self._inspector.existing(ids)
            if gone := [memory_id for memory_id in ids if memory_id not in there]:
                removed += await self._writes.remove_orphans(gone)
        if removed:
            log.info("worker.history.removed", memories=removed)
        return removed

    async def release_from_nothing(self) -> int:
        """An older release removes a memory and leaves hidden what that replaced; how many were found again.

        Seen twice, an hour apart: an import may still bring what replaces them.
        """
        suspects: dict[str, tuple[str, str]] = {}
        async for rows in self._inspector.replaced():
            by = {memory_id: links_of(metadata).superseded_by or "" for memory_id, _, metadata in rows}
            active = await self._inspector.existing(sorted(set(by.values())), where.active())
            suspects |= {i: (user_id, by[i]) for i, user_id, _ in rows if by[i] not in active}
        by_tenant: dict[str, dict[str, str]] = {}
        for memory_id in suspects.keys() & self._suspects.keys():
            user_id, by_id = suspects[memory_id]
            by_tenant.setdefault(user_id, {})[memory_id] = by_id
        self._suspects = dict(islice(suspects.items(), MAX_SUSPECTS))
        released = 0
        trash = timedelta(days=self._settings.trash_days)
        for user_id, replaced in by_tenant.items():
            writer = TenantWriter(self._runtime.table, self._runtime.writer, user_id, trash)
            released += await writer.release_from(replaced)
        return released

    # -- the table

    async def compact_if_due(self) -> None:
        maintenance = self._runtime.maintenance
        state = await maintenance.state()
        written = state.version != self._optimized_version
        await self._measure(state, written=written)
        rested = time.monotonic() - self._optimized_at
        pays = state.pressure >= 1 and rested * state.pressure >= COMPACT_PAUSE * self._optimize_s
        late = rested >= self._settings.optimize_after_s
        # nobody writes any more, so that no later compaction would remove what this one had to leave
        idle = not written and state.versions > 1 and rested >= self._settings.version_retention_s
        if not ((written and (pays or late)) or idle):
            return
        self._optimize_s = seconds = await maintenance.optimize()
        self._optimized_at = time.monotonic()
        self._uncompacted_since = None
        self._optimized_version = (await maintenance.state()).version
        self._runtime.metrics.optimized(TABLE, seconds)
        log.info("worker.optimized", seconds=round(seconds, 3), fragments=state.fragments, rows=state.rows)
        if state.rows > self._settings.vector_index_min_rows and (done := await maintenance.care_for_vector_index()):
            self._optimized_version = (await maintenance.state()).version
            log.info("worker.vector_index", action=done)

    async def _measure(self, state: TableState, *, written: bool) -> None:
        metrics = self._runtime.metrics
        if not written:
            self._uncompacted_since = None
        elif self._uncompacted_since is None:
            self._uncompacted_since = time.monotonic()
        metrics.set_compaction_lag(time.monotonic() - self._uncompacted_since if self._uncompacted_since else 0.0)
        queued, failed = [
            await self._inspector.count(where.equals("embedding_status", status), where.active())
            for status in ("queued", "failed")
        ]
        metrics.set_queue(queued, failed, await self._queue_age())
        if progress := self._pace.seen(queued):
            log.info("worker.backfill.progress", **asdict(progress))
        metrics.set_unindexed_rows("search_text", state.unindexed_rows)
        metrics.set_table_versions(TABLE, state.versions)

    async def _queue_age(self) -> float:
        """By this process's clock: the times in a row may be those of an import."""
        if self._waiter is None or not await self._inspector.is_queued(self._waiter):
            self._waiter, self._waiter_since = await self._inspector.oldest_queued(), time.monotonic()
        return time.monotonic() - self._waiter_since if self._waiter else 0.0

    # -- bookkeeping

    async def reconcile_if_due(self) -> None:
        """Make Postgres agree with the table: after an outage, after a start, and once an hour."""
        bookkeeping = self._runtime.bookkeeping
        # what another process could not write during an outage, and forgot when it ended, is known to nobody else
        outage_over = bookkeeping.healthy and bookkeeping.since != self._reconciled_up_since
        due = bookkeeping.needs_reconcile or outage_over or time.monotonic() - self._reconciled_at >= RECONCILE_S
        if not due:
            return
        up_since = bookkeeping.since
        try:
            done = await bookkeeping.reconcile(self._inspector.statuses(), self._runtime.table.space.to_json())
        except WarmstartError as error:
            await self._job_ran("reconcile", str(error))
            raise
        self._reconciled_at, self._reconciled_up_since = time.monotonic(), up_since
        await self._job_ran("reconcile", None)
        for kind in ("inserted", "updated", "deleted"):
            self._runtime.metrics.reconciled(kind, getattr(done, kind))
        log.info("worker.reconciled", result=str(done))

    async def _job_ran(self, name: str, error: str | None) -> None:
        with contextlib.suppress(BookkeepingUnavailable):
            await self._runtime.bookkeeping.job_ran(name, error)

    async def retry_failed(self) -> int:
        """Queue again what was given up; how many."""
        return await self._writes.retry_failed()
