"""Every read of the table: each carries the tenant's predicate, and each row that comes back is checked again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from lancedb.query import AsyncQueryBase, ColumnOrdering, MatchQuery

from warmstart.errors import TenantAssertion
from warmstart.memory import ListRequest, SearchRequest
from warmstart.store import predicates as where
from warmstart.store.links import HIDDEN
from warmstart.store.predicates import Predicate
from warmstart.store.schema import SHOWN, Row
from warmstart.store.table import Table, query_of, translated

log = structlog.get_logger(__name__)

#: Ties at the cut are resolved by reading on, to at most this many rows.
_MAX_TIE_DEPTH: Final = 20_000
#: Rows beside those wanted, to see the end of a tie.
TIES: Final = 16
#: Parts of the vector index that are looked into: 997 of the nearest 1,000 of a million memories are in them, and all
#: of the first ten. An index of up to some 400,000 memories has no more parts.
_IVF_PROBES: Final = 48
#: Rows of a few short columns: some 2 MB, and half the time that the engine's own batches take at 100,000.
_GROUP_BATCH: Final = 16_384
#: Rows; at their largest some 32 MB.
CONTENT_BATCH: Final = 1_024
Order = Literal["recency", "importance"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row in one arm: `score` is better when higher, `created_us` microseconds since 1970.

    `evidence` is what the arm found it by: the row's vector, or its search_text.
    """

    id: str
    score: float
    created_us: int
    evidence: Any = field(default=None, compare=False, repr=False)

    @property
    def order(self) -> tuple[float, int, str]:
        """Best score first, then the newer, then the id."""
        return (-self.score, -self.created_us, self.id)


def check_tenant(user_ids: Iterable[str], user_id: str) -> None:
    """The second check: the predicate should never be wrong, so this looks anyway."""
    if any(u != user_id for u in user_ids):
        log.critical("tenant.assertion", tenant=user_id)
        raise TenantAssertion("a row of another tenant came back from the store; nothing was returned")


def filters_of(request: SearchRequest) -> list[Predicate]:
    """The predicates of a search besides the tenant's."""
    parts = [where.active()]
    if request.namespace is not None:
        parts.append(where.in_namespace(request.namespace))
    if request.types:
        parts.append(where.one_of("type", request.types))
    if request.tags:
        parts.append(where.has_all("tags", request.tags))
    if request.entities:
        parts.append(where.has_all("entities", request.entities))
    if request.source is not None:
        parts.append(where.equals("source", request.source))
    if request.min_importance is not None:
        parts.append(where.compare("importance", ">=", float(request.min_importance)))
    return parts + _occurred(request)


def filters_of_list(request: ListRequest) -> list[Predicate]:
    parts: list[Predicate] = []
    if request.only_deleted:
        parts.append(where.is_not_null("deleted_at"))
    elif not request.include_deleted:
        parts.append(where.active())
    if request.namespace is not None:
        parts.append(where.in_namespace(request.namespace))
    if request.type is not None:
        parts.append(where.equals("type", request.type))
    if request.tag is not None:
        parts.append(where.has_all("tags", [request.tag]))
    if request.source is not None:
        parts.append(where.equals("source", request.source))
    return parts + _occurred(request)


def _occurred(request: SearchRequest | ListRequest) -> list[Predicate]:
    parts = []
    if request.occurred_from is not None:
        parts.append(where.compare("occurred_at", ">=", request.occurred_from))
    if request.occurred_to is not None:
        parts.append(where.compare("occurred_at", "<", request.occurred_to))
    return parts


class Reader:
    """The reads of one tenant."""

    def __init__(self, table: Table, user_id: str) -> None:
        self._lance = table.lance
        self._user_id = user_id

    def _where(self, filters: Sequence[Predicate]) -> str:
        return where.all_of([where.tenant(self._user_id), *filters]).sql

    def _checked(self, rows: pa.Table) -> pa.Table:
        check_tenant(pc.unique(rows["user_id"]).to_pylist(), self._user_id)
        return rows

    async def vector_arm(
        self, vector: Sequence[float], filters: Sequence[Predicate], depth: int, *, exact: bool
    ) -> list[Candidate]:
        """The `depth` nearest by cosine, best first; rows without a vector are not among them."""

        async def fetch(limit: int) -> pa.Table:
            query = (
                query_of(self._lance)
                .nearest_to(list(vector))
                .column("embedding")
                .distance_type("cosine")
                .where(self._where(filters))
                .limit(limit)
                .select(["id", "user_id", "created_at", "embedding", "_distance"])
            )
            if exact:
                return await query.bypass_vector_index().to_arrow()
            query = query.refine_factor(2)
            if list(filters) == [where.active()]:
                near = await query.nprobes(_IVF_PROBES).to_arrow()
                if near.num_rows == limit:
                    return near
            # the few that a filter leaves may lie in any part: all of them
            return await query.minimum_nprobes(1).maximum_nprobes(0).to_arrow()

        return await self._arm(fetch, "_distance", -1.0, depth, _vectors)

    async def text_matches(
        self, words: str, filters: Sequence[Predicate], limit: int, begun: Callable[[], None] = lambda: None
    ) -> list[tuple[str, float]]:
        """(id, BM25) of `limit` rows, for a caller that has the rows themselves.

        `begun` is called when all that is left is to wait for the engine's threads.
        """
        with translated("search"):
            rows = await self._text_query(words, filters, limit, ["id", "user_id", "_score"], begun)
        return list(zip(self._checked(rows)["id"].to_pylist(), rows["_score"].to_pylist(), strict=True))

    async def _text_query(
        self,
        words: str,
        filters: Sequence[Predicate],
        limit: int,
        columns: list[str],
        begun: Callable[[], None] = lambda: None,
    ) -> pa.Table:
        query = (
            query_of(self._lance)
            .nearest_to_text(MatchQuery(words, "search_text"))  # type: ignore[call-arg]
            .where(self._where(filters))
            .limit(limit)
            .select(columns)
        )
        # the query's own `to_batches` reads all of them before it returns
        batches = await AsyncQueryBase.to_batches(query)
        begun()
        return pa.Table.from_batches(await batches.read_all(), schema=batches.schema)

    async def text_arm(
        self, words: str, filters: Sequence[Predicate], depth: int, begun: Callable[[], None] = lambda: None
    ) -> list[Candidate]:
        """The `depth` best by BM25, best first; `begun` as for `text_matches`."""

        async def fetch(limit: int) -> pa.Table:
            columns = ["id", "user_id", "created_at", "search_text", "_score"]
            return await self._text_query(words, filters, limit, columns, begun)

        return await self._arm(fetch, "_score", 1.0, depth, lambda rows: rows["search_text"].to_pylist())

    async def _arm(
        self,
        fetch: Callable[[int], Awaitable[pa.Table]],
        column: str,
        sign: float,
        depth: int,
        evidence: Callable[[pa.Table], Sequence[Any]],
    ) -> list[Candidate]:
        limit = depth + TIES
        while True:
            with translated("search"):
                rows = self._checked(await fetch(limit))
            scores = rows[column].to_pylist()
            # a tie across the cut is ordered by age and id, so all of it must be seen
            if len(scores) < limit or scores[depth - 1] != scores[-1] or limit >= _MAX_TIE_DEPTH:
                break
            limit = min(limit * 4, _MAX_TIE_DEPTH)
        created = rows["created_at"].cast(pa.int64()).to_pylist()
        found = [
            Candidate(i, sign * s, c, e)
            for i, s, c, e in zip(rows["id"].to_pylist(), scores, created, evidence(rows), strict=True)
            if s is not None
        ]
        found.sort(key=lambda c: c.order)
        return found[:depth]

    async def newest_texts(self, filters: Sequence[Predicate], limit: int) -> pa.Table:
        """id, search_text, importance and created_at of the newest rows."""
        with translated("search"):
            rows = await (
                query_of(self._lance)
                .where(self._where(filters))
                .order_by([ColumnOrdering(column_name="created_at", ascending=False)])
                .limit(limit)
                .select(["id", "user_id", "search_text", "importance", "created_at"])
                .to_arrow()
            )
        return self._checked(rows)

    async def whole(self, filters: Sequence[Predicate]) -> pa.Table:
        """Every row that matches, with its vector; for tenants that fit into memory."""
        with translated("read"):
            rows = (
                await query_of(self._lance)
                .where(self._where(filters))
                .select([*SHOWN, "search_text", "embedding"])
                .to_arrow()
            )
        return self._checked(rows)

    async def rows(self, ids: Sequence[str], filters: Sequence[Predicate] = ()) -> dict[str, Row]:
        """The rows of `ids` that exist, trash included unless `filters` says otherwise."""
        if not ids:
            return {}
        with translated("read"):
            rows = await (
                query_of(self._lance).where(self._where([where.one_of("id", ids), *filters])).select(SHOWN).to_arrow()
            )
        return {row["id"]: row for row in self._checked(rows).to_pylist()}

    async def some(self, filters: Sequence[Predicate]) -> list[Row]:
        """Every row that matches, for filters that few do."""
        with translated("read"):
            rows = await query_of(self._lance).where(self._where(filters)).select(SHOWN).to_arrow()
        found: list[Row] = self._checked(rows).to_pylist()
        return found

    async def ids(self, filters: Sequence[Predicate], limit: int) -> list[str]:
        """Of at most `limit` rows that match, in no order."""
        with translated("read"):
            rows = (
                await query_of(self._lance)
                .where(self._where(filters))
                .select(["id", "user_id"])
                .limit(limit)
                .to_arrow()
            )
        found: list[str] = self._checked(rows)["id"].to_pylist()
        return found

    async def page(
        self, filters: Sequence[Predicate], order: Order, after: tuple[Any, ...] | None, limit: int
    ) -> list[Row]:
        """At most `limit` rows behind the keyset `after`, in `order`; holds no more than that."""
        parts = [*filters, *([_behind(order, after)] if after else [])]
        orderings = [
            ColumnOrdering(column_name="created_at", ascending=False),
            ColumnOrdering(column_name="id", ascending=True),
        ]
        if order == "importance":
            orderings.insert(0, ColumnOrdering(column_name="importance", ascending=False))
        with translated("list"):
            rows = await (
                query_of(self._lance)
                .where(self._where(parts))
                .order_by(orderings)
                .limit(limit)
                .select(SHOWN)
                .to_arrow()
            )
        found: list[Row] = self._checked(rows).to_pylist()
        return found

    async def count(self, filters: Sequence[Predicate]) -> int:
        """How many rows match; each is seen, so that a foreign one is."""
        return sum((await self.group(["user_id"], filters)).values())

    async def size(self) -> int:
        """About how many active rows there are: for choosing a way, never for an answer."""
        with translated("count"):
            return int(await self._lance.count_rows(self._where([where.active()])))

    async def group(self, columns: Sequence[str], filters: Sequence[Predicate]) -> dict[tuple[Any, ...], int]:
        """How many rows there are of each combination of values of `columns`, streamed."""
        totals: dict[tuple[Any, ...], int] = {}
        with translated("count"):
            batches = (
                await query_of(self._lance)
                .where(self._where(filters))
                .select(list(dict.fromkeys(["user_id", *columns])))
                .to_batches(max_batch_length=_GROUP_BATCH)
            )
            async for batch in batches:
                rows = self._checked(pa.Table.from_batches([batch]))
                for row in rows.group_by(list(columns)).aggregate([([], "count_all")]).to_pylist():
                    key = tuple(row[c] for c in columns)
                    totals[key] = totals.get(key, 0) + row["count_all"]
        return totals


def _vectors(rows: pa.Table) -> Sequence[Any]:
    """The embeddings as rows of one matrix, without a copy for each."""
    column = rows["embedding"].combine_chunks()
    vectors: Sequence[Any] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
    return vectors


def _behind(order: Order, after: tuple[Any, ...]) -> Predicate:
    """The rows that come after a page's last one."""
    *importance, created_at, last_id = after
    same = where.equals("created_at", created_at) & where.compare("id", ">", last_id)
    later = where.compare("created_at", "<", created_at) | same
    if order == "recency":
        return later
    return where.compare("importance", "<", float(importance[0])) | (
        where.equals("importance", float(importance[0])) & later
    )


class Content(NamedTuple):
    """A row as an inventory sees it."""

    id: str
    user_id: str
    content: str
    content_hash: str
    embedding_status: str
    trashed: bool


class Inspector:
    """Reads over all tenants, for the worker and for inventories, never for an answer to a tenant.

    They learn whose rows there are, then work tenant by tenant.
    """

    def __init__(self, table: Table) -> None:
        self._lance = table.lance

    async def next_queued_tenant(self, after: str) -> str | None:
        """The first tenant behind `after`, in the order of their ids, with a row that waits for its vector."""
        waiting = [
            where.equals("embedding_status", "queued"),
            where.active(),
            where.compare("user_id", ">", after),
        ]
        with translated("read the queue"):
            rows = await (
                query_of(self._lance)
                .where(where.all_of(waiting).sql)
                .order_by([ColumnOrdering(column_name="user_id", ascending=True)])
                .limit(1)
                .select(["user_id"])
                .to_arrow()
            )
        return rows["user_id"][0].as_py() if rows.num_rows else None

    async def oldest_queued(self) -> str | None:
        """The id of the memory that is embedded last, since the newest come first."""
        with translated("read the queue"):
            rows = await (
                query_of(self._lance)
                .where((where.equals("embedding_status", "queued") & where.active()).sql)
                .order_by([ColumnOrdering(column_name="created_at", ascending=True)])
                .limit(1)
                .select(["id"])
                .to_arrow()
            )
        return rows["id"][0].as_py() if rows.num_rows else None

    async def is_queued(self, memory_id: str) -> bool:
        return bool(
            await self.count(where.equals("id", memory_id), where.equals("embedding_status", "queued"), where.active())
        )

    async def count(self, *filters: Predicate) -> int:
        with translated("count"):
            return int(await self._lance.count_rows(where.all_of(list(filters)).sql if filters else None))

    async def existing(self, ids: Sequence[str], *filters: Predicate) -> set[str]:
        with translated("read"):
            wanted = where.all_of([where.one_of("id", ids), *filters])
            rows = await query_of(self._lance).where(wanted.sql).select(["id"]).to_arrow()
        return set(rows["id"].to_pylist())

    async def replaced(self) -> AsyncIterator[list[tuple[str, str, str]]]:
        """(id, user_id, metadata) of every row that another replaces, in batches."""
        with translated("read"):
            query = query_of(self._lance).where(where.starts_with("metadata", HIDDEN).sql)
            batches = await query.select(["id", "user_id", "metadata"]).to_batches(max_batch_length=CONTENT_BATCH)
            async for batch in batches:
                yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))

    async def of_others(self, ids: Sequence[str], user_id: str) -> set[str]:
        """Those of `ids` that are not free for `user_id`: ids are unique over all tenants."""
        if not ids:
            return set()
        foreign = where.one_of("id", ids) & where.none_of("user_id", [user_id])
        with translated("read"):
            rows = await query_of(self._lance).where(foreign.sql).select(["id"]).to_arrow()
        return set(rows["id"].to_pylist())

    async def queued(self) -> dict[str, int]:
        """How many memories of each tenant wait for their vector; those of none are not named."""
        waiting = where.equals("embedding_status", "queued") & where.active()
        totals: dict[str, int] = {}
        with translated("read the queue"):
            async for batch in await query_of(self._lance).where(waiting.sql).select(["user_id"]).to_batches():
                for row in batch.column(0).value_counts().to_pylist():
                    totals[row["values"]] = totals.get(row["values"], 0) + row["counts"]
        return totals

    async def expired_ids(self, at: datetime, limit: int) -> list[str]:
        with translated("read the trash"):
            rows = await (
                query_of(self._lance)
                .where((where.is_not_null("deleted_at") & where.compare("expires_at", "<=", at)).sql)
                .select(["id"])
                .limit(limit)
                .to_arrow()
            )
        return list(rows["id"].to_pylist())

    async def statuses(self) -> AsyncIterator[list[tuple[str, str, str]]]:
        """(id, user_id, embedding_status) of every row, in batches."""
        with translated("read"):
            batches = await query_of(self._lance).select(["id", "user_id", "embedding_status"]).to_batches()
            async for batch in batches:
                yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))

    async def contents(self) -> AsyncIterator[list[Content]]:
        """What an inventory is made of, of every row, in batches of a bounded size."""
        columns = ["id", "user_id", "content", "content_hash", "embedding_status", "deleted_at"]
        with translated("read"):
            batches = await query_of(self._lance).select(columns).to_batches(max_batch_length=CONTENT_BATCH)
            async for batch in batches:
                *told, deleted = batch.columns
                yield [
                    Content(*row)
                    for row in zip(*(c.to_pylist() for c in told), deleted.is_valid().to_pylist(), strict=True)
                ]

    async def largest_tenant(self) -> int:
        """Rows with a vector of the tenant that has most."""
        totals: dict[str, int] = {}
        ready = where.equals("embedding_status", "ready")
        with translated("count"):
            batches = await query_of(self._lance).where(ready.sql).select(["user_id"]).to_batches()
            async for batch in batches:
                for entry in pc.value_counts(batch.column(0)).to_pylist():
                    totals[entry["values"]] = totals.get(entry["values"], 0) + entry["counts"]
        return max(totals.values(), default=0)
