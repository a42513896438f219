from __future__ import annotations

import asyncio
import base64
import socket
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.upstash_server import Mode, UpstashServer
from warmstart.config import load
from warmstart.errors import CacheUnavailable
from warmstart.local_cache import ENTRY_OVERHEAD, MAX_CHARS, LocalCache
from warmstart.upstash import FAILURES_TO_OPEN, OPEN_S, UpstashCache, open_cache

#: A busy machine is no fault of the endpoint; who waits for one that is slow gives it TIGHT_S.
BUDGET_S = 10.0
TIGHT_S = 0.05


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

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
async def cache(server: UpstashServer, clock: Clock) -> AsyncIterator[UpstashCache]:
    opened = UpstashCache(server.url, server.token, BUDGET_S, clock=clock)
    yield opened
    await opened.close()


# -- the client


async def test_a_pipeline_is_one_post_with_bearer_and_no_wish_for_base64(server, cache):
    assert await cache.pipeline(("SET", "k", "v", "EX", 10), ("GET", "k"), ("MGET", "k", "none")) == [
        "OK",
        "v",
        ["v", None],
    ]
    ((headers, body),) = server.requests
    assert headers["authorization"] == "Bearer a-token"
    assert "upstash-encoding" not in headers
    assert body == [["PING"], ["SET", "k", "v", "EX", 10], ["GET", "k"], ["MGET", "k", "none"]]
    assert cache.healthy
    assert cache.reason == ""
    assert cache.since is None


async def test_calls_share_a_connection_and_only_the_first_asks_for_the_encoding(server, cache):
    for number in range(1, 6):
        assert await cache.pipeline(("INCR", "n")) == [number]
    assert server.connections == 1
    assert [len(body) for _, body in server.requests] == [2, 1, 1, 1, 1]


async def test_an_empty_pipeline_asks_nothing(server, cache):
    assert await cache.pipeline() == []
    assert server.requests == []


async def test_a_trailing_slash_of_the_url_does_no_harm(server):
    cache = UpstashCache(server.url + "/", server.token, BUDGET_S)
    assert await cache.pipeline(("PING",)) == ["PONG"]
    await cache.close()


# a value that is base64 itself, an OK as a value, text beyond ASCII, one that looks like encoded OK
VALUES = [base64.b64encode(b"\x00\x01vector").decode(), "OK", "T0s=", "PONG", "", "naïve 日本語 🎉"]


@pytest.mark.parametrize("mode", [Mode.OK, Mode.BASE64, Mode.BASE64_UPSTASH])
async def test_values_come_back_whatever_the_endpoint_encodes(server, cache, mode):
    server.mode = mode
    for number, value in enumerate(VALUES):
        assert await cache.pipeline(("SET", f"k{number}", value), ("GET", f"k{number}")) == ["OK", value]
    keys = [f"k{number}" for number in range(len(VALUES))]
    assert await cache.pipeline(("MGET", *keys, "none"), ("INCR", "n")) == [[*VALUES, None], 1]


async def test_an_endpoint_that_changes_its_encoding_over_a_restart_is_learned_anew(server, cache):
    await cache.pipeline(("SET", "k", "dmFsdWU="))
    server.mode = Mode.ERROR_500
    with pytest.raises(CacheUnavailable):
        await cache.pipeline(("GET", "k"))
    server.mode = Mode.BASE64
    assert await cache.pipeline(("GET", "k")) == ["dmFsdWU="]


FAULTS = {
    Mode.SLOW: "no answer within 50 ms",
    Mode.ERROR_500: "HTTP 500",
    Mode.HTML: "not JSON",
    Mode.TOO_MANY: "HTTP 429",
    Mode.REDIRECT: "HTTP 302",
    Mode.NOT_JSON: "not JSON",
    Mode.DEEP: "not JSON",
    Mode.WRONG_SHAPE: "not a list of 2 results",
    Mode.WRONG_COUNT: "not a list of 2 results",
    Mode.WRONG_ENTRY: "neither a result nor an error",
    Mode.NO_PONG: "PING",
    Mode.COMMAND_ERROR: "OOM command not allowed",
    Mode.RESET: "no usable answer",
    Mode.RESET_MID_BODY: "no usable answer",
    Mode.ENDLESS: "over 8388608 bytes",
}


@pytest.mark.parametrize(("mode", "reason"), FAULTS.items(), ids=lambda v: getattr(v, "name", ""))
async def test_every_fault_is_cache_unavailable_within_the_budget_and_heals(server, cache, mode, reason):
    server.mode, server.delay_s = mode, BUDGET_S
    if mode is Mode.SLOW:
        cache._budget_s = TIGHT_S
    start = time.monotonic()
    with pytest.raises(CacheUnavailable, match=reason):
        await cache.pipeline(("GET", "k"))
    assert time.monotonic() - start < BUDGET_S
    assert not cache.healthy
    assert reason in cache.reason
    assert cache.since is not None
    server.mode, cache._budget_s = Mode.OK, BUDGET_S
    assert await cache.pipeline(("INCR", "n")) == [1]
    assert cache.healthy
    assert cache.since is None


async def test_base64_that_is_none_is_cache_unavailable(server, cache):
    server.mode = Mode.BASE64
    await cache.pipeline(("SET", "k", "not base64!"))
    server.mode = Mode.OK
    with pytest.raises(CacheUnavailable, match="no usable answer"):
        await cache.pipeline(("GET", "k"))
    assert await cache.pipeline(("GET", "k")) == ["not base64!"]


async def test_nobody_listening():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        cache = UpstashCache(f"http://127.0.0.1:{bound.getsockname()[1]}", "t", BUDGET_S)
        with pytest.raises(CacheUnavailable, match="no connection to the endpoint"):
            await cache.pipeline(("GET", "k"))
        await cache.close()


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1", "http://", "http://[::1"])
async def test_an_impossible_url_is_cache_unavailable_too(url):
    cache = UpstashCache(url, "t", BUDGET_S)
    with pytest.raises(CacheUnavailable):
        await cache.pipeline(("GET", "k"))
    await cache.close()


async def test_a_wrong_token_is_said_without_repeating_it(server):
    cache = UpstashCache(server.url, "a-wrong-token", BUDGET_S)
    with pytest.raises(CacheUnavailable, match="HTTP 401") as caught:
        await cache.pipeline(("GET", "k"))
    assert "a-wrong-token" not in f"{caught.value!r} {cache.reason} {cache!r} {cache._client.headers!r}"
    await cache.close()


async def test_after_close_it_is_unavailable(server):
    cache = UpstashCache(server.url, server.token, BUDGET_S)
    await cache.close()
    with pytest.raises(CacheUnavailable):
        await cache.pipeline(("GET", "k"))


async def test_100_wide_vectors_fit(server, cache):
    vector = base64.b64encode(b"\x3f" * 4 * 8_192).decode()
    server.mode = Mode.BASE64
    await cache.pipeline(*(("SET", f"v{i}", vector) for i in range(100)))
    assert await cache.pipeline(("MGET", *(f"v{i}" for i in range(100)))) == [[vector] * 100]


# -- the circuit


async def fail(cache: UpstashCache, times: int) -> None:
    for _ in range(times):
        with pytest.raises(CacheUnavailable):
            await cache.pipeline(("GET", "k"))


async def test_the_circuit_opens_on_the_third_failure_in_a_row(server, cache):
    server.mode = Mode.ERROR_500
    await fail(cache, FAILURES_TO_OPEN - 1)
    server.mode = Mode.OK
    await cache.pipeline(("GET", "k"))
    server.mode = Mode.ERROR_500
    await fail(cache, FAILURES_TO_OPEN)
    asked = len(server.requests)
    with pytest.raises(CacheUnavailable, match=r"not asked, since the last calls failed: .*HTTP 500"):
        await cache.pipeline(("GET", "k"))
    assert len(server.requests) == asked == 2 * FAILURES_TO_OPEN


async def test_an_open_circuit_costs_nothing(server, cache):
    server.mode = Mode.SLOW
    cache._budget_s = TIGHT_S
    await fail(cache, FAILURES_TO_OPEN)
    asked = len(server.requests)
    start = time.monotonic()
    await fail(cache, 100)
    assert time.monotonic() - start < 100 * TIGHT_S / 2
    assert len(server.requests) == asked


async def test_after_five_seconds_one_probe_decides(server, cache, clock):
    server.mode = Mode.ERROR_500
    await fail(cache, FAILURES_TO_OPEN)
    clock.now += OPEN_S - 0.01
    asked = len(server.requests)
    await fail(cache, 1)
    assert len(server.requests) == asked
    clock.now += 0.01
    await fail(cache, 2)
    assert len(server.requests) == asked + 1
    clock.now += OPEN_S
    server.mode, server.delay_s = Mode.SLOW, 0.1
    calls = (cache.pipeline(("INCR", "n")) for _ in range(20))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [o for o in outcomes if not isinstance(o, CacheUnavailable)] == [[1]]
    server.mode = Mode.OK
    assert await cache.pipeline(("INCR", "n")) == [2]
    assert cache.healthy


async def test_a_cancelled_probe_leaves_room_for_the_next(server, cache, clock):
    server.mode = Mode.ERROR_500
    await fail(cache, FAILURES_TO_OPEN)
    clock.now += OPEN_S
    server.mode = Mode.SLOW
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cache.pipeline(("GET", "k")), 0.05)
    server.mode = Mode.OK
    assert await cache.pipeline(("GET", "k")) == [None]


async def test_calls_past_their_budget_leak_no_connection(server, clock):
    cache = UpstashCache(server.url, server.token, 0.05, clock=clock)
    server.mode = Mode.SLOW
    for _ in range(3):
        clock.now += OPEN_S
        calls = (cache.pipeline(("PING",)) for _ in range(80))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(o) for o in outcomes} == {CacheUnavailable}
    server.mode = Mode.OK
    clock.now += OPEN_S
    cache._budget_s = BUDGET_S
    await cache.pipeline(("PING",))
    assert await asyncio.gather(*(cache.pipeline(("PING",)) for _ in range(80))) == [["PONG"]] * 80
    await cache.close()


# -- the stand-in


async def test_open_cache_takes_the_stand_in_without_a_url(server):
    local = open_cache(load({}))
    assert isinstance(local, LocalCache)
    assert local.healthy
    env = {"UPSTASH_REDIS_REST_URL": server.url, "UPSTASH_REDIS_REST_TOKEN": server.token}
    remote = open_cache(load(env))
    assert isinstance(remote, UpstashCache)
    assert await remote.pipeline(("PING",)) == ["PONG"]
    await remote.close()


async def test_strings_counters_and_sets():
    cache = LocalCache()
    assert await cache.pipeline(
        ("PING",), ("get", "a"), ("SET", "a", 1), ("INCR", "a"), ("INCRBY", "a", -5), ("GET", "a"),
        ("SET", "b", 0.5), ("MGET", "a", "b", "c"), ("EXISTS", "a", "a", "c"), ("DEL", "a", "c"),
        ("GET", "a"),
        ("SADD", "s", "x", "y"), ("SADD", "s", "y", "z", "z"), ("SMEMBERS", "s"), ("SMEMBERS", "none"),
        ("MGET", "s"),
    ) == [
        "PONG", None, "OK", 2, -3, "-3",
        "OK", ["-3", "0.5", None], 2, 1, None,
        2, 1, ["x", "y", "z"], [],
        [None],
    ]  # fmt: skip


async def test_expiry_follows_the_monotonic_clock(clock):
    cache = LocalCache(clock=clock)
    await cache.pipeline(("SET", "a", "1", "EX", 10), ("SET", "b", "1", "PX", 1_500), ("SET", "c", "1"))
    ttls = await cache.pipeline(("TTL", "a"), ("PTTL", "b"), ("TTL", "c"), ("TTL", "d"))
    assert ttls == [10, 1_500, -1, -2]
    clock.now += 1.4
    assert await cache.pipeline(("TTL", "a"), ("GET", "b"), ("INCR", "b"), ("PTTL", "b")) == [9, "1", 2, 100]
    clock.now += 0.1
    assert await cache.pipeline(("GET", "b"), ("EXISTS", "b"), ("TTL", "b"), ("DEL", "b")) == [None, 0, -2, 0]
    assert await cache.pipeline(("EXPIRE", "a", 100), ("TTL", "a"), ("EXPIRE", "b", 5)) == [1, 100, 0]
    assert await cache.pipeline(("SET", "a", "2"), ("TTL", "a")) == ["OK", -1]
    assert await cache.pipeline(("PEXPIRE", "a", 250), ("PTTL", "a"), ("EXPIRE", "a", 0), ("GET", "a")) == [
        1, 250, 1, None,
    ]  # fmt: skip
    assert await cache.pipeline(("SADD", "s", "x"), ("EXPIRE", "s", 1), ("SADD", "s", "y")) == [1, 1, 1]
    clock.now += 1
    assert await cache.pipeline(("SMEMBERS", "s")) == [[]]


async def test_nx_sets_only_what_is_not_there(clock):
    cache = LocalCache(clock=clock)
    first, second = ("SET", "a", "1", "NX", "EX", 5), ("SET", "a", "2", "ex", "5", "nx")
    assert await cache.pipeline(first, second) == ["OK", None]
    clock.now += 5
    assert await cache.pipeline(("SET", "a", "3", "NX"), ("GET", "a")) == ["OK", "3"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("FLUSHALL",), "ERR unknown command"),
        (("GET",), "wrong number of arguments for 'get'"),
        (("GET", "a", "b"), "wrong number of arguments"),
        (("SET", "a", "1", "EX"), "not an integer"),
        (("SET", "a", "1", "EX", 0), "invalid expire"),
        (("SET", "a", "1", "EX", 1, "PX", 1), "syntax error"),
        (("SET", "a", "1", "KEEPTTL"), "syntax error"),
        (("INCR", "word"), "not an integer"),
        (("INCR", "empty"), "not an integer"),
        (("INCRBY", "n", "1.0"), "not an integer"),
        (("INCRBY", "n", " 1"), "not an integer"),
        (("INCRBY", "n", "\u0661"), "not an integer"),
        (("INCRBY", "n", 2**63), "not an integer"),
        (("INCR", "most"), "overflow"),
        (("GET", "set"), "WRONGTYPE"),
        (("INCR", "set"), "WRONGTYPE"),
        (("SADD", "word", "x"), "WRONGTYPE"),
        (("SMEMBERS", "word"), "WRONGTYPE"),
    ],
)
async def test_what_redis_refuses_is_cache_unavailable_and_the_rest_still_runs(command, message):
    cache = LocalCache()
    await cache.pipeline(("SET", "word", "x"), ("SET", "empty", ""), ("SET", "most", 2**63 - 1), ("SADD", "set", "x"))
    with pytest.raises(CacheUnavailable, match=message):
        await cache.pipeline(command, ("SET", "after", "1"))
    assert await cache.pipeline(("GET", "after")) == ["1"]


async def test_the_least_recently_used_goes_first():
    cache = LocalCache(max_entries=3)
    await cache.pipeline(("SET", "a", 1), ("SET", "b", 2), ("SET", "c", 3), ("GET", "a"), ("SET", "d", 4))
    assert await cache.pipeline(("MGET", "a", "b", "c", "d")) == [["1", None, "3", "4"]]
    assert len(cache) == 3


async def test_the_characters_are_bounded_too():
    cache = LocalCache()
    big = "x" * (MAX_CHARS // 4 - ENTRY_OVERHEAD - 1)
    await cache.pipeline(*(("SET", str(i), big) for i in range(4)))
    assert len(cache) == 4
    await cache.pipeline(("SADD", "s", "member"))
    assert await cache.pipeline(("EXISTS", "0"), ("EXISTS", "1"), ("EXISTS", "s")) == [0, 1, 1]
    await cache.pipeline(("SET", "too much", "x" * MAX_CHARS))
    assert len(cache) == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("SET"), st.sampled_from("abcdef"), st.text(max_size=5)),
            st.tuples(st.just("SADD"), st.sampled_from("gh"), st.text(max_size=5)),
            st.tuples(st.sampled_from(["DEL", "EXISTS"]), st.sampled_from("abcdefgh")),
        ),
        max_size=60,
    )
)
def test_the_bounds_hold_and_the_account_of_characters_stays_exact(commands):
    cache = LocalCache(max_entries=4)
    for command in commands:
        cache.execute(*command)
        assert len(cache) <= 4
    held = sum(e.size() + len(k) + ENTRY_OVERHEAD for k, e in cache._entries.items())
    assert cache._chars == held
