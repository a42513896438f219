"""The arithmetic of reciprocal rank fusion: every score there can be, and an order nothing can flip."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart.fusion import MAX_ONE_ARM, Ranked, contribution, fuse
from warmstart.memory import MAX_SCORE
from warmstart.store.reads import Candidate

DEPTH = 50


def arm(ids: list[str], created: dict[str, int] | None = None) -> list[Candidate]:
    return [Candidate(i, 1.0 - n / 100, (created or {}).get(i, 0)) for n, i in enumerate(ids)]


def filled(first: str, rank: int, prefix: str) -> list[Candidate]:
    """An arm of 50 with `first` at `rank`."""
    ids = [f"{prefix}{n}" for n in range(DEPTH)]
    ids[rank - 1] = first
    return arm(ids)


@pytest.mark.parametrize(
    ("vector", "text", "score", "shown"),
    [
        (1, 1, 2 / 61, "0.03279"),
        (50, 50, 2 / 110, "0.01818"),
        (1, None, 1 / 61, "0.01639"),
        (None, 1, 1 / 61, "0.01639"),
        (2, None, 1 / 62, "0.01613"),
        (None, 2, 1 / 62, "0.01613"),
        (50, None, 1 / 110, "0.00909"),
        (None, 50, 1 / 110, "0.00909"),
    ],
)
def test_the_table_of_scores(vector: int | None, text: int | None, score: float, shown: str) -> None:
    fused = fuse(filled("x", vector, "v") if vector else [], filled("x", text, "t") if text else [])
    [hit] = [r for r in fused if r.id == "x"]
    assert hit.score == pytest.approx(score, abs=1e-15)
    assert f"{hit.score:.5f}" == shown
    assert (hit.vector, hit.text) == (vector, text)


def test_the_extremes_have_names() -> None:
    assert MAX_SCORE == 2 / 61
    assert MAX_ONE_ARM == 1 / 61 == contribution(1)
    [hit] = fuse(arm(["x"]), arm(["x"]))
    assert hit.score == MAX_SCORE


def test_0_016_keeps_two_arm_hits_and_the_first_two_of_one_arm() -> None:
    both = fuse(filled("x", 50, "v"), filled("x", 50, "t"))
    kept = {r.id for r in both if (r.score or 0) >= 0.016}
    assert kept == {"x", "v0", "v1", "t0", "t1"}


def test_no_arm_no_hit() -> None:
    assert fuse([], []) == []


ids = st.lists(st.integers(0, 80).map(lambda n: f"mem_{n:02}"), unique=True, max_size=DEPTH)
ages = st.integers(0, 3)


@given(vector=ids, text=ids, data=st.data())
def test_order_scores_and_ranks(vector: list[str], text: list[str], data: st.DataObject) -> None:
    created = {i: data.draw(ages) for i in sorted({*vector, *text})}
    fused = fuse(arm(vector, created), arm(text, created))

    assert sorted(r.id for r in fused) == sorted({*vector, *text})
    for r in fused:
        assert r.vector == (vector.index(r.id) + 1 if r.id in vector else None)
        assert r.text == (text.index(r.id) + 1 if r.id in text else None)
        expected = sum(1 / (60 + rank) for rank in (r.vector, r.text) if rank)
        assert r.score == pytest.approx(expected, abs=1e-15)
        assert 1 / 110 <= (r.score or 0) <= 2 / 61
    keys = [(-(r.score or 0), -created[r.id], r.id) for r in fused]
    assert keys == sorted(keys)


@given(vector=ids, text=ids)
def test_equal_input_gives_equal_output(vector: list[str], text: list[str]) -> None:
    assert fuse(arm(vector), arm(text)) == fuse(arm(list(vector)), arm(list(text)))


@given(vector=ids, text=ids)
def test_the_arms_weigh_the_same(vector: list[str], text: list[str]) -> None:
    one, other = fuse(arm(vector), arm(text)), fuse(arm(text), arm(vector))
    assert [(r.id, r.score) for r in one] == [(r.id, r.score) for r in other]
    assert [(r.vector, r.text) for r in one] == [(r.text, r.vector) for r in other]


@given(text=ids)
def test_one_arm_keeps_its_own_order(text: list[str]) -> None:
    assert [r.id for r in fuse([], arm(text))] == text
    assert [r.id for r in fuse(arm(text), [])] == text


@given(vector=ids, text=ids, seed=st.integers())
def test_renaming_ids_changes_nothing_but_names(vector: list[str], text: list[str], seed: int) -> None:
    """Scores follow from ranks alone."""
    names = sorted({*vector, *text})
    shuffled = names[:]
    random.Random(seed).shuffle(shuffled)
    to = dict(zip(names, shuffled, strict=True))
    one = {r.id: r.score for r in fuse(arm(vector), arm(text))}
    other = {r.id: r.score for r in fuse(arm([to[i] for i in vector]), arm([to[i] for i in text]))}
    assert {to[i]: s for i, s in one.items()} == other


def test_equal_scores_go_by_age_then_id() -> None:
    created = {"mem_b": 5, "mem_a": 5, "mem_c": 9, "mem_d": 9}
    swapped = fuse(arm(["mem_b", "mem_a"], created), arm(["mem_a", "mem_b"], created))
    assert [r.id for r in swapped] == ["mem_a", "mem_b"]
    assert swapped[0].score == swapped[1].score
    apart = fuse(arm(["mem_b", "mem_c"], created), arm(["mem_d", "mem_a"], created))
    assert [r.id for r in apart] == ["mem_d", "mem_b", "mem_c", "mem_a"]


def test_a_hit_of_the_scan_has_no_score() -> None:
    assert Ranked("x", None) == Ranked("x", None, None, None)
