"""A circuit breaker: what keeps failing is left alone for a while, and costs its callers nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import structlog

#: Consecutive failures that open a circuit.
FAILURES_TO_OPEN: Final = 5
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0

log = structlog.get_logger(__name__)


class Admission(Enum):
    NORMAL = "normal"
    TRIAL = "trial"


class Circuit:
    """Closed; open after so many failures in a row; half-open, with one trial, after each pause. Pauses double.

    Whoever is let in by `admit` ends with exactly one of `succeeded`, `failed`, `released`.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
        pauses_s: tuple[float, float] | None = None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._first_pause_s, self._max_pause_s = pauses_s or (FIRST_PAUSE_S, MAX_PAUSE_S)
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._open_until: float | None = None
        self._trial = False

    def admit(self) -> Admission | None:
        if self._open_until is None:
            return Admission.NORMAL
        if self._trial or self._clock() < self._open_until:
            return None
        self._trial = True
        return Admission.TRIAL

    def released(self, admission: Admission) -> None:
        """Neither a success nor a failure: the caller gave up, or its own request was at fault."""
        if admission is Admission.TRIAL:
            self._trial = False

    def succeeded(self) -> None:
        if self._open_until is not None:
            log.info("circuit.closed", circuit=self._name)
        self._failures, self._pause_s = 0, self._first_pause_s
        self._open_until, self._trial = None, False

    def failed(self, admission: Admission, reason: str) -> None:
        self.released(admission)
        self._failures += 1
        overdue = self._open_until is None and self._failures >= self._failures_to_open
        if overdue or admission is Admission.TRIAL:
            pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self._max_pause_s)
            self.hold(reason, pause_s)

    def hold(self, reason: str, pause_s: float) -> None:
        """Open at once: the other side said how long to stay away, or fails too often."""
        until = self._clock() + min(pause_s, self._max_pause_s)
        if self._open_until is None:
            log.warning("circuit.opened", circuit=self._name, reason=reason)
            self._open_until = until
        else:
            self._open_until = max(self._open_until, until)
