"""A scenario: one file of scenarios/ that says how much load, what breaks, when, and what must hold."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadtests import slo
from loadtests.shapes import Shape

FOLDER: Final = Path(__file__).with_name("scenarios")
#: Requests of one visit; the rates of a shape count requests.
REQUESTS: Final = {"agent": 3.0, "hook": 1.0, "cli": 1.0, "indexer": 1.0, "reader": 1.0, "abuser": 1.0}

Kind = Literal["agent", "hook", "cli", "indexer", "reader", "abuser"]


class ScenarioError(Exception):
    """A scenario or an option that can't be run, and why."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fault(_Part):
    """`do` is done to `to` as in tests/containers/faults.py; a `rollout` and a `migration` end by themselves."""

    do: Literal["stopped", "paused", "slow", "disk-full", "rollout", "migration"]
    to: Literal["embeddings", "redis", "redis-rest", "postgres", "disk", "api"] = "api"
    at_s: Annotated[float, Field(ge=0)]
    #: Undone then; None: it ends by itself.
    until_s: float | None = None

    @model_validator(mode="after")
    def _ends(self) -> Fault:
        if (self.until_s is None) is not (self.do in ("rollout", "migration")):
            raise ValueError("a roll-out and a migration end by themselves, every other fault needs until_s")
        if self.until_s is not None and self.until_s <= self.at_s:
            raise ValueError("until_s must be after at_s")
        return self


class Rule(_Part):
    window: slo.Window
    limits: Literal["healthy", "shared", "degraded"]
    #: Only these of the table; all where not given.
    only: list[str] | None = None

    @property
    def table(self) -> dict[str, slo.Limit]:
        table = slo.TABLES[self.limits]
        return {name: table[name] for name in self.only or table}

    @model_validator(mode="after")
    def _knows(self) -> Rule:
        if unknown := set(self.only or ()) - set(slo.TABLES[self.limits]):
            raise ValueError(f"only names what is not in the table: {', '.join(sorted(unknown))}")
        return self


class Refusal(_Part):
    window: slo.Window
    group: str
    status: int


class Scenario(_Part):
    title: str
    #: In words, for the report: what is done, and what must be so all the same.
    breaks: str
    holds: str
    memories: Annotated[int, Field(ge=0, le=1_000_000)]
    tenants: Annotated[int, Field(ge=1, le=100)] = 10
    seed: int = 1
    #: Seconds that count for the errors alone.
    warm_up_s: float = 10.0
    shape: Shape
    #: Visits of each kind of user, as weights.
    mix: dict[Kind, Annotated[float, Field(ge=0)]]
    fault: Fault | None = None
    #: Limits of latency; an error is none's to allow.
    rules: list[Rule] = Field(default_factory=list)
    refusals: list[Refusal] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if not sum(self.mix.values()) > 0:
            raise ValueError("mix names no user with a weight above 0")
        if self.fault and (self.fault.until_s or self.fault.at_s) >= self.shape.seconds:
            raise ValueError(f"the fault must be over before the load is, at {self.shape.seconds:g} s")
        return self

    @property
    def requests_each(self) -> float:
        """Requests of a visit, on average."""
        return sum(w * REQUESTS[kind] for kind, w in self.mix.items()) / sum(self.mix.values())

    @property
    def slo_rules(self) -> list[slo.Rule]:
        return [slo.Rule(rule.window, rule.table) for rule in self.rules]

    @property
    def slo_refusals(self) -> list[slo.Refusal]:
        return [slo.Refusal(r.window, r.group, r.status) for r in self.refusals]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, overrides: Sequence[tuple[str, float]] = ()) -> Scenario:
    """By name or by path. `overrides`: fields of the shape, or `memories`, with another number."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ScenarioError(f"there is no scenario {name!r}; there are {', '.join(names())}") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: {error}") from None
    for field, number in overrides:
        if field in ("memories", "tenants"):
            values[field] = int(number)
        else:
            values.setdefault("shape", {})[field] = number
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(str(p) for p in e['loc']) or 'scenario'}: {e['msg']}" for e in error.errors())
        raise ScenarioError(f"{path.name}: {faults}") from None
