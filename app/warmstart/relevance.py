"""Whether a memory has to do with a prompt: what decides between a block and silence.

Ranking can't tell: something is always first. Neither can a fixed similarity,
since the model's lie between 0.7 and 0.9 for anything. So each memory is asked
how near the prompt is to it compared with how near its tenant's other memories
are, and how much of the prompt's weight in words it carries.
`loadtests/quality/README.md` has how often this is wrong, both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from warmstart.arms import FULL_LIST
from warmstart.memory import fold

Matrix = npt.NDArray[np.float32]

#: Vectors of a tenant that its memories are compared with; more tell no more.
SAMPLE: Final = 256
#: With fewer vectors too little is known about how near memories are to each other.
MIN_BACKGROUND: Final = 5
#: Standard deviations of likeness that a unit of weight in shared words stands for.
TEXT_WEIGHT: Final = 0.4
#: The best of many unrelated memories is nearer by chance: its expected excess grows with sqrt(2 ln n).
#: A line through what was measured for tenants of 10 to 200 memories.
SLOPE: Final = 0.65
OFFSET: Final = 0.85
#: A block is given for its best memory; others come with it that are so much less.
COMPANION: Final = 0.5
#: Two contents are near-duplicates where they share this much of their runs of GRAM letters.
GRAM: Final = 4
SAME: Final = 0.6
#: What shared words alone must reach where there are no vectors to compare.
TEXT_ALONE: Final = 1.3


def threshold(memories: int) -> float:
    """The least `likeness` + TEXT_WEIGHT · `shared_weight` of what is given, of a tenant of so many memories."""
    return SLOPE * math.sqrt(2 * math.log(max(memories, 2))) - OFFSET


def sample(vectors: Matrix) -> Matrix:
    """At most SAMPLE of `vectors`, evenly spread over them, so that the same tenant gives the same ones."""
    step = -(-len(vectors) // SAMPLE) if len(vectors) else 1
    return vectors[::step]


def likeness(query: Matrix, rows: Matrix, background: Matrix) -> list[float]:
    """For each of `rows` (n × dim): how many standard deviations nearer `query` is to it than `background` is.

    All are unit vectors; `background` may hold the rows themselves, which are left out of their own comparison.
    """
    cosine = rows @ query
    others = rows @ background.T
    others[others > 1 - 1e-5] = np.nan
    mean, spread = np.nanmean(others, axis=1), np.nanstd(others, axis=1)
    scores: Matrix = (cosine - mean) / np.maximum(spread, 1e-3)
    return [round(float(s), 5) for s in scores]


def shared_weight(terms: Sequence[str], texts: Sequence[str], arm: Sequence[str]) -> list[float]:
    """For each of `texts`: the weight of the query's `terms` in it, times its share of the weight of all.

    A term weighs more the fewer of the text arm's rows `arm` have it, as in `arms.weak_rows`.
    """
    if not terms:
        return [0.0] * len(texts)
    lowered = [t.lower() for t in arm]
    rows = max(len(lowered), FULL_LIST)
    weights = []
    for term in terms:
        having = sum(term in text for text in lowered)
        weights.append(math.log(1 + (rows - having + 0.5) / (having + 0.5)))
    total = sum(weights)
    carried = [sum(w for w, t in zip(weights, terms, strict=True) if t in text.lower()) for text in texts]
    return [round(c * c / total, 5) for c in carried]


def says_all(terms: Sequence[str], text: str) -> bool:
    """Whether `text` has every one of the query's terms: then it is about it, however common they are."""
    lowered = text.lower()
    return bool(terms) and all(term in lowered for term in terms)


def relevant(
    likenesses: Sequence[float | None], weights: Sequence[float], whole: Sequence[bool], memories: int
) -> list[bool]:
    """Which hits to give, of a tenant with so many vectors.

    A likeness is None where it can't be told; `whole`: which of them say all of the query's terms. All or nothing
    hangs on the best one, so that a block is not cut to a fragment.
    """
    if memories < MIN_BACKGROUND or not any(value is not None for value in likenesses):
        return [said or weight >= TEXT_ALONE for weight, said in zip(weights, whole, strict=True)]
    least = threshold(memories)
    found = [(value or 0.0) + TEXT_WEIGHT * weight for value, weight in zip(likenesses, weights, strict=True)]
    speaks = any(whole) or max(found) >= least
    return [said or (speaks and value >= least - COMPANION) for value, said in zip(found, whole, strict=True)]


def grams(text: str) -> frozenset[str]:
    """The runs of GRAM letters by which two texts are compared."""
    flat = " ".join(fold(text).lower().split())
    return frozenset(flat[i : i + GRAM] for i in range(max(1, len(flat) - GRAM + 1)))


def same_statement(first: frozenset[str], second: frozenset[str]) -> bool:
    """Whether two contents, as `grams`, say the same but for a word or a number: most runs are in both."""
    return len(first & second) >= SAME * len(first | second)
