"""From the hits of a search to those that are given to a prompt: relevant ones, each statement once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warmstart.memory import Hit
from warmstart.relevance import Matrix, grams, likeness, relevant, same_statement, sample, says_all, shared_weight
from warmstart.search import Outcome
from warmstart.terms import MAX_TERMS, search_text


def choose(hits: Sequence[Hit], outcome: Outcome, terms: Sequence[str]) -> list[Hit]:
    """Those of `hits` that have to do with the query of `terms` (as indexed), best first; often none."""
    if not hits:
        return []
    texts = [search_text(h.title, h.content, h.facts, h.tags, h.entities, h.type) for h in hits]
    weights = shared_weight(terms[:MAX_TERMS], texts, [c.evidence for c in outcome.texts])
    likenesses, memories = _likenesses(hits, outcome)
    keep = relevant(likenesses, weights, [says_all(terms, text) for text in texts], memories)
    return once([hit for hit, kept in zip(hits, keep, strict=True) if kept])


def once(hits: Sequence[Hit]) -> list[Hit]:
    """Of those that say the same the newest, at the place of the best: it replaced the others."""
    groups: list[list[tuple[Hit, frozenset[str]]]] = []
    for hit in hits:
        said = grams(hit.content)
        for group in groups:
            if any(same_statement(said, other) for _, other in group):
                group.append((hit, said))
                break
        else:
            groups.append([(hit, said)])
    return [max((h for h, _ in group), key=lambda h: (h.updated_at, h.id)) for group in groups]


def _likenesses(hits: Sequence[Hit], outcome: Outcome) -> tuple[list[float | None], int]:
    """How near the query is to each hit beyond what is usual, where its vector is at hand; and of how many vectors."""
    if outcome.query_vector is None:
        return [None] * len(hits), 0
    vectors = {c.id: c.evidence for c in outcome.near}
    if (snapshot := outcome.snapshot) is not None:
        background, memories = snapshot.vectors, len(snapshot.vectors)
        vectors |= snapshot.vectors_of([h.id for h in hits if h.id not in vectors])
    else:
        background, memories = _matrix([c.evidence for c in outcome.near]), outcome.memories
    there = [h.id for h in hits if h.id in vectors]
    if len(background) < 2 or not there:
        return [None] * len(hits), memories
    [query] = _unit(_matrix([outcome.query_vector]))
    scores = likeness(query, _unit(_matrix([vectors[i] for i in there])), _unit(_matrix(sample(background))))
    found = dict(zip(there, scores, strict=True))
    return [found.get(h.id) for h in hits], memories


def _matrix(vectors: Sequence[Sequence[float]] | Matrix) -> Matrix:
    return np.asarray(vectors, dtype=np.float32).reshape(len(vectors), -1)


def _unit(rows: Matrix) -> Matrix:
    unit: Matrix = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
