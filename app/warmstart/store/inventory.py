"""What a store holds, in figures that two copies of it agree on; reads only, in bounded memory.

For backups: taken when one is made, and again of what is restored from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from warmstart.errors import Problem, TenantAssertion
from warmstart.store import migrations
from warmstart.store import predicates as where
from warmstart.store.database import Connection, Database
from warmstart.store.history import kept_texts
from warmstart.store.reads import Content, Inspector, Reader
from warmstart.store.schema import Row, content_hash
from warmstart.store.stop_words import STOP_WORDS
from warmstart.store.table import Table, open_read_only
from warmstart.terms import MAX_TERMS, query_text

FORMAT: Final = 1
#: Rows named one by one: those whose id has the smallest hash, so the same in each copy.
SAMPLE: Final = 200
#: Memories of a tenant of which a search must find one, and how far down.
SEARCHED: Final = 3
SEARCH_DEPTH: Final = 1_000
#: For one statement: a Postgres that was just restored reads from a cold disk.
STATEMENT_S: Final = 30.0
#: More faults, or differences, of one kind are counted, not listed.
LISTED: Final = 20
_WORD: Final = re.compile(r"\w{3,}")
_MODULUS: Final = 1 << 256

Inventory = dict[str, Any]


@dataclass(slots=True)
class _Tenant:
    active: int = 0
    trashed: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    #: Earlier texts.
    versions: int = 0
    history: int = 0
    #: Active memories to search for.
    candidates: _Smallest = field(default_factory=lambda: _Smallest(SEARCHED))

    def add(self, row: Content, hashed: str) -> None:
        if row.trashed:
            self.trashed += 1
        else:
            self.active += 1
            self.candidates.add(row.id, "")
        self.by_status[row.embedding_status] += 1
        # a sum does not mind the order, which compaction changes
        self.digest = (self.digest + _number(f"{row.id} {hashed} {row.trashed}")) % _MODULUS

    def add_version(self, row: Row) -> None:
        self.versions += 1
        hashed = _number(f"{row['memory_id']} {row['version']} {row['content_hash']}")
        self.history = (self.history + hashed) % _MODULUS

    def to_dict(self) -> dict[str, Any]:
        return {
            "active": self.active,
            "trashed": self.trashed,
            "by_status": dict(sorted(self.by_status.items())),
            "digest": f"{self.digest:064x}",
            "versions": self.versions,
            "history": f"{self.history:064x}",
        }


class _Smallest:
    """The few ids whose hashes are smallest, each with what was given with it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[int, str, str]] = []

    def add(self, memory_id: str, told: str) -> None:
        entry = (-_number(memory_id), memory_id, told)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((memory_id, told) for _, memory_id, told in sorted(self._heap, reverse=True))


async def take(uri: str, dsn: str = "", *, search: bool = False) -> Inventory:
    """The inventory of the store at `uri`, beside the Postgres of `dsn` where one is named.

    Raises StoreUnavailable, or BookkeepingUnavailable.
    """
    table = await open_read_only(uri)
    if not dsn:
        return await _take(table, None, search=search)
    async with Database(dsn).direct() as conn:
        return await _take(table, conn, search=search)


async def _take(table: Table, conn: Connection | None, *, search: bool) -> Inventory:
    tenants: dict[str, _Tenant] = {}
    sample = _Smallest(SAMPLE)
    wrong: list[str] = []
    wrong_versions: list[str] = []
    books = await _Books.open(conn) if conn else None
    async for rows in Inspector(table).contents():
        for row in rows:
            hashed = content_hash(row.content)
            if hashed != row.content_hash:
                wrong.append(row.id)
            tenants.setdefault(row.user_id, _Tenant()).add(row, hashed)
            sample.add(row.id, row.content_hash)
        if books:
            await books.compare(rows)
    async for kept in kept_texts(table.history):
        for text in kept:
            if content_hash(text["content"]) != text["content_hash"]:
                wrong_versions.append(f"{text['memory_id']} version {text['version']}")
            tenants.setdefault(text["user_id"], _Tenant()).add_version(text)
    faults = _listed(f"the content of {memory_id} does not have the hash that is kept of it" for memory_id in wrong)
    faults += _listed(f"the content of {name} does not have the hash that is kept of it" for name in wrong_versions)
    searched = await _search(table, tenants, faults) if search else None
    told = None
    if books:
        told = books.to_dict(sorted(tenants))
        faults += _listed(
            f"Postgres knows no tenant {name}, whose memories are here" for name in told["unknown_tenants"]
        )
    bad = set(wrong)
    return {
        "format": FORMAT,
        "ok": not faults,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": sum(t.active + t.trashed for t in tenants.values()),
        "versions": sum(t.versions for t in tenants.values()),
        "version": await table.lance.version(),
        "bytes": await asyncio.to_thread(_bytes, Path(table.uri)),
        "space": asdict(table.space),
        "tenants": {name: tenants[name].to_dict() for name in sorted(tenants)},
        "sample": [{"id": i, "content_hash": kept, "ok": i not in bad} for i, kept in sample],
        "mismatches": len(wrong),
        "search": searched,
        "postgres": told,
        "faults": faults,
        "differences": [],
    }


async def _search(table: Table, tenants: dict[str, _Tenant], faults: list[str]) -> dict[str, int]:
    """One search a tenant, for words of a memory of its own, which must find that."""
    counted = {"searched": 0, "found": 0, "without_words": 0}
    failed = []
    for name in sorted(tenants):
        reader = Reader(table, name)
        ids = [memory_id for memory_id, _ in tenants[name].candidates]
        try:
            found = await _finds_one(reader, ids)
        except TenantAssertion:
            raise
        except Problem as error:
            found, reason = False, f": {error.detail}"
        else:
            reason = ""
        if found is None:
            counted["without_words"] += 1
            continue
        counted["searched"] += 1
        counted["found"] += found
        if not found:
            failed.append(f"full-text search of tenant {name} does not find its own memory by its words{reason}")
    faults += _listed(failed)
    return counted


async def _finds_one(reader: Reader, ids: Sequence[str]) -> bool | None:
    """None where no memory of `ids` has a word to search for."""
    rows = await reader.rows(ids, [where.active()])
    tried = False
    for memory_id in ids:
        words = _words(rows[memory_id]["content"]) if memory_id in rows else []
        if not words:
            continue
        tried = True
        hits = await reader.text_matches(query_text(" ".join(words)), [where.active()], SEARCH_DEPTH)
        if memory_id in {hit for hit, _ in hits}:
            return True
    return False if tried else None


def _words(content: str) -> list[str]:
    """The longest distinct words, which are most its own."""
    words = dict.fromkeys(word for word in _WORD.findall(content) if word.lower() not in STOP_WORDS)
    return sorted(words, key=len, reverse=True)[:MAX_TERMS]


class _Books:
    """What Postgres says of the same memories."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._schema = self._active_keys = self._status_rows = 0
        self._tenants: set[str] = set()
        self._rows = self._known = self._differing = 0

    @classmethod
    async def open(cls, conn: Connection) -> _Books:
        books = cls(conn)
        async with asyncio.timeout(STATEMENT_S):
            books._schema = (await migrations.state(conn, migrations.shipped())).schema
            books._tenants = {row["id"] async for row in await conn.execute("SELECT id FROM tenants")}
            row = await (
                await conn.execute(
                    "SELECT (SELECT count(*) FROM api_keys WHERE revoked_at IS NULL) AS keys,"
                    " (SELECT count(*) FROM memory_status) AS statuses"
                )
            ).fetchone()
        books._active_keys, books._status_rows = (row["keys"], row["statuses"]) if row else (0, 0)
        return books

    async def compare(self, rows: Sequence[Content]) -> None:
        async with asyncio.timeout(STATEMENT_S):
            found = await (
                await self._conn.execute(
                    "SELECT count(*) AS known, count(*) FILTER (WHERE m.status <> t.status) AS differing"
                    " FROM memory_status m JOIN unnest(%s::text[], %s::text[]) AS t (id, status) ON m.memory_id = t.id",
                    ([row.id for row in rows], [row.embedding_status for row in rows]),
                )
            ).fetchone()
        self._rows += len(rows)
        if found:
            self._known += found["known"]
            self._differing += found["differing"]

    def to_dict(self, tenants: Sequence[str]) -> dict[str, Any]:
        return {
            "schema": self._schema,
            "tenants": len(self._tenants),
            "active_keys": self._active_keys,
            "status_rows": self._status_rows,
            "status_missing": self._rows - self._known,
            "status_orphaned": self._status_rows - self._known,
            "status_differing": self._differing,
            "unknown_tenants": [name for name in tenants if name not in self._tenants],
        }


def differences(before: Inventory, after: Inventory) -> list[str]:
    """What of `before` is otherwise in `after`.

    Not the table's version and size, which compaction changes, nor the status rows, which lag behind.
    """
    found = [
        f"{name}: {before[name]} before, {after[name]} now" for name in ("rows", "space") if before[name] != after[name]
    ]
    found += _listed(_differing_tenants(before["tenants"], after["tenants"]))
    now = {row["id"]: row["content_hash"] for row in after["sample"]}
    found += _listed(
        f"memory {row['id']} " + ("has another content" if row["id"] in now else "is not there, or newer ones are")
        for row in before["sample"]
        if now.get(row["id"]) != row["content_hash"]
    )
    if before["postgres"] and after["postgres"]:
        for name in ("tenants", "active_keys"):
            had, has = before["postgres"][name], after["postgres"][name]
            if had != has:
                found.append(f"{name.replace('_', ' ')} in Postgres: {had} before, {has} now")
    return found


def _differing_tenants(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"tenant {name} is gone, with {before[name]['active']} active memories"
        elif name not in before:
            yield f"tenant {name} is new, with {after[name]['active']} active memories"
        else:
            # an inventory of an older release says nothing of history
            for what in ("active", "trashed", "by_status", "digest", "versions", "history"):
                had, has = before[name].get(what), after[name].get(what)
                if had != has and None not in (had, has):
                    yield f"tenant {name}, {what}: {had} before, {has} now"


def _listed(lines: Any) -> list[str]:
    every = list(lines)
    return every if len(every) <= LISTED else [*every[:LISTED], f"and {len(every) - LISTED} more like these"]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
