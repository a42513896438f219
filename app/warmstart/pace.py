"""How fast a queue empties, and when it will be empty."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: A shorter queue is empty before anyone asks how long it takes.
WORTH_TELLING: Final = 100
TELL_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    left: int
    done: int
    per_second: float
    #: Seconds until nothing is left, at this rate; None where nothing moves.
    left_s: float | None


class Pace:
    """The rate since the queue was last short, so that a pause or a slow start shows in the estimate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = 0
        self._since = self._told_at = clock()

    def add(self, done: int) -> None:
        self._done += done

    def seen(self, left: int) -> Progress | None:
        """`left` is the queue's length now. What there is to tell, once in TELL_EVERY_S."""
        now = self._clock()
        if left < WORTH_TELLING:
            self._done, self._since, self._told_at = 0, now, now
            return None
        if now - self._told_at < TELL_EVERY_S:
            return None
        self._told_at = now
        rate = self._done / (now - self._since)
        return Progress(left, self._done, round(rate, 1), round(left / rate) if rate else None)
