"""How the service is, and which rung of the ladder answers now."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from warmstart.web.dashboard.view import Visit

#: What each rung does, in order.
RUNGS: Final = (
    ("hybrid", "By meaning and by words, fused"),
    ("vector", "By meaning alone"),
    ("keyword", "By words alone"),
    ("scan", "A literal look through the newest memories"),
)


async def show(visit: Visit) -> Response:
    return visit.show("health.html", health=await visit.memories.health(), rungs=RUNGS)
