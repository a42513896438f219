"""The `memory_history` table: made when the first memory is edited, written under the lock of `memories`.

A release that doesn't know of it leaves it alone; what it leaves behind of
memories it removed, the worker removes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog
from lancedb import AsyncConnection
from lancedb.index import BTree
from lancedb.table import AsyncTable

from warmstart.errors import StoreUnavailable
from warmstart.store import predicates as where
from warmstart.store.repair import (
    drop_damaged_indices,
    go_back_to_whole_version,
    has_damaged_index,
    has_version,
    set_table_aside,
)
from warmstart.store.schema import HISTORY, history_schema

log = structlog.get_logger(__name__)

INDEXED: Final = "memory_id"


class HistoryTable:
    """The handle, opened where there is a table."""

    def __init__(self, connection: AsyncConnection, directory: Path | None) -> None:
        self._connection = connection
        self.directory = directory
        self._lance: AsyncTable | None = None

    async def find(self) -> AsyncTable | None:
        if self._lance is None and self.directory and has_version(self.directory, HISTORY):
            self._lance = await self._connection.open_table(HISTORY)
        return self._lance

    async def make(self) -> AsyncTable:
        """The table, made where there is none; only under the write lock."""
        lance = await self.find()
        if lance is None:
            lance = await self._connection.create_table(HISTORY, schema=history_schema(), exist_ok=True)
            await _ensure_index(lance)
            self._lance = lance
        await lance.checkout_latest()  # type: ignore[no-untyped-call]
        return lance

    async def pinned(self) -> AsyncTable | None:
        """A handle that stays at the newest version there is now."""
        lance = await self.find()
        if lance is None:
            return None
        version = await lance.version()
        pinned = await self._connection.open_table(HISTORY)
        await pinned.checkout(version)
        return pinned

    async def check(self) -> None:
        """See that it can be read, and its index used; only under the write lock."""
        lance = await self.find()
        if lance is None or self.directory is None:
            return
        await lance.count_rows(where.compare("version", ">", 0).sql)
        if has_damaged_index(self.directory, HISTORY):
            await drop_damaged_indices(lance)
        await _ensure_index(lance)


async def _ensure_index(lance: AsyncTable) -> None:
    if not any(index.columns == [INDEXED] for index in await lance.list_indices()):
        await lance.create_index(INDEXED, config=BTree())


def repair_history(directory: Path) -> list[str]:
    """What a power cut left of it, made whole, or else moved aside as it is: memories are served all the same."""
    try:
        return go_back_to_whole_version(directory, HISTORY)
    except StoreUnavailable as error:
        aside = set_table_aside(directory, HISTORY)
        log.error(
            "store.history.set_aside",
            set_aside=aside,
            reason=error.detail,
            meaning="no memory is missing; their earlier texts are in the backup, or in what was set aside",
        )
        return [aside]
