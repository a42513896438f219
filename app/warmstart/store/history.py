"""Earlier texts of memories: read by their tenant, kept before each edit, removed with their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

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
from warmstart.store.table import Table, translated


class History:
    """The earlier texts of one tenant's memories. What changes is called under the write lock only."""

    def __init__(self, table: Table, user_id: str) -> None:
        self._table: HistoryTable = table.history
        self._user_id = user_id

    async def page(self, current: Row, before: int | None, limit: int) -> list[Row]:
        """At most `limit` versions older than `before` of the memory that is `current` now, newest first."""
        lance = await self._table.find()
        if lance is None:
            return []
        filters = [where.equals("memory_id", current["id"])]
        if before is not None:
            filters.append(where.compare("version", "<", before))
        # one more, since the newest may be the present text
        found = await self._rows(lance, filters, limit + 1)
        return newest_first(current, found)[:limit]

    async def version(self, memory_id: str, version: int) -> Row | None:
        lance = await self._table.find()
        if lance is None:
            return None
        found = await self._rows(lance, [where.equals("memory_id", memory_id), where.equals("version", version)], 1)
        return found[0] if found else None

    async def _rows(self, lance: AsyncTable, filters: Sequence[Predicate], limit: int) -> list[Row]:
        with translated("read the history"):
            rows = await (
                lance.query()
                .where(where.all_of([where.tenant(self._user_id), *filters]).sql)
                .order_by([ColumnOrdering(column_name="version", ascending=False)])
                .limit(limit)
                .select(list(HISTORY_COLUMNS))
                .to_arrow()
            )
        found: list[Row] = rows.to_pylist()
        check_tenant((row["user_id"] for row in found), self._user_id)
        return found

    async def keep(self, row: Row) -> None:
        """`row`, a memory that is about to be edited; on the disk for good when this returns.

        So no crash can leave the edit without the text it replaced. The other way
        round, a text that is kept but was not replaced, is seen by `page`.
        """
        lance = await self._table.make()
        known = await self._rows(lance, [where.equals("memory_id", row["id"])], 1)
        version = known[0]["version"] + 1 if known else 1
        if not known or not _is_present(known[0], row):
            kept = {name: row[name] for name in HISTORY_COLUMNS if name in row}
            kept |= {"memory_id": row["id"], "version": version}
            await lance.add(pa.Table.from_pylist([kept], schema=history_schema()))
            if version > MAX_VERSIONS:
                mine = where.tenant(self._user_id) & where.equals("memory_id", row["id"])
                oldest = mine & where.compare("version", "<=", version - MAX_VERSIONS)
                await lance.delete(oldest.sql)
        await _sync(self._table, lance)


def newest_first(current: Row, versions: Sequence[Row]) -> list[Row]:
    """The earlier texts among `versions` of the memory that is `current`."""
    return [v for v in sorted(versions, key=lambda v: -v["version"]) if not _is_present(v, current)]


def _is_present(version: Row, current: Row) -> bool:
    """Whether a version was kept for an edit that never came."""
    if version["updated_at"] >= current["updated_at"]:
        return True
    return all(version[name] == current[name] for name in EDITABLE)


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
        async for batch in await lance.query().select(["memory_id"]).to_batches(max_batch_length=where.MAX_VALUES):
            yield pc.unique(batch.column(0)).to_pylist()


async def kept_texts(table: HistoryTable) -> AsyncIterator[list[Row]]:
    """What an inventory is made of, of every version of all tenants, in batches of a bounded size."""
    if (lance := await table.find()) is None:
        return
    columns = ["memory_id", "user_id", "version", "content", "content_hash"]
    with translated("read the history"):
        async for batch in await lance.query().select(columns).to_batches(max_batch_length=CONTENT_BATCH):
            yield batch.to_pylist()


async def _sync(table: HistoryTable, lance: AsyncTable) -> None:
    if table.directory is not None:
        version = await lance.version()
        await asyncio.to_thread(sync_filesystem, table.directory)
        mark_synced(table.directory, version, HISTORY)
