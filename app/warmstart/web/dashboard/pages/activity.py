"""What happened by the hour, as pictures."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from warmstart.activity import HOUR_S
from warmstart.web.dashboard.charts import lines, stacked
from warmstart.web.dashboard.rendering import ms
from warmstart.web.dashboard.view import Visit

SPANS: Final = {"24": ("24 hours", 24), "168": ("7 days", 168)}
MODES: Final = ("hybrid", "vector", "keyword", "scan")


async def show(visit: Visit) -> Response:
    span = visit.query.get("hours", "24")
    span = span if span in SPANS else "24"
    words, count = SPANS[span]
    activity = visit.runtime.activity
    hours = activity.hours(visit.user_id, count)
    health = await visit.memories.health()
    starts = [hour.start for hour in hours]
    total = sum(sum(hour.searches.values()) for hour in hours)
    by_mode = {mode: sum(hour.searches[mode] for hour in hours) for mode in MODES}
    said = ", ".join(f"{n:,} {mode}" for mode, n in by_mode.items() if n) or "none"
    medians = [hour.quantile(0.5) for hour in hours]
    slowest = [hour.quantile(0.95) for hour in hours]
    worst = max((s for s in slowest if s is not None), default=None)
    began = activity.since.timestamp() - HOUR_S
    deepest = max(hour.queued for hour in hours)
    charts = [
        stacked(
            "Searches an hour", f"{total:,} searches in the last {words}: {said}.",
            starts, [dict(hour.searches) for hour in hours], [m for m in MODES if by_mode[m]],
        ),
        lines(
            "Time of a search", f"In the slowest hour, 95 of 100 searches were answered within {ms(worst)}.", starts,
            {"half of them": _in_ms(medians), "95 of 100": _in_ms(slowest)}, " ms",
        ),
        lines(
            "Memories waiting for their vector", f"At most {deepest:,} waited; now {health.queued:,} do.", starts,
            {"waiting": [h.queued if h.start > began else None for h in hours]},
            "",
        ),
    ]  # fmt: skip
    return visit.show(
        "activity.html", charts=charts, hours=hours, total=total, span=span, spans=SPANS,
        since=activity.since, periods=activity.periods, health=health,
    )  # fmt: skip


def _in_ms(seconds: list[float | None]) -> list[float | None]:
    return [None if s is None else s * 1000 for s in seconds]
