"""The ladder of a search: both arms, one arm, a literal scan; never an error where an answer exists.

hybrid    both arms answered (or the tenant has no vectors yet)
vector    full-text failed
keyword   no vector for the query, or the vector arm failed, or embedding is off
scan      no vector, and full-text gave nothing or failed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from warmstart.arms import CANDIDATES, vector_scores, weak_rows
from warmstart.config import Settings
from warmstart.embeddings import Embedder
from warmstart.errors import EmbeddingError, TenantAssertion
from warmstart.fusion import MAX_ONE_ARM, Ranked, fuse
from warmstart.memory import Mode, SearchRequest, fold
from warmstart.store.frequencies import Frequencies
from warmstart.store.maintenance import Maintenance
from warmstart.store.predicates import Predicate
from warmstart.store.reads import TIES, Candidate, Reader, filters_of
from warmstart.store.resident import Residents
from warmstart.store.snapshot import Snapshot
from warmstart.store.table import Table
from warmstart.terms import MAX_TERMS, keep_rarest, query_text

log = structlog.get_logger(__name__)

#: Arms under way at once; what ran past its budget counts until it ends.
MAX_ARMS: Final = 64
#: A scan costs more than the arms that it stands in for: under a load that makes these late, scans without a bound
#: would keep them late.
MAX_SCANS: Final = 4
#: How long the vector arm's computing waits for the text arm's query to be with the engine's threads, so that
#: both go on at once: until then each step of that query needs the same thread that computes.
_HEAD_START_S: Final = 0.005
#: How old the knowledge may be whether a tenant is large enough for the vector index.
_SIZE_AGE_S: Final = 60.0
_MAX_SIZES: Final = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds: for the whole search, for the query's vector, for one arm."""

    total: float
    embedding: float
    arm: float

    @classmethod
    def of(cls, settings: Settings) -> Budget:
        return cls(
            settings.search_budget_ms / 1000,
            settings.embed_query_budget_ms / 1000,
            settings.arm_budget_ms / 1000,
        )


@dataclass(slots=True)
class Outcome:
    """Ranked ids, best first, and how they came about."""

    ranked: list[Ranked] = field(default_factory=list)
    mode: Mode = "hybrid"
    degraded: list[str] = field(default_factory=list)
    #: The tenant as it was searched, where it is held in memory.
    snapshot: Snapshot | None = None
    #: What the arms found it by: the query's vector, the nearest rows with theirs, the rows of the text arm.
    query_vector: Sequence[float] | None = None
    near: Sequence[Candidate] = ()
    texts: Sequence[Candidate] = ()
    #: About how many rows the tenant has.
    memories: int = 0

    def degrade(self, reason: str) -> None:
        if reason not in self.degraded:
            self.degraded.append(reason)


class _ArmFailed(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(slots=True)
class _Asked:
    """One search under way."""

    user_id: str
    reader: Reader
    query: str
    filters: Sequence[Predicate]
    budget: Budget
    deadline: float
    #: Rows an arm ranks.
    depth: int
    #: Done once the text arm has no more use for this thread than to take the answer.
    text_begun: asyncio.Future[None]
    outcome: Outcome = field(default_factory=Outcome)
    #: The query's terms as indexed, where a vector arm makes them needed.
    terms: Sequence[str] = ()

    @property
    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def text_has_begun(self) -> None:
        if not self.text_begun.done():
            self.text_begun.set_result(None)


class Search:
    """The retrieval path over one table."""

    def __init__(self, settings: Settings, table: Table, embedder: Embedder, maintenance: Maintenance) -> None:
        self._settings = settings
        self._table = table
        self._embedder = embedder
        self._maintenance = maintenance
        self._frequencies = Frequencies(table, settings.scan_rows)
        self._residents = Residents(table, settings.resident_mb << 20)
        self._arms: set[asyncio.Task[Any]] = set()
        self._scans = asyncio.Semaphore(MAX_SCANS)
        self._sizes: dict[str, tuple[float, int]] = {}

    @property
    def vectors_off(self) -> str | None:
        """Why there is no vector arm, as of the table's last refresh: `migrating`, `disabled`, `space`, or None."""
        if self._table.migration is not None:
            return "migrating"
        if not self._settings.embedding_enabled:
            return "disabled"
        return "space" if self._table.space != self._settings.space else None

    async def run(self, user_id: str, request: SearchRequest, budget: Budget, depth: int | None = None) -> Outcome:
        """An arm ranks `depth` rows, or FETCH_DEPTH. Raises TenantAssertion, nothing else that a rung can answer."""
        await self._table.refresh()
        reader = Reader(self._table, user_id)
        deadline = time.monotonic() + budget.total
        asked = _Asked(
            user_id,
            reader,
            request.query,
            filters_of(request),
            budget,
            deadline,
            depth or self._settings.fetch_depth,
            asyncio.get_running_loop().create_future(),
        )
        outcome = asked.outcome
        text = self._spawn(self._text(asked), asked, "text")
        text.add_done_callback(lambda _: asked.text_has_begun())
        off = self.vectors_off
        vector = None if off else asyncio.create_task(self._vector_arm(asked))
        if vector:
            vector.add_done_callback(_looked_at)
        await asyncio.wait([t for t in (text, vector) if t is not None], timeout=asked.left)
        texts, vectors = _settle(text, outcome), _settle(vector, outcome)
        await self._table.refresh()
        # a migration may have begun or ended meanwhile: either way something may be missing
        for reason in (off, self.vectors_off):
            if reason in ("space", "migrating"):
                outcome.degrade(reason)

        if vectors is None and not texts:
            await self._scan(asked)
            return outcome
        if vectors is None:
            outcome.mode = "keyword"
        elif texts is None:
            outcome.mode = "vector"
        outcome.texts = texts or []
        weak = _weak(asked.terms, texts) if vectors and texts else frozenset[str]()
        outcome.ranked = self._cut(fuse(vectors or [], texts or [], weak), request.min_score, outcome)
        return outcome

    @staticmethod
    def _cut(ranked: list[Ranked], min_score: float | None, outcome: Outcome) -> list[Ranked]:
        if min_score is None:
            return ranked
        if outcome.mode != "hybrid" and min_score > MAX_ONE_ARM:
            # with one arm nothing can reach it: an empty answer would hide what was found
            outcome.degrade("min_score")
            return ranked
        return [r for r in ranked if (r.score or 0.0) >= min_score]

    async def terms(self, query: str) -> Sequence[str]:
        """The distinct terms of `query` as indexed; empty without an index."""
        return await self._frequencies.query_terms(query_text(query))

    # -- the arms

    async def _text(self, asked: _Asked) -> list[Candidate]:
        words = await self._words(asked.user_id, asked.query)
        if not words:
            return []
        if self.vectors_off:
            return await self._text_matches(asked, words)
        found, asked.terms = await asyncio.gather(self._text_matches(asked, words), self.terms(asked.query))
        return found

    async def _text_matches(self, asked: _Asked, words: str) -> list[Candidate]:
        depth = asked.depth
        # a held tenant has the other columns at hand, and each column read costs
        if (snapshot := self._residents.peek(asked.user_id)) is not None:
            matches = await asked.reader.text_matches(words, asked.filters, depth + TIES, asked.text_has_begun)
            if (found := snapshot.text_candidates(matches, depth)) is not None:
                return found
        return await asked.reader.text_arm(words, asked.filters, depth, asked.text_has_begun)

    async def _words(self, user_id: str, query: str) -> str:
        """The query as full-text reads it: each term once, and of too many the rarest."""
        words = query_text(query).split()
        if sum(len(w) if not w.isascii() else 1 + sum(not c.isalnum() for c in w) for w in words) <= MAX_TERMS:
            return " ".join({w.lower(): w for w in words}.values())
        terms = []
        for word, parts in zip(words, await self._frequencies.terms(words), strict=True):
            # a word of several terms (an unspaced script, a path) is kept or cut by its terms
            terms += [(parts[0], word)] if len(parts) == 1 else [(part, part) for part in parts]
        if len(dict(terms)) <= MAX_TERMS:
            return " ".join(keep_rarest(terms, lambda _: 0))
        return " ".join(keep_rarest(terms, await self._frequencies.of(user_id)))

    async def _vector_arm(self, asked: _Asked) -> list[Candidate]:
        try:
            values = await self._embedder.embed_query(asked.query, asked.budget.embedding)
        except EmbeddingError as error:
            raise _ArmFailed("embedding", str(error)) from error
        await self._table.refresh()
        if reason := self.vectors_off:  # meanwhile the table became one of another space
            raise _ArmFailed(reason, "the table's vectors are of another space by now")
        return await self._spawn(self._nearest(asked, values), asked, "vector")

    async def _nearest(self, asked: _Asked, values: Sequence[float]) -> list[Candidate]:
        rows = await self._rows_with_vectors(asked.reader, asked.user_id)
        large = rows > self._settings.vector_index_min_rows
        if not large and (snapshot := await self._residents.get(asked.user_id)):
            asked.outcome.snapshot = snapshot
            # a filter is the table's to apply, before it ranks
            near = snapshot.nearest(values, CANDIDATES) if len(asked.filters) == 1 else None
        else:
            near = None
        if near is None:
            exact = not (large and await self._maintenance.has_vector_index())
            near = await asked.reader.vector_arm(values, asked.filters, CANDIDATES, exact=exact)
        asked.outcome.query_vector, asked.outcome.near, asked.outcome.memories = values, near, rows
        if not near:
            return []
        await asyncio.wait([asked.text_begun], timeout=_HEAD_START_S)
        scores = vector_scores(np.asarray(values, dtype=np.float32), np.stack([c.evidence for c in near]))
        order = sorted(range(len(near)), key=lambda i: (-scores[i], -near[i].created_us, near[i].id))
        return [replace(near[i], score=scores[i]) for i in order[: asked.depth]]

    async def _rows_with_vectors(self, reader: Reader, user_id: str) -> int:
        """How large the tenant is, as known at most _SIZE_AGE_S ago."""
        known = self._sizes.get(user_id)
        at = time.monotonic()
        if known is None or at - known[0] > _SIZE_AGE_S:
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            known = self._sizes[user_id] = (at, await reader.size())
        return known[1]

    def _spawn(self, arm: Coroutine[Any, Any, T], asked: _Asked, reason: str) -> asyncio.Task[T]:
        """`arm` under its budget. Past it the caller goes on; the straggler keeps its place until it ends."""
        if len(self._arms) >= MAX_ARMS:
            arm.close()
            return asyncio.create_task(_fail(_ArmFailed(reason, f"{MAX_ARMS} arms are under way already")))
        task = asyncio.create_task(arm)
        self._arms.add(task)
        task.add_done_callback(self._ended)
        waiting = asyncio.create_task(_within(task, min(asked.budget.arm, asked.left), reason))
        waiting.add_done_callback(_looked_at)
        return waiting

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._arms.discard(task)
        _looked_at(task)

    # -- the scan

    async def _scan(self, asked: _Asked) -> None:
        outcome = asked.outcome
        outcome.mode = "scan"
        arm = self._spawn(self._newest(asked), asked, "scan")
        await asyncio.wait([arm], timeout=asked.left)
        rows = _settle(arm, outcome)
        if rows is not None:
            outcome.ranked = await asyncio.to_thread(scan, rows, scan_needles(asked.query))

    async def _newest(self, asked: _Asked) -> pa.Table:
        async with self._scans:
            if not asked.left:
                raise _ArmFailed("scan", f"{MAX_SCANS} scans were under way all the time")
            return await asked.reader.newest_texts(asked.filters, self._settings.scan_rows)

    async def close(self) -> None:
        for task in list(self._arms):
            task.cancel()
        await self._frequencies.close()
        await self._residents.close()


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Its error is who waits for it's to raise; a straggler has nobody, and must not be reported as forgotten."""
    if not task.cancelled():
        task.exception()


async def _fail(error: Exception) -> Any:
    raise error


async def _within(task: asyncio.Task[T], budget_s: float, reason: str) -> T:
    done, _ = await asyncio.wait({task}, timeout=budget_s)
    if not done:
        raise _ArmFailed(reason, f"took longer than {budget_s * 1000:.0f} ms")
    try:
        return task.result()
    except (TenantAssertion, _ArmFailed):
        raise
    except Exception as error:
        raise _ArmFailed(reason, str(error)) from error


def _settle(task: asyncio.Task[T] | None, outcome: Outcome) -> T | None:
    """What the arm gave; None, with the reason noted, where it gave nothing in time."""
    if task is None:
        return None
    if not task.done():
        task.cancel()
        outcome.degrade("budget")
        return None
    try:
        return task.result()
    except _ArmFailed as error:
        outcome.degrade(error.reason)
        event = "search.embedding.degraded" if error.reason == "embedding" else "search.arm.degraded"
        log.warning(event, reason=error.reason, detail=str(error)[:300])
        return None


def _weak(terms: Sequence[str], texts: Sequence[Candidate]) -> frozenset[str]:
    weak = weak_rows(terms[:MAX_TERMS], [c.evidence for c in texts])
    return frozenset(c.id for c, is_weak in zip(texts, weak, strict=True) if is_weak)


def scan_needles(query: str) -> list[str]:
    """What the scan looks for: the whole query, and each of its first words."""
    folded = fold(query).strip().lower()
    words = dict.fromkeys(w for w in query_text(query).lower().split() if len(w) > 1 or not w.isascii())
    return list(dict.fromkeys([folded, *list(words)[:MAX_TERMS]])) if folded else []


def scan(rows: pa.Table, needles: Sequence[str], most: int = 50) -> list[Ranked]:
    """Rows whose text has one of `needles` literally, most important first, then newest, then by id."""
    if not needles or not rows.num_rows:
        return []
    text = pc.utf8_lower(rows["search_text"])
    hit = pc.match_substring(text, needles[0])
    for needle in needles[1:]:
        hit = pc.or_(hit, pc.match_substring(text, needle))
    found = rows.select(["id", "importance", "created_at"]).filter(hit)
    order = [("importance", "descending"), ("created_at", "descending"), ("id", "ascending")]
    ids = found.sort_by(order)["id"].slice(0, most).to_pylist()
    return [Ranked(id=i, score=None) for i in ids]
