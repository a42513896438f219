"""Small commits written once more as one, so that reads stay fast between two compactions.

Every commit leaves a fragment of its own, and every query opens each of them:
with 100, a read takes five to ten times what it takes with one. A compaction
mends that, but folds the indices too, which takes too long to do after every
few saves. Writing the newest rows again under their ids takes some 30 ms, and
is one commit: at no time are they there twice, or not at all. Eight commits
become one, eight of those again one, as long as that is small: so a row is
rewritten three times at most, and there are few fragments at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lancedb.table import AsyncTable

from warmstart.config import Space
from warmstart.store import predicates as where
from warmstart.store.schema import TEXT_INDEX, schema
from warmstart.store.table import query_of, rewrite

#: Small commits after which their rows are written as one.
COMMITS: Final = 8
#: Rows of a commit that is left as it is; COMMITS of the largest that isn't are within the bounds of a predicate.
SMALL: Final = 64


class Gatherer:
    """Which rows lie in small fragments, as far as this process wrote them."""

    def __init__(self) -> None:
        #: By how often they were gathered: the rows of each commit.
        self._levels: list[list[list[str]]] = []

    def note(self, touched: Mapping[str, Sequence[str] | None] | None) -> None:
        """A commit that wrote the rows of `touched` (tenant → ids; None: nobody knows which)."""
        self._add(0, [memory_id for ids in (touched or {}).values() for memory_id in ids or ()])

    def _add(self, level: int, rows: list[str]) -> None:
        if 0 < len(rows) <= SMALL:
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(rows)

    @property
    def is_due(self) -> bool:
        return any(len(commits) >= COMMITS for commits in self._levels)

    def forget(self) -> None:
        """The rows noted so far stay where they are."""
        self._levels = []

    async def run(self, lance: AsyncTable, space: Space) -> None:
        """Rewrite the rows of COMMITS commits, as they are now, into one fragment.

        Under the write lock, on the newest version.
        """
        level = next(i for i, commits in enumerate(self._levels) if len(commits) >= COMMITS)
        commits, self._levels[level] = self._levels[level], []
        ids = list(dict.fromkeys(memory_id for rows in commits for memory_id in rows))
        shape = schema(space)
        rows = await query_of(lance).where(where.one_of("id", ids).sql).select(shape.names).to_arrow()
        index = await lance.index_stats(TEXT_INDEX)
        if index is None or index.num_unindexed_rows < rows.num_rows:
            self.forget()  # a compaction was faster, of whichever process
            return
        if rows.num_rows:
            await rewrite(lance, rows.cast(shape))
        self._add(level + 1, rows["id"].to_pylist())
