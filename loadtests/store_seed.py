"""Puts memories with their vectors into the store of this environment: `loadtests.seeding` sends it there.

A program of its own that imports nothing but the service, since it runs in a container too, where there are no load
tests. It reads a line `{"topics": [text, …], "seed"}`, then lines `{"user_id", "topic", "memory"}`, and says how
many rows it inserted.

Embedding ten thousand texts takes a quarter of an hour on two cores, so only the topics are embedded. A memory's
vector is its topic's with noise around it: neighbours of one topic (a cosine of 0.8, about that of related texts), each
a vector of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from warmstart.config import Settings, load
from warmstart.embeddings import Embedder
from warmstart.local_cache import LocalCache
from warmstart.memory import NewMemory
from warmstart.store.maintenance import Maintenance
from warmstart.store.schema import Row, row_of
from warmstart.store.table import open_table
from warmstart.store.writer import MAX_GROUP_ROWS, Writer

#: Length of the noise, where a vector has length 1.
NOISE = 0.5
EMBED_TIMEOUT_S = 120.0
#: The newest row is so old, and each one before it older.
NEWEST = timedelta(hours=1)
APART = timedelta(minutes=1)


async def topic_vectors(settings: Settings, topics: list[str]) -> Any:
    """One row a topic."""
    if settings.openai_base_url:
        embedder = Embedder(settings, LocalCache(), base_url=settings.openai_base_url)
        return np.asarray(await embedder.embed_documents(topics, EMBED_TIMEOUT_S), dtype=np.float32)
    from warmstart.local_embedder import LocalEmbedder

    local = LocalEmbedder()
    await local.start()
    try:
        embedder = Embedder(settings, LocalCache(), base_url=local.base_url, transport=local.transport)
        return np.asarray(await embedder.embed_documents(topics, EMBED_TIMEOUT_S), dtype=np.float32)
    finally:
        await local.stop()


def row(line: str, vectors: Any, noise: Any, at: datetime) -> Row:
    given = json.loads(line)
    around = noise.standard_normal(vectors.shape[1]).astype(np.float32)
    vector = vectors[given["topic"]] + around * (NOISE / np.linalg.norm(around))
    made = row_of(NewMemory.model_validate(given["memory"]), given["user_id"], at)
    return made | {"embedding": (vector / np.linalg.norm(vector)).tolist(), "embedding_status": "ready"}


async def main() -> None:
    settings = load()
    first = json.loads(sys.stdin.readline())
    vectors = await topic_vectors(settings, first["topics"])
    noise, at, inserted = np.random.default_rng(first["seed"]), datetime.now(UTC) - NEWEST, 0
    table = await open_table(settings.lancedb, settings.space)
    writer = Writer(table, settings.space)
    writer.start()
    while lines := list(itertools.islice(sys.stdin, MAX_GROUP_ROWS)):
        rows = [row(line, vectors, noise, at - (inserted + i) * APART) for i, line in enumerate(lines)]
        inserted += sum(not one.duplicate for one in await writer.insert(rows))
    maintenance = Maintenance(table, writer, settings.vector_index_min_rows, settings.version_retention_s)
    await maintenance.optimize()
    await writer.close()
    print(inserted)


asyncio.run(main())
