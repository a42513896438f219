"""Every address of the dashboard, and who answers there."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from warmstart.web.dashboard.pages import activity, health, keys, login, memories, memory, namespaces, transfer, trash
from warmstart.web.dashboard.rendering import STATIC
from warmstart.web.dashboard.view import View

VIEWS: Final = (
    View("/", memories.show),
    View("/login", login.show, login.sign_in, signed_in=False),
    View("/logout", post=login.sign_out),
    View("/memories/trash", post=memories.to_trash),
    View("/memories/restore", post=trash.restore),
    View("/memories/{id}", memory.show),
    View("/memories/{id}/edit", memory.edit, memory.save),
    View("/memories/{id}/history/{version}/restore", post=memory.restore_version),
    View("/trash", trash.show),
    View("/trash/empty", trash.confirm, trash.empty),
    View("/namespaces", namespaces.show),
    View("/namespaces/{name}", namespaces.one, namespaces.rename),
    View("/namespaces/{name}/trash", post=namespaces.to_trash),
    View("/keys", keys.show, keys.create),
    View("/keys/{key}/revoke", keys.confirm, keys.revoke),
    View("/activity", activity.show),
    View("/health", health.show),
    View("/transfer", transfer.show),
    View("/transfer/export", transfer.export),
    View("/transfer/import", post=transfer.take, raw=True),
)


class Static(StaticFiles):
    """Kept for ever by browsers, since an address changes with its file."""

    path = "/static"

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response

    async def __call__(self, scope: Scope, receive: object, send: object) -> None:
        await super().__call__(scope, receive, send)  # type: ignore[arg-type]


def routes() -> list[BaseRoute]:
    return [*(Route(view.path, view) for view in VIEWS), Mount("/static", Static(directory=STATIC))]
