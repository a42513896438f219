"""A real store in a directory, with vectors narrow enough for many small tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from warmstart.config import Space
from warmstart.memory import Memory, NewMemory
from warmstart.store.changes import BackfillWriter, TenantWriter
from warmstart.store.maintenance import Maintenance
from warmstart.store.reads import Reader
from warmstart.store.schema import Row, now, row_of
from warmstart.store.table import Table, open_table
from warmstart.store.writer import Writer

DIM = 8
SPACE = Space("test-model", "1", DIM, "", "")
TRASH = timedelta(days=30)


@dataclass
class Store:
    table: Table
    writer: Writer

    def reader(self, user_id: str = "alice") -> Reader:
        return Reader(self.table, user_id)

    def tenant(self, user_id: str = "alice", trash: timedelta = TRASH) -> TenantWriter:
        return TenantWriter(self.table, self.writer, user_id, trash)

    def backfill(self, dim: int = DIM) -> BackfillWriter:
        return BackfillWriter(self.table, self.writer, dim)

    def maintenance(self, min_rows: int = 50_000, retention_s: int = 600) -> Maintenance:
        return Maintenance(self.table, self.writer, min_rows, retention_s)

    async def all_rows(self, user_id: str = "alice") -> list[Row]:
        return await self.reader(user_id).page([], "recency", None, 100_000)

    async def save(self, *contents: str, **fields: Any) -> list[str]:
        return [i.id for i in await self.writer.insert([row(c, **fields) for c in contents])]


@asynccontextmanager
async def open_store(directory: Path, *, vectors: bool = True) -> AsyncIterator[Store]:
    table = await open_table(str(directory), SPACE)
    writer = Writer(table, SPACE if vectors else None)
    writer.start()
    try:
        yield Store(table, writer)
    finally:
        await writer.close()


def row(
    content: str,
    *,
    user_id: str = "alice",
    at: datetime | None = None,
    vector: list[float] | None = None,
    **fields: Any,
) -> Row:
    made = row_of(NewMemory(content=content, **fields), user_id, at or now())
    if vector is not None:
        made |= {"embedding": vector, "embedding_status": "ready"}
    return made


def etag(row: Row) -> str:
    return Memory.model_validate(row | {"metadata": json.loads(row["metadata"])}).etag


def manifests(directory: Path) -> list[Path]:
    """Newest first."""
    return sorted((directory / "memories.lance" / "_versions").glob("*.manifest"))
