"""What a tenant can do: the one implementation under REST, MCP and the command line."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from warmstart import __version__, cursors, transfer
from warmstart.context import assemble, count_tokens_now, entry
from warmstart.errors import EmbeddingError, Invalid, Migrating, NotFound, TenantAssertion
from warmstart.events import Events
from warmstart.exchange import MAX_VERSIONS, ExportedMemory, Format, ImportResult
from warmstart.fusion import Ranked
from warmstart.given import Given, is_block
from warmstart.giving import choose
from warmstart.memory import (
    Batch,
    BatchItem,
    BatchResult,
    ContextRequest,
    ContextResult,
    Counts,
    DependencyHealth,
    EventResult,
    Health,
    History,
    HistoryRequest,
    Hit,
    ListRequest,
    Memory,
    MemoryPatch,
    Mode,
    NamespaceChange,
    NamespaceInfo,
    Namespaces,
    NewEvent,
    NewMemory,
    Page,
    Ranks,
    RecallRequest,
    Saved,
    SearchRequest,
    SearchResult,
    Version,
)
from warmstart.search import Budget, Outcome
from warmstart.store import predicates as where
from warmstart.store.changes import TenantWriter
from warmstart.store.history import History as Versions
from warmstart.store.importing import Importer
from warmstart.store.links import links_of, split
from warmstart.store.predicates import Predicate
from warmstart.store.reads import Order, Reader, filters_of_list
from warmstart.store.schema import EDITABLE, Row, as_float32, now, row_of
from warmstart.store.table import MIGRATING_RETRY_S
from warmstart.store.writer import Inserted

if TYPE_CHECKING:
    from warmstart.runtime import Runtime

log = structlog.get_logger(__name__)

T = TypeVar("T")


def to_memory(row: Row) -> Memory:
    return Memory.model_validate(shown(row))


def to_version(row: Row) -> Version:
    return Version.model_validate(shown(row))


def shown(row: Row) -> Row:
    metadata, linked = split(row["metadata"])
    # importance is kept with seven digits; what was given as 0.1 is answered as 0.1
    return row | {"metadata": metadata, "importance": round(row["importance"], 6)} | linked._asdict()


def etag(row: Row) -> str:
    return to_memory(row).etag


class MemoryService:
    """Implements `MemoryAPI` for one tenant; made anew for each request."""

    def __init__(self, runtime: Runtime, user_id: str) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._user_id = user_id
        self._reader = Reader(runtime.table, user_id)
        self._given = Given(runtime.cache, user_id)
        self._history = Versions(runtime.table, user_id)
        trash = timedelta(days=runtime.settings.trash_days)
        self._writer = TenantWriter(runtime.table, runtime.writer, user_id, trash)

    # -- write

    async def save(self, new: NewMemory) -> Saved:
        [known] = await self._given_back([new])
        if known is not None:
            self._runtime.metrics.saved("duplicate")
            return Saved.model_validate(known.model_dump() | {"duplicate": True})
        row = row_of(new, self._user_id, now())
        row["embedding"] = await self._vector_in_time(new.content)
        row["embedding_status"] = "queued" if row["embedding"] is None else "ready"
        [inserted] = await self._insert([row], ["supersedes"])
        if inserted.duplicate:
            self._runtime.metrics.saved("duplicate")
            kept = await self._row(inserted.id)
            return Saved.model_validate(to_memory(kept).model_dump() | {"duplicate": True})
        self._runtime.metrics.saved("queued" if row["embedding"] is None else "inline")
        self._note(row)
        return Saved.model_validate(to_memory(row).model_dump())

    async def save_batch(self, batch: Batch) -> BatchResult:
        at = now()
        given_back = await self._given_back(batch.memories)
        places = [place for place, known in enumerate(given_back) if known is None]
        rows = [row_of(batch.memories[place], self._user_id, at) for place in places]
        fields = [f"memories.{place}.supersedes" for place in places]
        inserted = iter(await self._insert(rows, fields) if rows else ())
        fresh = iter(rows)
        results = []
        for known in given_back:
            if known is not None:
                results.append(BatchItem(status="duplicate", id=known.id))
                continue
            row, answer = next(fresh), next(inserted)
            if not answer.duplicate:
                self._note(row)
            results.append(BatchItem(status="duplicate" if answer.duplicate else "created", id=answer.id))
        created = sum(r.status == "created" for r in results)
        self._runtime.metrics.saved("queued", created)
        self._runtime.metrics.saved("duplicate", len(results) - created)
        return BatchResult(results=results, created=created, duplicates=len(results) - created)

    async def _given_back(self, new: Sequence[NewMemory]) -> builtins.list[Memory | None]:
        """For each: the active memory that a prompt was given and that comes back now; it is not stored again.

        Raises Invalid for a block of which nothing is known any more.
        """
        ids = await self._given.recognise([n.content for n in new])
        rows = await self._reader.rows(sorted({i for i in ids if i}), [where.active()])
        for place, (memory, known) in enumerate(zip(new, ids, strict=True)):
            if is_block(memory.content) and known not in rows:
                raise Invalid(
                    "content: is a block that this memory gave to a prompt; it is not stored again: "
                    "save what is new, in words of its own",
                    field="content" if len(new) == 1 else f"memories.{place}.content",
                )
        # what is to take another's place is saved: that it was given says nothing of the other
        return [to_memory(rows[i]) if i in rows and not n.supersedes else None for n, i in zip(new, ids, strict=True)]

    async def _insert(self, rows: builtins.list[Row], fields: builtins.list[str]) -> builtins.list[Inserted]:
        if any(links_of(row["metadata"]).supersedes for row in rows):
            return await self._writer.save(rows, fields)
        return await self._runtime.writer.insert(rows)

    async def update(self, memory_id: str, patch: MemoryPatch, if_match: str | None = None) -> Memory:
        values = patch.changes()
        if "importance" in values:
            values["importance"] = as_float32(values["importance"])
        row = await self._writer.edit(memory_id, values, if_match, etag)
        self._note(row)
        return to_memory(row)

    async def restore_version(self, memory_id: str, version: int, if_match: str | None = None) -> Memory:
        """An edit to what the memory was then; it stays in the namespace it is in."""
        await self._row(memory_id)
        before = await self._history.version(memory_id, version)
        if before is None:
            raise NotFound(f"{memory_id} has no version {version}: the last {MAX_VERSIONS} are kept", id=memory_id)
        values = {name: before[name] for name in EDITABLE if name != "namespace"}
        values["metadata"], _ = split(before["metadata"])
        row = await self._writer.edit(memory_id, values, if_match, etag)
        self._note(row)
        return to_memory(row)

    async def delete(self, memory_id: str, *, hard: bool = False, if_match: str | None = None) -> None:
        if hard:
            await self._writer.delete_for_good(memory_id, if_match, etag)
            self._runtime.bookkeeping.note_gone([memory_id])
            self._audit("memory.delete", memory_id)
        else:
            await self._writer.delete(memory_id, if_match, etag)

    async def delete_many(self, ids: Sequence[str]) -> int:
        """To the trash, in one step; how many of `ids` were active memories."""
        return await self._writer.delete_many(ids)

    async def empty_trash(self, until: datetime) -> int:
        """Removes for good what was deleted up to `until`; how many memories."""
        removed = 0
        while ids := await self._writer.empty_trash(until):
            self._runtime.bookkeeping.note_gone(ids)
            removed += len(ids)
        self._audit("trash.empty", self._user_id, {"memories": removed})
        return removed

    async def restore(self, memory_id: str) -> Memory:
        return to_memory(await self._writer.restore(memory_id))

    async def rename_namespace(self, name: str, to: str) -> NamespaceChange:
        moved = await self._writer.rename_namespace(name, to)
        self._audit("namespace.rename", self._user_id, {"memories": moved})
        return NamespaceChange(name=to, memories=moved)

    async def delete_namespace(self, name: str) -> NamespaceChange:
        trashed = await self._writer.delete_namespace(name)
        self._audit("namespace.delete", self._user_id, {"memories": trashed})
        return NamespaceChange(name=name, memories=trashed)

    async def _vector_in_time(self, content: str) -> list[float] | None:
        """The vector of `content`, or None: the worker makes it later."""
        if self._runtime.search.vectors_off:
            return None
        try:
            [vector] = await self._runtime.embedder.embed_documents(
                [content], self._settings.embed_save_budget_ms / 1000
            )
            return vector
        except EmbeddingError as error:
            self._runtime.metrics.degraded("save", "embedding")
            log.info("save.embedding.queued", reason=error.reason)
            return None

    def _note(self, row: Row) -> None:
        self._runtime.bookkeeping.note(
            row["id"], self._user_id, row["embedding_status"], space=self._runtime.table.space.to_json()
        )

    def _audit(self, action: str, subject: str, detail: dict[str, Any] | None = None) -> None:
        self._runtime.bookkeeping.audit(self._user_id, action, subject, detail)

    # -- read

    async def get(self, memory_id: str) -> Memory:
        return to_memory(await self._row(memory_id))

    async def history(self, memory_id: str, request: HistoryRequest) -> History:
        current = await self._row(memory_id)
        before = cursors.decode_version(request.cursor) if request.cursor else None
        rows = await self._history.page(current, before, request.limit + 1)
        more = len(rows) > request.limit
        rows = rows[: request.limit]
        return History(
            versions=[to_version(row) for row in rows], next_cursor=str(rows[-1]["version"]) if more else None
        )

    async def _row(self, memory_id: str) -> Row:
        (row, partial) = await self._told(self._one(memory_id))
        if row is None and partial:
            raise Migrating(
                "a migration runs, and this memory is not among those that are back; try again",
                retry_after=MIGRATING_RETRY_S,
            )
        if row is None:
            raise NotFound(f"no memory {memory_id}", id=memory_id)
        return row

    async def _one(self, memory_id: str) -> Row | None:
        return (await self._reader.rows([memory_id])).get(memory_id)

    async def _told(self, read: Coroutine[Any, Any, T]) -> tuple[T, dict[str, Any]]:
        """What `read` gives, and what its answer says of a migration that ran before it or after it."""
        table = self._runtime.table
        try:
            before = await table.share_back()
        except BaseException:
            read.close()
            raise
        found = await read
        share = await table.share_back()
        share = before if share is None else share
        return found, {} if share is None else {"degraded": ["migrating"], "migrated": share}

    async def list(self, request: ListRequest) -> Page:
        return await self._page(filters_of_list(request), "recency", request, request.cursor, request.limit)

    async def recall(self, request: RecallRequest) -> Page:
        filters = [where.active()]
        if request.namespace is not None:
            filters.append(where.in_namespace(request.namespace))
        if request.since is not None:
            filters.append(where.compare("created_at", ">=", request.since))
        return await self._page(filters, request.order, request, request.cursor, request.limit)

    async def _page(
        self,
        filters: builtins.list[Predicate],
        order: Order,
        request: ListRequest | RecallRequest,
        cursor: str | None,
        limit: int,
    ) -> Page:
        query = request.model_dump_json(exclude={"cursor", "limit"})
        after = cursors.decode(cursor, query, order) if cursor else None
        rows, partial = await self._told(self._reader.page(filters, order, after, limit + 1))
        more = len(rows) > limit
        rows = rows[:limit]
        return Page(
            memories=[to_memory(row) for row in rows],
            next_cursor=cursors.encode(rows[-1], query, order) if more else None,
            **partial,
        )

    async def count(self, request: ListRequest) -> int:
        """How many memories a listing of `request` gives over all its pages."""
        return await self._reader.count(filters_of_list(request))

    async def counts(self) -> Counts:
        found, partial = await self._told(self._counts())
        return found.model_copy(update=partial)

    async def _counts(self) -> Counts:
        groups = await self._reader.group(["namespace", "type"], [where.active()])
        namespaces: dict[str, int] = {}
        types: dict[str, int] = {}
        for (namespace, kind), count in sorted(groups.items()):
            namespaces[namespace] = namespaces.get(namespace, 0) + count
            types[kind] = types.get(kind, 0) + count
        trashed = await self._reader.count([where.is_not_null("deleted_at")])
        return Counts(active=sum(types.values()), trashed=trashed, namespaces=namespaces, types=types)

    async def namespaces(self) -> Namespaces:
        found, partial = await self._told(self._namespaces())
        return found.model_copy(update=partial)

    async def _namespaces(self) -> Namespaces:
        active = await self._reader.group(["namespace"], [where.active()])
        trashed = await self._reader.group(["namespace"], [where.is_not_null("deleted_at")])
        return Namespaces(
            namespaces=[
                NamespaceInfo(name=key[0], active=active.get(key, 0), trashed=trashed.get(key, 0))
                for key in sorted({*active, *trashed})
            ]
        )

    # -- search

    async def search(self, request: SearchRequest) -> SearchResult:
        started = time.perf_counter()
        limit = min(
            request.limit if "limit" in request.model_fields_set else self._settings.default_limit,
            self._settings.max_limit,
        )
        hits, outcome = await self._hits(request, limit, Budget.of(self._settings))
        took = time.perf_counter() - started
        self._runtime.metrics.search(outcome.mode, took)
        self._runtime.activity.search(self._user_id, outcome.mode, took, degraded=bool(outcome.degraded))
        for reason in outcome.degraded:
            self._runtime.metrics.degraded("search", reason)
        return SearchResult(
            hits=hits,
            mode=outcome.mode,
            degraded=outcome.degraded,
            migrated=await self._share_back(outcome),
            took_ms=round(took * 1000, 3),
        )

    async def _share_back(self, outcome: Outcome) -> float | None:
        if "migrating" not in outcome.degraded:
            return None
        share = await self._runtime.table.share_back()
        return 1.0 if share is None else share  # None: it ended this moment

    async def _hits(self, request: SearchRequest, limit: int, budget: Budget) -> tuple[builtins.list[Hit], Outcome]:
        outcome = await self._runtime.search.run(self._user_id, request, budget)
        return await self._fetched(outcome, outcome.ranked[:limit]), outcome

    async def _fetched(self, outcome: Outcome, ranked: Sequence[Ranked]) -> builtins.list[Hit]:
        rows = outcome.snapshot.get([r.id for r in ranked]) if outcome.snapshot else {}
        if missing := [r.id for r in ranked if r.id not in rows]:
            rows |= await self._reader.rows(missing, [where.active()])
        return [
            Hit.model_validate(shown(rows[r.id]) | {"score": r.score, "ranks": Ranks(vector=r.vector, text=r.text)})
            for r in ranked
            if r.id in rows
        ]

    async def context(self, request: ContextRequest) -> ContextResult:
        """Never an error but a failed tenant check: what can't be had in time is an empty block."""
        started = time.perf_counter()
        block, ids, mode = "", builtins.list[str](), None
        budget_s = (request.budget_ms or self._settings.context_budget_ms) / 1000
        if request.query.strip():
            try:
                async with asyncio.timeout(budget_s):
                    block, ids, mode = await self._context(request, budget_s)
            except TenantAssertion:
                raise
            except Exception as error:
                reason = "budget" if isinstance(error, TimeoutError) else "failed"
                self._runtime.metrics.degraded("context", reason)
                log.warning("context.empty", reason=reason, detail=str(error)[:300])
        took = time.perf_counter() - started
        self._runtime.metrics.context(took)
        return ContextResult(context=block, ids=ids, mode=mode, latency_ms=round(took * 1000, 3))

    async def _context(self, request: ContextRequest, budget_s: float) -> tuple[str, builtins.list[str], Mode | None]:
        budget = Budget(
            budget_s * 0.9,
            min(self._settings.context_embed_budget_ms / 1000, budget_s * 0.6),
            self._settings.arm_budget_ms / 1000,
        )
        search = SearchRequest(query=request.query, namespace=request.namespace)
        limit = self._settings.default_limit
        outcome, terms, given = await asyncio.gather(
            self._runtime.search.run(self._user_id, search, budget, limit * self._settings.context_depth_factor),
            self._runtime.search.terms(request.query),
            self._given.to(request.conversation_id),
        )
        for reason in outcome.degraded:
            self._runtime.metrics.degraded("context", reason)
        hits = await self._fetched(outcome, [r for r in outcome.ranked if r.id not in given][:limit])
        chosen = choose(hits, outcome, terms)
        entries = [(h.id, entry(h.title, h.content, h.facts)) for h in chosen]
        block, ids = assemble(entries, request.token_budget, count_tokens_now)
        if ids:
            await self._given.remember(request.conversation_id, [h for h in chosen if h.id in ids])
        return block, ids, outcome.mode

    async def event(self, event: NewEvent, *, retrieve: bool = False) -> EventResult:
        """Never an error but a failed tenant check."""
        runtime = self._runtime
        events = Events(
            self._user_id, runtime.bookkeeping, runtime.cache, runtime.metrics, self.context,
            self._settings.context_budget_ms,
        )  # fmt: skip
        return await events.receive(event, retrieve=retrieve)

    # -- all at once

    def export(self, form: Format) -> AsyncIterator[bytes]:
        return transfer.export(self._runtime.table, self._user_id, form, self._runtime.transfers)

    async def import_memories(self, memories: Sequence[ExportedMemory]) -> ImportResult:
        importer = Importer(self._runtime.table, self._runtime.writer, self._user_id)
        books, transfers = self._runtime.bookkeeping, self._runtime.transfers
        result = await transfer.import_memories(importer, books, self._user_id, memories, transfers)
        self._audit("memories.import", self._user_id, {"memories": result.created})
        return result

    # -- state

    async def health(self) -> Health:
        runtime = self._runtime
        share = await runtime.table.share_back()
        degraded, mode = runtime.rung()
        active = where.active()
        queued = await self._reader.count([where.equals("embedding_status", "queued"), active])
        failed = await self._reader.count([where.equals("embedding_status", "failed"), active])
        state = await runtime.maintenance.state()
        return Health(
            status="degraded" if degraded else "ok",
            mode=mode,
            degraded=degraded,
            dependencies=[DependencyHealth(**d) for d in runtime.dependencies(share)],
            queued=queued,
            failed=failed,
            unindexed_rows=state.unindexed_rows,
            version=__version__,
        )
