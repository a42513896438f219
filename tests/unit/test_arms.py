"""The order inside each arm: the same rows give the same scores, in whatever order they come, and never a NaN."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from warmstart.arms import CANDIDATES, FULL_LIST, MIN_COVERAGE, vector_scores, weak_rows

Matrix = npt.NDArray[np.float32]
#: One step of the last digit kept: where two orders of one sum fall on either side of a half.
STEP = 1.01e-5

seeds = st.integers(0, 2**32 - 1)
dims = st.sampled_from([1, 2, 8, 64, 384])
counts = st.integers(20, CANDIDATES)


def neighbourhood(seed: int, rows: int, dim: int, clusters: int = 6) -> tuple[Matrix, Matrix]:
    """A query and rows around a few centres, as texts are."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, dim))
    made = centres[rng.integers(0, clusters, rows)] + 0.7 * rng.standard_normal((rows, dim))
    return (centres[0] + 0.5 * rng.standard_normal(dim)).astype(np.float32), made.astype(np.float32)


# -- vectors


@example(seed=12618, rows=20, dim=8)
@given(seed=seeds, rows=counts, dim=dims)
@settings(max_examples=60)
def test_scores_do_not_depend_on_the_order_of_the_rows(seed: int, rows: int, dim: int) -> None:
    query, vectors = neighbourhood(seed, rows, dim)
    straight = np.array(vector_scores(query, vectors))
    shuffled = np.random.default_rng(seed).permutation(rows)
    back = np.empty(rows)
    back[shuffled] = vector_scores(query, vectors[shuffled])
    assert np.abs(straight - back).max() <= STEP


@given(seed=seeds, rows=st.integers(1, CANDIDATES), dim=dims)
@settings(max_examples=40)
def test_the_same_rows_give_the_same_scores(seed: int, rows: int, dim: int) -> None:
    query, vectors = neighbourhood(seed, rows, dim)
    first = vector_scores(query, vectors)
    assert all(vector_scores(query.copy(), vectors.copy()) == first for _ in range(3))


def test_another_process_gives_the_same_scores() -> None:
    program = (
        "import numpy as np, warmstart.arms as arms\n"
        "rng = np.random.default_rng(5)\n"
        "print(arms.vector_scores(*[rng.standard_normal(s).astype(np.float32) for s in [(384,), (100, 384)]]))"
    )
    rng = np.random.default_rng(5)
    query, rows = (rng.standard_normal(shape).astype(np.float32) for shape in [(384,), (100, 384)])
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(vector_scores(query, rows))


@given(seed=seeds, rows=st.integers(1, 19), dim=dims, length=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=60)
def test_of_few_candidates_the_score_is_the_cosine(seed: int, rows: int, dim: int, length: float) -> None:
    query, vectors = neighbourhood(seed, rows, dim)
    expected = vectors @ query / (np.linalg.norm(vectors, axis=1) * np.linalg.norm(query))
    assert np.allclose(vector_scores(query * length, vectors * length), expected, atol=2e-5)


def test_the_way_changes_at_twenty() -> None:
    query, vectors = neighbourhood(1, 20, 64)
    assert max(vector_scores(query, vectors[:19])) <= 1
    assert np.mean(vector_scores(query, vectors)) == pytest.approx(0, abs=1e-4)  # standard scores


def test_the_length_of_a_vector_says_nothing() -> None:
    query, vectors = neighbourhood(3, 60, 64)
    lengths = np.random.default_rng(3).uniform(0.01, 50, (60, 1)).astype(np.float32)
    assert np.allclose(vector_scores(query * 7, vectors * lengths), vector_scores(query, vectors), atol=2e-5)


def test_nearer_is_higher() -> None:
    """Rows without clusters, one of which is the query."""
    rng = np.random.default_rng(4)
    vectors = rng.standard_normal((80, 384)).astype(np.float32)
    scores = vector_scores(vectors[33], vectors)
    assert int(np.argmax(scores)) == 33


def test_what_candidates_share_in_groups_is_taken_out() -> None:
    """A row on the topic in another language is farther by cosine than any row in the query's, and first here."""
    rng = np.random.default_rng(6)
    topics = rng.standard_normal((30, 384)).astype(np.float32)
    languages = 1.5 * rng.standard_normal((2, 384)).astype(np.float32)
    vectors = np.vstack([topics[1:] + languages[0], topics + languages[1]])
    query = topics[0] + languages[0]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert int(np.argmax(unit @ query)) < 29
    assert int(np.argmax(vector_scores(query, vectors))) == 29


@given(seed=seeds, rows=counts, dim=dims, kinds=st.integers(1, 5))
@settings(max_examples=60)
def test_equal_vectors_have_equal_scores(seed: int, rows: int, dim: int, kinds: int) -> None:
    """Wherever they stand, or the older of two equal rows could come first."""
    query, vectors = neighbourhood(seed, rows, dim)
    which = np.random.default_rng(seed).integers(0, kinds, rows)
    scores = vector_scores(query, vectors[:kinds][which])
    assert np.isfinite(scores).all()
    assert len(set(zip(which.tolist(), scores, strict=True))) == len(set(which.tolist()))


@given(seed=seeds, kinds=st.integers(2, 4))
@settings(max_examples=40)
def test_a_few_kinds_of_rows_are_ordered_by_cosine_not_by_noise(seed: int, kinds: int) -> None:
    """As many directions as are taken out: what is left of a row is rounding, and must not rank it."""
    query, vectors = neighbourhood(seed, 60, 64)
    which = np.arange(60) % kinds
    scores = dict(zip(which.tolist(), vector_scores(query, vectors[:kinds][which]), strict=True))
    again = dict(zip(which[::-1].tolist(), vector_scores(query, vectors[:kinds][which[::-1]]), strict=True))
    assert max(abs(scores[k] - again[k]) for k in scores) <= 2e-5
    unit = vectors[:kinds] / np.linalg.norm(vectors[:kinds], axis=1, keepdims=True)
    cosine = unit @ (query / np.linalg.norm(query))
    # each has more equals than neighbours are counted, so none is more of a hub
    ranked = cosine[sorted(scores, key=lambda k: -scores[k])]
    assert (np.diff(ranked) <= 1e-4).all()


@pytest.mark.parametrize("rows", [1, 19, 20, 100])
@pytest.mark.parametrize("dim", [1, 3, 8, 384])
@pytest.mark.parametrize("query", ["ones", "zeros", "other"])
@pytest.mark.parametrize("vectors", ["ones", "zeros", "some zeros", "opposite", "tiny"])
def test_no_input_gives_a_nan_or_a_warning(rows: int, dim: int, query: str, vectors: str) -> None:
    asked = {"ones": np.ones(dim), "zeros": np.zeros(dim), "other": np.arange(dim) - 1.5}[query].astype(np.float32)
    made = np.ones((rows, dim), np.float32)
    if vectors == "zeros":
        made *= 0
    elif vectors == "some zeros":
        made[::3] = 0
    elif vectors == "opposite":
        made[::2] = -1
    elif vectors == "tiny":
        made *= np.float32(1e-30)
    with np.errstate(all="raise", under="ignore"):
        scores = vector_scores(asked, made)
    assert len(scores) == rows
    assert np.isfinite(scores).all()
    if vectors in ("ones", "zeros", "tiny"):
        assert len(set(scores)) == 1


# -- texts


def test_without_terms_or_texts_nothing_is_weak() -> None:
    assert weak_rows([], ["a", "b"]) == [False, False]
    assert weak_rows(["a"], []) == []
    assert weak_rows([], []) == []


def weight(rows: int, having: int) -> float:
    rows = max(rows, FULL_LIST)
    return math.log(1 + (rows - having + 0.5) / (having + 0.5))


@pytest.mark.parametrize("rows", [4, 50])
def test_weights_by_hand(rows: int) -> None:
    """`common` is in four rows, `rare` in one, `unknown` in none; of fewer than fifty rows the rest is thought up."""
    texts = ["common rare", "common", "common here", "the common", *["other"] * 46][:rows]
    common, rare, unknown = weight(rows, 4), weight(rows, 1), weight(rows, 0)
    assert (common, rare, unknown) == pytest.approx((2.42775, 3.52636, 4.62497), abs=1e-5)
    assert common < MIN_COVERAGE * (common + rare + unknown) < rare
    assert weak_rows(["common", "rare", "unknown"], texts) == [False] + [True] * (rows - 1)
    # without the rare one, a third of the weight is enough; a row of neither has nothing
    assert common > MIN_COVERAGE * (common + unknown)
    assert weak_rows(["common", "unknown"], texts) == [False] * 4 + [True] * (rows - 4)


def test_a_term_of_every_row_of_a_full_list_weighs_next_to_nothing() -> None:
    texts = ["common rare", *["common"] * 59]
    assert weak_rows(["common", "rare"], texts) == [False] + [True] * 59


def test_terms_are_found_in_any_case_and_inside_words() -> None:
    """Terms are stems: the word has more letters."""
    assert weak_rows(["migrat", "xyz"], ["MIGRATION xyz", "Migrated", "none"]) == [False, False, True]


@given(
    texts=st.lists(st.lists(st.sampled_from("abcdefg"), max_size=5).map("".join), min_size=1, max_size=12),
    terms=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True),
)
def test_weak_is_less_than_the_share(texts: list[str], terms: list[str]) -> None:
    weights = {t: weight(len(texts), sum(t in text for text in texts)) for t in terms}
    total = sum(weights[t] for t in terms)
    expected = [sum(weights[t] for t in terms if t in text) < MIN_COVERAGE * total for text in texts]
    assert weak_rows(terms, texts) == expected
    for text, weak in zip(texts, expected, strict=True):
        if all(t in text for t in terms):
            assert not weak
        if not any(t in text for t in terms):
            assert weak


@given(texts=st.lists(st.text("abc ", max_size=6), min_size=1, max_size=10), seed=seeds)
def test_whether_a_row_is_weak_does_not_depend_on_the_order(texts: list[str], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    weak = weak_rows(["a", "b", "c"], texts)
    assert weak_rows(["a", "b", "c"], [texts[i] for i in order]) == [weak[i] for i in order]
