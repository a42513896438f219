"""The bench as a check: a loss that is there each time fails, one that a busy machine made does not."""

from __future__ import annotations

import pytest

from loadtests.bench.__main__ import CHECK_TRIES, NOISE, USUAL_RATIO, check

ABOVE, AT = USUAL_RATIO + NOISE + 0.01, USUAL_RATIO + NOISE


@pytest.mark.parametrize(
    ("ratios", "passes", "left"),
    [
        ([AT, ABOVE], True, 1),
        ([ABOVE, ABOVE, AT, ABOVE], True, 1),
        ([ABOVE] * CHECK_TRIES + [AT], False, 1),
    ],
)
def test_a_ratio_worse_than_noise_each_time_fails(ratios: list[float], passes: bool, left: int) -> None:
    runs = iter(ratios)
    assert check(runs) is passes
    assert len(list(runs)) == left
