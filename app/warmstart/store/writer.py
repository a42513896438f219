"""Every change to the table.

All changes of a process go through one queue. Its writer takes the lock, looks
at what other processes committed, checks, writes, syncs the disk once, and only
then answers everyone in the group: many small saves make one version of the
table and share one sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import structlog

from warmstart.config import Space
from warmstart.errors import Problem, StoreUnavailable
from warmstart.store import predicates as where
from warmstart.store.gather import Gatherer
from warmstart.store.journal import Rows, merge
from warmstart.store.lock import sync_filesystem
from warmstart.store.reads import check_tenant
from warmstart.store.repair import mark_synced
from warmstart.store.schema import Row, schema
from warmstart.store.table import Table, query_of, store_problem

log = structlog.get_logger(__name__)

MAX_PENDING: Final = 1_000
#: Rows that one group writes; it also bounds the predicate of the duplicate check.
MAX_GROUP_ROWS: Final = 500
#: In a group, changes that each make a version of their own.
MAX_GROUP_CHANGES: Final = 16

#: Tenant, namespace, hash of the content.
Key = tuple[str, str, str]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Inserted:
    """`duplicate` of the active row that has this content already, else `id` is new."""

    id: str
    duplicate: bool


@dataclass(slots=True)
class _Insert:
    rows: list[Row]
    done: asyncio.Future[list[Inserted]]


@dataclass(slots=True)
class _Change:
    run: Callable[[], Awaitable[Any]]
    touches: Rows | None
    done: asyncio.Future[Any]


#: Makes changes of one kind at once: for each what it gave, or why it failed.
Together = Callable[[Table, "Writer", Sequence[T]], Awaitable[list[U | Exception]]]


@dataclass(slots=True)
class _Joint:
    run: Together[Any, Any]
    change: Any
    touches: Rows
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Group:
    inserts: list[_Insert] = field(default_factory=list)
    changes: list[_Change] = field(default_factory=list)
    joint: dict[Together[Any, Any], list[_Joint]] = field(default_factory=dict)
    rows: int = 0

    def full(self) -> bool:
        return self.rows >= MAX_GROUP_ROWS or len(self.changes) >= MAX_GROUP_CHANGES

    def futures(self) -> list[asyncio.Future[Any]]:
        joint = [op.done for ops in self.joint.values() for op in ops]
        return [*(op.done for op in self.inserts), *(op.done for op in self.changes), *joint]


class Writer:
    """The queue and its one coroutine. Callers may be cancelled; a write that began is finished."""

    def __init__(self, table: Table, space: Space | None) -> None:
        """`space` is that of the vectors this process makes; None: it makes none."""
        self._table = table
        self._lance = table.lance
        self._space = space
        self._queue: asyncio.Queue[_Insert | _Change | _Joint] = asyncio.Queue(MAX_PENDING)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._gatherer = Gatherer()
        self.wrote = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def close(self) -> None:
        """What was accepted is written first; what comes later is refused."""
        self._closed = True
        if self._task:
            await self._queue.join()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def insert(self, rows: Sequence[Row]) -> list[Inserted]:
        """Each row once: a row whose content is active in its tenant and namespace is skipped and reported."""
        for row in rows:
            self._check_vector(row)
        done: asyncio.Future[list[Inserted]] = asyncio.get_running_loop().create_future()
        return await self._submit(_Insert(list(rows), done), done)

    async def change(self, run: Callable[[], Awaitable[T]], touches: Rows | None) -> T:
        """Run `run` under the lock, on the newest version; answered after the sync.

        `touches` is for the journal: the rows that are other than before, by
        tenant (None: any of them), or None: rows of any tenant. It is read when
        `run` has ended, so that this can add what it found.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._submit(_Change(run, touches, done), done)

    async def together(self, run: Together[T, U], change: T, touches: Rows) -> U:
        """As `change`, for one that `run` makes in one commit with those of its kind that wait beside it."""
        done: asyncio.Future[U] = asyncio.get_running_loop().create_future()
        return await self._submit(_Joint(run, change, touches, done), done)

    @property
    def takes_vectors(self) -> bool:
        """Whether this process's vectors belong into the table; two spaces are never mixed."""
        return self._space == self._table.space

    async def _submit(self, operation: _Insert | _Change | _Joint, done: asyncio.Future[T]) -> T:
        if self._closed:
            raise StoreUnavailable("the service is stopping; nothing was written, try again", retry_after=5)
        await self._table.refresh()
        self._table.refuse_while_migrating()
        try:
            self._queue.put_nowait(operation)
        except asyncio.QueueFull:
            raise StoreUnavailable(
                f"{MAX_PENDING} writes are waiting already; nothing was written, try again", retry_after=1
            ) from None
        return await asyncio.shield(done)

    def _check_vector(self, row: Row) -> None:
        vector = row["embedding"]
        if vector is None:
            return
        if not self.takes_vectors:
            row.update(embedding=None, embedding_status="queued")
        else:
            check_numbers(vector, self._table.space.dim)

    # -- the writer's own coroutine

    async def _run(self) -> None:
        while True:
            group = _Group()
            self._take(group, await self._queue.get())
            while not group.full() and not self._queue.empty():
                self._take(group, self._queue.get_nowait())
            try:
                await self._write(group)
                while self._gatherer.is_due:
                    await self._gather()
            except BaseException as error:
                problem = error if isinstance(error, Problem) else store_problem("write", error)
                for future in group.futures():
                    if not future.done():
                        future.set_exception(problem)
                        # a caller that went away leaves nobody to look at it
                        future.exception()
                if not isinstance(error, Exception):
                    raise
            finally:
                for _ in group.futures():
                    self._queue.task_done()

    async def _gather(self) -> None:
        """Only after everyone was answered. Where it fails nothing is lost: the next compaction does it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rewrite = _Change(lambda: self._gatherer.run(self._lance, self._table.space), {}, done)
        try:
            await self._write(_Group(changes=[rewrite]))
            await done
        except Exception as error:
            log.info("store.gather.failed", reason=str(error)[:300])
            self._gatherer.forget()

    @staticmethod
    def _take(group: _Group, operation: _Insert | _Change | _Joint) -> None:
        if isinstance(operation, _Insert):
            group.inserts.append(operation)
            group.rows += len(operation.rows)
        elif isinstance(operation, _Joint):
            group.joint.setdefault(operation.run, []).append(operation)
            group.rows += 1
        else:
            group.changes.append(operation)

    async def _write(self, group: _Group) -> None:
        answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        touched: dict[str, Sequence[str] | None] | None = {}
        async with self._table.lock.hold():
            await self._lance.checkout_latest()  # type: ignore[no-untyped-call]
            # once more, since a migration may have begun, or even ended, while the group waited
            await self._table.refresh()
            self._table.refuse_while_migrating()
            before = await self._lance.version()
            if group.inserts:
                rows = [row for op in group.inserts for row in op.rows]
                touched = _owners(rows)
                try:
                    inserted = await self.insert_now(rows)
                    for op in group.inserts:
                        answers.append((op.done, inserted[: len(op.rows)], None))
                        inserted = inserted[len(op.rows) :]
                except Exception as error:
                    answers += [(op.done, None, error) for op in group.inserts]
            for change in group.changes:
                try:
                    answers.append((change.done, await change.run(), None))
                except Exception as error:
                    answers.append((change.done, None, error))
                if change.touches is None:
                    touched = None
                elif touched is not None:
                    merge(touched, change.touches)
            for run, operations in group.joint.items():
                done = [op.done for op in operations]
                try:
                    made = await run(self._table, self, [op.change for op in operations])
                    for future, each in zip(done, made, strict=True):
                        answers.append((future, None, each) if isinstance(each, Exception) else (future, each, None))
                except Exception as error:
                    answers += [(future, None, error) for future in done]
                if touched is not None:
                    for joint in operations:
                        merge(touched, joint.touches)
            directory = self._table.directory
            if directory is not None:
                after = await self._lance.version()
                await asyncio.to_thread(_sync, directory, after)
                if after != before:
                    self._gatherer.note(touched)
                if self._table.journal:
                    self._table.journal.append(before, after, touched if after != before else {})
        self.wrote.set()
        for future, answer, failure in answers:
            if future.done():
                continue
            if failure is None:
                future.set_result(answer)
            else:
                future.set_exception(failure if isinstance(failure, Problem) else store_problem("write", failure))
                future.exception()

    async def insert_now(self, rows: Sequence[Row]) -> list[Inserted]:
        """As `insert`, within a change: under the lock, answered with it."""
        known = await self.known_now(rows)
        fresh: list[Row] = []
        answers: list[Inserted] = []
        for row in rows:
            key = key_of(row)
            if (there := known.get(key)) is not None:
                answers.append(Inserted(there, True))
                continue
            known[key] = row["id"]
            fresh.append(row)
            answers.append(Inserted(row["id"], False))
        if fresh:
            for row in fresh:
                self._check_vector(row)
            await self._lance.add(pa.Table.from_pylist(fresh, schema=schema(self._table.space)))
        return answers

    async def known_now(self, rows: Sequence[Row]) -> dict[Key, str]:
        """The ids of the active rows that have the content of one of `rows`: one query a group. Under the lock."""
        by_tenant: dict[str, list[Row]] = {}
        for row in rows:
            by_tenant.setdefault(row["user_id"], []).append(row)
        wanted = [
            where.tenant(user_id)
            & where.one_of("namespace", sorted({r["namespace"] for r in own}))
            & where.one_of("content_hash", sorted({r["content_hash"] for r in own}))
            for user_id, own in by_tenant.items()
        ]
        # the hashes stand once more outside the ORs, where the index on them is used
        hashes = where.one_of("content_hash", sorted({r["content_hash"] for r in rows}))
        found = await (
            query_of(self._lance)
            .where(where.all_of([hashes, where.active(), where.any_of(wanted)]).sql)
            .select(["id", "user_id", "namespace", "content_hash"])
            .to_arrow()
        )
        known: dict[Key, str] = {}
        for row in found.to_pylist():
            if row["user_id"] not in by_tenant:
                check_tenant([row["user_id"]], next(iter(by_tenant)))
            known[key_of(row)] = row["id"]
        return known


def key_of(row: Row) -> Key:
    """Of all active rows, one may have it."""
    return row["user_id"], row["namespace"], row["content_hash"]


def _owners(rows: Sequence[Row]) -> dict[str, Sequence[str] | None]:
    owned: dict[str, Sequence[str] | None] = {}
    for row in rows:
        merge(owned, {row["user_id"]: [row["id"]]})
    return owned


def check_numbers(vector: Sequence[float], width: int) -> None:
    """Refused before the queue, or one bad vector would fail its whole group."""
    if len(vector) != width:
        raise ValueError(f"a vector of {len(vector)} numbers can't go into a table of width {width}")
    if not all(map(math.isfinite, vector)):
        raise ValueError("a vector must be of finite numbers")


def _sync(directory: Path, version: int) -> None:
    sync_filesystem(directory)
    mark_synced(directory, version)
