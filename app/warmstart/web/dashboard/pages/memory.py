"""One memory: read, edited with a look at what others changed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from starlette.responses import Response

from warmstart.errors import Conflict, Duplicate, Invalid, NotFound, Problem, Stale, TenantAssertion
from warmstart.memory import HistoryRequest, Memory, Version
from warmstart.store.schema import title_of
from warmstart.web.dashboard.forms import SPECS, MemoryForm, blank, filled, merge, patch_of, texts_of
from warmstart.web.dashboard.markdown import render
from warmstart.web.dashboard.view import Visit

#: Of a memory's past, the newest are shown; an export has them all.
VERSIONS: Final = 20


@dataclass(frozen=True, slots=True)
class Step:
    """An earlier version, and what the edit that followed it changed."""

    before: Version
    until: datetime
    changed: list[Change]


@dataclass(frozen=True, slots=True)
class Change:
    label: str
    before: str
    after: str


async def show(visit: Visit) -> Response:
    memory = await visit.memories.get(visit.path["id"])
    history = await visit.memories.history(memory.id, HistoryRequest(limit=VERSIONS))
    # some texts are made to take long: other requests go on meanwhile
    content = await asyncio.to_thread(render, memory.content)
    return visit.show("memory.html", memory=memory, content=content, steps=_steps(memory, history.versions))


def _steps(memory: Memory, versions: Sequence[Version]) -> list[Step]:
    steps = []
    after: Memory | Version = memory
    for before in versions:
        was, became = texts_of(before), texts_of(after)
        changes = [Change(s.label, was[s.name], became[s.name]) for s in SPECS if was[s.name] != became[s.name]]
        steps.append(Step(before, after.updated_at, changes))
        after = before
    return steps


async def restore_version(visit: Visit) -> Response:
    memory_id = visit.path["id"]
    try:
        await visit.memories.restore_version(memory_id, int(visit.path["version"]), visit.field("etag"))
    except (Stale, Duplicate, Conflict) as problem:
        return await visit.go(f"/memories/{memory_id}", f"Nothing was restored: {problem.detail}.")
    return await visit.go(f"/memories/{memory_id}", "The earlier version is back; what it replaced is in the history.")


async def edit(visit: Visit) -> Response:
    memory = await visit.memories.get(visit.path["id"])
    if memory.deleted_at is not None:
        return await visit.go(f"/memories/{memory.id}", "This memory is in the trash: restore it to edit it.")
    return _page(visit, memory.id, blank(memory))


async def save(visit: Visit) -> Response:
    memory_id, form = visit.path["id"], filled(visit)
    try:
        patch = patch_of(form, title_of)
        if patch is None:
            return await visit.go(f"/memories/{memory_id}", "Nothing was changed.")
        await visit.memories.update(memory_id, patch, form.etag)
    except Invalid as problem:
        return _page(visit, memory_id, form, None if form.blame(problem) else problem, status=problem.status)
    except Stale as problem:
        return await edit_again(visit, memory_id, problem)
    except TenantAssertion:
        raise
    except Problem as problem:
        return _page(visit, memory_id, form, problem, status=problem.status)
    return await visit.go(f"/memories/{memory_id}", "Saved.")


async def edit_again(visit: Visit, memory_id: str, problem: Problem | None = None) -> Response:
    """What was typed, over the memory as it is by now; nothing is lost, and nothing saved."""
    form = filled(visit)
    try:
        now = await visit.memories.get(memory_id)
    except NotFound as gone:
        return _page(visit, memory_id, form, gone, status=gone.status)
    if problem is None and form.etag == now.etag:
        return _page(visit, memory_id, form)
    differences = merge(form, now)
    return visit.show(
        "edit.html", 412 if problem else 200,
        memory_id=memory_id, form=form, problem=None, differences=differences, trashed=now.deleted_at is not None,
    )  # fmt: skip


def _page(
    visit: Visit, memory_id: str, form: MemoryForm, problem: Problem | None = None, status: int = 200
) -> Response:
    return visit.show(
        "edit.html", status, memory_id=memory_id, form=form, problem=problem, differences=None, trashed=False
    )
