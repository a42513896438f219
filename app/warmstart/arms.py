"""How each arm of a hybrid search orders and admits its rows, before ranks are fused.

Rank fusion trusts a rank more than it should: a row in the middle of both
lists beats the first of one. So the quality of the fused list is decided here:
the vector arm corrects what its model is known to get wrong, and the text arm
keeps to rows that carry a fair share of the query.
`loadtests/quality/README.md` has what each step gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

#: The nearest rows that the vector arm orders anew; its best 50 are ranked.
CANDIDATES: Final = 100
#: With fewer there is nothing to learn from the neighbourhood.
_MIN_CANDIDATES: Final = 20
#: A text near everything is near every query: its closeness to its own neighbours counts against it.
HUB_NEIGHBOURS: Final = 10
HUB_WEIGHT: Final = 0.2
#: Directions that candidates share say which language they are in, rather than what they are about.
COMMON_DIRECTIONS: Final = 3
_ITERATIONS: Final = 8
#: The share of the query's weight that a row must carry to enter the text arm beside a vector arm.
MIN_COVERAGE: Final = 0.3
FULL_LIST: Final = 50
#: The last digits are what rounding left; ties must not be told by them.
_DIGITS: Final = 5
#: Of a unit vector: what is shorter is what rounding left, and points nowhere.
_NOTHING: Final = 1e-4

# these products are small: handing them to several threads costs ten times what they take
threadpool_limits(limits=1, user_api="blas")

Matrix = npt.NDArray[np.float32]


def vector_scores(query: Matrix, rows: Matrix) -> list[float]:
    """A score for each of `rows` (n × dim, nearest first): higher is nearer to `query` (dim).

    Two views of the same cosine, as standard scores: less the row's closeness to
    its own neighbours, and with the candidates' common directions taken out.
    """
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    # sums differ in their last digits with the order of the rows, which must not show: theirs is that of their numbers
    keys = [row.tobytes() for row in rows]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rows = rows[order]
    query = query / max(float(np.linalg.norm(query)), 1e-12)
    cosine = np.einsum("ij,j->i", rows, query)
    score = cosine if len(rows) < _MIN_CANDIDATES else _corrected(cosine, query, rows)
    # equal vectors get the score of the first: a product's last digits differ with a row's place too
    scores: dict[bytes, float] = {}
    for place, value in zip(order, score.tolist(), strict=True):
        scores.setdefault(keys[place], round(value, _DIGITS))
    return [scores[key] for key in keys]


def _corrected(cosine: Matrix, query: Matrix, rows: Matrix) -> Matrix:
    """The sum of both views; `cosine` are those of `rows` to `query`."""
    likeness = rows @ rows.T
    np.fill_diagonal(likeness, -1.0)
    near = np.partition(likeness, -HUB_NEIGHBOURS, axis=1)[:, -HUB_NEIGHBOURS:].mean(axis=1)
    return _standard(cosine - HUB_WEIGHT * near) + _standard(_without_common(query, rows))


def _without_common(query: Matrix, rows: Matrix) -> Matrix:
    """Cosines to `query` after centring and removing the directions in which `rows` vary most."""
    mean = rows.mean(axis=0)
    centred, wanted = rows - mean, query - mean
    common = _strongest_directions(centred)
    centred -= (centred @ common) @ common.T
    wanted = wanted - common @ (common.T @ wanted)
    lengths, length = np.linalg.norm(centred, axis=1), float(np.linalg.norm(wanted))
    cosines: Matrix = (centred @ wanted) / np.maximum(lengths * length, 1e-9)
    # few directions among the rows: all of them were taken out, and the rest is noise
    cosines[(lengths < _NOTHING) | (length < _NOTHING)] = 0.0
    return cosines


def _strongest_directions(centred: Matrix) -> Matrix:
    """An orthonormal basis (dim × COMMON_DIRECTIONS) of where `centred` (n × dim) varies most.

    Subspace iteration on the small side, n × n: a tenth of an exact decomposition's time.
    It stops before it has converged, so where it starts must not depend on the order of the rows.
    """
    spread = centred @ centred.T
    basis = centred @ _start(centred.shape[1])
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(spread @ basis)[0]
    directions: Matrix = np.linalg.qr(centred.T @ basis)[0]
    return directions


@lru_cache(maxsize=4)
def _start(dim: int) -> Matrix:
    return np.random.default_rng(0).standard_normal((dim, COMMON_DIRECTIONS)).astype(np.float32)


def _standard(values: Matrix) -> Matrix:
    spread = float(values.std())
    standard: Matrix = (values - values.mean()) / (spread if spread > 1e-6 else 1.0)
    return standard


def weak_rows(terms: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Which of `texts` (a text arm's rows) carry too little of a query of `terms` (as indexed).

    A term weighs more the fewer of the rows have it; one that none has weighs most.
    """
    if not terms or not texts:
        return [False] * len(texts)
    found = [[term in text for term in terms] for text in (t.lower() for t in texts)]
    # as if the list were full: among a few rows every term would look common
    rows = max(len(texts), FULL_LIST)
    weights = []
    for i in range(len(terms)):
        having = sum(has[i] for has in found)
        weights.append(math.log(1 + (rows - having + 0.5) / (having + 0.5)))
    total = sum(weights)
    return [sum(w for w, has in zip(weights, row, strict=True) if has) < MIN_COVERAGE * total for row in found]
