"""Stores to be migrated, and the command as an operator runs it: a process of its own, which can be killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lancedb
import pyarrow as pa

from warmstart.config import Settings, Space
from warmstart.memory import NewMemory
from warmstart.store.schema import TABLE, Row, row_of, schema
from warmstart.store.table import open_table

OLD = "old-model"
NEW = "new-model"
NOWHERE = "http://127.0.0.1:9/v1"
_THEN = datetime(2026, 1, 1, tzinfo=UTC)
TEXTS = ("the walrus", "Käse und Brot", "漢字かな交じり文", "line one\nline two\r\n\u2028tail ", '"quoted" \\ \t', "🦭")


def space(dim: int, model: str = OLD) -> Space:
    return Space(model, "", dim, "", "")


def rows_of(count: int, dim: int) -> list[Row]:
    """Memories of several tenants: some failed, some queued, some in the trash, of the same moment, or far from now."""
    dice = random.Random(count)
    rows = []
    for n in range(count):
        new = NewMemory(
            content=f"{TEXTS[n % len(TEXTS)]} {n}",
            title="given" if n % 4 == 0 else None,
            namespace=f"space-{n % 2}",
            facts=[TEXTS[(n + 1) % len(TEXTS)]] * (n % 3),
            tags=["a", "ü"][: n % 3],
            importance=dice.random(),
            metadata={"n": n, "nested": {"text": TEXTS[n % len(TEXTS)]}},
            occurred_at=datetime(1, 1, 1, tzinfo=UTC) if n % 7 == 0 else None,
        )
        at = _THEN + timedelta(seconds=dice.randrange(count), microseconds=dice.choice([0, 1, 999_999]))
        row = row_of(new, f"tenant-{n % 3}", at)
        row |= {"embedding": [dice.random() for _ in range(dim)], "embedding_status": "ready"}
        if n % 5 == 0:
            row |= {"embedding": None, "embedding_status": ("failed", "queued")[n % 2]}
        if n % 6 == 0:
            row |= {"deleted_at": _THEN, "expires_at": _THEN + timedelta(days=3_650, microseconds=n)}
        rows.append(row)
    return rows


async def make_store(directory: Path, rows: Sequence[Row], vectors_of: Space) -> None:
    table = await open_table(str(directory), vectors_of)
    for start in range(0, len(rows), 1_000):
        batch = rows[start : start + 1_000]
        await table.lance.add(pa.Table.from_pylist(list(batch), schema=schema(vectors_of)))


async def contents(directory: Path) -> list[Row]:
    """Every row, by id; opened as nobody in the product does."""
    lance = await (await lancedb.connect_async(str(directory))).open_table(TABLE)
    rows: list[Row] = (await lance.query().to_arrow()).to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def migrated(rows: Sequence[Row]) -> list[Row]:
    """What is to become of `rows`: all as it was, but for the vectors."""
    return sorted((r | {"embedding": None, "embedding_status": "queued"} for r in rows), key=lambda row: row["id"])


class Command:
    """`warmstart migrate dimension` on a home, with settings of its own; Postgres is not there unless named."""

    def __init__(self, home: Path, dim: int, model: str = NEW, **environ: str) -> None:
        self.home = home
        self.store = home / "lancedb"
        self.dim = dim
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "WARMSTART_HOME": str(home),
            "WARMSTART_ALLOW_ROOT": "True",
            "DATABASE_URL": "postgresql://nobody@127.0.0.1:9/none",
            "OPENAI_BASE_URL": NOWHERE,
            "EMBED_MODEL": model,
            "EMBEDDING_DIM": str(dim),
        } | environ

    def with_space(self, dim: int, model: str) -> Command:
        return Command(self.home, dim, model, **{"DATABASE_URL": self.environ["DATABASE_URL"]})

    def settings(self) -> Settings:
        return Settings.model_validate(
            {
                "warmstart_home": self.home,
                "database_url": self.environ["DATABASE_URL"],
                "openai_base_url": NOWHERE,
                "embed_model": self.environ["EMBED_MODEL"],
                "embedding_dim": self.dim,
            }
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        arguments = arguments or ("--to", str(self.dim))
        return subprocess.Popen(
            [sys.executable, "-m", "warmstart.cli", "migrate", "dimension", *arguments, "--json"],
            env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> Any:
        """The JSON object of its last line."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, (process.returncode, out, err)
        assert "Traceback" not in err
        return json.loads(out.splitlines()[-1])
