"""How many requests are due, when: the load as a plan that no slow answer can bend.

Arrivals are a Poisson process whose rate follows the shape, from a seed: the
same plan each time. They are open: a request is due when the plan says so,
whether or not those before it were answered, as with clients that know nothing
of each other. Latency is measured from that time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

#: A second; more than what one process can send.
MAX_RATE: Final = 2_000.0

Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    #: Of the whole load.
    seconds: Seconds

    @property
    def peak(self) -> float:
        """The highest rate, requests a second."""
        raise NotImplementedError

    def rate_at(self, second: float) -> float:
        """Requests a second."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        raise NotImplementedError


class Steady(_Shape):
    """The same rate throughout; for hours, it is a soak."""

    kind: Literal["steady", "soak"]
    rate: Rate

    @property
    def peak(self) -> float:
        return self.rate

    def rate_at(self, second: float) -> float:
        return self.rate

    @property
    def words(self) -> str:
        return f"{self.rate:g} requests a second"


class Ramp(_Shape):
    """Steps from one rate to another, each long enough to be measured: where the first one fails is the knee."""

    kind: Literal["ramp"]
    start: Rate
    end: Rate
    steps: Annotated[int, Field(ge=2, le=100)]

    @property
    def peak(self) -> float:
        return max(self.start, self.end)

    def rate_at(self, second: float) -> float:
        step = min(int(second / self.seconds * self.steps), self.steps - 1)
        return self.start + (self.end - self.start) * step / (self.steps - 1)

    @property
    def words(self) -> str:
        return f"{self.start:g} to {self.end:g} requests a second in {self.steps} steps"

    def plateaus(self) -> list[tuple[float, float, float]]:
        """(from, until, requests a second) of each step."""
        length = self.seconds / self.steps
        return [(i * length, (i + 1) * length, self.rate_at((i + 0.5) * length)) for i in range(self.steps)]


class Spike(_Shape):
    """A rate that jumps for some seconds and comes back."""

    kind: Literal["spike"]
    rate: Rate
    spike: Rate
    spike_at: Annotated[float, Field(ge=0)]
    spike_s: Seconds

    @property
    def peak(self) -> float:
        return max(self.rate, self.spike)

    def rate_at(self, second: float) -> float:
        return self.spike if self.spike_at <= second < self.spike_at + self.spike_s else self.rate

    @property
    def words(self) -> str:
        return f"{self.rate:g} requests a second, {self.spike:g} for {self.spike_s:g} s"


Shape = Annotated[Steady | Ramp | Spike, Field(discriminator="kind")]


def arrivals(shape: Steady | Ramp | Spike, dice: random.Random, requests_each: float = 1.0) -> Iterator[float]:
    """Seconds at which a visit is due, in order, where each makes so many requests on average."""
    second = 0.0
    while True:
        # thinning: arrivals at the peak's rate, of which each is kept with the share its own time's rate has of it
        second += dice.expovariate(shape.peak / requests_each)
        if second >= shape.seconds:
            return
        if dice.random() * shape.peak < shape.rate_at(second):
            yield second
