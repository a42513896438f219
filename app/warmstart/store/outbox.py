"""What is to be written to Postgres when it answers: newest states of memories, and audit entries.

`note`, `note_gone` and `audit` are called on the hot path, on the event loop's
thread: they never wait and never raise. While Postgres is down the entries
wait; what a full queue drops is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import structlog

from warmstart.errors import BookkeepingUnavailable
from warmstart.store.database import Connection, Database

log = structlog.get_logger(__name__)

MAX_PENDING: Final = 100_000
MAX_AUDIT_PENDING: Final = 10_000
MAX_EVENTS_PENDING: Final = 10_000
FLUSH_BATCH: Final = 500
CLOSE_FLUSH_S: Final = 0.5
MAX_REASON: Final = 500
#: Names, actors, subjects, and each value of an audit entry's detail.
MAX_NAME: Final = 200
MAX_DETAIL: Final = 20
#: What an audit row never holds, whoever writes it.
PRIVATE_FIELDS: Final = frozenset(
    {"content", "title", "facts", "tags", "entities", "metadata", "query", "text", "search_text"}
)


@dataclass(frozen=True, slots=True)
class State:
    user_id: str
    status: str
    attempts: int
    next_attempt_at: datetime | None
    reason: str | None
    space: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Gone:
    at: datetime


@dataclass(frozen=True, slots=True)
class AuditEntry:
    id: UUID
    at: datetime
    actor: str
    action: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Event:
    """What is kept of an event: never what it says."""

    id: str
    user_id: str
    kind: str
    hash: str
    created_at: datetime


class Outbox(Database):
    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._pending: dict[str, State | Gone] = {}
        self._audits: deque[AuditEntry] = deque()
        self._events: deque[Event] = deque()
        #: Entries lost to a full queue, or refused by Postgres, since the start.
        self.dropped = 0
        #: A status was lost: only `reconcile` makes the status rows right again.
        self.needs_reconcile = False

    async def close(self) -> None:
        """Writes out what waits, if Postgres answers in CLOSE_FLUSH_S, then closes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            with suppress(TimeoutError, BookkeepingUnavailable):
                async with asyncio.timeout(CLOSE_FLUSH_S):
                    await self._flush()
        await super().close()

    def note(
        self,
        memory_id: str,
        user_id: str,
        status: str,
        *,
        attempts: int = 0,
        next_attempt_at: datetime | None = None,
        reason: str | None = None,
        space: str | None = None,
    ) -> None:
        """A memory's newest state; an older one that still waits is replaced. `space` is JSON."""
        short = clean(reason, MAX_REASON) if reason else None
        state = State(user_id, status, attempts, next_attempt_at, short, space, datetime.now(UTC))
        self._put(memory_id, state)

    def note_gone(self, memory_ids: Iterable[str]) -> None:
        """These memories were removed for good."""
        now = datetime.now(UTC)
        for memory_id in memory_ids:
            self._put(memory_id, Gone(now))

    def audit(self, actor: str, action: str, subject: str, detail: Mapping[str, Any] | None = None) -> None:
        """Who did what to which id. `detail` holds ids, counts and settings, never what a memory says."""
        if len(self._audits) >= MAX_AUDIT_PENDING:
            self.dropped += 1
            return
        self._audits.append(audit_entry(actor, action, subject, detail or {}))
        self._wake.set()

    def note_event(self, event: Event) -> bool:
        """Whether there was room for it; Postgres keeps the first of one id."""
        if len(self._events) >= MAX_EVENTS_PENDING:
            self.dropped += 1
            return False
        self._events.append(event)
        self._wake.set()
        return True

    @property
    def waiting(self) -> int:
        """Entries that Postgres has not got yet."""
        return len(self._pending) + len(self._audits) + len(self._events)

    def _put(self, memory_id: str, state: State | Gone) -> None:
        if memory_id not in self._pending and len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            self.needs_reconcile = True
            return
        self._pending[memory_id] = state
        self._wake.set()

    async def _work(self) -> None:
        await self._flush()
        await super()._work()

    async def _flush(self) -> None:
        while self._pending:
            batch = list(islice(self._pending.items(), FLUSH_BATCH))
            await self._write(batch)
            for memory_id, state in batch:
                if self._pending.get(memory_id) is state:  # not replaced in the meantime
                    del self._pending[memory_id]
        while self._audits:
            entries = list(islice(self._audits, FLUSH_BATCH))
            async with self.connection() as conn:
                await insert_audit(conn, entries)
            for _ in entries:
                self._audits.popleft()
        while self._events:
            events = list(islice(self._events, FLUSH_BATCH))
            async with self.connection() as conn:
                await insert_events(conn, events)
            for _ in events:
                self._events.popleft()

    async def _write(self, batch: Sequence[tuple[str, State | Gone]]) -> None:
        """Writes `batch`; halves one that Postgres refuses, so that a bad entry stops no other."""
        try:
            async with self.connection() as conn, conn.transaction():
                await _upsert(conn, [(i, s) for i, s in batch if isinstance(s, State)])
                await _delete(conn, [(i, s) for i, s in batch if isinstance(s, Gone)])
        except BookkeepingUnavailable as error:
            if not isinstance(error.__cause__, psycopg.DataError | psycopg.IntegrityError):
                raise
            if len(batch) == 1:
                self.dropped += 1
                self.needs_reconcile = True
                log.error("bookkeeping.refused", memory_id=batch[0][0], reason=str(error))
                return
            middle = len(batch) // 2
            await self._write(batch[:middle])
            await self._write(batch[middle:])


async def _upsert(conn: Connection, states: list[tuple[str, State]]) -> None:
    if not states:
        return
    states.sort()  # one order for all processes: no deadlocks
    ids = [memory_id for memory_id, _ in states]
    columns = [[getattr(state, name) for _, state in states] for name in State.__slots__]
    await conn.execute(
        "INSERT INTO memory_status AS m"
        " (memory_id, user_id, status, attempts, next_attempt_at, reason, space, updated_at)"
        " SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::int[], %s::timestamptz[], %s::text[],"
        " %s::text[]::jsonb[], %s::timestamptz[])"
        " ON CONFLICT (memory_id) DO UPDATE SET user_id = excluded.user_id, status = excluded.status,"
        " attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at, reason = excluded.reason,"
        " space = excluded.space, updated_at = excluded.updated_at"
        # another process may have written a newer state while this one waited
        " WHERE m.updated_at <= excluded.updated_at",
        [ids, *columns],
    )


async def _delete(conn: Connection, gone: list[tuple[str, Gone]]) -> None:
    if gone:
        await conn.execute(
            "DELETE FROM memory_status m USING unnest(%s::text[], %s::timestamptz[]) AS t (id, at)"
            " WHERE m.memory_id = t.id AND m.updated_at <= t.at",
            ([memory_id for memory_id, _ in gone], [g.at for _, g in gone]),
        )


async def insert_audit(conn: Connection, entries: list[AuditEntry]) -> None:
    if entries:
        columns = [[getattr(entry, name) for entry in entries] for name in AuditEntry.__slots__]
        await conn.execute(
            "INSERT INTO audit (id, at, actor, action, subject, detail) SELECT * FROM unnest(%s::uuid[],"
            " %s::timestamptz[], %s::text[], %s::text[], %s::text[], %s::text[]::jsonb[])"
            " ON CONFLICT (id) DO NOTHING",  # it may have arrived before its answer was lost
            columns,
        )


async def insert_events(conn: Connection, events: Sequence[Event]) -> int:
    """How many of them were new."""
    columns = [[getattr(event, name) for event in events] for name in Event.__slots__]
    done = await conn.execute(
        "INSERT INTO events (id, user_id, kind, hash, created_at) SELECT * FROM unnest(%s::text[], %s::text[],"
        " %s::text[], %s::text[], %s::timestamptz[]) ON CONFLICT (user_id, id) DO NOTHING",
        columns,
    )
    return done.rowcount


def audit_entry(actor: str, action: str, subject: str, detail: Mapping[str, Any]) -> AuditEntry:
    kept = {
        clean(str(name), MAX_NAME): value if isinstance(value, bool | int) else clean(str(value), MAX_NAME)
        for name, value in islice(detail.items(), MAX_DETAIL)
        if name not in PRIVATE_FIELDS
    }
    actor, action, subject = (clean(text, MAX_NAME) for text in (actor, action, subject))
    return AuditEntry(uuid4(), datetime.now(UTC), actor, action, subject, json.dumps(kept))


def clean(text: str, length: int) -> str:
    """Cut, and without what Postgres refuses: NUL and lone surrogates."""
    return text[:length].replace("\x00", "").encode(errors="replace").decode()
