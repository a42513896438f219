"""What is changed: by a tenant, and by the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pyarrow as pa

from warmstart.errors import Conflict, Expired, NotFound
from warmstart.store import predicates as where
from warmstart.store.edits import Edit, check_match, duplicate, edit_all, later_than
from warmstart.store.history import remove
from warmstart.store.links import HIDDEN, LINKED, NONE, links_of
from warmstart.store.predicates import Predicate
from warmstart.store.reads import Inspector, Reader, check_tenant
from warmstart.store.schema import Row, now, schema
from warmstart.store.superseding import Superseding
from warmstart.store.table import Table, query_of
from warmstart.store.writer import Inserted, Writer, check_numbers, key_of


class TenantWriter:
    """The changes of one tenant."""

    def __init__(self, table: Table, writer: Writer, user_id: str, trash: timedelta) -> None:
        self._table = table
        self._lance = table.lance
        self._writer = writer
        self._user_id = user_id
        self._reader = Reader(table, user_id)
        self._history_table = table.history
        self._trash = trash

    async def save(self, rows: Sequence[Row], fields: Sequence[str]) -> list[Inserted]:
        """New rows of which some supersede another; `fields` name where that was asked for, one for each row.

        All or nothing: raises Invalid or Conflict where one of them can't.
        """
        touched: list[str] = [row["id"] for row in rows]

        async def run() -> list[Inserted]:
            known = await self._writer.known_now(rows)
            ids = [known.setdefault(key_of(row), row["id"]) for row in rows]
            wanted = [
                (memory_id, old, field)
                for row, memory_id, field in zip(rows, ids, fields, strict=True)
                if (old := links_of(row["metadata"]).supersedes) is not None
            ]
            fresh = {row["id"]: row for row, memory_id in zip(rows, ids, strict=True) if row["id"] == memory_id}
            superseding = self._superseding(touched)
            plan = await superseding.plan(wanted, fresh)
            inserted = await self._writer.insert_now(rows)
            # both are found for a moment, but at no time neither
            await superseding.carry_out(plan)
            return inserted

        return await self._writer.change(run, {self._user_id: touched})

    async def release_from(self, replaced: Mapping[str, str]) -> int:
        """Rows (id → what replaces it) whose replacement an older release removed are found again; how many."""

        async def run() -> int:
            active = await self._reader.rows(sorted(set(replaced.values())), [where.active()])
            rows = await self._reader.rows(sorted(replaced))
            leaving = {by: NONE for by in replaced.values() if by not in active}
            await self._superseding(touched).relink(rows, leaving)
            return len(touched)

        touched: list[str] = []
        return await self._writer.change(run, {self._user_id: touched})

    def _superseding(self, touched: list[str]) -> Superseding:
        return Superseding(self._table, self._reader, touched)

    async def edit(self, memory_id: str, values: Row, if_match: str | None, etag: Callable[[Row], str]) -> Row:
        """Set `values` in place, and keep what they replace."""
        edit = Edit(self._user_id, memory_id, values, if_match, etag)
        return await self._writer.together(edit_all, edit, {self._user_id: [memory_id]})

    async def delete(self, memory_id: str, if_match: str | None, etag: Callable[[Row], str]) -> Row:
        """To the trash; a row that is there already stays as it is."""

        async def run() -> Row:
            row = await self._one(memory_id)
            check_match(row, if_match, etag)
            if row["deleted_at"] is not None:
                return row
            await self._superseding(touched).release([row])
            at = now()
            return await self._update(row, {"deleted_at": at, "expires_at": at + self._trash})

        touched = [memory_id]
        return await self._writer.change(run, {self._user_id: touched})

    async def delete_many(self, ids: Sequence[str]) -> int:
        """To the trash, all in one step; how many of them were active."""
        touched = list(ids)
        return await self._writer.change(
            lambda: self._to_trash(where.one_of("id", ids), touched), {self._user_id: touched}
        )

    async def delete_for_good(self, memory_id: str, if_match: str | None, etag: Callable[[Row], str]) -> None:
        async def run() -> None:
            row = await self._one(memory_id)
            check_match(row, if_match, etag)
            await self._superseding(touched).release([row])
            await remove(self._history_table, [memory_id], self._user_id)
            await self._lance.delete(self._row(memory_id))

        touched = [memory_id]
        await self._writer.change(run, {self._user_id: touched})

    async def empty_trash(self, until: datetime) -> list[str]:
        """Removes for good what was deleted up to `until`, at most MAX_VALUES; their ids, none once all are gone."""

        async def run() -> list[str]:
            ids = await self._reader.ids([where.compare("deleted_at", "<=", until)], where.MAX_VALUES)
            if ids:
                await remove(self._history_table, ids, self._user_id)
                await self._lance.delete((where.tenant(self._user_id) & where.one_of("id", ids)).sql)
            return ids

        return await self._writer.change(run, {self._user_id: None})

    async def restore(self, memory_id: str) -> Row:
        async def run() -> Row:
            row = await self._one(memory_id)
            if row["deleted_at"] is None:
                return row
            if row["expires_at"] <= now():
                raise Expired(f"{memory_id} could be restored until {row['expires_at'].isoformat()}", id=memory_id)
            if there := (await self._writer.known_now([row])).get(key_of(row)):
                raise duplicate(there, row["namespace"])
            restored = await self._update(row, {"deleted_at": None, "expires_at": None})
            await self._superseding(touched).take_again(restored)
            return restored

        touched = [memory_id]
        return await self._writer.change(run, {self._user_id: touched})

    async def rename_namespace(self, name: str, to: str) -> int:
        """How many rows moved, trash included; refused where `to` has any row."""

        async def run() -> int:
            # counted row by row: a foreign one ends it before anything is changed
            if not await self._reader.count([where.equals("namespace", name)]):
                raise NotFound(f"no namespace {name!r}")
            if await self._reader.count([where.equals("namespace", to)]):
                raise Conflict(f"the namespace {to!r} exists already; pick another name", field="name")
            return await self._update_all(where.equals("namespace", name), {"namespace": to, "updated_at": now()})

        return await self._writer.change(run, {self._user_id: None})

    async def delete_namespace(self, name: str) -> int:
        """How many active rows went to the trash."""

        async def run() -> int:
            if not await self._reader.count([where.equals("namespace", name)]):
                raise NotFound(f"no namespace {name!r}")
            return await self._to_trash(where.equals("namespace", name), [])

        return await self._writer.change(run, {self._user_id: None})

    async def _to_trash(self, rows: Predicate, touched: list[str]) -> int:
        """The active ones of `rows`; how many they were."""
        leaving = rows & where.active()
        linked = await self._reader.some([leaving, where.starts_with("metadata", LINKED)])
        await self._superseding(touched).release(linked)
        at = now()
        return await self._update_all(leaving, {"deleted_at": at, "expires_at": at + self._trash, "updated_at": at})

    def _row(self, memory_id: str) -> str:
        return (where.tenant(self._user_id) & where.equals("id", memory_id)).sql

    async def _one(self, memory_id: str) -> Row:
        row = (await self._reader.rows([memory_id])).get(memory_id)
        if row is None:
            raise NotFound(f"no memory {memory_id}", id=memory_id)
        return row

    async def _update(self, row: Row, changed: Row) -> Row:
        changed["updated_at"] = later_than(row)
        await self._lance.update(where=self._row(row["id"]), updates_sql=assignments(changed))
        return {k: v for k, v in (row | changed).items() if k in row}

    async def _update_all(self, rows: Predicate, changed: Row) -> int:
        result = await self._lance.update(
            where=(where.tenant(self._user_id) & rows).sql, updates_sql=assignments(changed)
        )
        return int(result.rows_updated)


def assignments(values: Row) -> dict[str, str]:
    return {column: where.literal(value) for column, value in values.items()}


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector for the row `id`, made from the content that has `content_hash`."""

    id: str
    user_id: str
    content_hash: str
    values: Sequence[float]


class BackfillWriter:
    """The worker's changes."""

    def __init__(self, table: Table, writer: Writer, dim: int) -> None:
        self._table = table
        self._lance = table.lance
        self._history = table.history
        self._inspector = Inspector(table)
        self._writer = writer
        self._dim = dim

    async def set_vectors(self, user_id: str, vectors: Sequence[Vector]) -> list[str]:
        """Ids whose vector was written: those whose content is still the one that was embedded."""
        for vector in vectors:
            check_numbers(vector.values, self._table.space.dim)
            check_numbers(vector.values, self._dim)
        made = {v.id: v for v in vectors}

        async def run() -> list[str]:
            if not self._writer.takes_vectors:
                return []  # they were made before a migration that is over by now
            shape = schema(self._table.space)
            rows = (
                await query_of(self._lance)
                .where(
                    where.all_of(
                        [
                            where.tenant(user_id),
                            where.one_of("id", sorted(made)),
                            where.equals("embedding_status", "queued"),
                        ]
                    ).sql
                )
                .select([f.name for f in shape if f.name != "embedding"])
                .to_arrow()
            ).to_pylist()
            check_tenant((r["user_id"] for r in rows), user_id)
            fresh = [
                row | {"embedding": list(made[row["id"]].values), "embedding_status": "ready"}
                for row in rows
                if row["content_hash"] == made[row["id"]].content_hash
            ]
            if fresh:
                table = pa.Table.from_pylist(fresh, schema=shape)
                await self._lance.merge_insert("id").when_matched_update_all().execute(table)
            return [row["id"] for row in fresh]

        return await self._writer.change(run, {user_id: sorted(made)})

    async def settle(self, user_id: str, ids: Sequence[str]) -> None:
        """Rows that another memory replaces: they wait for no vector, whatever queued them."""

        async def run() -> None:
            mine = where.tenant(user_id) & where.one_of("id", list(ids)) & where.starts_with("metadata", HIDDEN)
            await self._lance.update(where=mine.sql, updates_sql=assignments({"embedding_status": "ready"}))

        await self._writer.change(run, {user_id: list(ids)})

    async def set_failed(self, user_id: str, hashes: dict[str, str]) -> None:
        """Give up on the rows `id → content_hash`, where their content is still that."""

        async def run() -> None:
            await self._lance.update(
                where=where.all_of(
                    [
                        where.tenant(user_id),
                        where.one_of("id", sorted(hashes)),
                        where.one_of("content_hash", sorted(set(hashes.values()))),
                        where.equals("embedding_status", "queued"),
                    ]
                ).sql,
                updates_sql=assignments({"embedding_status": "failed"}),
            )

        await self._writer.change(run, {user_id: sorted(hashes)})

    async def retry_failed(self) -> int:
        """Queue every failed row again; how many."""

        async def run() -> int:
            result = await self._lance.update(
                where=where.equals("embedding_status", "failed").sql,
                updates_sql=assignments({"embedding_status": "queued"}),
            )
            return int(result.rows_updated)

        return await self._writer.change(run, None)

    async def purge(self, ids: Sequence[str], at: datetime) -> None:
        """Remove the rows of `ids` whose time in the trash is over; one restored meanwhile stays."""

        async def run() -> None:
            expired = where.is_not_null("deleted_at") & where.compare("expires_at", "<=", at)
            rows = (where.one_of("id", list(ids)) & expired).sql
            gone = (await query_of(self._lance).where(rows).select(["id"]).to_arrow())["id"].to_pylist()
            await remove(self._history, gone)
            await self._lance.delete(rows)

        await self._writer.change(run, {})

    async def remove_orphans(self, suspects: Sequence[str]) -> int:
        """Remove the history of those of `suspects`, ids of memories, that are not there; how many."""

        async def run() -> int:
            gone = sorted(set(suspects) - await self._inspector.existing(suspects))
            await remove(self._history, gone)
            return len(gone)

        return await self._writer.change(run, {})
