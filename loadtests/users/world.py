"""What the users of one run share: keys, the data they write and ask for, and chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from loadtests.data import Generator, zipf


@dataclass
class World:
    #: One a tenant, without a rate limit.
    keys: list[str]
    generator: Generator
    dice: random.Random
    #: A key with the ordinary limit, for those who storm against it.
    limited_key: str = ""
    _weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._weights = zipf(len(self.keys))

    def key(self) -> str:
        """Of the tenant whose turn it is: the first has the most memories and the most traffic."""
        return self.dice.choices(self.keys, self._weights)[0]
