"""The key ring over the real Postgres, frozen, killed and gone."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from warmstart.errors import AuthUnavailable, Unauthorized
from warmstart.keys import KeyRing, revoke_in_snapshot
from warmstart.store.bookkeeping import Bookkeeping, hash_key
from warmstart.store.database import CALL_BUDGET_S

Server = Any


def new_key() -> str:
    return "ws_sk_" + secrets.token_urlsafe(32)


@asynccontextmanager
async def process(dsn: str, path: Path, **more: Any) -> AsyncIterator[KeyRing]:
    """A Bookkeeping and a KeyRing of its own, as each process has."""
    books = Bookkeeping(dsn)
    await books.open()
    ring = KeyRing(books, path, 72, **more)
    await ring.start()
    try:
        yield ring
    finally:
        await ring.stop()
        await books.close()


async def refused_within(ring: KeyRing, key: str, seconds: float) -> float:
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        try:
            await ring.identify(key)
        except Unauthorized:
            return time.monotonic() - begun
        await asyncio.sleep(0.05)
    raise AssertionError(f"the key still works after {seconds} s")


async def works_within(ring: KeyRing, key: str, seconds: float) -> str:
    begun = time.monotonic()
    while True:
        try:
            return (await ring.identify(key)).user_id
        except AuthUnavailable:
            assert time.monotonic() - begun < seconds
            await asyncio.sleep(0.05)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
async def tenant(bookkeeping: Bookkeeping) -> str:
    return await bookkeeping.create_tenant("one")


async def test_frozen_known_keys_cost_nothing_and_unknown_ones_end_in_time(
    postgres: Server, dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    async with process(dsn, path, refresh_s=60) as ring:
        late = await bookkeeping.create_key(tenant, "late")
        postgres.freeze()
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(AuthUnavailable):
                await ring.identify(new_key())
            assert time.monotonic() - begun < CALL_BUDGET_S / 2
            took = []
            for _ in range(200):
                begun = time.monotonic()
                assert (await ring.identify(key)).user_id == tenant
                took.append(time.monotonic() - begun)
            assert median(took) < 0.005
        with pytest.raises(AuthUnavailable):
            await ring.identify(late)
        postgres.thaw()
        assert await works_within(ring, late, 10) == tenant
        with pytest.raises(Unauthorized):
            await ring.identify(new_key())


async def test_killed_and_started_again_unknown_keys_are_answered(
    postgres: Server, dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    async with process(dsn, path) as ring:
        await postgres.kill()
        assert (await ring.identify(key)).user_id == tenant
        begun = time.monotonic()
        with pytest.raises(AuthUnavailable):
            await ring.identify(new_key())
        assert time.monotonic() - begun < CALL_BUDGET_S / 2
        await postgres.start()
        begun = time.monotonic()
        while True:
            try:
                await ring.identify(new_key())
            except Unauthorized:
                break
            except AuthUnavailable:
                assert time.monotonic() - begun < 10
                await asyncio.sleep(0.05)


async def test_a_new_key_works_at_once_in_every_process(
    dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    async with process(dsn, path) as one, process(dsn, path) as two:
        key = await bookkeeping.create_key(tenant, "k", unlimited=True)
        for ring in (one, two):
            begun = time.monotonic()
            identity = await ring.identify(key)
            assert time.monotonic() - begun < CALL_BUDGET_S / 2
            assert (identity.user_id, identity.unlimited) == (tenant, True)


async def test_a_revocation_reaches_every_process_and_the_snapshot(
    postgres: Server, dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    kept = await bookkeeping.create_key(tenant, "kept")
    async with process(dsn, path) as one, process(dsn, path) as two:  # with the refresh that production has
        key_id = (await one.identify(key)).key_id
        assert (await two.identify(key)).key_id == key_id
        await bookkeeping.revoke_key(key_id)
        assert max(await asyncio.gather(*(refused_within(r, key, 10) for r in (one, two)))) < 10
        assert (await two.identify(kept)).user_id == tenant
    assert key_id not in (await asyncio.to_thread(path.read_text))


async def test_a_revocation_with_postgres_frozen_reaches_every_process_and_later_postgres(
    postgres: Server, dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    async with process(dsn, path) as one, process(dsn, path) as two:
        key_id = (await one.identify(key)).key_id
        await two.identify(key)
        postgres.freeze()
        assert revoke_in_snapshot(path, key_id) == key_id
        assert max(await asyncio.gather(*(refused_within(r, key, 10) for r in (one, two)))) < 10
        postgres.thaw()
        begun = time.monotonic()
        while True:
            if bookkeeping.healthy and (await bookkeeping.list_keys())[0].revoked_at is not None:
                break
            assert time.monotonic() - begun < 15
            await asyncio.sleep(0.1)
        for ring in (one, two):
            with pytest.raises(Unauthorized):
                await ring.identify(key)
    assert await bookkeeping.active_keys(10) == []


async def test_a_start_with_postgres_gone_uses_the_snapshot_for_72_hours(
    postgres: Server, dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path
) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    gone = await bookkeeping.create_key(tenant, "gone")
    async with process(dsn, path) as ring:
        await ring.identify(key)
    await postgres.kill()
    revoke_in_snapshot(path, hash_key(gone)[:16])
    async with process(dsn, path) as ring:
        assert (await ring.identify(key)).user_id == tenant
        with pytest.raises(Unauthorized):
            await ring.identify(gone)
        with pytest.raises(AuthUnavailable):
            await ring.identify(new_key())
    async with process(dsn, path, clock=lambda: time.time() + 73 * 3600) as ring:
        with pytest.raises(AuthUnavailable):
            await ring.identify(key)
    await postgres.start()
    async with process(dsn, path) as ring:
        assert (await ring.identify(key)).user_id == tenant
        with pytest.raises(Unauthorized):
            await ring.identify(gone)


async def test_last_use_is_recorded(dsn: str, bookkeeping: Bookkeeping, tenant: str, path: Path) -> None:
    key = await bookkeeping.create_key(tenant, "k")
    async with process(dsn, path, refresh_s=0.05) as ring:
        await ring.identify(key)
        await asyncio.sleep(0.3)
    (listed,) = await bookkeeping.list_keys(tenant)
    assert listed.last_used_at is not None
