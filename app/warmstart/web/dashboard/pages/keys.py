"""API keys of the tenant: made, shown once, revoked."""

from __future__ import annotations

from starlette.responses import Response

from warmstart.errors import BookkeepingUnavailable, Invalid, NotFound
from warmstart.store.bookkeeping import ApiKey
from warmstart.web.dashboard.view import Visit


async def show(visit: Visit) -> Response:
    return await _page(visit)


async def create(visit: Visit) -> Response:
    name = visit.field("name").strip()
    try:
        if not name:
            raise Invalid("name: give it a name, such as the client it is for", field="name")
        return await _page(visit, made=await visit.account.create_key(name))
    except Invalid as problem:
        return await _page(visit, problem=problem, name=name, status=problem.status)
    except BookkeepingUnavailable:
        return await _page(visit, name=name, status=503)


async def confirm(visit: Visit) -> Response:
    return visit.show("revoke_key.html", key=await _find(visit))


async def revoke(visit: Visit) -> Response:
    key = await _find(visit)
    await visit.account.revoke_key(key.id)
    if key.id == (visit.session and visit.session.identity.key_id):
        return await visit.go("/login")
    return await visit.go("/keys", f"The key {key.name} is revoked: within 10 s no process takes it any more.")


async def _page(
    visit: Visit, *, made: str = "", problem: Invalid | None = None, name: str = "", status: int = 200
) -> Response:
    keys: list[ApiKey] | None
    try:
        keys = await visit.account.keys()
    except BookkeepingUnavailable:
        keys = None
    return visit.show("keys.html", status, keys=keys, made=made, problem=problem, name=name)


async def _find(visit: Visit) -> ApiKey:
    for key in await visit.account.keys():
        if key.id == visit.path["key"]:
            return key
    raise NotFound("there is no such key, or it was revoked already")
