from __future__ import annotations

import asyncio
import json
import secrets
import stat
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from warmstart import key_snapshot, keys
from warmstart.errors import AuthUnavailable, BookkeepingUnavailable, Conflict, NotFound, StoreUnavailable, Unauthorized
from warmstart.key_snapshot import Snapshot, SnapshotKey, Tombstone
from warmstart.keys import Identity, KeyRing, revoke_in_snapshot
from warmstart.store.bookkeeping import KeyRow, hash_key


def new_key() -> str:
    return "ws_sk_" + secrets.token_urlsafe(32)


class Books:
    """The key table, in memory: Bookkeeping's answers, without its server."""

    def __init__(self, *known: str) -> None:
        self.rows = {hash_key(k): KeyRow(hash_key(k), f"key_{i}", f"usr_{i}", False) for i, k in enumerate(known)}
        self.healthy = True
        self.delay_s = 0.0
        self.asked: list[str] = []
        #: Each ring asks once or twice in a refresh, after it has read the file and before it writes it.
        self.fingerprints = 0
        self.most_at_once = self._at_once = 0
        self.touched: dict[str, datetime] = {}

    def _up(self) -> None:
        if not self.healthy:
            raise BookkeepingUnavailable("down")

    async def find_key(self, key_hash: str, budget_s: float) -> KeyRow | None:
        self._up()
        self.asked.append(key_hash)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self._at_once -= 1
        return self.rows.get(key_hash)

    async def keys_fingerprint(self) -> str:
        self.fingerprints += 1
        self._up()
        return f"{len(self.rows)}:" + "".join(sorted(self.rows))

    async def active_keys(self, limit: int) -> list[KeyRow]:
        self._up()
        return list(self.rows.values())[:limit]

    async def revoke_hashes(self, revoked: dict[str, datetime]) -> int:
        self._up()
        return sum(self.rows.pop(h, None) is not None for h in revoked)

    async def touch_keys(self, last_used: dict[str, datetime]) -> None:
        self._up()
        self.touched |= last_used


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


async def ring(books: Books, path: Path, **more: Any) -> KeyRing:
    opened = KeyRing(books, path, 72, **({"refresh_s": 0.01} | more))  # type: ignore[arg-type]
    await opened.start()
    return opened


async def refreshed(books: Books, rings: int = 1) -> None:
    """Each of so many rings has refreshed from its beginning to its end."""
    until = books.fingerprints + 4 * rings
    async with asyncio.timeout(30):
        while books.fingerprints < until:  # noqa: ASYNC110 (what is waited for knows nothing of it)
            await asyncio.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.mark.parametrize(
    "key", ["", "ws_sk_", "ws_sk_" + "a" * 42, "ws_sk_" + "a" * 44, "xx_sk_" + "a" * 43, "ws_sk_" + "ä" * 43,
            "ws_sk_" + "a" * 42 + "\n", "ws_sk_" + "a" * 43 + "\n", "ws_sk_" + "a" * 1_000_000, "ws_sk_" + "\x00" * 43]
)  # fmt: skip
async def test_a_malformed_key_is_refused_without_asking(key: str, path: Path) -> None:
    books = Books()
    opened = await ring(books, path)
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    assert books.asked == []
    await opened.stop()


async def test_a_known_key_is_answered_without_asking(path: Path) -> None:
    key = new_key()
    books = Books(key)
    opened = await ring(books, path)
    assert await opened.identify(key) == Identity("usr_0", "key_0")
    assert books.asked == []
    await opened.stop()


async def test_a_new_key_works_at_once_and_an_unknown_one_is_asked_once(path: Path) -> None:
    books = Books()
    opened = await ring(books, path, refresh_s=60)
    key, wrong = new_key(), new_key()
    books.rows[hash_key(key)] = KeyRow(hash_key(key), "key_n", "usr_n", True)
    assert await opened.identify(key) == Identity("usr_n", "key_n", unlimited=True)
    for _ in range(3):
        with pytest.raises(Unauthorized):
            await opened.identify(wrong)
    assert books.asked == [hash_key(key), hash_key(wrong)]
    await opened.stop()


async def test_the_negative_cache_ends_and_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "UNKNOWN_TTL_S", 0.05)
    monkeypatch.setattr(keys, "MAX_UNKNOWN", 3)
    books = Books()
    opened = await ring(books, path, refresh_s=60)
    late = new_key()
    with pytest.raises(Unauthorized):
        await opened.identify(late)
    books.rows[hash_key(late)] = KeyRow(hash_key(late), "key_l", "usr_l", False)
    await asyncio.sleep(0.06)
    assert (await opened.identify(late)).user_id == "usr_l"
    for _ in range(10):
        with pytest.raises(Unauthorized):
            await opened.identify(new_key())
    assert len(opened._unknown) == 3
    await opened.stop()


async def test_many_callers_of_one_unknown_key_share_one_question(path: Path) -> None:
    books = Books()
    books.delay_s = 0.02
    opened = await ring(books, path, refresh_s=60)
    wrong = new_key()
    answers = await asyncio.gather(*(opened.identify(wrong) for _ in range(50)), return_exceptions=True)
    assert all(isinstance(a, Unauthorized) for a in answers)
    assert len(books.asked) == 1
    await opened.stop()


async def test_a_caller_that_goes_away_takes_no_answer_from_the_others(path: Path) -> None:
    key = new_key()
    books = Books()
    books.delay_s = 0.05
    opened = await ring(books, path, refresh_s=60)
    books.rows = Books(key).rows
    first = asyncio.create_task(opened.identify(key))
    second = asyncio.create_task(opened.identify(key))
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second).user_id == "usr_0"
    await opened.stop()


async def test_a_flood_of_unknown_keys_asks_few_at_once_and_waits_boundedly(path: Path) -> None:
    books = Books()
    books.delay_s = 0.05
    opened = await ring(books, path, refresh_s=60)
    begun = time.monotonic()
    answers = await asyncio.gather(*(opened.identify(new_key()) for _ in range(400)), return_exceptions=True)
    assert time.monotonic() - begun < 1
    assert books.most_at_once == keys.MAX_ASKS
    assert {type(a) for a in answers} == {Unauthorized, AuthUnavailable}
    assert not opened._asking
    await opened.stop()


async def test_a_slow_database_is_503_within_the_budget(path: Path) -> None:
    books = Books()
    books.delay_s = 5
    opened = await ring(books, path, refresh_s=60)
    begun = time.monotonic()
    with pytest.raises(AuthUnavailable) as caught:
        await opened.identify(new_key())
    assert time.monotonic() - begun < 0.3
    assert caught.value.to_dict()["retry_after"] == keys.RETRY_AFTER_S
    await opened.stop()


async def test_with_postgres_down_a_start_uses_the_snapshot(path: Path) -> None:
    key = new_key()
    books = Books(key)
    await (await ring(books, path)).stop()
    books.healthy = False
    opened = await ring(books, path)
    assert (await opened.identify(key)).user_id == "usr_0"
    with pytest.raises(AuthUnavailable):
        await opened.identify(new_key())
    await opened.stop()


@pytest.mark.parametrize(("hours", "works"), [(71.9, True), (72.1, False), (-1.0, False)])
async def test_the_snapshot_is_used_for_72_hours_after_postgres_confirmed_it(
    hours: float, works: bool, path: Path
) -> None:
    key, clock = new_key(), Clock()
    books = Books(key)
    running = await ring(books, path, clock=clock)
    books.healthy = False
    clock.now += hours * 3600
    started = await ring(books, path, clock=clock)
    for opened in (running, started):  # one that runs on obeys the same limit as one that starts
        if works:
            assert (await opened.identify(key)).user_id == "usr_0"
        else:
            with pytest.raises(AuthUnavailable):
                await opened.identify(key)
    books.healthy = True
    await refreshed(books, rings=2)
    assert (await running.identify(key)).user_id == (await started.identify(key)).user_id == "usr_0"
    await running.stop()
    await started.stop()


async def test_an_idle_confirmation_is_written_now_and_then(path: Path) -> None:
    clock = Clock()
    books = Books(new_key())
    opened = await ring(books, path, clock=clock)
    before = content(path)["confirmed_at"]
    clock.now += 59
    await refreshed(books)
    assert content(path)["confirmed_at"] == before
    clock.now += 2
    await refreshed(books)
    assert content(path)["confirmed_at"] == before + 61
    await opened.stop()


async def test_a_revocation_in_the_file_reaches_a_running_ring_with_postgres_down(path: Path) -> None:
    key, other = new_key(), new_key()
    books = Books(key, other)
    opened = await ring(books, path)
    books.healthy = False
    assert revoke_in_snapshot(path, "key_0") == "key_0"
    await refreshed(books)
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    assert (await opened.identify(other)).user_id == "usr_1"
    books.healthy = True
    await refreshed(books)
    assert hash_key(key) not in books.rows  # Postgres was told
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    await opened.stop()


async def test_a_tombstone_wins_over_a_postgres_restored_from_a_backup(path: Path) -> None:
    key = new_key()
    books = Books(key)
    opened = await ring(books, path)
    revoke_in_snapshot(path, hash_key(key)[:12])
    await refreshed(books)
    assert books.rows == {}
    books.rows = Books(key).rows  # the backup has it active
    await refreshed(books)
    assert books.rows == {}
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    await opened.stop()


async def test_a_key_made_and_revoked_between_refreshes_does_not_stay(path: Path) -> None:
    books = Books()
    opened = await ring(books, path, refresh_s=0.1)
    await refreshed(books)  # its own file is read by then
    key = new_key()
    books.rows = Books(key).rows
    assert (await opened.identify(key)).user_id == "usr_0"
    books.rows = {}  # the table is what it was at the last refresh
    await refreshed(books)
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    await opened.stop()


async def test_a_clock_that_went_back_does_not_let_the_file_win_over_postgres(path: Path) -> None:
    key, clock = new_key(), Clock()
    books = Books(key)
    opened = await ring(books, path, clock=clock)
    clock.now -= 200
    books.rows = {}
    await refreshed(books)
    with pytest.raises(Unauthorized):
        await opened.identify(key)
    await opened.stop()


async def test_last_use_is_told_once_a_minute(path: Path) -> None:
    key, clock = new_key(), Clock()
    books = Books(key)
    opened = await ring(books, path, clock=clock)
    times = []
    for _ in range(3):
        await opened.identify(key)
        await refreshed(books)
        times.append(books.touched["key_0"].timestamp())
        clock.now += 40
    assert times[0] == times[1]
    assert times[2] == pytest.approx(times[0] + 80)
    await opened.stop()


async def test_an_admitted_key_works_without_postgres_and_is_written_nowhere(path: Path) -> None:
    books = Books()
    opened = await ring(books, path)
    key = new_key()
    opened.admit(key, "usr_here")
    books.healthy = False
    assert (await opened.identify(key)).user_id == "usr_here"
    assert hash_key(key) not in read(path)
    with pytest.raises(ValueError, match="not an API key"):
        opened.admit("short", "usr_here")
    await opened.stop()


async def test_too_many_keys_are_loaded_up_to_the_limit_and_the_rest_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    known = [new_key() for _ in range(3)]
    books = Books(*known)
    opened = await ring(books, path, refresh_s=60)
    assert [(await opened.identify(k)).user_id for k in known] == ["usr_0", "usr_1", "usr_2"]
    assert books.asked == [hash_key(known[2])]
    await opened.stop()


# -- the file


def read(path: Path) -> str:
    return path.read_text()


def write(path: Path, text: str) -> None:
    path.write_text(text)


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def filled(*hashes: str, confirmed_at: float = 1_000.0) -> Snapshot:
    return Snapshot(confirmed_at, {h: SnapshotKey(f"key_{i}", "usr_1", False) for i, h in enumerate(hashes)})


async def test_the_file_is_private_and_holds_no_key(path: Path) -> None:
    key = new_key()
    await (await ring(Books(key), path)).stop()
    assert mode(path) == 0o600
    assert key not in read(path)
    assert hash_key(key) in read(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 2, "confirmed_at": 1, "keys": {}, "revoked": {}}', '{"version": 1}',
     '{"version": 1, "confirmed_at": 1, "keys": {"no hash": {"key_id": "k", "user_id": "u", "unlimited": false}}, '
     '"revoked": {}}', '{"version": 1, "confirmed_at": "x", "keys": {}, "revoked": {}}'],
)  # fmt: skip
async def test_a_corrupt_file_is_set_aside_and_made_anew(text: str, path: Path) -> None:
    write(path, text)
    key = new_key()
    opened = await ring(Books(key), path)
    assert read(path.with_name("keys.json.corrupt")) == text
    assert list(content(path)["keys"]) == [hash_key(key)]
    await opened.stop()


def test_a_key_that_is_unlimited_only_by_a_wrong_type_is_not(path: Path) -> None:
    row = {"key_id": "k", "user_id": "u", "unlimited": "yes"}
    path.write_text(json.dumps({"version": 1, "confirmed_at": time.time(), "keys": {"0" * 64: row}, "revoked": {}}))
    loaded = key_snapshot.load(path)
    assert loaded is not None
    assert loaded.keys["0" * 64].unlimited is False


def test_a_later_confirmation_in_the_file_is_kept_and_tombstones_add_up(path: Path) -> None:
    a, b, c = "a" * 64, "b" * 64, "c" * 64
    key_snapshot.save(path, filled(a, b, confirmed_at=2_000), 2_000)
    late = filled(a, b, c, confirmed_at=1_000)  # a process that was frozen between reading and writing
    late.revoked[a] = Tombstone("key_0", 1_500)
    merged = key_snapshot.save(path, late, 2_000)
    assert (merged.confirmed_at, set(merged.keys), set(merged.revoked)) == (2_000, {b}, {a})
    assert key_snapshot.load(path) == merged


def test_a_confirmation_from_the_future_is_not_believed(path: Path) -> None:
    key_snapshot.save(path, filled("a" * 64, confirmed_at=9_000), 9_000)
    merged = key_snapshot.save(path, filled("b" * 64, confirmed_at=1_000), 1_000)
    assert set(merged.keys) == {"b" * 64}


def test_tombstones_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_snapshot, "MAX_TOMBSTONES", 2)
    now = 100 * 86_400.0
    dead = {f"{i:064x}": Tombstone("k", at) for i, at in enumerate([now - 91 * 86_400, now - 2, now - 1, now])}
    merged = key_snapshot.save(path, Snapshot(revoked=dead), now)
    assert sorted(t.at for t in merged.revoked.values()) == [now - 1, now]


def test_revoking_in_the_file_names_one_key(path: Path) -> None:
    with pytest.raises(NotFound, match="no key snapshot"):
        revoke_in_snapshot(path, "key_0")
    same = "abcdef0123456789"
    key_snapshot.save(path, filled(same + "a" * 48, same + "b" * 48, confirmed_at=time.time()), time.time())
    with pytest.raises(Conflict, match="key_0, key_1"):
        revoke_in_snapshot(path, same)
    for nothing in ("key_9", "abcdef", "ABCDEF0123456789", "ws_sk_abcd"):
        with pytest.raises(NotFound):
            revoke_in_snapshot(path, nothing)
    assert revoke_in_snapshot(path, same + "b") == "key_1"
    assert revoke_in_snapshot(path, "key_1") == "key_1"  # again: already so
    after = key_snapshot.load(path)
    assert after is not None
    assert [k.key_id for k in after.keys.values()] == ["key_0"]


WRITER = """
import sys
from pathlib import Path
from warmstart import key_snapshot as k
for i in range(int(sys.argv[2]), int(sys.argv[2]) + 25):
    k.save(Path(sys.argv[1]), k.Snapshot(revoked={f"{i:064x}": k.Tombstone(f"key_{i}", 1_000.0)}), 1_000.0)
"""


def test_processes_that_write_at_once_lose_no_tombstone(path: Path) -> None:
    key_snapshot.save(path, filled("f" * 64), 1_000)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in (0, 25)]
    while any(w.poll() is None for w in writers):
        assert key_snapshot.load(path) is not None  # never half of one
    assert [w.returncode for w in writers] == [0, 0]
    after = key_snapshot.load(path)
    assert after is not None
    assert len(after.revoked) == 50
    assert not path.with_name("keys.json.corrupt").exists()


def test_a_frozen_writer_holds_nobody_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_snapshot, "LOCK_TIMEOUT_S", 0.05)
    with key_snapshot._locked(path), pytest.raises(StoreUnavailable, match="locked by another process"):
        key_snapshot.save(path, filled("a" * 64), 1_000)
