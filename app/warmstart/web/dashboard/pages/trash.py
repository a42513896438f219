"""The trash: what is left of its time, back out of it, and emptied for good."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

from starlette.responses import Response

from warmstart.errors import Conflict, Duplicate, Expired, Invalid, NotFound
from warmstart.memory import ListRequest, parse
from warmstart.web.dashboard.view import Visit, local

PAGE: Final = 25
DELETED: Final = ListRequest(only_deleted=True)


async def show(visit: Visit) -> Response:
    request = parse(
        ListRequest,
        {"only_deleted": True, "limit": PAGE} | ({"cursor": visit.query["cursor"]} if "cursor" in visit.query else {}),
    )
    page = await visit.memories.list(request)
    whole = page.next_cursor is None and request.cursor is None
    total = len(page.memories) if whole else await visit.memories.count(DELETED)
    next_page = "/trash?" + urlencode({"cursor": page.next_cursor}) if page.next_cursor else ""
    return visit.show("trash.html", page=page, total=total, next=next_page, days=visit.runtime.settings.trash_days)


async def restore(visit: Visit) -> Response:
    restored, failures = [], []
    for memory_id in visit.ids():
        try:
            restored.append(await visit.memories.restore(memory_id))
        except (Duplicate, Conflict, Expired, NotFound) as problem:
            failures.append(problem.detail)
    back = local(visit.field("back") or "/trash")
    text = "Restored." if len(restored) == 1 and not failures else f"{len(restored):,} restored."
    if failures:
        text += f" {len(failures):,} could not be: {failures[0]}."
    return await visit.go(back, text)


async def confirm(visit: Visit) -> Response:
    total = await visit.memories.count(DELETED)
    return visit.show("empty_trash.html", total=total, until=datetime.now(UTC).isoformat())


async def empty(visit: Visit) -> Response:
    try:
        until = datetime.fromisoformat(visit.field("until")).astimezone(UTC)
    except (ValueError, OverflowError):
        raise Invalid("until: must be the time at which you were asked", field="until") from None
    removed = await visit.memories.empty_trash(min(until, datetime.now(UTC)))
    return await visit.go(
        "/trash", f"{removed:,} {'memory was' if removed == 1 else 'memories were'} removed for good."
    )
