from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.upstash_server import Mode, UpstashServer
from warmstart.local_cache import LocalCache
from warmstart.ratelimit import Allowance, RateLimiter
from warmstart.upstash import FAILURES_TO_OPEN, OPEN_S, UpstashCache

#: A busy machine is no fault of the endpoint.
BUDGET_S = 10.0


class Clock:
    def __init__(self, now: float = 1_764_500_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def server() -> AsyncIterator[UpstashServer]:
    async with UpstashServer() as running:
        yield running


@pytest.fixture
async def shared(server: UpstashServer, clock: Clock) -> AsyncIterator[UpstashCache]:
    cache = UpstashCache(server.url, server.token, BUDGET_S, clock=clock)
    yield cache
    await cache.close()


@pytest.mark.parametrize("limit", [1, 2, 60, 600])
async def test_one_below_at_and_one_above_the_limit(clock, limit):
    limiter = RateLimiter(LocalCache(), clock=clock)
    answers = [await limiter.hit("key", "k", limit) for _ in range(limit + 1)]
    assert [a.allowed for a in answers] == [True] * limit + [False]
    assert [a.remaining for a in answers] == [*range(limit - 1, -1, -1), 0]
    assert {a.limit for a in answers} == {limit}


async def test_a_new_window_starts_anew_at_the_moment_reset_said(clock):
    clock.now = 1_764_500_010.25  # 30.25 s into a minute
    limiter = RateLimiter(LocalCache(), clock=clock)
    assert await limiter.hit("key", "k", 1) == Allowance(True, 1, 0, 30)
    assert await limiter.hit("key", "k", 1) == Allowance(False, 1, 0, 30)
    clock.now += 29.7
    assert await limiter.hit("key", "k", 1) == Allowance(False, 1, 0, 1)
    clock.now += 0.05
    assert await limiter.hit("key", "k", 1) == Allowance(True, 1, 0, 60)


@given(
    now=st.floats(min_value=0, max_value=4e9),
    window_s=st.integers(min_value=1, max_value=86_400),
    limit=st.integers(min_value=1, max_value=5),
)
async def test_reset_lies_within_the_window(now, window_s, limit):
    limiter = RateLimiter(LocalCache(), clock=Clock(now))
    allowance = await limiter.hit("key", "k", limit, window_s)
    assert allowance.allowed
    assert 1 <= allowance.reset_s <= window_s


async def test_buckets_keys_and_windows_are_apart(clock):
    limiter = RateLimiter(LocalCache(), clock=clock)
    for bucket, key in [("key", "a"), ("key", "b"), ("login", "a"), ("key", "\ud800"), ("key", "")]:
        assert (await limiter.hit(bucket, key, 1)).allowed
        assert not (await limiter.hit(bucket, key, 1)).allowed


async def test_the_wire_carries_a_hash_one_pipeline_and_an_expiry(server, shared, clock):
    secret = "ws_sk_" + "s" * 43
    await RateLimiter(shared, clock=clock).hit("key", secret, 600)
    digest = hashlib.sha256(secret.encode()).hexdigest()[:32]
    counter = f"ws:rl:key:{digest}:{int(clock.now) // 60 * 60}"
    assert server.commands == [["INCR", counter], ["EXPIRE", counter, 60]]
    assert len(server.requests) == 1
    assert secret not in str(server.requests)


async def test_two_processes_share_one_limit(server, shared, clock):
    other = UpstashCache(server.url, server.token, BUDGET_S, clock=clock)
    limiters = [RateLimiter(shared, clock=clock), RateLimiter(other, clock=clock)]
    allowed = [(await limiters[i % 2].hit("key", "k", 10)).allowed for i in range(12)]
    assert allowed == [True] * 10 + [False] * 2
    await other.close()


async def test_peek_counts_nothing(server, shared, clock):
    for cache in (LocalCache(), shared):
        limiter = RateLimiter(cache, clock=clock)
        untouched = Allowance(True, 2, 2, 60 - int(clock.now) % 60)
        assert [await limiter.peek("login", "a", 2) for _ in range(5)] == [untouched] * 5
        await limiter.hit("login", "a", 2)
        assert (await limiter.peek("login", "a", 2)).remaining == 1
        await limiter.hit("login", "a", 2)
        full = await limiter.peek("login", "a", 2)
        assert (full.allowed, full.remaining) == (False, 0)
        await limiter.hit("login", "a", 2)
        assert (await limiter.peek("login", "a", 2)).remaining == 0


@pytest.mark.parametrize("mode", [Mode.ERROR_500, Mode.HTML, Mode.RESET, Mode.TOO_MANY, Mode.WRONG_TYPE])
async def test_with_the_cache_gone_the_count_goes_on_in_this_process(server, shared, clock, mode):
    limiter = RateLimiter(shared, clock=clock)
    for _ in range(3):
        assert (await limiter.hit("key", "k", 5)).allowed
    server.mode = mode
    assert (await limiter.peek("key", "k", 5)).remaining == 2
    answers = [await limiter.hit("key", "k", 5) for _ in range(3)]
    assert [(a.allowed, a.remaining) for a in answers] == [(True, 1), (True, 0), (False, 0)]
    assert not (await limiter.peek("key", "k", 5)).allowed


async def test_when_the_cache_is_back_it_is_asked_again(server, shared, clock):
    clock.now = 1_764_500_040.0  # the first second of a minute, so that the window lasts
    limiter = RateLimiter(shared, clock=clock)
    server.mode = Mode.ERROR_500
    for _ in range(FAILURES_TO_OPEN + 2):
        await limiter.hit("key", "k", 60)
    assert len(server.requests) == FAILURES_TO_OPEN
    server.mode = Mode.OK
    clock.now += OPEN_S
    asked = len(server.requests)
    assert (await limiter.hit("key", "k", 60)).allowed
    assert len(server.requests) == asked + 1
    assert shared.healthy


@pytest.mark.parametrize("where", ["local", "shared", "down"])
async def test_of_100_at_once_exactly_60_pass(server, shared, clock, where):
    if where == "down":
        server.mode = Mode.ERROR_500
    limiter = RateLimiter(LocalCache() if where == "local" else shared, clock=clock)
    answers = await asyncio.gather(*(limiter.hit("key", "k", 60) for _ in range(100)))
    assert sum(a.allowed for a in answers) == 60
    assert sorted(a.remaining for a in answers) == [0] * 41 + list(range(1, 60))
