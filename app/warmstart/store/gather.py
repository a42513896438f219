"""Small commits written once more as one, so that reads stay fast between two compactions.

Every commit leaves a fragment of its own, and every query opens each of them:
with 100, a read takes five to ten times what it takes with one. A compaction
mends that, but folds the indices too, which takes too long to do after every
few saves. Writing the newest rows again under their ids takes some 30 ms, and
is one commit: at no time are they there twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lancedb.table import AsyncTable

from warmstart.config import Space
from warmstart.store import predicates as where
from warmstart.store.schema import TEXT_INDEX, schema

#: Small commits after which their rows are written as one fragment.
COMMITS: Final = 8
#: Rows of a commit that is left as it is.
SMALL: Final = 64
#: Rows are written again and again until so many have come together; the rest is the compaction's.
MAX_ROWS: Final = 500


class Gatherer:
    """Which rows lie in small fragments, as far as this process wrote them."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._commits = 0

    def note(self, touched: Mapping[str, Sequence[str] | None] | None) -> None:
        """A commit that wrote the rows of `touched` (tenant → ids; None: nobody knows which)."""
        rows = [memory_id for ids in (touched or {}).values() for memory_id in ids or ()]
        if 0 < len(rows) <= SMALL:
            self._ids |= dict.fromkeys(rows)
            self._commits += 1

    @property
    def is_due(self) -> bool:
        return self._commits >= COMMITS

    def forget(self) -> None:
        """The rows noted so far stay where they are."""
        self._ids, self._commits = {}, 0

    async def run(self, lance: AsyncTable, space: Space) -> None:
        """Rewrite the rows noted, as they are now, into one fragment. Under the write lock, on the newest version."""
        shape = schema(space)
        rows = await lance.query().where(where.one_of("id", list(self._ids)).sql).select(shape.names).to_arrow()
        index = await lance.index_stats(TEXT_INDEX)
        if index is None or index.num_unindexed_rows < rows.num_rows:
            self.forget()  # a compaction was faster, of whichever process
            return
        if rows.num_rows:
            await (
                lance.merge_insert("id")
                .when_matched_update_all()
                # a row that waits for its vector has none, which is a bad one for the engine
                .execute(rows.cast(shape), on_bad_vectors="null")
            )
        self.forget()
        if rows.num_rows < MAX_ROWS:
            self._ids = dict.fromkeys(rows["id"].to_pylist())
