"""Everything out, and in again."""

from __future__ import annotations

from starlette.responses import Response

from warmstart.exchange import MAX_CHUNK, MAX_CHUNK_MEMORIES, ExportQuery
from warmstart.memory import parse
from warmstart.web.api import answer, export_answer
from warmstart.web.dashboard.view import Visit
from warmstart.web.decode import read_import

#: As `warmstart import --from` calls them.
ORIGINS = (
    ("mcp-memory-service", "its SQLite database"),
    ("basic-memory", "a folder of markdown notes"),
    ("server-memory", "the reference server's memory.json"),
    ("agent-files", "CLAUDE.md, AGENTS.md"),
)


async def show(visit: Visit) -> Response:
    counts = await visit.memories.counts()
    return visit.show(
        "transfer.html", counts=counts, origins=ORIGINS, most_bytes=MAX_CHUNK, most_memories=MAX_CHUNK_MEMORIES
    )


async def export(visit: Visit) -> Response:
    return await export_answer(visit.memories, parse(ExportQuery, visit.query).format)


async def take(visit: Visit) -> Response:
    """Some lines of an export; the page's script sends one part after the other."""
    return answer(await visit.memories.import_memories(await read_import(visit.request)))
