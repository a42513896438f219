"""How many texts go to a provider at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from warmstart.portion import AGE, LEAST, Portion

PROVIDERS: dict[str, Callable[[int], float]] = {
    "a slow processor": lambda n: 0.095 * n,
    "a fast processor": lambda n: 0.01 + 0.012 * n,
    "a graphics card": lambda n: 0.005 + 0.0005 * n,
    "far away": lambda n: 0.3 + 0.001 * n,
    "very slow": lambda n: 2.0 * n,
}


@pytest.mark.parametrize(("provider", "expected"), [*zip(PROVIDERS, (3, 17, 32, 32, LEAST), strict=True)])
def test_it_settles_where_the_provider_takes_so_much_longer(provider: str, expected: int) -> None:
    portion = Portion(32)
    sizes = []
    for _ in range(500):
        sizes.append(portion.size)
        portion.took(portion.size, PROVIDERS[provider](portion.size))
    # but for the one that shows what one takes
    assert set(sizes[6:]) <= {1, expected}
    assert sizes[6:].count(1) <= 500 // AGE


def test_it_follows_a_provider_that_became_slower_and_faster() -> None:
    portion, seconds = Portion(32), 0.001
    for _ in range(8):
        portion.took(portion.size, seconds * portion.size)
    assert portion.size == 32
    portion.took(32, 1.6)
    assert portion.size <= 5
    for _ in range(8):
        portion.took(portion.size, seconds * portion.size)
    assert portion.size == 32


def test_it_grows_again_where_the_way_to_the_provider_became_longer() -> None:
    portion = Portion(32)
    for _ in range(10):
        portion.took(portion.size, 0.095 * portion.size)
    for _ in range(150):
        portion.took(portion.size, 0.5 + 0.001 * portion.size)
    assert portion.size == 32


def test_a_slow_start_is_forgotten() -> None:
    portion = Portion(32)
    portion.took(1, 3.0)
    for _ in range(10):
        portion.took(portion.size, 0.05 * portion.size)
    assert 3 <= portion.size <= 8


@pytest.mark.parametrize("most", [1, 2, 3])
def test_it_keeps_to_the_most(most: int) -> None:
    portion = Portion(most)
    for _ in range(10):
        portion.took(portion.size, 0.0)
        assert 1 <= portion.size <= most
    assert portion.size == most
