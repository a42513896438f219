"""What Postgres keeps: tenants, key hashes, a status row a memory, jobs, audit. Never a memory's text.

Every awaited method ends within CALL_BUDGET_S and raises BookkeepingUnavailable
when Postgres does not answer. `note`, `note_gone` and `audit` never wait: what
they are given goes into bounded queues that one background task writes out.
LanceDB is the truth about memories; `reconcile` makes the status rows agree.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from warmstart.errors import Conflict, Invalid, NotFound
from warmstart.store import reconcile
from warmstart.store.database import CALL_BUDGET_S
from warmstart.store.outbox import (
    MAX_NAME,
    MAX_REASON,
    Event,
    Outbox,
    State,
    audit_entry,
    clean,
    insert_audit,
    insert_events,
)

AUDIT_DAYS: Final = 90
EVENT_DAYS: Final = 30
PURGE_BATCH: Final = 5_000
RESET_BATCH: Final = 5_000
KEY_PREFIX: Final = "ws_sk_"
#: Who acts where no tenant does, in the audit.
OPERATOR: Final = "operator"
SHOWN_CHARS: Final = len(KEY_PREFIX) + 4


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    tenant_id: str
    name: str
    prefix: str
    unlimited: bool
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What a login needs to know of an active key."""

    hash: str
    key_id: str
    tenant_id: str
    unlimited: bool


@dataclass(frozen=True, slots=True)
class Attempts:
    attempts: int
    next_attempt_at: datetime | None
    reason: str | None


def hash_key(key: str) -> str:
    """The SHA-256 of an API key, in hex: the only form in which one is kept."""
    return hashlib.sha256(key.encode()).hexdigest()


class Bookkeeping(Outbox):
    # -- memories, for the worker

    async def attempts(self, memory_ids: Sequence[str]) -> dict[str, Attempts]:
        """Past attempts at embedding, of those of `memory_ids` that have a row or a state that waits."""
        found: dict[str, Attempts] = {}
        async with self.connection() as conn:
            rows = await conn.execute(
                "SELECT memory_id, attempts, next_attempt_at, reason FROM memory_status WHERE memory_id = ANY(%s)",
                (list(memory_ids),),
            )
            async for row in rows:
                found[row["memory_id"]] = Attempts(row["attempts"], row["next_attempt_at"], row["reason"])
        for memory_id in memory_ids:
            state = self._pending.get(memory_id)
            if isinstance(state, State):
                found[memory_id] = Attempts(state.attempts, state.next_attempt_at, state.reason)
            elif state is not None:
                found.pop(memory_id, None)
        return found

    async def reconcile(self, rows: AsyncIterator[list[tuple[str, str, str]]], space_json: str) -> reconcile.Reconciled:
        """Makes the status rows agree with LanceDB's (memory_id, user_id, status), given in batches.

        As a whole it takes as long as `rows` does; each step of it is bounded.
        """
        dropped = self.dropped
        async with self.unbounded_connection() as conn:
            done = await reconcile.run(conn, rows, space_json)
        if dropped == self.dropped:
            self.needs_reconcile = False
        return done

    async def reset_statuses(self) -> int:
        """Queues up to RESET_BATCH memories anew, none of whose vectors are there any more; how many it were."""
        async with self.connection() as conn:
            done = await conn.execute(_RESET_STATUSES, (RESET_BATCH,))
            return done.rowcount

    async def status_counts(self, user_id: str) -> dict[str, int]:
        async with self.connection() as conn:
            rows = await conn.execute(
                "SELECT status, count(*) AS n FROM memory_status WHERE user_id = %s GROUP BY status",
                (user_id,),
            )
            return {row["status"]: row["n"] async for row in rows}

    async def job_ran(self, name: str, error: str | None = None) -> None:
        async with self.connection() as conn:
            await conn.execute(
                "INSERT INTO jobs (name, last_run_at, last_error) VALUES (%s, now(), %s) ON CONFLICT (name)"
                " DO UPDATE SET last_run_at = excluded.last_run_at, last_error = excluded.last_error",
                (name, clean(error, MAX_REASON) if error else None),
            )

    async def purge(self) -> int:
        """Removes audit rows over AUDIT_DAYS and events over EVENT_DAYS old; answers how many."""
        removed = 0
        for statement, days in ((_PURGE_AUDIT, AUDIT_DAYS), (_PURGE_EVENTS, EVENT_DAYS)):
            while True:
                async with self.connection() as conn:
                    count = (await conn.execute(statement, (days, PURGE_BATCH))).rowcount
                removed += count
                if count < PURGE_BATCH:
                    break
        return removed

    # -- events

    async def record_event(self, event: Event, budget_s: float) -> bool:
        """Whether it is new: the tenant had no event of its id in the last EVENT_DAYS."""
        async with self.connection(budget_s) as conn:
            return await insert_events(conn, [event]) == 1

    # -- tenants and keys

    async def create_tenant(self, name: str) -> str:
        tenant_id = "usr_" + secrets.token_hex(10)
        async with self.connection() as conn, conn.transaction():
            await conn.execute("INSERT INTO tenants (id, name) VALUES (%s, %s)", (tenant_id, _name(name)))
            await insert_audit(conn, [audit_entry(OPERATOR, "tenant.create", tenant_id, {})])
        return tenant_id

    async def tenants(self) -> list[Tenant]:
        async with self.connection() as conn:
            rows = await conn.execute("SELECT id, name, created_at FROM tenants ORDER BY created_at, id")
            return [Tenant(**row) async for row in rows]

    async def revoke_tenant(self, tenant_id: str) -> int:
        """Revokes all of a tenant's keys; answers how many were active."""
        async with self.connection() as conn, conn.transaction():
            done = await conn.execute(
                "UPDATE api_keys SET revoked_at = now() WHERE tenant_id = %s AND revoked_at IS NULL", (tenant_id,)
            )
            return done.rowcount

    async def forget_tenant(self, tenant_id: str) -> dict[str, int]:
        """Removes every row of a tenant; by table, how many it were. What stays is that it was deleted, and when."""
        removed = {}
        async with self.connection() as conn, conn.transaction():
            for table, condition in _OF_A_TENANT.items():
                done = await conn.execute(f"DELETE FROM {table} WHERE {condition}", {"tenant": tenant_id})  # noqa: S608 - names of ours
                removed[table] = done.rowcount
            await insert_audit(conn, [audit_entry(OPERATOR, "tenant.delete", tenant_id, {})])
        return removed

    async def rows_of_tenant(self, tenant_id: str) -> int:
        """How many rows name a tenant, but for the note of its deletion."""
        counts = [f"(SELECT count(*) FROM {table} WHERE {condition})" for table, condition in _OF_A_TENANT.items()]  # noqa: S608
        async with self.connection() as conn:
            row = await (await conn.execute(f"SELECT {' + '.join(counts)} AS n", {"tenant": tenant_id})).fetchone()
        return int(row["n"]) if row else 0

    async def create_key(self, tenant_id: str, name: str, *, unlimited: bool = False, actor: str = OPERATOR) -> str:
        """The new key, which is shown this once; raises NotFound for an unknown tenant."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        key_id = "key_" + secrets.token_hex(8)
        async with self.connection() as conn, conn.transaction():
            made = await conn.execute(
                "INSERT INTO api_keys (id, tenant_id, name, hash, prefix, unlimited)"
                " SELECT %s, id, %s, %s, %s, %s FROM tenants WHERE id = %s",
                (key_id, _name(name), hash_key(key), key[:SHOWN_CHARS], unlimited, tenant_id),
            )
            if made.rowcount != 1:
                raise NotFound(f"there is no tenant {tenant_id!r}")
            detail = {"tenant": tenant_id, "unlimited": unlimited}
            await insert_audit(conn, [audit_entry(actor, "key.create", key_id, detail)])
        return key

    async def list_keys(self, tenant_id: str | None = None) -> list[ApiKey]:
        async with self.connection() as conn:
            rows = await conn.execute(
                "SELECT id, tenant_id, name, prefix, unlimited, created_at, last_used_at, revoked_at"
                " FROM api_keys WHERE %(tenant)s::text IS NULL OR tenant_id = %(tenant)s ORDER BY created_at, id",
                {"tenant": tenant_id},
            )
            return [ApiKey(**row) async for row in rows]

    async def revoke_key(self, id_or_prefix: str, tenant_id: str | None = None, *, actor: str = OPERATOR) -> str:
        """Revokes one key, named by its id or shown prefix, of one tenant or of any.

        Answers its id, also where it is revoked already. Raises NotFound, or Conflict where several active keys share
        the prefix.
        """
        async with self.connection() as conn, conn.transaction():
            rows = await conn.execute(
                "SELECT id FROM api_keys WHERE (id = %(key)s OR prefix = %(key)s) AND revoked_at IS NULL"
                " AND (%(tenant)s::text IS NULL OR tenant_id = %(tenant)s) FOR UPDATE",
                {"key": id_or_prefix, "tenant": tenant_id},
            )
            ids = [row["id"] async for row in rows]
            if not ids:
                known = await conn.execute(
                    "SELECT id FROM api_keys WHERE id = %(key)s"
                    " AND (%(tenant)s::text IS NULL OR tenant_id = %(tenant)s)",
                    {"key": id_or_prefix, "tenant": tenant_id},
                )
                if row := await known.fetchone():
                    return str(row["id"])
                raise NotFound(f"there is no active key with the id or prefix {id_or_prefix[:40]!r}")
            if len(ids) > 1:
                raise Conflict(f"several keys begin like this, name one by its id: {', '.join(sorted(ids))}")
            await conn.execute("UPDATE api_keys SET revoked_at = now() WHERE id = %s", (ids[0],))
            await insert_audit(conn, [audit_entry(actor, "key.revoke", ids[0], {})])
        return str(ids[0])

    async def revoke_hashes(self, revoked: Mapping[str, datetime]) -> int:
        """Applies revocations (key hash to time) made while Postgres was down; answers how many were new."""
        async with self.connection() as conn, conn.transaction():
            rows = await conn.execute(
                "UPDATE api_keys k SET revoked_at = t.at"
                " FROM unnest(%s::text[], %s::timestamptz[]) AS t (hash, at)"
                " WHERE k.hash = t.hash AND k.revoked_at IS NULL RETURNING k.id",
                (list(revoked), list(revoked.values())),
            )
            ids = [row["id"] async for row in rows]
            entries = [audit_entry(OPERATOR, "key.revoke", key_id, {"offline": True}) for key_id in ids]
            await insert_audit(conn, entries)
        return len(ids)

    async def find_key(self, key_hash: str, budget_s: float = CALL_BUDGET_S) -> KeyRow | None:
        """The active key of this hash."""
        async with self.connection(budget_s) as conn:
            row = await (await conn.execute(_ACTIVE_KEYS + " AND hash = %s", (key_hash,))).fetchone()
        return KeyRow(**row) if row else None

    async def active_keys(self, limit: int) -> list[KeyRow]:
        async with self.connection() as conn:
            rows = await conn.execute(_ACTIVE_KEYS + " ORDER BY created_at LIMIT %s", (limit,))
            return [KeyRow(**row) async for row in rows]

    async def keys_fingerprint(self) -> str:
        """Changes whenever `active_keys` does, so that they need not be fetched each time."""
        async with self.connection() as conn:
            row = await (await conn.execute(_FINGERPRINT)).fetchone()
        return str(row["fingerprint"]) if row else ""

    async def touch_keys(self, last_used: Mapping[str, datetime]) -> None:
        """Key id to the time of its last use."""
        async with self.connection() as conn:
            await conn.execute(
                "UPDATE api_keys k SET last_used_at = t.at"
                " FROM unnest(%s::text[], %s::timestamptz[]) AS t (id, at)"
                " WHERE k.id = t.id AND (k.last_used_at IS NULL OR k.last_used_at < t.at)",
                (list(last_used), list(last_used.values())),
            )


#: Table → its rows that are a tenant's, in the order in which they can go.
_OF_A_TENANT: Final = {
    "events": "user_id = %(tenant)s",
    "memory_status": "user_id = %(tenant)s",
    "audit": "(actor = %(tenant)s OR subject = %(tenant)s OR detail->>'tenant' = %(tenant)s OR subject IN"
    " (SELECT id FROM api_keys WHERE tenant_id = %(tenant)s)) AND action <> 'tenant.delete'",
    "api_keys": "tenant_id = %(tenant)s",
    "tenants": "id = %(tenant)s",
}
_ACTIVE_KEYS: Final = "SELECT hash, id AS key_id, tenant_id, unlimited FROM api_keys WHERE revoked_at IS NULL"
_FINGERPRINT: Final = (
    "SELECT count(*) || ':' || coalesce(sum(hashtextextended(hash || id || tenant_id || unlimited, 0)), 0)"
    " AS fingerprint FROM api_keys WHERE revoked_at IS NULL"
)
_RESET_STATUSES: Final = (
    "UPDATE memory_status SET status = 'queued', attempts = 0, next_attempt_at = NULL, reason = NULL, space = NULL,"
    " updated_at = now() WHERE memory_id IN (SELECT memory_id FROM memory_status WHERE status <> 'queued'"
    " OR attempts <> 0 OR next_attempt_at IS NOT NULL OR reason IS NOT NULL OR space IS NOT NULL LIMIT %s)"
)
_PURGE_AUDIT: Final = (
    "DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE at < now() - make_interval(days => %s) LIMIT %s)"
)
_PURGE_EVENTS: Final = (
    "DELETE FROM events WHERE (user_id, id) IN"
    " (SELECT user_id, id FROM events WHERE created_at < now() - make_interval(days => %s) LIMIT %s)"
)


def _name(name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME or clean(name, MAX_NAME) != name:
        problem = f"name must be 1 to {MAX_NAME} characters without NUL; this has {len(name)}"
        raise Invalid(problem, field="name")
    return name
