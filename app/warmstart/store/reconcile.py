"""Makes `memory_status` agree with LanceDB, which is the truth, in constant memory.

LanceDB's rows are copied into a temporary table, then compared in Postgres, all
in one transaction. A state noted after the start is newer than what was read, so
it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import AsyncConnection

COPY_BUDGET_S: Final = 5.0
#: A million rows that all differ take about a third of this.
MERGE_BUDGET_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Reconciled:
    inserted: int
    updated: int
    deleted: int


async def run(
    conn: AsyncConnection[dict[str, Any]], rows: AsyncIterator[list[tuple[str, str, str]]], space_json: str
) -> Reconciled:
    """`rows`: batches of (memory_id, user_id, status), each memory once. Raises TimeoutError."""
    started = datetime.now(UTC)
    async with conn.transaction():
        async with asyncio.timeout(COPY_BUDGET_S):
            await conn.execute(
                "CREATE TEMP TABLE truth"
                " (memory_id text NOT NULL, user_id text NOT NULL, status text NOT NULL) ON COMMIT DROP"
            )
        async for batch in rows:
            async with (
                asyncio.timeout(COPY_BUDGET_S),
                conn.cursor() as cursor,
                cursor.copy("COPY truth FROM STDIN") as copy,
            ):
                for row in batch:
                    await copy.write_row(row)
        async with asyncio.timeout(MERGE_BUDGET_S):
            await conn.execute("ANALYZE truth")
            merged = await (await conn.execute(_MERGE, {"space": space_json, "started": started})).fetchone()
            deleted = await conn.execute(_DELETE, {"started": started})
    counts = merged or {"inserted": 0, "updated": 0}
    return Reconciled(counts["inserted"], counts["updated"], deleted.rowcount)


# Only rows that differ are written. A status that went back to `queued` starts its attempts anew.
_MERGE: Final = """
WITH merged AS (
    INSERT INTO memory_status AS m (memory_id, user_id, status, space, updated_at)
    SELECT DISTINCT ON (t.memory_id) t.memory_id, t.user_id, t.status,
           CASE WHEN t.status = 'ready' THEN %(space)s::jsonb END, %(started)s
    FROM truth t LEFT JOIN memory_status s USING (memory_id)
    WHERE s.memory_id IS NULL OR s.status <> t.status OR s.user_id <> t.user_id
    ORDER BY t.memory_id
    ON CONFLICT (memory_id) DO UPDATE SET
        user_id = excluded.user_id,
        status = excluded.status,
        attempts = CASE excluded.status WHEN 'failed' THEN m.attempts ELSE 0 END,
        next_attempt_at = NULL,
        reason = CASE excluded.status WHEN 'failed' THEN m.reason END,
        space = excluded.space,
        updated_at = excluded.updated_at
    WHERE m.updated_at < excluded.updated_at
    RETURNING (xmax = 0) AS inserted
)
SELECT count(*) FILTER (WHERE inserted) AS inserted, count(*) FILTER (WHERE NOT inserted) AS updated
FROM merged
"""

_DELETE: Final = """
DELETE FROM memory_status s
WHERE s.updated_at < %(started)s AND NOT EXISTS (SELECT FROM truth t WHERE t.memory_id = s.memory_id)
"""
