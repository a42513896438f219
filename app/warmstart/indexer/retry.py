"""Another try, where one may help: what was asked is the same, however often it arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from warmstart.errors import Problem, RateLimited, ServerUnreachable, WarmstartError

#: Tries of one request that met no server, or one that can't serve now; some 40 s in all.
MAX_TRIES: Final = 7
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 15.0
#: A window of the rate limit is a minute; a request that is refused in so many after each other has no chance.
MAX_RATE_LIMITED: Final = 10
MAX_RETRY_AFTER_S: Final = 120.0
_LATER: Final = frozenset({429, 503})

T = TypeVar("T")


async def persistently(
    request: Callable[[], Awaitable[T]],
    *,
    on_pause: Callable[[float, WarmstartError], None],
    on_unreachable: Callable[[], Awaitable[None]],
) -> T:
    """What `request` answers. Waits as the server says, else longer each time; raises the last error."""
    tries = limited = 0
    while True:
        try:
            return await request()
        except (Problem, ServerUnreachable) as error:
            if isinstance(error, Problem) and _status(error) not in _LATER:
                raise
            if isinstance(error, RateLimited):
                limited += 1
            else:
                tries += 1
            if tries >= MAX_TRIES or limited >= MAX_RATE_LIMITED:
                raise
            pause = _pause(error, tries)
            on_pause(pause, error)
            await asyncio.sleep(pause)
            if isinstance(error, ServerUnreachable):
                await on_unreachable()


def _status(error: Problem) -> int:
    return int(error.extra.get("status", error.status))


def _pause(error: WarmstartError, tries: int) -> float:
    said = error.extra.get("retry_after") if isinstance(error, Problem) else None
    if isinstance(said, int | float) and said > 0:
        return min(float(said), MAX_RETRY_AFTER_S)
    longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, tries - 1))
    return float(longest * random.uniform(0.5, 1))  # noqa: S311
