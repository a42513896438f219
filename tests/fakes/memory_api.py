"""A tenant's memory in a dict, and the runtime around it: what the HTTP surface stands on in its tests."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from warmstart.config import Settings
from warmstart.errors import Duplicate, Expired, Invalid, NotFound, Stale, Unauthorized
from warmstart.exchange import SCHEMA, ExportedMemory, Format, ImportResult
from warmstart.local_cache import LocalCache
from warmstart.memory import (
    Batch,
    BatchItem,
    BatchResult,
    ContextRequest,
    ContextResult,
    Counts,
    EventResult,
    Health,
    History,
    HistoryRequest,
    Hit,
    ListRequest,
    Memory,
    MemoryPatch,
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
from warmstart.metrics import Metrics
from warmstart.ratelimit import RateLimiter

KEY = "ws_sk_" + "a" * 43
OTHER_KEY = "ws_sk_" + "b" * 43
UNLIMITED_KEY = "ws_sk_" + "c" * 43
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(frozen=True)
class FakeIdentity:
    user_id: str
    key_id: str
    unlimited: bool = False


class FakeKeys:
    def __init__(self) -> None:
        self.known = {
            KEY: FakeIdentity("alice", "key_alice"),
            OTHER_KEY: FakeIdentity("bob", "key_bob"),
            UNLIMITED_KEY: FakeIdentity("alice", "key_alice_2", unlimited=True),
        }
        self.error: Exception | None = None
        self.asked = 0

    async def identify(self, api_key: str) -> FakeIdentity:
        self.asked += 1
        if self.error:
            raise self.error
        if api_key not in self.known:
            raise Unauthorized("this API key is not known")
        return self.known[api_key]

    async def identify_hash(self, key_hash: str) -> FakeIdentity:
        known = {hashlib.sha256(key.encode()).hexdigest(): key for key in self.known}
        return await self.identify(known.get(key_hash, ""))


class InMemoryAPI:
    """`error`, where set, is what every method raises."""

    def __init__(self) -> None:
        self.rows: dict[str, Memory] = {}
        self.versions: dict[str, list[Version]] = {}
        self.error: Exception | None = None
        self._ids = itertools.count(1)
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    async def save(self, new: NewMemory) -> Saved:
        self._raise()
        hashed = hashlib.sha256(new.content.encode()).hexdigest()
        for row in self._active(new.namespace):
            if row.content_hash == hashed:
                return Saved(**row.model_dump(), duplicate=True)
        number, now = next(self._ids), self._tick()
        row = Memory(
            **new.model_dump(exclude={"title", "occurred_at"}),
            id="mem_" + "".join(ALPHABET[number >> shift & 31] for shift in range(125, -1, -5)),
            title=new.title or new.content.splitlines()[0][:200],
            content_hash=hashed,
            embedding_status="ready",
            occurred_at=new.occurred_at or now,
            created_at=now,
            updated_at=now,
        )
        self.rows[row.id] = row
        return Saved(**row.model_dump())

    async def save_batch(self, batch: Batch) -> BatchResult:
        saved = [await self.save(new) for new in batch.memories]
        items = [BatchItem(status="duplicate" if s.duplicate else "created", id=s.id) for s in saved]
        duplicates = sum(s.duplicate for s in saved)
        return BatchResult(results=items, created=len(items) - duplicates, duplicates=duplicates)

    async def search(self, request: SearchRequest) -> SearchResult:
        self._raise()
        hits = [
            Hit(**row.model_dump(), score=1 / (61 + rank), ranks=Ranks(text=rank + 1))
            for rank, row in enumerate(r for r in self._active() if request.query.lower() in r.content.lower())
        ]
        return SearchResult(hits=hits[: request.limit], mode="keyword", degraded=["embedding"], took_ms=1.5)

    async def recall(self, request: RecallRequest) -> Page:
        self._raise()
        rows = self._active(request.namespace)
        if request.order == "importance":
            rows.sort(key=lambda r: -r.importance)
        return self._page(rows, request.limit, request.cursor)

    async def context(self, request: ContextRequest) -> ContextResult:
        found = await self.search(SearchRequest(query=request.query or "\n"))
        text = "".join(f"### {hit.title}\n\n{hit.content}\n" for hit in found.hits)
        return ContextResult(context=text, ids=[h.id for h in found.hits], mode=found.mode, latency_ms=2.5)

    async def event(self, event: NewEvent, *, retrieve: bool = False) -> EventResult:
        self._raise()
        retrieval = await self.context(ContextRequest(query=event.event_id)) if retrieve else None
        return EventResult(event_id=event.event_id, stored=True, retrieval=retrieval)

    async def get(self, memory_id: str) -> Memory:
        self._raise()
        if memory_id not in self.rows:
            raise NotFound(f"no memory has the id {memory_id}")
        return self.rows[memory_id]

    async def list(self, request: ListRequest) -> Page:
        self._raise()
        rows = sorted(self.rows.values(), key=lambda r: r.created_at, reverse=True)
        if request.only_deleted:
            rows = [r for r in rows if r.deleted_at]
        elif not request.include_deleted:
            rows = [r for r in rows if not r.deleted_at]
        wanted = {"namespace": request.namespace, "type": request.type, "source": request.source}
        rows = [r for r in rows if all(v is None or getattr(r, k) == v for k, v in wanted.items())]
        rows = [r for r in rows if request.tag is None or request.tag in r.tags]
        return self._page(rows, request.limit, request.cursor)

    async def update(self, memory_id: str, patch: MemoryPatch, if_match: str | None = None) -> Memory:
        row = await self.get(memory_id)
        if if_match is not None and if_match != row.etag:
            raise Stale("the memory changed since it was read")
        changes = patch.changes()
        if "content" in changes:
            changes["content_hash"] = hashlib.sha256(changes["content"].encode()).hexdigest()
            for other in self._active(row.namespace):
                if other.id != row.id and other.content_hash == changes["content_hash"]:
                    raise Duplicate("another memory has this content", id=other.id)
        kept = self.versions.setdefault(memory_id, [])
        kept.insert(0, Version(**row.model_dump(), version=len(kept) + 1))
        self.rows[memory_id] = row.model_copy(update={**changes, "updated_at": self._tick()})
        return self.rows[memory_id]

    async def history(self, memory_id: str, request: HistoryRequest) -> History:
        await self.get(memory_id)
        page = [v for v in self.versions.get(memory_id, []) if v.version < int(request.cursor or 1 << 30)]
        more = len(page) > request.limit
        page = page[: request.limit]
        return History(versions=page, next_cursor=str(page[-1].version) if more else None)

    async def restore_version(self, memory_id: str, version: int, if_match: str | None = None) -> Memory:
        await self.get(memory_id)
        for kept in self.versions.get(memory_id, []):
            if kept.version == version:
                return await self.update(memory_id, MemoryPatch(content=kept.content, title=kept.title), if_match)
        raise NotFound(f"{memory_id} has no version {version}")

    async def delete(self, memory_id: str, *, hard: bool = False, if_match: str | None = None) -> None:
        row = await self.get(memory_id)
        if if_match is not None and if_match != row.etag:
            raise Stale(f"{memory_id} changed since it was read")
        if hard:
            del self.rows[memory_id]
            return
        now = self._tick()
        times = {"deleted_at": now, "expires_at": now + timedelta(days=30), "updated_at": now}
        self.rows[memory_id] = row.model_copy(update=times)

    async def restore(self, memory_id: str) -> Memory:
        row = await self.get(memory_id)
        if row.expires_at and row.expires_at < self._now:
            raise Expired("the 30 days in the trash are over")
        times = {"deleted_at": None, "expires_at": None, "updated_at": self._tick()}
        self.rows[memory_id] = row.model_copy(update=times)
        return self.rows[memory_id]

    async def counts(self) -> Counts:
        self._raise()
        active = self._active()
        return Counts(
            active=len(active),
            trashed=len(self.rows) - len(active),
            namespaces=Counter(r.namespace for r in active),
            types=Counter(r.type for r in active),
        )

    async def namespaces(self) -> Namespaces:
        active = (await self.counts()).namespaces
        names = sorted({r.namespace for r in self.rows.values()})
        all_rows = Counter(r.namespace for r in self.rows.values())
        return Namespaces(
            namespaces=[
                NamespaceInfo(name=n, active=active.get(n, 0), trashed=all_rows[n] - active.get(n, 0)) for n in names
            ]
        )

    async def rename_namespace(self, name: str, to: str) -> NamespaceChange:
        rows = self._in_namespace(name)
        for row in rows:
            self.rows[row.id] = row.model_copy(update={"namespace": to})
        return NamespaceChange(name=to, memories=len(rows))

    async def delete_namespace(self, name: str) -> NamespaceChange:
        rows = self._in_namespace(name)
        for row in rows:
            await self.delete(row.id)
        return NamespaceChange(name=name, memories=len(rows))

    async def export(self, form: Format) -> AsyncIterator[bytes]:
        self._raise()
        header = {"schema": SCHEMA, "exported_at": self._now.isoformat(), "count": len(self.rows)}
        kept = [
            row.model_dump(mode="json", exclude_none=True, exclude={"embedding_status"}) for row in self.rows.values()
        ]
        if form == "json":
            lines = ",\n".join(map(json.dumps, kept)) + "\n" if kept else ""
            yield f'{json.dumps(header)[:-1]},"memories":[\n{lines}]}}\n'.encode()
        else:
            yield b"".join(json.dumps(line).encode() + b"\n" for line in [header, *kept])

    async def import_memories(self, memories: Sequence[ExportedMemory]) -> ImportResult:
        self._raise()
        fresh = [memory for memory in memories if memory.id not in self.rows]
        for memory in fresh:
            self.rows[memory.id] = Memory(**memory.model_dump(), embedding_status="queued")
        return ImportResult(created=len(fresh), unchanged=len(memories) - len(fresh))

    async def health(self) -> Health:
        self._raise()
        return Health(
            status="ok", mode="hybrid", degraded=[], dependencies=[], queued=0, failed=0, unindexed_rows=0, version="0"
        )

    def forget_trash(self, days: int) -> None:
        """As if so many days had passed."""
        self._now += timedelta(days=days)

    def _raise(self) -> None:
        if self.error:
            raise self.error

    def _tick(self) -> datetime:
        self._now += timedelta(microseconds=1)
        return self._now

    def _active(self, namespace: str | None = None) -> list[Memory]:
        rows = [r for r in self.rows.values() if not r.deleted_at and namespace in (None, r.namespace)]
        return sorted(rows, key=lambda r: r.created_at, reverse=True)

    def _in_namespace(self, name: str) -> list[Memory]:
        self._raise()
        rows = [r for r in self.rows.values() if r.namespace == name]
        if not rows:
            raise NotFound(f"there is no namespace {name}")
        return rows

    def _page(self, rows: list[Memory], limit: int, cursor: str | None) -> Page:
        if (cursor is not None and not cursor.isascii()) or (cursor and not cursor.isdecimal()):
            raise Invalid("cursor: is not one this server gave", field="cursor")
        start = int(cursor or 0)
        more = len(rows) > start + limit
        return Page(memories=rows[start : start + limit], next_cursor=str(start + limit) if more else None)


@dataclass
class FakeRuntime:
    settings: Settings = field(default_factory=Settings)
    keys: FakeKeys = field(default_factory=FakeKeys)
    limiter: RateLimiter = field(default_factory=lambda: RateLimiter(LocalCache()))
    metrics: Metrics = field(default_factory=Metrics)
    tenants: dict[str, InMemoryAPI] = field(default_factory=dict)
    readiness: tuple[bool, dict[str, Any]] = (True, {})
    closed: bool = False

    def service(self, user_id: str) -> InMemoryAPI:
        return self.tenants.setdefault(user_id, InMemoryAPI())

    def rung(self) -> tuple[list[str], str]:
        return [], "hybrid"

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        return self.readiness

    def reset(self) -> None:
        """As new, under a running application."""
        vars(self).update(vars(FakeRuntime()))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FakeRuntime]:
        yield self
        self.closed = True
