"""Fixed windows on the wall clock, shared through the cache.

Each hit is counted in this process too, so that with the cache gone a caller
does not start its window anew.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from warmstart.errors import CacheUnavailable
from warmstart.local_cache import LocalCache
from warmstart.upstash import Cache


@dataclass(frozen=True)
class Allowance:
    allowed: bool
    limit: int
    remaining: int
    reset_s: int


class RateLimiter:
    def __init__(self, cache: Cache, *, clock: Callable[[], float] = time.time) -> None:
        self._cache = cache
        self._own = LocalCache()
        self._clock = clock

    async def hit(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance:
        """Count one and tell whether it is within `limit`. Never raises."""
        now = self._clock()
        counter = _counter(bucket, key, now, window_s)
        commands = ("INCR", counter), ("EXPIRE", counter, window_s)
        own, _ = await self._own.pipeline(*commands)
        used = await self._shared(*commands)
        used = own if used is None else used
        return _allowance(used <= limit, used, limit, now, window_s)

    async def peek(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance:
        """Whether a hit would be within `limit`, without counting it. Never raises."""
        now = self._clock()
        command = "GET", _counter(bucket, key, now, window_s)
        (own,) = await self._own.pipeline(command)
        used = await self._shared(command)
        used = int(own or 0) if used is None else used
        return _allowance(used < limit, used, limit, now, window_s)

    async def _shared(self, *commands: tuple[str | int, ...]) -> int | None:
        """The count of all processes, from the first command; None where the cache gives none."""
        try:
            count = (await self._cache.pipeline(*commands))[0]
            return 0 if count is None else int(count)
        except (CacheUnavailable, ValueError, TypeError, OverflowError):
            return None


def _counter(bucket: str, key: str, now: float, window_s: int) -> str:
    # the key may be a secret or an address: only its hash leaves the process
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"ws:rl:{bucket}:{digest}:{int(now // window_s) * window_s}"


def _allowance(allowed: bool, used: int, limit: int, now: float, window_s: int) -> Allowance:
    reset_s = math.ceil(window_s - now % window_s)
    return Allowance(allowed, limit, max(0, limit - used), max(1, min(window_s, reset_s)))
