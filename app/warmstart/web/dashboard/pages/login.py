"""Signing in with an API key, and out."""

from __future__ import annotations

import re

from starlette.responses import RedirectResponse, Response

from warmstart.errors import AuthUnavailable, RateLimited, Unauthorized
from warmstart.memory import ID_PATTERN
from warmstart.store.bookkeeping import hash_key
from warmstart.web.auth import MAX_KEY, log_in
from warmstart.web.dashboard.pages import memory
from warmstart.web.dashboard.session import Session
from warmstart.web.dashboard.view import Visit, decode_form, local
from warmstart.web.problems import headers_of

_EDIT = re.compile(rf"/memories/({ID_PATTERN[1:-1]})/edit")


async def show(visit: Visit) -> Response:
    next_path = local(visit.query.get("next", "/"))
    try:
        await visit.sessions.open(visit.request, secure=visit.secure)
    except (Unauthorized, AuthUnavailable):
        return visit.show("login.html", next=next_path, draft="", draft_of="", problem=None, lost=False)
    return RedirectResponse(next_path, 303)


async def sign_in(visit: Visit) -> Response:
    key = visit.field("key").strip()
    next_path, draft, draft_of = local(visit.field("next") or "/"), visit.field("draft"), visit.field("draft_of")

    def given() -> str:
        if not key or len(key) > MAX_KEY:
            raise Unauthorized("enter an API key: ws_sk_ and 43 characters; `warmstart keys create` makes one")
        return key

    scope = visit.request.scope
    try:
        identity = await log_in(scope, visit.runtime, scope["state"]["clients"], given)
    except (Unauthorized, AuthUnavailable, RateLimited) as problem:
        again = visit.show(
            "login.html", problem.status, next=next_path, draft=draft, draft_of=draft_of, problem=problem, lost=False
        )
        if not isinstance(problem, Unauthorized):
            again.headers.update(headers_of(problem))
        return again
    visit.session = Session(identity)
    response: Response = RedirectResponse(next_path, 303)
    if draft and (edited := _EDIT.fullmatch(draft_of)):
        visit.form = decode_form(draft)
        response = await memory.edit_again(visit, edited[1])
    await visit.sessions.keep(response, visit.session, hash_key(key), secure=visit.secure)
    return response


async def sign_out(visit: Visit) -> Response:
    response = RedirectResponse("/login", 303)
    visit.sessions.end(response, secure=visit.secure)
    return response
