"""One tenant as of one moment, read in bounded memory whatever is written meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, Self

from lancedb.table import AsyncTable

from warmstart.exchange import MAX_VERSIONS
from warmstart.store import predicates as where
from warmstart.store.history import newest_first
from warmstart.store.reads import check_tenant
from warmstart.store.schema import HISTORY_COLUMNS, SHOWN, Row
from warmstart.store.table import Table, query_of, translated

#: Memories read at once: at their largest some 25 MB.
_MEMORIES: Final = 256
#: Earlier texts read at once: at their largest some 20 MB.
_VERSIONS: Final = 4 * MAX_VERSIONS


class Pinned:
    """A version of `memories`, and one of `memory_history` that is not older."""

    def __init__(self, lance: AsyncTable, history: AsyncTable | None, user_id: str) -> None:
        self._lance = lance
        self._history = history
        self._user_id = user_id
        self._mine = where.tenant(user_id)

    @classmethod
    async def of(cls, table: Table, user_id: str) -> Self:
        with translated("read"):
            lance = await table.pinned()
            history = await table.history.pinned()
            if history is not None and not await history.count_rows(where.tenant(user_id).sql):
                history = None
        return cls(lance, history, user_id)

    async def count(self) -> int:
        with translated("count"):
            return int(await self._lance.count_rows(self._mine.sql))

    async def memories(self) -> AsyncIterator[tuple[Row, list[Row]]]:
        """Every memory, those in the trash too, each with its earlier texts, newest first."""
        with translated("read"):
            query = query_of(self._lance).where(self._mine.sql).select(SHOWN)
            async for batch in await query.to_batches(max_batch_length=_MEMORIES):
                rows: list[Row] = batch.to_pylist()
                check_tenant((row["user_id"] for row in rows), self._user_id)
                async for some, versions in self._with_versions(rows):
                    for row in some:
                        # history may be newer: what was edited since is still as it was, here
                        yield row, newest_first(row, versions.get(row["id"], []))

    async def _with_versions(self, rows: list[Row]) -> AsyncIterator[tuple[list[Row], dict[str, list[Row]]]]:
        if self._history is None:
            yield rows, {}
            return
        ids = [row["id"] for row in rows]
        counts = Counter(row["memory_id"] for row in await self._versions(ids, ["memory_id", "user_id"]))
        for some in _groups(rows, counts):
            found: dict[str, list[Row]] = {}
            with_history = [row["id"] for row in some if counts[row["id"]]]
            for version in await self._versions(with_history, HISTORY_COLUMNS) if with_history else []:
                found.setdefault(version["memory_id"], []).append(version)
            yield some, found

    async def _versions(self, ids: Sequence[str], columns: Sequence[str]) -> list[Row]:
        assert self._history is not None  # noqa: S101 - as its callers see to
        query = query_of(self._history).where((self._mine & where.one_of("memory_id", ids)).sql)
        rows: list[Row] = (await query.select(list(columns)).to_arrow()).to_pylist()
        check_tenant((row["user_id"] for row in rows), self._user_id)
        return rows


def _groups(rows: list[Row], counts: Counter[str]) -> Iterator[list[Row]]:
    """`rows` in groups of a bounded number of versions."""
    group: list[Row] = []
    size = 0
    for row in rows:
        if group and size + counts[row["id"]] > _VERSIONS:
            yield group
            group, size = [], 0
        group.append(row)
        size += counts[row["id"]]
    yield group
