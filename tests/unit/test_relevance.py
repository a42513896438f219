"""What decides between a block and silence, in numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmstart.relevance import (
    COMPANION,
    MIN_BACKGROUND,
    SAMPLE,
    TEXT_ALONE,
    TEXT_WEIGHT,
    grams,
    likeness,
    relevant,
    same_statement,
    sample,
    says_all,
    shared_weight,
    threshold,
)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def test_likeness_counts_in_standard_deviations_of_the_background() -> None:
    background = unit(np.array([[1.0, 0.2], [1.0, 0.6], [0.2, 1.0]]))
    row, query = unit(np.array([[1.0, 0.0]])), unit(np.array([1.0, 0.1]))
    others = background @ row[0]
    expected = (float(query @ row[0]) - others.mean()) / others.std()
    assert likeness(query, row, background) == [pytest.approx(expected, abs=1e-3)]


def test_a_row_is_not_its_own_background() -> None:
    rows = unit(np.random.default_rng(1).standard_normal((20, 8)) + 2)
    query = unit(np.ones(8))
    with_itself = likeness(query, rows[:1], rows)
    assert with_itself == pytest.approx(likeness(query, rows[:1], rows[1:]), abs=1e-4)


def test_texts_that_lie_near_everything_are_told_from_near_ones() -> None:
    """The same cosine to the query says less of a row that is as near to all others."""
    rng = np.random.default_rng(2)
    crowd = unit(np.array([3.0, 0, 0, 0]) + rng.standard_normal((50, 4)))
    hub, own = unit(np.array([[3.0, 1, 0, 0], [0.5, 1, 2.5, 0]]))
    query = unit(hub + own)
    assert float(query @ hub) == pytest.approx(float(query @ own), abs=1e-3)
    of_hub, of_own = likeness(query, np.stack([hub, own]), crowd)
    assert of_own > of_hub + 0.5


def test_the_threshold_grows_as_the_best_of_many_does() -> None:
    thresholds = [threshold(n) for n in (5, 10, 40, 200, 10_000)]
    assert thresholds == sorted(thresholds)
    assert threshold(200) == pytest.approx(0.65 * math.sqrt(2 * math.log(200)) - 0.85)


def test_shared_weight_is_more_for_rare_words_and_for_all_of_the_query() -> None:
    arm = [f"common text {i}" for i in range(40)] + ["common rare"]
    rare, common, both, none = shared_weight(["common", "rare"], ["rare", "common", "Common RARE", "else"], arm)
    assert both > rare > common > none == 0
    assert shared_weight([], ["x"], []) == [0.0]


def test_all_or_nothing_hangs_on_the_best() -> None:
    least = threshold(200)
    likenesses = [least + 0.01, least - COMPANION + 0.01, least - COMPANION - 0.01]
    assert relevant(likenesses, [0, 0, 0], [False] * 3, 200) == [True, True, False]
    assert relevant([least - 0.01, least - 0.02], [0, 0], [False] * 2, 200) == [False, False]
    # words make up for meaning
    assert relevant([least - 1], [1.01 / TEXT_WEIGHT], [False], 200) == [True]
    assert relevant([None, least + 1], [0, 0], [False] * 2, 200)[1] is True


def test_without_vectors_words_alone_decide() -> None:
    for likenesses, memories in (([None, None], 200), ([9.0, 9.0], MIN_BACKGROUND - 1)):
        assert relevant(likenesses, [TEXT_ALONE, TEXT_ALONE - 0.01], [False] * 2, memories) == [True, False]
    assert relevant([], [], [], 0) == []


@pytest.mark.parametrize("count", [0, 1, SAMPLE, SAMPLE + 1, 10_000])
def test_a_sample_is_bounded_and_always_the_same(count: int) -> None:
    vectors = np.arange(count, dtype=np.float32).reshape(-1, 1)
    taken = sample(vectors)
    assert len(taken) == min(count, len(taken)) <= SAMPLE
    assert np.array_equal(taken, sample(vectors))


LONG = "The api listens on port 8080 of the loopback address, and caddy is what the world sees of it."


@pytest.mark.parametrize(
    "other",
    [
        LONG.replace("8080", "8484"),
        LONG.lower(),
        LONG.replace("  ", " ").replace(", ", ",\n"),
        "Note: " + LONG,
        LONG + " Decided on Monday.",
        LONG.replace("loopback", "first"),
    ],
)
def test_near_duplicates(other: str) -> None:
    assert same_statement(grams(LONG), grams(other))
    assert same_statement(grams(other), grams(LONG))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LONG, "The worker listens to nothing; it polls the table for what waits."),
        ("Use tabs", "Use spaces"),
        ("数据库迁移之前先备份", "部署之后检查日志"),
        ("a", "b"),
        ("", "x"),
    ],
)
def test_other_statements(first: str, second: str) -> None:
    assert not same_statement(grams(first), grams(second))


@given(st.text(max_size=50))
@settings(max_examples=50, deadline=None)
def test_every_text_is_the_same_as_itself(text: str) -> None:
    assert same_statement(grams(text), grams(text))


def test_what_says_every_word_of_the_prompt_is_about_it() -> None:
    """However common the words are among a tenant's memories, and however alike these."""
    least = threshold(200)
    assert relevant([least - 2, least - 0.1], [0.1, 0.1], [True, False], 200) == [True, True]
    assert relevant([None], [0.1], [True], 0) == [True]
    assert says_all(["quokka"], "it remembers Quokkas")
    assert not says_all(["quokka", "ferri"], "it remembers quokkas")
    assert not says_all([], "anything")
