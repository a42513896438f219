"""Memories that come with ids, times and history of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from warmstart.exchange import ExportedMemory, ExportedVersion
from warmstart.store import history, links
from warmstart.store.links import Links
from warmstart.store.reads import Inspector, Reader
from warmstart.store.schema import EDITABLE, SHOWN, Row, as_float32, derived, schema
from warmstart.store.table import Table
from warmstart.store.writer import MAX_GROUP_ROWS, Writer, key_of

Outcome = Literal["created", "unchanged", "duplicate", "differs"]
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
#: `mem_` and the characters of an id that tell its time.
_TIME_CHARS: Final = len("mem_") + 10
#: What makes two rows the same; the rest derives from it, or is a vector's.
_COMPARED: Final = [c for c in SHOWN if c not in ("user_id", "embedding_status", "metadata", "content_hash")]


@dataclass(frozen=True, slots=True)
class Imported:
    outcome: Outcome
    #: As it is here: another one where that of the export is another tenant's.
    id: str
    #: Of the memory that has the content already.
    other: str | None = None


def own_id(user_id: str, memory_id: str) -> str:
    """The id that a tenant's import gives to what has another tenant's id: the same each time, and of the same age."""
    digest = int.from_bytes(hashlib.sha256(f"{user_id}\0{memory_id}".encode()).digest())
    return memory_id[:_TIME_CHARS] + "".join(_CROCKFORD[digest >> 5 * i & 31] for i in range(16))


class Importer:
    """The imports of one tenant."""

    def __init__(self, table: Table, writer: Writer, user_id: str) -> None:
        self._table = table
        self._writer = writer
        self._user_id = user_id
        self._reader = Reader(table, user_id)
        self._inspector = Inspector(table)

    async def write(self, memories: Sequence[ExportedMemory]) -> list[Imported]:
        """At most MAX_GROUP_ROWS memories, no id twice: what isn't there is made, all else left as it is."""
        if len(memories) > MAX_GROUP_ROWS:
            raise ValueError(f"at most {MAX_GROUP_ROWS} memories at once")
        touched: list[str] = []

        async def run() -> list[Imported]:
            renamed = await self._renamed(memories)
            rows = [_row(memory, self._user_id, renamed) for memory in memories]
            there = await self._reader.rows([row["id"] for row in rows])
            fresh = [row for row in rows if row["id"] not in there]
            known = await self._writer.known_now([row for row in fresh if row["deleted_at"] is None])
            answers, made = [], []
            for memory, row in zip(memories, rows, strict=True):
                answer = _answer(row, there, known)
                answers.append(answer)
                if answer.outcome == "created":
                    made.append((memory, row))
            if made:
                touched.extend(row["id"] for _, row in made)
                await self._add(made)
            return answers

        return await self._writer.change(run, {self._user_id: touched})

    async def _add(self, made: Sequence[tuple[ExportedMemory, Row]]) -> None:
        versions = [_version(version, row) for memory, row in made for version in memory.history]
        # first, and synced, as with an edit: no memory can be there without its history
        await history.replace(self._table.history, [row["id"] for _, row in made], versions)
        rows = [row for _, row in made]
        await self._table.lance.add(pa.Table.from_pylist(rows, schema=schema(self._table.space)))

    async def _renamed(self, memories: Sequence[ExportedMemory]) -> dict[str, str]:
        """Those of the ids that another tenant has, and what they become."""
        ids = {i for m in memories for i in (m.id, m.supersedes, m.superseded_by) if i is not None}
        return {i: own_id(self._user_id, i) for i in await self._inspector.of_others(sorted(ids), self._user_id)}


def _row(memory: ExportedMemory, user_id: str, renamed: Mapping[str, str]) -> Row:
    linked = Links(*(i and renamed.get(i, i) for i in (memory.superseded_by, memory.supersedes)))
    row: Row = {name: getattr(memory, name) for name in SHOWN if name in ExportedMemory.model_fields}
    row |= {
        "id": renamed.get(memory.id, memory.id),
        "user_id": user_id,
        "importance": as_float32(memory.importance),
        "metadata": links.join(memory.metadata, linked),
        "embedding": None,
        "embedding_status": "ready" if linked.superseded_by else "queued",
    }
    return row | derived(row)


def _version(version: ExportedVersion, row: Row) -> Row:
    kept: Row = {name: getattr(version, name) for name in (*EDITABLE, "content_hash", "updated_at", "version")}
    return kept | {
        "memory_id": row["id"],
        "user_id": row["user_id"],
        "importance": as_float32(version.importance),
        "metadata": links.join(version.metadata),
    }


def _answer(row: Row, there: Mapping[str, Row], known: dict[tuple[str, str, str], str]) -> Imported:
    if (before := there.get(row["id"])) is not None:
        same = all(before[name] == row[name] for name in _COMPARED)
        same = same and links.split(before["metadata"]) == links.split(row["metadata"])
        return Imported("unchanged" if same else "differs", row["id"])
    if row["deleted_at"] is None:
        other = known.setdefault(key_of(row), row["id"])
        if other != row["id"]:
            return Imported("duplicate", row["id"], other)
    return Imported("created", row["id"])
