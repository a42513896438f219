"""What a process without an API serves: whether it lives, and its metrics."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warmstart.metrics import CONTENT_TYPE, Metrics


def create_probe_app(metrics: Metrics, is_alive: Callable[[], bool]) -> Starlette:
    """`/healthz` and `/metrics`, for the container network: neither needs a key, neither tells of a tenant."""

    def healthz(request: Request) -> Response:
        alive = is_alive()
        return JSONResponse({"status": "ok" if alive else "stuck"}, 200 if alive else 503)

    def rendered(request: Request) -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", rendered)])
