"""One memory replaces another: links are laid by a save, lifted when the replacement goes, laid again when it is back.

Everything here runs under the write lock, on the rows of one tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import pyarrow as pa

from warmstart.errors import Conflict, Invalid
from warmstart.store import links
from warmstart.store import predicates as where
from warmstart.store.links import Links, links_of
from warmstart.store.reads import Reader
from warmstart.store.schema import Row, derived, now, schema
from warmstart.store.table import Table, rewrite
from warmstart.store.writer import MAX_GROUP_ROWS


class Superseding:
    """`touched` gathers the ids of the rows that became other ones, for the journal."""

    def __init__(self, table: Table, reader: Reader, touched: list[str]) -> None:
        self._table = table
        self._reader = reader
        self._touched = touched

    async def plan(self, wanted: Sequence[tuple[str, str, str]], fresh: Mapping[str, Row]) -> Plan:
        """What the pairs (replacement, replaced, the field that names it) mean; refused before anything is written.

        `fresh` are the rows that are about to be saved, by id.
        """
        ids = {memory_id for new, old, _ in wanted for memory_id in (new, old)}
        plan = Plan({**await self._reader.rows(sorted(ids)), **fresh})
        for new, old, field in wanted:
            plan.replace(new, old, field)
        return plan

    async def carry_out(self, plan: Plan) -> None:
        await self._write(plan.rows, {memory_id: plan.links[memory_id] for memory_id in plan.changed})

    async def release(self, gone: Iterable[Row]) -> None:
        """Before `gone` leave the search: what they replaced is found again, unless something else replaces them."""
        leaving = {row["id"]: links_of(row["metadata"]) for row in gone}
        replacing = [memory_id for memory_id, linked in leaving.items() if linked.supersedes is not None]
        if not replacing:
            return
        await self.relink({row["id"]: row for row in await self._replaced_by(replacing)}, leaving)

    async def relink(self, rows: Mapping[str, Row], leaving: Mapping[str, Links]) -> None:
        """Each of `rows` to what replaces its replacement, where that is `leaving`."""
        changed: dict[str, Links] = {}
        for memory_id, row in rows.items():
            linked = links_of(row["metadata"])
            heir = linked.superseded_by
            while heir is not None and heir in leaving:
                heir = leaving[heir].superseded_by
            if heir != linked.superseded_by:
                changed[memory_id] = linked._replace(superseded_by=heir)
        await self._write(rows, changed)

    async def take_again(self, row: Row) -> None:
        """After `row` came out of the trash: what it replaced is replaced again, where neither has a replacement."""
        linked = links_of(row["metadata"])
        if linked.supersedes is None or linked.superseded_by is not None:
            return
        rows = await self._reader.rows([linked.supersedes])
        free = {i: links_of(r["metadata"]) for i, r in rows.items() if not links_of(r["metadata"]).superseded_by}
        await self._write(rows, {i: known._replace(superseded_by=row["id"]) for i, known in free.items()})

    async def _replaced_by(self, replacing: Sequence[str]) -> list[Row]:
        start = links.replaced_by(replacing[0]) if len(replacing) == 1 else links.LINKED
        found = await self._reader.some([where.starts_with("metadata", start)])
        wanted = set(replacing)
        return [row for row in found if links_of(row["metadata"]).superseded_by in wanted]

    async def _write(self, rows: Mapping[str, Row], changed: Mapping[str, Links]) -> None:
        ids = [i for i, linked in changed.items() if linked != links_of(rows[i]["metadata"])]
        for start in range(0, len(ids), MAX_GROUP_ROWS):
            whole = await self._reader.whole([where.one_of("id", ids[start : start + MAX_GROUP_ROWS])])
            after = [_relinked(row, changed[row["id"]]) for row in whole.to_pylist()]
            table = pa.Table.from_pylist(after, schema=schema(self._table.space))
            await rewrite(self._table.lance, table)
        self._touched += ids


def _relinked(row: Row, linked: Links) -> Row:
    was_hidden = links_of(row["metadata"]).superseded_by is not None
    after = row | {"metadata": links.relink(row["metadata"], **linked._asdict())}
    after |= derived(after)
    # strictly later than before, so that an ETag never names two states
    after["updated_at"] = max(now(), row["updated_at"] + timedelta(microseconds=1))
    if linked.superseded_by is not None:
        # without a vector, a row that is replaced waits for none either
        after |= {"embedding": None, "embedding_status": "ready"}
    elif was_hidden:
        after |= {"embedding": None, "embedding_status": "queued"}
    return after


class Plan:
    """Links as they are to be, worked out before any is written."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self.rows = rows
        self.links = {memory_id: links_of(row["metadata"]) for memory_id, row in rows.items()}
        self.changed: set[str] = set()

    def replace(self, new: str, old: str, field: str) -> None:
        """`new` in place of `old`. Raises Invalid or Conflict."""
        if old not in self.rows:
            raise Invalid(f"{field}: no memory {old}", field=field)
        if new == old:
            raise Invalid(f"{field}: {old} has this very content; a memory can't supersede itself", field=field)
        if self.rows[old]["deleted_at"] is not None:
            raise Conflict(f"{old} is in the trash already, so nothing is left to supersede", id=old, field=field)
        by, other = self.links[old].superseded_by, self.links[new].supersedes
        if by not in (None, new):
            raise Conflict(f"{old} is superseded already, by {by}: supersede that one", id=by, field=field)
        if other not in (None, old):
            raise Conflict(f"{new}, which has this content, supersedes {other} already", id=new, field=field)
        if by == new:  # a save that is repeated
            return
        # said again, `new` holds once more, whatever came in its place
        self._set(new, Links(superseded_by=None, supersedes=old))
        self._set(old, self.links[old]._replace(superseded_by=new))

    def _set(self, memory_id: str, linked: Links) -> None:
        if self.links[memory_id] != linked:
            self.links[memory_id] = linked
            self.changed.add(memory_id)
