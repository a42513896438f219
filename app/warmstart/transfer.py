"""A tenant's memories out of the service and into it, in bounded memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np

from warmstart.errors import Migrating, Overloaded, StoreUnavailable
from warmstart.exchange import MAX_NOTES, SCHEMA, ExportedMemory, ExportedVersion, Format, ImportNote, ImportResult
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.store.importing import Imported, Importer
from warmstart.store.links import split
from warmstart.store.pinned import Pinned
from warmstart.store.schema import Row, now
from warmstart.store.table import MIGRATING_RETRY_S, Table
from warmstart.store.writer import MAX_GROUP_ROWS

#: Under way at once in a process; each holds some 50 MB at most.
MAX_TRANSFERS: Final = 4
#: Bytes of an export that are sent at once.
_CHUNK: Final = 1 << 16
_BUSY_RETRY_S: Final = 2

_VERSION_FIELDS: Final = tuple(ExportedVersion.model_fields)
_MEMORY_FIELDS: Final = tuple(ExportedMemory.model_fields)


class Transfers:
    """How many exports and imports are under way."""

    def __init__(self) -> None:
        self._running = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        if self._running >= MAX_TRANSFERS:
            raise Overloaded(
                f"{MAX_TRANSFERS} exports or imports are under way already; try again", retry_after=_BUSY_RETRY_S
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


async def export(table: Table, user_id: str, form: Format, transfers: Transfers) -> AsyncIterator[bytes]:
    """All memories of a tenant as they were when this began. Raises Migrating while some are not back."""
    with transfers.one():
        if await table.share_back() is not None:
            raise Migrating(
                "a migration runs, and not all memories are back: export them when it has ended",
                retry_after=MIGRATING_RETRY_S,
            )
        pinned = await Pinned.of(table, user_id)
        count = await pinned.count()
        header = _json({"schema": SCHEMA, "exported_at": _time(now()), "count": count})
        pending = bytearray(header + b"\n" if form == "ndjson" else header[:-1] + b',"memories":[\n')
        sent = 0
        async for row, versions in pinned.memories():
            sent += 1
            pending += _json(exported(row, versions))
            pending += b",\n" if form == "json" and sent < count else b"\n"
            if len(pending) >= _CHUNK:
                yield bytes(pending)
                pending.clear()
        if sent != count:
            raise StoreUnavailable(f"{sent} of {count} memories could be read: the export is not whole", retry_after=5)
        yield bytes(pending + (b"]}\n" if form == "json" else b""))


def exported(row: Row, versions: Sequence[Row]) -> dict[str, Any]:
    """A row and its earlier texts, as in the format."""
    found = _plain(row, _MEMORY_FIELDS)
    if versions:
        found["history"] = [_plain(version, _VERSION_FIELDS) for version in versions]
    return found


def _plain(row: Row, fields: Sequence[str]) -> dict[str, Any]:
    metadata, linked = split(row["metadata"])
    # the shortest number that is this one in 32 bits
    known = row | linked._asdict() | {"metadata": metadata, "importance": float(str(np.float32(row["importance"])))}
    values = {name: known[name] for name in fields if known.get(name) is not None}
    return {name: _time(value) if isinstance(value, datetime) else value for name, value in values.items()}


def _time(value: datetime) -> str:
    return value.isoformat().replace("+00:00", "Z")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def import_memories(
    importer: Importer, books: Bookkeeping, user_id: str, memories: Sequence[ExportedMemory], transfers: Transfers
) -> ImportResult:
    """Each as it is in the export, but for its vector, which the worker makes."""
    result = ImportResult()
    with transfers.one():
        for start in range(0, len(memories), MAX_GROUP_ROWS):
            group = memories[start : start + MAX_GROUP_ROWS]
            for memory, imported in zip(group, await importer.write(group), strict=True):
                _count(result, memory, imported)
                if imported.outcome == "created":
                    books.note(imported.id, user_id, "ready" if memory.superseded_by else "queued")
    return result


def _count(result: ImportResult, memory: ExportedMemory, imported: Imported) -> None:
    note: ImportNote | None = None
    match imported.outcome:
        case "created":
            result.created += 1
            if imported.id != memory.id:
                result.renamed += 1
                note = ImportNote(id=memory.id, outcome="renamed", other=imported.id)
        case "unchanged":
            result.unchanged += 1
        case "duplicate":
            result.duplicates += 1
            note = ImportNote(id=memory.id, outcome="duplicate", other=imported.other)
        case "differs":
            result.differing += 1
            note = ImportNote(id=memory.id, outcome="differs")
    if note and len(result.notes) < MAX_NOTES:
        result.notes.append(note)
