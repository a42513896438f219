"""How many texts go to an embedding provider at once."""

from __future__ import annotations

from typing import Final

#: A query that comes meanwhile waits behind them so much longer than behind one.
TARGET_S: Final = 0.2
#: A request of one text is a save's, which others let pass.
LEAST: Final = 2
#: Requests after which it is seen once more what one text takes: the way to the provider may have become longer.
AGE: Final = 50


class Portion:
    """As many texts a request as the provider takes TARGET_S longer for than for one.

    So a processor gets a few, and what has a graphics card or is far away, where
    more texts cost hardly more time, as many as it takes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        #: Seconds that a request of one text takes, as seen so many requests ago.
        self._alone: float | None = None
        self._age = 0
        self._fitting = 1
        self.size = 1

    def took(self, texts: int, seconds: float) -> None:
        """A request of so many was answered after so long."""
        self._age += 1
        if texts == 1 or self._alone is None or seconds < self._alone:
            self._alone, self._age = seconds, 0
        fitting = self._fitting
        if texts > 1:
            each = (seconds - self._alone) / (texts - 1)
            fitting = min(2 * fitting, 1 + int(TARGET_S / each) if each > 0 else self._most)
        self._fitting = min(self._most, max(LEAST, fitting))
        self.size = 1 if self._age >= AGE and self._fitting < self._most else self._fitting
