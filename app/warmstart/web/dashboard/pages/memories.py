"""The first page: all memories, newest first, by filter or by search."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from warmstart.errors import Invalid
from warmstart.memory import Counts, ListRequest, Memory, Page, SearchRequest, SearchResult, parse
from warmstart.web.dashboard.matches import Found, explain
from warmstart.web.dashboard.view import Visit, local

PAGE: Final = 25
HITS: Final = 25
FILTERS: Final[tuple[str, ...]] = ("namespace", "type", "tag", "source", "from", "to")


@dataclass(slots=True)
class Results:
    """What is in the list: a page of memories, or a search's hits."""

    memories: list[Memory]
    #: Of all pages; equal to the rows shown where there is one page. None: the tenant's counts have it.
    total: int | None
    next: str = ""
    found: list[Found] | None = None
    search: SearchResult | None = None
    partial: Page | None = None
    problem: Invalid | None = None

    @property
    def status(self) -> int:
        return 422 if self.problem else 200


async def show(visit: Visit) -> Response:
    filters: dict[str, str] = {name: visit.query[name] for name in FILTERS if name in visit.query}
    query = visit.query.get("q", "")
    if "fragment" in visit.query:
        results = await _results(visit, query, filters)
        return visit.show("results.html", results.status, results=results, query=query, filters=filters, most_hits=HITS)
    results, counts = await asyncio.gather(_results(visit, query, filters), visit.memories.counts())
    if results.total is None:
        results.total = _known(counts, filters)
    return visit.show(
        "memories.html", results.status, results=results, query=query, filters=filters, counts=counts, most_hits=HITS,
        is_new=_is_new(counts, query, filters),
    )  # fmt: skip


async def _results(visit: Visit, query: str, filters: dict[str, str]) -> Results:
    try:
        return await (_searched(visit, query, filters) if query.strip() else _listed(visit, filters))
    except Invalid as problem:
        return Results([], 0, problem=problem)


def _known(counts: Counts, filters: dict[str, str]) -> int:
    """How many pass filters that need no count of their own."""
    if "namespace" in filters:
        return counts.namespaces.get(filters["namespace"], 0)
    return counts.types.get(filters["type"], 0) if "type" in filters else counts.active


def _is_new(counts: Counts, query: str, filters: dict[str, str]) -> bool:
    return not (counts.active or counts.trashed or query or filters)


async def _listed(visit: Visit, filters: dict[str, str]) -> Results:
    request = parse(ListRequest, _fields(filters) | {"limit": PAGE} | _cursor(visit))
    page = await visit.memories.list(request)
    whole = page.next_cursor is None and request.cursor is None
    total: int | None
    if whole:
        total = len(page.memories)
    elif "fragment" not in visit.query and (not filters or set(filters) in ({"namespace"}, {"type"})):
        total = None
    else:
        total = await visit.memories.count(request)
    next_page = "/?" + urlencode({**filters, "cursor": page.next_cursor}) if page.next_cursor else ""
    return Results(page.memories, total, next_page, partial=page)


async def _searched(visit: Visit, query: str, filters: dict[str, str]) -> Results:
    fields = _fields(filters)
    if tag := fields.pop("tag", None):
        fields["tags"] = [tag]
    answer = await visit.memories.search(parse(SearchRequest, {**fields, "query": query, "limit": HITS}))
    found = await asyncio.to_thread(lambda: [explain(hit, query) for hit in answer.hits])
    return Results(list(answer.hits), len(found), found=found, search=answer)


def _cursor(visit: Visit) -> dict[str, str]:
    return {"cursor": visit.query["cursor"]} if "cursor" in visit.query else {}


def _fields(filters: dict[str, str]) -> dict[str, Any]:
    """The filters as fields of a request; a day is all of that day, in UTC."""
    fields: dict[str, Any] = {name: filters[name] for name in ("namespace", "type", "tag", "source") if name in filters}
    if "from" in filters:
        fields["occurred_from"] = _day("from", filters["from"])
    if "to" in filters:
        try:
            fields["occurred_to"] = _day("to", filters["to"]) + timedelta(days=1)
        except OverflowError:
            del filters["to"]  # the end of all days bounds nothing
    return fields


def _day(name: str, text: str) -> datetime:
    try:
        return datetime.combine(date.fromisoformat(text), time())
    except ValueError:
        raise Invalid(f"{name}: must be a date such as 2026-01-31", field=name) from None


async def to_trash(visit: Visit) -> Response:
    back = local(visit.field("back") or "/")
    ids = visit.ids()
    moved = await visit.memories.delete_many(ids)
    if moved == 1 and len(ids) == 1:
        text = "The memory is in the trash."
    else:
        text = f"{moved:,} {'memory is' if moved == 1 else 'memories are'} in the trash."
    if moved < len(ids):
        text += f" {len(ids) - moved:,} were there already, or are gone."
    return await visit.go(back, text, tuple(ids))
