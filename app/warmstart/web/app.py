"""The ASGI application: REST under /v1, MCP at /mcp, health, metrics, the OpenAPI document.

From the outside in: `Answer` (request id, problems, security headers, log,
metrics), `HostCheck`, `LoadLimit`, `Authentication`, the route. Requests are
never cancelled when their client leaves: a save that began is finished.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmstart.errors import Problem, TenantAssertion
from warmstart.web.api import CLIENT_CLOSED, OPERATIONS, Call, Operation, resources
from warmstart.web.auth import ANSWER_HEADERS, Authentication, Clients, HostCheck, Hosts, LoadLimit, needs_key
from warmstart.web.dashboard import Sessions, dashboard_routes
from warmstart.web.metrics import method_label, metrics, route_label
from warmstart.web.openapi import document
from warmstart.web.problems import PROBLEM_RESPONSE, http_exception, method_not_allowed, problem_response
from warmstart.web.runtime import OpenRuntime

log = structlog.get_logger(__name__)

SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Asked every few seconds, for ever.
PROBES: Final = frozenset({"/healthz", "/readyz", "/metrics"})


async def openapi_document(call: Call) -> Response:
    return Response(document(), media_type="application/json")


UNDOCUMENTED: Final = (
    Operation("GET", "/openapi.json", openapi_document, "The OpenAPI document", None),
    Operation("GET", "/metrics", metrics, "Prometheus' text", None),
)


def create_app(open_runtime: OpenRuntime) -> Starlette:
    """The application; its lifespan opens the runtime and, above it, MCP."""
    # here, so that the REST surface alone can be imported without mcp
    from warmstart.mcp_server import streamable_http

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with open_runtime() as runtime:
            settings = runtime.settings
            async with streamable_http(runtime) as mcp:
                yield {
                    "runtime": runtime,
                    "hosts": Hosts(settings),
                    "clients": Clients(settings),
                    "sessions": Sessions(settings.warmstart_home),
                    "mcp": mcp,
                }

    app = Starlette(
        routes=[
            *(Route(resource.path, resource) for resource in resources((*OPERATIONS, *UNDOCUMENTED))),
            # both, since a redirect loses the body in some clients
            Route("/mcp", McpEndpoint()),
            Route("/mcp/", McpEndpoint()),
            *dashboard_routes(),
        ],
        middleware=[
            Middleware(Answer),
            Middleware(HostCheck),
            Middleware(LoadLimit),
            Middleware(Authentication),
        ],
        exception_handlers={HTTPException: http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class McpEndpoint:
    """POST only: there are no sessions, so there is nothing to GET or DELETE."""

    path: Final = "/mcp"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise method_not_allowed(scope["method"], ["POST"])
        await scope["state"]["mcp"](scope, receive, send)


class Answer:
    """Sees to it that every request gets one answer, a request id, a log line and its metrics."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        answer_headers = {**SECURITY_HEADERS, "X-Request-Id": request_id}
        if needs_key(scope["path"]):
            answer_headers["Cache-Control"] = "no-store"
        scope[ANSWER_HEADERS] = answer_headers
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in answer_headers.items():
                    headers.setdefault(name, value)
            await send(message)

        measures = scope["state"]["runtime"].metrics
        measures.request_started()
        started = time.perf_counter()
        try:
            with structlog.contextvars.bound_contextvars(request_id=request_id):
                try:
                    await self.app(scope, receive, send_with_headers)
                except Exception as error:
                    if isinstance(error, TenantAssertion):
                        measures.tenant_assertion()
                    problem = _as_problem(error, request_id)  # logs what was not foreseen
                    if status:  # the answer is on its way: all that is left is to break it off
                        raise
                    response = scope.get(PROBLEM_RESPONSE, problem_response)(problem)
                    await response(scope, receive, send_with_headers)
        finally:
            seconds = time.perf_counter() - started
            # no status: it was cancelled before it could answer
            measures.request_ended(route_label(scope), method_label(scope), status or CLIENT_CLOSED, seconds)
            _log_request(scope, request_id, status or CLIENT_CLOSED, seconds)


def _as_problem(error: Exception, request_id: str) -> Problem:
    if isinstance(error, TenantAssertion):
        log.critical("tenant.assertion", detail=error.detail)
    elif not isinstance(error, Problem):
        log.error("http.unexpected", exc_info=error)
        error = Problem("something went wrong in the server; its log has the cause under this request id")
        error.extra["request_id"] = request_id
    return error


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _log_request(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    user = scope.get("user")
    routine = logging.DEBUG if route_label(scope) in PROBES else logging.INFO
    log.log(
        routine if status < 500 else logging.WARNING,
        "http.request",
        request_id=request_id,
        method=method_label(scope),
        route=route_label(scope),
        status=status,
        ms=round(seconds * 1000, 1),
        key_id=user.key_id if user else None,
    )
