"""What the load process is told: the shape, the users, where to, as whom. Written by the run, read by locustfile.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from loadtests.scenario import REQUESTS, Scenario
from loadtests.shapes import arrivals

#: Where the plan lies, for the load process.
VARIABLE = "LOADTEST_PLAN"


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")

    scenario: Scenario
    url: str
    keys: list[str]
    limited_key: str = ""
    #: PEM of the authority that signed the server's certificate; empty: the system's.
    authority: str = ""
    #: Of the namespaces that are written to.
    prefix: str
    #: Where requests.csv and begun go.
    folder: Path

    @property
    def requests_file(self) -> Path:
        return self.folder / "requests.csv"

    @property
    def begun_file(self) -> Path:
        """Holds the Unix time at which the load began."""
        return self.folder / "begun"

    def visits(self) -> Iterator[tuple[float, str]]:
        return visits(self.scenario)


def visits(scenario: Scenario) -> Iterator[tuple[float, str]]:
    """(second, kind of user) of each visit, in order; the same for the same seed."""
    dice = random.Random(scenario.seed)
    kinds, weights = list(scenario.mix), list(scenario.mix.values())
    for second in arrivals(scenario.shape, dice, scenario.requests_each):
        yield second, dice.choices(kinds, weights)[0]


def planned_requests(scenario: Scenario) -> list[float]:
    """When each request of the plan is due; those of one visit, at its begin."""
    return [second for second, kind in visits(scenario) for _ in range(round(REQUESTS[kind]))]
