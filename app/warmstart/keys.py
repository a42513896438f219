"""Who a caller is, by API key, without waiting for Postgres.

A known key is one lookup in memory. The table is loaded from the snapshot file
at start and reloaded from Postgres every `refresh_s`; a key that is not in it
asks Postgres once. With Postgres down known keys go on working for
`max_age_hours` after Postgres last confirmed them, and others are 503. A
revocation written to the file (with Postgres down) is seen by its changed stamp,
and told to Postgres before anything is loaded from there again.

Keys are compared by looking up their SHA-256: how long a lookup takes may tell
something about a hash, and nothing about a key of 256 random bits, so no
constant-time comparison is needed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog

from warmstart import key_snapshot
from warmstart.errors import AuthUnavailable, BookkeepingUnavailable, StoreUnavailable, Unauthorized
from warmstart.key_snapshot import MAX_CLOCK_SKEW_S, Snapshot, SnapshotKey, revoke_in_snapshot
from warmstart.store.bookkeeping import Bookkeeping, KeyRow, hash_key

__all__ = ["Identity", "KeyRing", "revoke_in_snapshot"]

log = structlog.get_logger(__name__)

REFRESH_S: Final = 2.0
ASK_BUDGET_S: Final = 0.2
#: Of Bookkeeping's four connections, so that a flood of wrong keys leaves some to the others.
MAX_ASKS: Final = 2
MAX_WAITING_ASKS: Final = 256
UNKNOWN_TTL_S: Final = 5.0
MAX_UNKNOWN: Final = 10_000
MAX_KEYS: Final = 200_000
#: How stale the file's confirmation may be while Postgres is up.
CONFIRM_EVERY_S: Final = 60.0
TOUCH_EVERY_S: Final = 60.0
RETRY_AFTER_S: Final = 2

_KEY = re.compile(r"ws_sk_[A-Za-z0-9_-]{43}")
_UNREACHABLE: Final = "unreachable"


@dataclass(frozen=True, slots=True)
class Identity:
    user_id: str
    key_id: str
    unlimited: bool = False


class KeyRing:
    def __init__(
        self,
        bookkeeping: Bookkeeping,
        snapshot_path: Path,
        max_age_hours: float,
        refresh_s: float = REFRESH_S,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bookkeeping = bookkeeping
        self._path = snapshot_path
        self._max_age_s = max_age_hours * 3600
        self._refresh_s = refresh_s
        self._clock = clock
        self._snapshot = Snapshot()
        self._known: dict[str, Identity] = {}
        self._admitted: dict[str, Identity] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._asking: dict[str, asyncio.Task[KeyRow | str | None]] = {}
        self._ask_slots = asyncio.Semaphore(MAX_ASKS)
        self._used: dict[str, float] = {}
        self._touched: dict[str, float] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._fingerprint = ""
        self._told: set[str] = set()
        self._saved_at = float("-inf")
        self._unsaved = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ready with Postgres up or down."""
        await self._refresh()
        self._task = asyncio.create_task(self._run(), name="keys")

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._task = None

    def admit(self, api_key: str, user_id: str) -> None:
        """Lets a key in that lives as long as this process; it is written nowhere."""
        if not _KEY.fullmatch(api_key):
            raise ValueError("not an API key")
        self._admitted[hash_key(api_key)] = Identity(user_id, "ephemeral")

    async def identify(self, api_key: str) -> Identity:
        """Whose key this is; raises Unauthorized, or AuthUnavailable where that can't be said now."""
        if not _KEY.fullmatch(api_key):
            raise Unauthorized("this is no API key: one is ws_sk_ and 43 characters")
        return await self.identify_hash(hash_key(api_key))

    async def identify_hash(self, key_hash: str) -> Identity:
        """The same by what is kept of a key: for a session that began with it."""
        if key_hash in self._snapshot.revoked:
            raise Unauthorized("this API key was revoked")
        if identity := self._admitted.get(key_hash):
            return identity
        if (identity := self._known.get(key_hash)) and self._is_fresh():
            self._used[identity.key_id] = self._clock()
            return identity
        return await self._ask_once(key_hash)

    def _is_fresh(self) -> bool:
        age = self._clock() - self._snapshot.confirmed_at
        return -MAX_CLOCK_SKEW_S < age <= self._max_age_s

    # -- a key that is not known here

    async def _ask_once(self, key_hash: str) -> Identity:
        if self._unknown.get(key_hash, 0.0) > time.monotonic():
            raise _unauthorized()
        if (task := self._asking.get(key_hash)) is None:
            if len(self._asking) >= MAX_WAITING_ASKS:
                raise _unavailable()
            task = self._asking[key_hash] = asyncio.create_task(self._ask(key_hash))
            task.add_done_callback(lambda _: self._asking.pop(key_hash, None))
        answer = await asyncio.shield(task)  # others may wait for the same answer
        if isinstance(answer, str):
            raise _unavailable()
        if key_hash in self._snapshot.revoked:
            raise Unauthorized("this API key was revoked")
        if answer is None:
            raise _unauthorized()
        return Identity(answer.tenant_id, answer.key_id, answer.unlimited)

    async def _ask(self, key_hash: str) -> KeyRow | str | None:
        try:
            async with asyncio.timeout(ASK_BUDGET_S), self._ask_slots:
                row = await self._bookkeeping.find_key(key_hash, ASK_BUDGET_S)
        except (TimeoutError, BookkeepingUnavailable):
            return _UNREACHABLE
        if row is None:
            self._unknown[key_hash] = time.monotonic() + UNKNOWN_TTL_S
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
        else:
            self._known[key_hash] = Identity(row.tenant_id, row.key_id, row.unlimited)
            # known from here on, also where Postgres is gone before the next refresh
            self._snapshot.keys[key_hash] = SnapshotKey(row.key_id, row.tenant_id, row.unlimited)
            self._unsaved = True
            self._fingerprint = ""  # it may have been revoked since: the next refresh loads them all
        return row

    # -- every refresh_s

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self._refresh()
            except Exception:
                # without this task no revocation would ever arrive
                log.exception("keys.refresh.fault")

    async def _refresh(self) -> None:
        """The file first, since it answers also while Postgres does not."""
        try:
            await self._read_file()
            with suppress(BookkeepingUnavailable):
                await self._load()
                await self._touch()
            await self._write_file()
        except (OSError, StoreUnavailable) as error:
            log.warning("keys.snapshot.unusable", path=str(self._path), reason=str(error))

    async def _read_file(self) -> None:
        stamp = key_snapshot.stamp(self._path)
        if stamp is None or stamp == self._stamp:
            return
        there = await asyncio.to_thread(key_snapshot.load, self._path)
        self._stamp = stamp
        if there is None:
            return
        self._snapshot.bury(there.revoked)
        # its keys only while Postgres, which knows better, does not answer
        if not self._snapshot.confirmed_at or not self._bookkeeping.healthy:
            self._snapshot.merge(there, self._clock())
            self._fingerprint = ""
        self._index()

    async def _load(self) -> None:
        """All active keys, if they changed; Postgres has confirmed them either way."""
        asked_at = self._clock()
        fingerprint = await self._bookkeeping.keys_fingerprint()
        if fingerprint != self._fingerprint:
            self._told.clear()  # Postgres may have been restored from a time before
        if await self._tell_revocations():
            fingerprint = await self._bookkeeping.keys_fingerprint()
        if fingerprint == self._fingerprint:
            self._snapshot.confirmed_at = asked_at
            return
        rows = await self._bookkeeping.active_keys(MAX_KEYS + 1)
        if len(rows) > MAX_KEYS:
            log.error("keys.too_many", limit=MAX_KEYS, detail="the newest keys are asked for one by one")
            del rows[MAX_KEYS:]
        keys = {r.hash: SnapshotKey(r.key_id, r.tenant_id, r.unlimited) for r in rows}
        revoked, before = self._snapshot.revoked, self._snapshot.keys
        self._snapshot = Snapshot(asked_at, keys)
        self._snapshot.bury(revoked)
        self._unsaved |= self._snapshot.keys != before
        self._fingerprint = fingerprint
        self._index()

    async def _tell_revocations(self) -> bool:
        """Tombstones go to Postgres before keys come from it, or it would bring one back."""
        untold = self._snapshot.revoked.keys() - self._told
        if not untold:
            return False
        revoked = {h: datetime.fromtimestamp(self._snapshot.revoked[h].at, UTC) for h in untold}
        await self._bookkeeping.revoke_hashes(revoked)
        self._told |= untold
        return True

    def _index(self) -> None:
        self._known = {h: Identity(k.user_id, k.key_id, k.unlimited) for h, k in self._snapshot.keys.items()}

    async def _touch(self) -> None:
        now = self._clock()
        used, self._used = self._used, {}
        due = {k: at for k, at in used.items() if at - self._touched.get(k, float("-inf")) >= TOUCH_EVERY_S}
        if due:
            await self._bookkeeping.touch_keys({k: datetime.fromtimestamp(at, UTC) for k, at in due.items()})
            self._touched = {k: at for k, at in self._touched.items() if at > now - TOUCH_EVERY_S} | due

    async def _write_file(self) -> None:
        """When it changed, and now and then to say that Postgres confirmed it."""
        confirmed = self._snapshot.confirmed_at
        if not confirmed or not (self._unsaved or confirmed - self._saved_at >= CONFIRM_EVERY_S):
            return
        merged = await asyncio.to_thread(key_snapshot.save, self._path, self._snapshot, self._clock())
        self._saved_at, self._unsaved = confirmed, False
        self._snapshot.bury(merged.revoked)
        self._index()


def _unauthorized() -> Unauthorized:
    return Unauthorized("this API key is not known here, or was revoked")


def _unavailable() -> AuthUnavailable:
    return AuthUnavailable(
        "this API key is not known to this process and the key database does not answer: try again",
        retry_after=RETRY_AFTER_S,
    )
