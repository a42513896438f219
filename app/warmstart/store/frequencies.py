"""How many of a tenant's memories have a term, for cutting long queries to their rarest words."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from warmstart.store import predicates as where
from warmstart.store.reads import Reader
from warmstart.store.table import Table

MAX_AGE_S: Final = 600.0
MAX_TENANTS: Final = 32
#: Queries whose terms are remembered.
MAX_QUERIES: Final = 512
#: A first long query waits this long for its tenant's counts, then goes by the length of the words.
WAIT_S: Final = 0.3
_CHUNK: Final = 200
#: Stands between texts that are split in one call; random, so that no text has it.
_BORDER: Final = "qz" + "".join(secrets.choice("bcdfghjklmnpqrtvwxz") for _ in range(24)) + "zq"

Frequency = Callable[[str], int]


class Frequencies:
    """Document frequencies by tenant, at most MAX_AGE_S old, over its newest `depth` rows."""

    def __init__(self, table: Table, depth: int) -> None:
        self._table = table
        self._depth = depth
        self._known: OrderedDict[str, tuple[float, Counter[str]]] = OrderedDict()
        self._counting: dict[str, asyncio.Task[Counter[str]]] = {}
        self._split: dict[str, tuple[str, ...]] = {}

    async def terms(self, texts: Sequence[str]) -> list[list[str]]:
        """The terms of each text, as the index makes them."""
        joined = f" {_BORDER} ".join(texts)
        split: list[list[str]] = [[]]
        for token in await self._table.lance.tokenize(joined, column="search_text"):
            if token.text == _BORDER:
                split.append([])
            else:
                split[-1].append(token.text)
        return split

    async def query_terms(self, text: str) -> tuple[str, ...]:
        """The distinct terms of a query; the same query is often asked again. Empty without an index."""
        if (known := self._split.get(text)) is not None:
            return known
        try:
            [terms] = await self.terms([text])
        except (RuntimeError, ValueError):
            return ()
        if len(self._split) >= MAX_QUERIES:
            self._split.clear()
        self._split[text] = tuple(dict.fromkeys(terms))
        return self._split[text]

    async def of(self, user_id: str) -> Frequency:
        known = self._known.get(user_id)
        if known and time.monotonic() - known[0] < MAX_AGE_S:
            self._known.move_to_end(user_id)
            return known[1].__getitem__
        task = self._counting.get(user_id)
        if task is None:
            task = asyncio.create_task(self._count(user_id))
            self._counting[user_id] = task
            task.add_done_callback(lambda t: self._counted(user_id, t))
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        if done and not task.cancelled() and task.exception() is None:
            return task.result().__getitem__
        return known[1].__getitem__ if known else lambda _: 0

    def _counted(self, user_id: str, task: asyncio.Task[Counter[str]]) -> None:
        del self._counting[user_id]
        if task.cancelled() or task.exception() is not None:
            return
        self._known[user_id] = (time.monotonic(), task.result())
        while len(self._known) > MAX_TENANTS:
            self._known.popitem(last=False)

    async def _count(self, user_id: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        texts = await Reader(self._table, user_id).newest_texts([where.active()], self._depth)
        for start in range(0, texts.num_rows, _CHUNK):
            chunk = texts["search_text"].slice(start, _CHUNK).to_pylist()
            for terms in await self.terms(chunk):
                counts.update(set(terms))
        return counts

    async def close(self) -> None:
        for task in list(self._counting.values()):
            task.cancel()
