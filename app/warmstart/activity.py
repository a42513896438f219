"""What this process did, hour by hour and tenant by tenant: for pictures, lost with the process.

Prometheus' counters are of all tenants together and have no past; a tenant is shown its own, and nobody else's.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from warmstart.errors import Problem
from warmstart.metrics import LATENCY_BUCKETS

HOUR_S: Final = 3600
#: A week.
MAX_HOURS: Final = 168
#: Past it the tenant that was idle longest is forgotten.
MAX_TENANTS: Final = 1_000
MAX_PERIODS: Final = 100
#: How often it is looked what is degraded, and how long the queues are.
LOOK_S: Final = 5.0
QUEUE_EVERY: Final = 12


@dataclass(slots=True)
class Hour:
    """`start` in seconds since 1970; the times of searches as counts of LATENCY_BUCKETS and of what is slower."""

    start: int
    searches: Counter[str] = field(default_factory=Counter)
    degraded: int = 0
    times: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS) + 1))
    queued: int = 0

    def quantile(self, share: float) -> float | None:
        """Seconds within which `share` of the searches were answered, to the width of a bucket; None without any."""
        rank = share * sum(self.times)
        if not rank:
            return None
        below = 0
        for i, count in enumerate(self.times):
            if below + count >= rank and count:
                floor = LATENCY_BUCKETS[i - 1] if i else 0.0
                ceiling = LATENCY_BUCKETS[min(i, len(LATENCY_BUCKETS) - 1)]
                return floor + (ceiling - floor) * (rank - below) / count
            below += count
        return LATENCY_BUCKETS[-1]


@dataclass(frozen=True, slots=True)
class Period:
    """A time in which something was degraded; `end` is None while it lasts."""

    reasons: tuple[str, ...]
    start: datetime
    end: datetime | None = None


class Activity:
    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, dict[int, Hour]] = OrderedDict()
        self._periods: deque[Period] = deque(maxlen=MAX_PERIODS)
        self.since = datetime.fromtimestamp(clock(), UTC)

    # -- what happens

    def search(self, user_id: str, mode: str, seconds: float, *, degraded: bool) -> None:
        hour = self._hour(user_id)
        hour.searches[mode] += 1
        hour.degraded += degraded
        hour.times[bisect_left(LATENCY_BUCKETS, seconds)] += 1

    def queued(self, depths: Mapping[str, int]) -> None:
        """How many memories of each tenant wait now; of an hour the most is kept."""
        for user_id, depth in depths.items():
            hour = self._hour(user_id)
            hour.queued = max(hour.queued, depth)

    def rung(self, reasons: Sequence[str]) -> None:
        """What is degraded now."""
        now, last = datetime.fromtimestamp(self._clock(), UTC), self._periods[-1] if self._periods else None
        lasts = last is not None and last.end is None
        if last is not None and lasts:
            if last.reasons == tuple(reasons):
                return
            self._periods[-1] = Period(last.reasons, last.start, now)
        if reasons:
            self._periods.append(Period(tuple(reasons), now))

    # -- what is shown

    def hours(self, user_id: str, count: int) -> list[Hour]:
        """The last `count` hours, oldest first, the present one last."""
        known = self._tenants.get(user_id, {})
        present = self._start()
        starts = (present - HOUR_S * back for back in range(count - 1, -1, -1))
        return [known.get(start) or Hour(start) for start in starts]

    @property
    def periods(self) -> list[Period]:
        """Newest first."""
        return list(reversed(self._periods))

    def _start(self) -> int:
        return int(self._clock() // HOUR_S) * HOUR_S

    def _hour(self, user_id: str) -> Hour:
        hours = self._tenants.setdefault(user_id, {})
        self._tenants.move_to_end(user_id)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        start = self._start()
        if start not in hours:
            hours[start] = Hour(start)
            for old in [s for s in hours if s <= start - HOUR_S * MAX_HOURS]:
                del hours[old]
        return hours[start]

    async def watch(
        self, reasons: Callable[[], Sequence[str]], queues: Callable[[], Awaitable[Mapping[str, int]]]
    ) -> None:
        """Looks for ever."""
        looks = 0
        while True:
            self.rung(reasons())
            if looks % QUEUE_EVERY == 0:
                with suppress(Problem):  # the store does not answer: the next look may be luckier
                    self.queued(await queues())
            looks += 1
            await asyncio.sleep(LOOK_S)
