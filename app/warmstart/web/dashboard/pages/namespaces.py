"""Namespaces: how much is in each, renamed, or put in the trash."""

from __future__ import annotations

from starlette.responses import Response

from warmstart.errors import Conflict, Duplicate, Invalid, NotFound, Problem
from warmstart.memory import NamespaceInfo, RenameNamespace, parse
from warmstart.web.dashboard.view import Visit


async def show(visit: Visit) -> Response:
    return visit.show("namespaces.html", listed=await visit.memories.namespaces())


async def one(visit: Visit) -> Response:
    return visit.show("namespace.html", namespace=await _find(visit), wanted=visit.path["name"], problem=None)


async def rename(visit: Visit) -> Response:
    name, wanted = visit.path["name"], visit.field("name").strip()
    if wanted == name:
        return await visit.go("/namespaces", "Nothing was changed.")
    try:
        change = await visit.memories.rename_namespace(name, parse(RenameNamespace, {"name": wanted}).name)
    except (Invalid, Conflict, Duplicate) as problem:
        return await _again(visit, wanted, problem)
    moved = f"{change.memories:,} {'memory is' if change.memories == 1 else 'memories are'}"
    return await visit.go(
        "/namespaces", f"{name} is called {change.name} now: {moved} in it, those in the trash included."
    )


async def to_trash(visit: Visit) -> Response:
    change = await visit.memories.delete_namespace(visit.path["name"])
    moved = f"{change.memories:,} {'memory' if change.memories == 1 else 'memories'} of {change.name}"
    return await visit.go("/namespaces", f"{moved} {'is' if change.memories == 1 else 'are'} in the trash.")


async def _again(visit: Visit, wanted: str, problem: Problem) -> Response:
    return visit.show("namespace.html", problem.status, namespace=await _find(visit), wanted=wanted, problem=problem)


async def _find(visit: Visit) -> NamespaceInfo:
    for namespace in (await visit.memories.namespaces()).namespaces:
        if namespace.name == visit.path["name"]:
            return namespace
    raise NotFound(f"there is no namespace {visit.path['name']!r}: it was renamed, or its last memory is gone")
