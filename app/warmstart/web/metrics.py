"""`/metrics`, and the measuring of every request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from warmstart.errors import Forbidden
from warmstart.metrics import CONTENT_TYPE
from warmstart.web.api import Call
from warmstart.web.auth import parse_address

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: For the look at what the service depends on; without its answer the figures are those of the last one.
LOOK_TIMEOUT_S: Final = 2.0
FORWARDED: Final = ("x-forwarded-for", "forwarded", "x-real-ip")


async def metrics(call: Call) -> Response:
    """Prometheus' text, for loopback and private addresses that come without a proxy.

    The rule keeps it from being published by accident: a reverse proxy adds
    X-Forwarded-For, and an address of the internet is not private.
    """
    request = call.request
    host = request.client.host if request.client else ""
    if any(name in request.headers for name in FORWARDED) or not _is_near(host):
        raise Forbidden("metrics are for the local network, without a proxy between")
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await call.runtime.ready()  # which sets warmstart_dependency_up
    return Response(call.runtime.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _is_near(host: str) -> bool:
    address = parse_address(host)
    return address is not None and (address.is_loopback or address.is_private)


def route_label(scope: Scope) -> str:
    """The template of the route that answered; one word for all requests that reached none."""
    return getattr(scope.get("endpoint"), "path", "unrouted")


def method_label(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"
