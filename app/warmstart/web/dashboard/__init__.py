"""The dashboard: server-rendered pages for people, over the same service as REST and MCP."""

from __future__ import annotations

from starlette.routing import BaseRoute

from warmstart.web.dashboard.session import Sessions

__all__ = ["Sessions", "dashboard_routes"]


def dashboard_routes() -> list[BaseRoute]:
    from warmstart.web.dashboard.routes import routes

    return routes()
