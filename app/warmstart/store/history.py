"""Earlier texts of memories: read by their tenant, kept before each edit, removed with their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from lancedb.query import ColumnOrdering
from lancedb.table import AsyncTable

from warmstart.exchange import MAX_VERSIONS
from warmstart.store import predicates as where
from warmstart.store.history_table import HistoryTable
from warmstart.store.lock import sync_filesystem
from warmstart.store.predicates import Predicate
from warmstart.store.reads import CONTENT_BATCH, check_tenant
from warmstart.store.repair import mark_synced
from warmstart.store.schema import EDITABLE, HISTORY, HISTORY_COLUMNS, Row, history_schema
from warmstart.store.table import Table, query_of, translated

#: Content by its hash, which is shorter.
_COMPARED: Final = [*(name for name in EDITABLE if name != "content"), "content_hash"]


class History:
    """The earlier texts of one tenant's memories."""

    def __init__(self, table: Table, user_id: str) -> None:
        self._table: HistoryTable = table.history
        self._user_id = user_id

    async def page(self, current: Row, before: int | None, limit: int) -> list[Row]:
        """At most `limit` versions older than `before` of the memory that is `current` now, newest first.

        What is older than `before` may say what is said now, and is an earlier text all the same.
        """
        lance = await self._table.find()
        if lance is None:
            return []
        filters = [where.equals("memory_id", current["id"])]
        if before is not None:
            filters.append(where.compare("version", "<", before))
        # one more, since the newest may be the present text
        found = await self._rows(lance, filters, limit + 1)
        return (found if before else newest_first(current, found))[:limit]

    async def version(self, memory_id: str, version: int) -> Row | None:
        lance = await self._table.find()
        if lance is None:
            return None
        found = await self._rows(lance, [where.equals("memory_id", memory_id), where.equals("version", version)], 1)
        return found[0] if found else None

    async def _rows(self, lance: AsyncTable, filters: Sequence[Predicate], limit: int) -> list[Row]:
        with translated("read the history"):
            rows = await (
                query_of(lance)
                .where(where.all_of([where.tenant(self._user_id), *filters]).sql)
                .order_by([ColumnOrdering(column_name="version", ascending=False)])
                .limit(limit)
                .select(list(HISTORY_COLUMNS))
                .to_arrow()
            )
        found: list[Row] = rows.to_pylist()
        check_tenant((row["user_id"] for row in found), self._user_id)
        return found


async def keep(table: HistoryTable, rows: Sequence[Row]) -> None:
    """`rows`, memories of any tenants that are about to be edited; on the disk for good when this returns.

    So no crash can leave an edit without the text it replaced. The other way
    round, a text that is kept but was not replaced, is seen by `page`.
    Under the write lock only.
    """
    lance = await table.make()
    newest = await _newest(lance, rows)
    kept, too_old = [], []
    for row in rows:
        known = newest.get(row["id"])
        if known and _is_present(known, row):
            continue
        version = known["version"] + 1 if known else 1
        kept.append(
            {name: row[name] for name in HISTORY_COLUMNS if name in row} | {"memory_id": row["id"], "version": version}
        )
        if version > MAX_VERSIONS:
            too_old.append(_of(row) & where.compare("version", "<=", version - MAX_VERSIONS))
    if kept:
        await lance.add(pa.Table.from_pylist(kept, schema=history_schema()))
    if too_old:
        await lance.delete(where.any_of(too_old).sql)
    await _sync(table, lance)


def _of(row: Row) -> Predicate:
    return where.tenant(row["user_id"]) & where.equals("memory_id", row["id"])


async def _newest(lance: AsyncTable, rows: Sequence[Row]) -> dict[str, Row]:
    """The newest version of each of the memories `rows` that has one, without its content."""
    with translated("read the history"):
        # once more without the tenants, where the index is used
        mine = where.any_of([_of(row) for row in rows]) & where.one_of("memory_id", [row["id"] for row in rows])
        found = await query_of(lance).where(mine.sql).select([c for c in HISTORY_COLUMNS if c != "content"]).to_arrow()
    places: dict[str, tuple[int, int]] = {}
    for place, (memory_id, version) in enumerate(
        zip(found["memory_id"].to_pylist(), found["version"].to_pylist(), strict=True)
    ):
        places[memory_id] = max((version, place), places.get(memory_id, (0, 0)))
    owners = {row["id"]: row["user_id"] for row in rows}
    newest: dict[str, Row] = {}
    for version in found.take(pa.array([place for _, place in places.values()], pa.int64())).to_pylist():
        check_tenant([version["user_id"]], owners[version["memory_id"]])
        newest[version["memory_id"]] = version
    return newest


def newest_first(current: Row, versions: Sequence[Row]) -> list[Row]:
    """The earlier texts among `versions`, the newest of them included, of the memory that is `current`."""
    earlier = [v for v in versions if v["updated_at"] < current["updated_at"]]
    found = sorted(earlier, key=lambda v: -v["version"])
    return found[1:] if found and _is_present(found[0], current) else found


def _is_present(version: Row, current: Row) -> bool:
    """Whether the newest version was kept for an edit that never came."""
    if version["updated_at"] >= current["updated_at"]:
        return True
    return all(version[name] == current[name] for name in _COMPARED)


async def remove(table: HistoryTable, ids: Sequence[str], user_id: str | None = None) -> None:
    """The history of memories that go for good; of any tenant where none is named. Under the write lock only."""
    if (lance := await table.find()) is None or not ids:
        return
    rows = where.one_of("memory_id", ids)
    if user_id is not None:
        rows = where.tenant(user_id) & rows
    await lance.checkout_latest()  # type: ignore[no-untyped-call]
    if await lance.count_rows(rows.sql):  # a delete of nothing makes a version all the same
        await lance.delete(rows.sql)


async def replace(table: HistoryTable, ids: Sequence[str], versions: Sequence[Row]) -> None:
    """`versions` as all the history of memories that are about to be made; on the disk for good when this returns."""
    await remove(table, ids)  # of an import that was cut off here
    if versions:
        lance = await table.make()
        await lance.add(pa.Table.from_pylist(list(versions), schema=history_schema()))
        await _sync(table, lance)


async def kept_ids(table: HistoryTable) -> AsyncIterator[list[str]]:
    """Ids of the memories, of all tenants, that have a history: a few at once, an id perhaps more than once."""
    if (lance := await table.find()) is None:
        return
    with translated("read the history"):
        async for batch in await query_of(lance).select(["memory_id"]).to_batches(max_batch_length=where.MAX_VALUES):
            yield pc.unique(batch.column(0)).to_pylist()


async def kept_texts(table: HistoryTable) -> AsyncIterator[list[Row]]:
    """What an inventory is made of, of every version of all tenants, in batches of a bounded size."""
    if (lance := await table.find()) is None:
        return
    columns = ["memory_id", "user_id", "version", "content", "content_hash"]
    with translated("read the history"):
        async for batch in await query_of(lance).select(columns).to_batches(max_batch_length=CONTENT_BATCH):
            yield batch.to_pylist()


async def _sync(table: HistoryTable, lance: AsyncTable) -> None:
    if table.directory is not None:
        version = await lance.version()
        await asyncio.to_thread(sync_filesystem, table.directory)
        mark_synced(table.directory, version, HISTORY)
