"""Edits of memories: those that wait together become one commit of the table, and one of its history before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from warmstart.errors import Conflict, Duplicate, NotFound, Problem, Stale
from warmstart.store import predicates as where
from warmstart.store.history import keep
from warmstart.store.links import join, links_of
from warmstart.store.reads import check_tenant
from warmstart.store.schema import SHOWN, Row, derived, now, schema, title_of
from warmstart.store.table import Table, query_of, rewrite
from warmstart.store.writer import Key, Writer, key_of


@dataclass(frozen=True, slots=True)
class Edit:
    """`values` for the columns of a memory that they name, where it still is what `if_match` says."""

    user_id: str
    memory_id: str
    values: Row
    if_match: str | None
    etag: Callable[[Row], str]


async def edit_all(table: Table, writer: Writer, edits: Sequence[Edit]) -> list[Row | Exception]:
    """Of each the row as it is now, or why not. Under the write lock, on the newest version.

    New content recomputes what derives from it and queues its vector anew.
    Several of one memory are edits one after the other.
    """
    answers: dict[int, Row | Exception] = {}
    waiting = dict(enumerate(edits))
    while waiting:
        first = {edit.memory_id: number for number, edit in reversed(waiting.items())}
        some = {number: waiting.pop(number) for number in sorted(first.values())}
        answers |= zip(some, await _edit_each(table, writer, list(some.values())), strict=True)
    return [answers[number] for number in range(len(edits))]


async def _edit_each(table: Table, writer: Writer, edits: Sequence[Edit]) -> list[Row | Exception]:
    """`edits` are of memories that differ."""
    rows = await _rows(table, edits)
    planned: list[Row | Exception] = []
    for edit in edits:
        try:
            planned.append(_planned(edit, rows.get(edit.memory_id)))
        except Problem as error:
            planned.append(error)
    await _refuse_seconds(writer, rows, planned)
    fresh = [row for row in planned if isinstance(row, dict) and row is not rows[row["id"]]]
    if fresh:
        await keep(table.history, [rows[row["id"]] for row in fresh])
        await rewrite(table.lance, pa.Table.from_pylist(fresh, schema=schema(table.space)))
    return [row if isinstance(row, Exception) else {column: row[column] for column in SHOWN} for row in planned]


async def _rows(table: Table, edits: Sequence[Edit]) -> dict[str, Row]:
    """The memories of `edits` that there are, whole."""
    wanted = [where.tenant(user_id) & where.one_of("id", ids) for user_id, ids in _by_tenant(edits).items()]
    # once more without the tenants, where the index is used
    mine = where.any_of(wanted) & where.one_of("id", [edit.memory_id for edit in edits])
    found = await query_of(table.lance).where(mine.sql).select(schema(table.space).names).to_arrow()
    return {row["id"]: row for row in found.to_pylist()}


def _by_tenant(edits: Sequence[Edit]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for edit in edits:
        ids.setdefault(edit.user_id, []).append(edit.memory_id)
    return ids


def _planned(edit: Edit, row: Row | None) -> Row:
    """The row as it is to be; the same object where nothing changes."""
    if row is None:
        raise NotFound(f"no memory {edit.memory_id}", id=edit.memory_id)
    check_tenant([row["user_id"]], edit.user_id)
    if row["deleted_at"] is not None:
        raise Conflict(f"{edit.memory_id} is in the trash: restore it first", id=edit.memory_id)
    check_match(row, edit.if_match, edit.etag)
    linked = links_of(row["metadata"])
    given = dict(edit.values)
    if "metadata" in given:
        given["metadata"] = join(given["metadata"], linked)
    changed: dict[str, Any] = {k: v for k, v in given.items() if row[k] != v}
    if not changed:
        return row
    if "content" in changed and "title" not in edit.values and row["title"] == title_of(row["content"]):
        changed["title"] = title_of(changed["content"])
    changed |= derived(row | changed)
    if changed["content_hash"] != row["content_hash"]:
        # what another memory replaces has no vector, and waits for none
        changed |= {"embedding": None, "embedding_status": "ready" if linked.superseded_by else "queued"}
    return row | changed | {"updated_at": later_than(row)}


def later_than(row: Row) -> datetime:
    """When a row is changed: strictly after its last change, so that an ETag never names two states."""
    changed_at: datetime = row["updated_at"]
    return max(now(), changed_at + timedelta(microseconds=1))


async def _refuse_seconds(writer: Writer, rows: dict[str, Row], planned: list[Row | Exception]) -> None:
    """Puts the reason in the place of each planned row whose content another memory has already."""
    moving = {
        number: row
        for number, row in enumerate(planned)
        if isinstance(row, dict) and key_of(row) != key_of(rows[row["id"]])
    }
    if not moving:
        return
    taken: dict[Key, str] = await writer.known_now(list(moving.values()))
    for number, row in moving.items():
        if (there := taken.setdefault(key_of(row), row["id"])) != row["id"]:
            planned[number] = duplicate(there, row["namespace"])


def duplicate(there: str, namespace: str) -> Duplicate:
    """Why a row can't become active: `there` has its content."""
    return Duplicate(f"{there} in namespace {namespace!r} has this content already", id=there)


def check_match(row: Row, if_match: str | None, etag: Callable[[Row], str]) -> None:
    if if_match and if_match != "*" and etag(row) not in [part.strip() for part in if_match.split(",")]:
        raise Stale(f"{row['id']} changed since it was read: read it again and repeat the change", id=row["id"])
