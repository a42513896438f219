"""One path of the dashboard as an ASGI application: who visits, what may be sent, and problems as pages."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from warmstart.errors import Invalid, MalformedRequest, NotFound, Problem, Unauthorized, UnsupportedMedia
from warmstart.memory import ID_PATTERN, NAMESPACE_PATTERN
from warmstart.web.api import CLIENT_CLOSED
from warmstart.web.auth import ANSWER_HEADERS, count_request
from warmstart.web.dashboard import csrf
from warmstart.web.dashboard.rendering import PAGE_HEADERS, page
from warmstart.web.dashboard.session import Notice, Session, Sessions
from warmstart.web.decode import MAX_BODY, read_bytes
from warmstart.web.problems import PROBLEM_RESPONSE, headers_of, method_not_allowed
from warmstart.web.runtime import Runtime, Service

if TYPE_CHECKING:
    from warmstart.account import Account

MAX_FIELDS: Final = 300
#: A path of this server, and nothing that a browser reads as another one.
_LOCAL = re.compile(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*")
MAX_RETURN: Final = 2_000
_PATTERNS: Final = {
    "id": ID_PATTERN,
    "name": NAMESPACE_PATTERN,
    "key": r"^[A-Za-z0-9_-]{1,64}$",
    "version": r"^[1-9][0-9]{0,8}$",
}
Form = dict[str, list[str]]


@dataclass
class Visit:
    """One request to a page; `session` is None only where a page needs nobody signed in."""

    request: Request
    sessions: Sessions
    secure: bool
    session: Session | None = None
    form: Form = field(default_factory=dict)
    notice: Notice | None = None

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self.request.scope["state"]["runtime"]
        return runtime

    @property
    def user_id(self) -> str:
        if self.session is None:
            raise Unauthorized("sign in with an API key")
        return self.session.identity.user_id

    @cached_property
    def memories(self) -> Service:
        return self.runtime.service(self.user_id)

    @cached_property
    def account(self) -> Account:
        return self.runtime.account(self.user_id)

    @property
    def path(self) -> dict[str, str]:
        return self.request.path_params

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters that say something; of several of one name the last."""
        return {name: value for name, value in self.request.query_params.items() if value}

    @property
    def url(self) -> str:
        """As the visitor reaches this server."""
        return f"{'https' if self.secure else 'http'}://{self.request.headers['host']}"

    def field(self, name: str) -> str:
        """Of the form; empty where it was not sent. Line ends are those of Unix, as they were before the browser."""
        return self.form.get(name, [""])[-1].replace("\r\n", "\n").replace("\r", "\n")

    def ids(self) -> list[str]:
        """The memories that were ticked."""
        found = list(dict.fromkeys(self.form.get("id", [])))
        if not found:
            raise Invalid("tick at least one memory", field="id")
        if any(not re.fullmatch(ID_PATTERN, memory_id) for memory_id in found):
            raise Invalid("this is not the id of a memory", field="id")
        return found

    def show(self, template: str, status: int = 200, **values: Any) -> Response:
        return page(self, template, status, **values)

    async def go(self, path: str, text: str = "", undo: tuple[str, ...] = ()) -> Response:
        """On to another page, which tells `text`."""
        response = RedirectResponse(path, 303)
        if text:
            await self.sessions.tell(response, Notice(text, undo), secure=self.secure)
        return response


Handler = Callable[[Visit], Awaitable[Response]]


class View:
    """`raw`: what is posted is no form but a body for the handler to read, sent by a script with the form's token."""

    def __init__(
        self,
        path: str,
        get: Handler | None = None,
        post: Handler | None = None,
        *,
        signed_in: bool = True,
        raw: bool = False,
    ) -> None:
        self.path = path
        self._raw = raw
        self._handlers = {name: handler for name, handler in (("GET", get), ("POST", post)) if handler}
        self._signed_in = signed_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        secure = scope["state"]["clients"].is_secure(scope, request.headers)
        visit = Visit(request, scope["state"]["sessions"], secure)
        if not self._raw:
            scope[PROBLEM_RESPONSE] = lambda problem: problem_page(visit, problem)
        scope[ANSWER_HEADERS].update(PAGE_HEADERS)
        try:
            response = await self._answer(visit)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED)
        if visit.notice is not None:
            visit.sessions.forget(response, secure=secure)
        if scope["method"] == "HEAD":
            response = Response(status_code=response.status_code, headers=dict(response.headers))
        await response(scope, receive, send)

    async def _answer(self, visit: Visit) -> Response:
        method = visit.request.method
        handler = self._handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise method_not_allowed(method, sorted(self._handlers))
        for name, value in visit.path.items():
            if not re.fullmatch(_PATTERNS[name], value):
                raise NotFound("there is nothing at this address")
        if method == "POST":
            csrf.check_origin(visit.request)
            visit.form = {} if self._raw else await read_form(visit.request)
        if self._signed_in:
            try:
                visit.session = await visit.sessions.open(visit.request, secure=visit.secure)
            except Unauthorized:
                if self._raw:
                    raise
                return lost(visit)
            await count_request(visit.request.scope, visit.runtime, visit.session.identity)
            if method == "POST":
                given = visit.request.headers.get(csrf.HEADER, "") if self._raw else visit.field(csrf.FIELD)
                csrf.check_token(given, visit.session.token)
        if "fragment" not in visit.query and not self._raw:
            visit.notice = await visit.sessions.told(visit.request, secure=visit.secure)
        return await handler(visit)


def lost(visit: Visit) -> Response:
    """No session, or none any more: to the sign-in, and from there back, with what was typed."""
    request = visit.request
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    if "fragment" in visit.query:
        raise Unauthorized("the session is over: sign in again")
    if request.method != "POST":
        return RedirectResponse("/login" if here == "/" else f"/login?{urlencode({'next': here})}", 303)
    back = urlsplit(request.headers.get("referer", ""))
    values = {name: texts for name, texts in visit.form.items() if name != csrf.FIELD}
    return visit.show(
        "login.html",
        401,
        next=local(back.path + (f"?{back.query}" if back.query else "")),
        # an edit is shown again after the sign-in, to be saved then; nothing else is worth keeping
        draft=urlencode(values, doseq=True) if request.url.path.endswith("/edit") else "",
        draft_of=request.url.path,
        problem=None,
        lost=True,
    )


def local(path: str) -> str:
    """`path` if it is one of this server's pages, else the first page: no way out to another host."""
    if len(path) > MAX_RETURN or not _LOCAL.fullmatch(path) or path.startswith(("/login", "/logout", "/v1", "/mcp")):
        return "/"
    return path


def problem_page(visit: Visit, problem: Problem) -> Response:
    """`problem` for a person; a part of a page gets the words alone."""
    if "fragment" in visit.query:
        response = Response(problem.detail, problem.status, media_type="text/plain")
    else:
        response = visit.show("problem.html", problem.status, problem=problem)
    response.headers.update(headers_of(problem))
    if isinstance(problem, Unauthorized):
        del response.headers["WWW-Authenticate"]  # it would ask for a password in a window of the browser's own
    return response


async def read_form(request: Request) -> Form:
    """A form as browsers send it, URL-encoded. Problems: 400, 413, 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise UnsupportedMedia("a form is sent as application/x-www-form-urlencoded")
    return decode_form((await read_bytes(request, MAX_BODY)).decode("ascii", "replace"))


def decode_form(text: str) -> Form:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except UnicodeDecodeError:
        raise MalformedRequest("the form must be percent-encoded UTF-8") from None
    except ValueError:
        raise MalformedRequest(f"a form has at most {MAX_FIELDS} fields") from None
    form: Form = {}
    for name, value in pairs:
        form.setdefault(name, []).append(value)
    return form
