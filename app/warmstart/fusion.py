"""Reciprocal rank fusion: ranks from 1, k = 60, so that every possible score is arithmetic."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from warmstart.memory import RRF_K
from warmstart.store.reads import Candidate

#: First in one arm only: the most a search with one arm can give.
MAX_ONE_ARM: Final = 1 / (RRF_K + 1)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A fused hit; a rank is None where the arm did not have it. `score` is None on the scan rung."""

    id: str
    score: float | None
    vector: int | None = None
    text: int | None = None


def contribution(rank: int) -> float:
    return 1 / (RRF_K + rank)


def fuse(vector: Sequence[Candidate], text: Sequence[Candidate], weak: Container[str] = frozenset()) -> list[Ranked]:
    """Both arms as one list, by score, then the newer, then the id: equal input gives equal output.

    Rows of `text` in `weak` get no rank from it; the others keep theirs.
    """
    vector_rank = {c.id: rank for rank, c in enumerate(vector, 1)}
    text_rank = {c.id: rank for rank, c in enumerate(text, 1) if c.id not in weak}
    created = {c.id: c.created_us for c in (*vector, *text) if c.id in vector_rank or c.id in text_rank}
    fused = [
        Ranked(
            id=i,
            score=sum(contribution(ranks[i]) for ranks in (vector_rank, text_rank) if i in ranks),
            vector=vector_rank.get(i),
            text=text_rank.get(i),
        )
        for i in created
    ]
    fused.sort(key=lambda r: (-(r.score or 0.0), -created[r.id], r.id))
    return fused
