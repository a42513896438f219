"""Export and import."""

from __future__ import annotations

from starlette.responses import Response

from warmstart.web.dashboard.view import Visit


async def show(visit: Visit) -> Response:
    return visit.show("transfer.html", counts=await visit.memories.counts())
