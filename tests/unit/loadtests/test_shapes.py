"""The plan of arrivals: open, of the right rate at each time, the same for the same seed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from pydantic import TypeAdapter, ValidationError

from loadtests.shapes import Ramp, Shape, Spike, Steady, arrivals

STEADY = Steady(kind="steady", rate=20.0, seconds=200.0)
RAMP = Ramp(kind="ramp", start=10.0, end=50.0, steps=5, seconds=500.0)
SPIKE = Spike(kind="spike", rate=10.0, spike=100.0, spike_at=50.0, spike_s=20.0, seconds=100.0)


def planned(shape: Steady | Ramp | Spike, seed: int = 1, each: float = 1.0) -> list[float]:
    return list(arrivals(shape, random.Random(seed), each))


def count(found: list[float], begin: float, end: float) -> int:
    return sum(begin <= second < end for second in found)


@pytest.mark.parametrize("shape", [STEADY, RAMP, SPIKE])
def test_arrivals_are_in_order_within_the_time_and_the_same_for_a_seed(shape: Steady | Ramp | Spike) -> None:
    found = planned(shape)
    assert all(a <= b for a, b in pairwise(found))
    assert 0 <= found[0] <= found[-1] < shape.seconds
    assert found == planned(shape)
    assert found != planned(shape, seed=2)


def test_the_rate_is_that_of_the_shape_at_each_time() -> None:
    # a Poisson count of 4,000 is within 5 % by a long way: its deviation is 63
    assert count(planned(STEADY), 0, 200) == pytest.approx(4_000, rel=0.05)
    ramp = planned(RAMP)
    for begin, end, rate in RAMP.plateaus():
        assert count(ramp, begin, end) == pytest.approx(rate * 100, rel=0.15)
    spike = planned(SPIKE)
    assert count(spike, 50, 70) == pytest.approx(2_000, rel=0.1)
    assert count(spike, 0, 50) == pytest.approx(500, rel=0.15)


def test_visits_of_three_requests_come_a_third_as_often() -> None:
    assert len(planned(STEADY, each=3.0)) == pytest.approx(4_000 / 3, rel=0.1)


def test_arrivals_are_as_irregular_as_strangers_are() -> None:
    gaps = [b - a for a, b in pairwise(planned(STEADY))]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # of an exponential they are the same


def test_steps_of_a_ramp() -> None:
    assert [rate for _, _, rate in RAMP.plateaus()] == [10, 20, 30, 40, 50]
    assert (RAMP.rate_at(0), RAMP.rate_at(99.9), RAMP.rate_at(100), RAMP.rate_at(499)) == (10, 10, 20, 50)
    assert RAMP.peak == 50


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "steady", "rate": 0.0, "seconds": 10.0},
        {"kind": "steady", "rate": 1e9, "seconds": 10.0},
        {"kind": "steady", "rate": 1.0, "seconds": 0.0},
        {"kind": "steady", "rate": 1.0, "seconds": 10.0, "spike": 2.0},
        {"kind": "ramp", "start": 1.0, "end": 2.0, "steps": 1, "seconds": 10.0},
        {"kind": "wave", "rate": 1.0, "seconds": 10.0},
    ],
)
def test_what_is_no_shape_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Shape).validate_python(values)
