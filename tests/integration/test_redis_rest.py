"""The Upstash-REST endpoint as its own process, before a real Redis, asked by clients nobody here wrote."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upstash_redis import Redis
from upstash_redis.errors import UpstashError

from clients.node import NODE, npm_ci
from fakes.redis_server import RedisServer, free_port, wait_for_port
from warmstart.errors import CacheUnavailable, ConfigError
from warmstart.local_cache import LocalCache
from warmstart.ratelimit import RateLimiter
from warmstart.redis_rest import create_app
from warmstart.redis_rest.app import (
    ALLOWED,
    MAX_ARGUMENT_BYTES,
    MAX_BODY_BYTES,
    MAX_COMMANDS,
    MAX_REQUESTS_AT_ONCE,
)
from warmstart.upstash import UpstashCache

pytestmark = pytest.mark.services

TOKEN = "the-token"
CLIENTS = Path(__file__).parents[1] / "clients"
SERVE = (
    "import os; from warmstart.redis_rest import run;"
    "run('127.0.0.1', int(os.environ['PORT']), os.environ['REDIS_URL'], os.environ['TOKEN'])"
)
BASE64 = {"Upstash-Encoding": "base64"}


@contextmanager
def endpoint(redis_url: str, folder: Path) -> Iterator[str]:
    port, log = free_port(), folder / "rest.log"
    env = {**os.environ, "PORT": str(port), "REDIS_URL": redis_url, "TOKEN": TOKEN}
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-c", SERVE], env=env, stdout=out, stderr=out)
    try:
        wait_for_port(port, process, log)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM, log.read_text()  # uvicorn raises it again once it is done
        assert "Application shutdown complete" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert TOKEN not in log.read_text()
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with endpoint(server.url, tmp_path_factory.mktemp("rest")) as running:
        yield running


@pytest.fixture(scope="module")
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.admin_url) as client:
        yield client


@pytest.fixture
def http(url: str, raw: redis.Redis) -> Iterator[httpx.Client]:
    raw.flushall()
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=15) as client:
        yield client


@pytest.fixture
def official(url: str, raw: redis.Redis) -> Iterator[Redis]:
    raw.flushall()
    with Redis(url=url, token=TOKEN, rest_retries=0, allow_telemetry=False) as client:
        yield client


def command(http: httpx.Client, *parts: object, **headers: str) -> tuple[int, dict[str, object]]:
    answer = http.post("/", json=list(parts), headers=headers)
    return answer.status_code, answer.json()


# -- Upstash's own clients


def test_python_strings_hashes_lists_and_sets(official: Redis) -> None:
    assert official.ping() == "PONG"
    assert official.set("a", "grüße 日本語 🎉", ex=60) is True
    assert official.get("a") == "grüße 日本語 🎉"
    assert 50 < official.ttl("a") <= 60
    assert official.set("a", "x", nx=True) is False
    assert official.mset({"b": "OK", "c": "T0s="})
    assert official.mget("b", "c", "none") == ["OK", "T0s=", None]
    assert official.incrby("n", 41) == 41
    assert official.incrbyfloat("n", 0.5) == 41.5
    assert official.hset("h", values={"one": "1", "two": "zwei"}) == 2
    assert official.hgetall("h") == {"one": "1", "two": "zwei"}
    assert official.rpush("l", "x", "y") == 2
    assert official.lrange("l", 0, -1) == ["x", "y"]
    assert official.sadd("s", "x", "y", "x") == 2
    assert sorted(official.smembers("s")) == ["x", "y"]
    assert official.zadd("z", {"x": 1.5, "y": 2}) == 2
    assert official.zrange("z", 0, -1, withscores=True) == [("x", 1.5), ("y", 2.0)]
    assert official.delete("a", "b", "none") == 2


def test_python_pipelines_transactions_and_scripts(official: Redis) -> None:
    pipeline = official.pipeline()
    pipeline.set("a", "1").incr("a").get("a")
    assert pipeline.exec() == [True, 2, "2"]
    transaction = official.multi()
    transaction.set("b", "OK").get("b").get("none")
    assert transaction.exec() == [True, "OK", None]
    script = "#!lua flags=allow-key-locking\nreturn {KEYS[1], ARGV[1], 7}"
    sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    with pytest.raises(UpstashError, match=r"^NOSCRIPT "):
        official.evalsha(sha, ["k"], ["v"])
    assert official.eval(script, ["k"], ["v"]) == ["k", "v", 7]
    assert official.evalsha(sha, ["k"], ["v"]) == ["k", "v", 7]
    assert official.script_exists(sha, "0" * 40) == [True, False]
    assert official.script_load(script) == sha


def test_python_errors(official: Redis, url: str) -> None:
    official.set("word", "x")
    with pytest.raises(UpstashError, match="ERR value is not an integer"):
        official.incr("word")
    with pytest.raises(UpstashError, match="Command is not available: 'FLUSHALL'"):
        official.flushall()
    with Redis(url=url, token="wrong", rest_retries=0) as stranger, pytest.raises(UpstashError, match="Unauthorized"):
        stranger.get("word")


def test_node_redis_and_ratelimit(url: str) -> None:
    folder = npm_ci(CLIENTS)
    env = {**os.environ, "UPSTASH_REDIS_REST_URL": url, "UPSTASH_REDIS_REST_TOKEN": TOKEN}
    done = subprocess.run([NODE, "upstash.mjs"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [c for c in checks if not c["ok"]] == []
    assert done.returncode == 0, done.stderr
    assert len(checks) == 10


async def test_our_own_client(url: str, raw: redis.Redis) -> None:
    raw.flushall()
    cache = UpstashCache(url, TOKEN, 2)
    assert await cache.pipeline(("SET", "k", "dmVj", "EX", 10), ("MGET", "k", "none"), ("TTL", "k")) == [
        "OK", ["dmVj", None], 10,
    ]  # fmt: skip
    vectors = {f"v{i}": base64.b64encode(bytes([i]) * 1536).decode() for i in range(100)}
    assert await cache.pipeline(*(("SET", k, v, "EX", 60) for k, v in vectors.items())) == ["OK"] * 100
    assert await cache.pipeline(("MGET", *vectors)) == [list(vectors.values())]
    with pytest.raises(CacheUnavailable, match="not an integer"):
        await cache.pipeline(("SET", "w", "x"), ("INCR", "w"))
    limiter = RateLimiter(cache, clock=lambda: 1_764_500_000.0)
    assert [(await limiter.hit("b", "k", 3)).allowed for _ in range(4)] == [True, True, True, False]
    assert not (await limiter.peek("b", "k", 3)).allowed
    await cache.close()


keys, words = st.sampled_from("abc"), st.sampled_from(["", "0", "7", "-3", "01", "x", "日本", str(2**63 - 1)])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("SET"), keys, words),
            st.tuples(st.just("SET"), keys, words, st.sampled_from(["EX", "PX", "nx"]), st.sampled_from(["100000"])),
            st.tuples(st.just("SET"), keys, words, st.just("EX"), words),
            st.tuples(st.just("INCRBY"), keys, words),
            st.tuples(st.sampled_from(["SADD", "EXISTS", "DEL", "MGET"]), keys, keys),
            st.tuples(st.sampled_from(["GET", "INCR", "TTL", "SMEMBERS", "EXISTS", "DEL", "SADD", "SET"]), keys),
            st.tuples(st.just("EXPIRE"), keys, st.sampled_from(["-1", "0", "1000", "x"])),
        ),
        max_size=15,
    )
)
def test_the_stand_in_answers_as_redis_does(http: httpx.Client, raw: redis.Redis, commands: list[tuple]) -> None:
    raw.flushall()
    local = LocalCache()
    ours = []
    for one in commands:
        try:
            ours.append({"result": local.execute(*one)})
        except CacheUnavailable as error:
            ours.append({"error": str(error)})
    theirs = http.post("/pipeline", json=commands).json() if commands else []
    for one, mine, real in zip(commands, ours, theirs, strict=True):
        if one[0] == "SMEMBERS" and "result" in real:
            mine, real = ({"result": sorted(answer["result"])} for answer in (mine, real))
        assert mine == real, one


# -- the protocol


def test_shapes_and_status_codes(http: httpx.Client) -> None:
    assert command(http, "SET", "a", "x") == (200, {"result": "OK"})
    assert command(http, "get", "a") == (200, {"result": "x"})
    assert command(http, "GET", "none") == (200, {"result": None})
    assert command(http, "STRLEN", "a") == (200, {"result": 1})
    assert command(http, "MGET", "a", "none") == (200, {"result": ["x", None]})
    assert command(http, "EVAL", "return {1, {2, 'x', {}}}", 0) == (200, {"result": [1, [2, "x", []]]})
    status, body = command(http, "INCR", "a")
    assert (status, body) == (400, {"error": "ERR value is not an integer or out of range"})
    status, body = command(http, "LPUSH", "a", "x")
    assert status == 400
    assert str(body["error"]).startswith("WRONGTYPE ")
    status, body = command(http, "GET")
    assert (status, body) == (400, {"error": "ERR wrong number of arguments for 'get' command"})
    assert http.get("/").status_code == 400


def test_a_pipeline_answers_each_command_and_refuses_only_what_it_must(http: httpx.Client) -> None:
    answer = http.post("/pipeline", json=[["SET", "a", "x"], ["INCR", "a"], ["KEYS", "*"], ["GET", "a"]])
    assert answer.status_code == 200
    first, second, third, last = answer.json()
    assert (first, last) == ({"result": "OK"}, {"result": "x"})
    assert second == {"error": "ERR value is not an integer or out of range"}
    assert "'KEYS'" in third["error"]


def test_a_transaction_is_all_or_nothing_where_redis_discards_it(http: httpx.Client) -> None:
    answer = http.post("/multi-exec", json=[["SET", "a", "x"], ["INCR", "a"], ["GET", "a"]])
    assert answer.status_code == 200
    assert answer.json()[1] == {"error": "ERR value is not an integer or out of range"}
    for bad, cause in ([["GET"], "wrong number of arguments"], [["CONFIG", "GET", "*"], "'CONFIG'"]):
        answer = http.post("/multi-exec", json=[["SET", "a", "changed"], bad])
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("EXECABORT ")
        assert cause in answer.json()["error"]
    assert command(http, "GET", "a") == (200, {"result": "x"})


def test_a_transaction_knows_scripts_by_the_sha_they_were_sent_with(http: httpx.Client) -> None:
    script = "#!lua flags=allow-key-locking\nreturn 'in a transaction'"
    sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    answer = http.post("/multi-exec", json=[["SCRIPT", "LOAD", script], ["EVALSHA", sha, 0], ["SCRIPT", "EXISTS", sha]])
    assert answer.json() == [{"result": sha}, {"result": "in a transaction"}, {"result": [1]}]


def test_base64_is_every_string_but_a_plain_ok(http: httpx.Client) -> None:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    commands = [["SET", "a", "日本"], ["GET", "a"], ["MGET", "a", "none"], ["STRLEN", "a"], ["SET", "b", "OK"]]
    commands += [["GET", "b"], ["MGET", "b"], ["GET", "none"], ["INCR", "a"], ["PING"]]
    expected = ["OK", encoded("日本"), [encoded("日本"), None], 6, "OK", "OK", [encoded("OK")], None]
    for path in ("/pipeline", "/multi-exec"):
        answers = http.post(path, json=commands, headers=BASE64).json()
        assert [a.get("result") for a in answers[:8]] == expected
        assert answers[8] == {"error": "ERR value is not an integer or out of range"}
        assert answers[9] == {"result": encoded("PONG")}
    assert command(http, "GET", "a", **BASE64) == (200, {"result": encoded("日本")})


def test_bytes_that_are_no_text(http: httpx.Client, raw: redis.Redis) -> None:
    raw.set("bytes", b"\xff\x00a")
    assert command(http, "GET", "bytes") == (200, {"result": "\ufffd\x00a"})
    assert command(http, "GET", "bytes", **BASE64) == (200, {"result": base64.b64encode(b"\xff\x00a").decode()})


def test_path_style(http: httpx.Client, raw: redis.Redis) -> None:
    assert http.get("/set/foo/bar").json() == {"result": "OK"}
    assert http.get("/GET/foo").json() == {"result": "bar"}
    assert http.head("/get/foo").status_code == 200
    assert http.post("/set/a%2Fb%20c/x%25+y/EX/100").json() == {"result": "OK"}
    assert raw.get("a/b c") == b"x%+y"
    assert http.post("/set/body?EX=100&NX", content=b"\x00\xffraw/%41").json() == {"result": "OK"}
    assert raw.get("body") == b"\x00\xffraw/%41"
    assert 90 < raw.ttl("body") <= 100
    assert http.put("/set/body", params={"_token": TOKEN}, content=b"put").json() == {"result": "OK"}
    assert raw.get("body") == b"put"
    assert raw.ttl("body") == -1
    assert http.get("/mget/foo/none").json() == {"result": ["bar", None]}
    assert http.get("/hget/foo/x").status_code == 400


def test_arguments_arrive_as_they_were_written(http: httpx.Client, raw: redis.Redis) -> None:
    body = '["RPUSH", "l", 1, 1.0, 1e3, 12345678901234567890123, true, false, "", "\\u0000"]'
    assert http.post("/", content=body).json() == {"result": 8}
    assert raw.lrange("l", 0, -1) == [
        b"1", b"1.0", b"1e3", b"12345678901234567890123", b"true", b"false", b"", b"\x00",
    ]  # fmt: skip


def test_who_may_ask(url: str, http: httpx.Client) -> None:
    command(http, "SET", "a", "x")
    with httpx.Client(base_url=url) as stranger:
        for given_token in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN):
            for path in ("/", "/pipeline", "/get/a"):
                answer = stranger.post(path, headers={"Authorization": given_token}, content=b'["GET", "a"]')
                assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
        assert stranger.get("/get/a?_token=wrong").status_code == 401
        assert stranger.get("/get/a?_token=%C3%A4").status_code == 401
        assert stranger.get(f"/get/a?_token={TOKEN}").json() == {"result": "x"}
        assert stranger.post(f"/?_token={TOKEN}", json=["GET", "a"]).json() == {"result": "x"}
        assert stranger.get("/get/a", headers={"Authorization": f"bearer {TOKEN}"}).json() == {"result": "x"}
        assert stranger.get("/health").json() == {"status": "ok"}


def test_other_methods_and_formats(http: httpx.Client) -> None:
    for method in ("DELETE", "PATCH", "OPTIONS"):
        answer = http.request(method, "/get/a")
        assert answer.status_code == 405
        assert "GET, HEAD, POST, PUT" in answer.json()["error"]
    assert http.get("/pipeline").status_code == 405
    assert http.get("/get/a", headers={"Upstash-Response-Format": "resp2"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/", b"", "not JSON"),
        ("/", b"[", "not JSON"),
        ("/", b'["GET", NaN]', "not JSON"),
        ("/", b"[" * 100_000, "not JSON"),
        ("/", b"\xff", "not JSON"),
        ("/", b'{"a": 1}', "must be a JSON array"),
        ("/", b"[]", "must be a JSON array"),
        ("/", b'"GET"', "must be a JSON array"),
        ("/", b'["GET", ["a"]]', "string, a number or a boolean"),
        ("/", b'["GET", null]', "string, a number or a boolean"),
        ("/", b'["GET", "\\ud800"]', "lone surrogate"),
        ("/", b'[""]', "Command is not available: ''"),
        ("/pipeline", b"[]", "array of commands"),
        ("/pipeline", b'["GET", "a"]', "must be a JSON array"),
        ("/pipeline", b"[[]]", "must be a JSON array"),
        ("/multi-exec", b"{}", "array of commands"),
    ],
)
def test_what_can_not_be_read_is_400_and_says_why(http: httpx.Client, path: str, body: bytes, message: str) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


HARMFUL = """
CONFIG FLUSHALL FLUSHDB KEYS SCAN SHUTDOWN DEBUG SAVE BGSAVE BGREWRITEAOF SLAVEOF REPLICAOF SYNC PSYNC MIGRATE
RESTORE DUMP MODULE ACL AUTH HELLO CLIENT CLUSTER COMMAND INFO LATENCY MEMORY MONITOR SLOWLOG SWAPDB SELECT MOVE
RESET QUIT FAILOVER BLPOP BRPOP BLMOVE BLMPOP BRPOPLPUSH BZPOPMIN BZPOPMAX BZMPOP WAIT XREAD XREADGROUP SUBSCRIBE
PSUBSCRIBE SSUBSCRIBE UNSUBSCRIBE PUBLISH MULTI EXEC DISCARD WATCH UNWATCH SORT SORT_RO SETBIT SETRANGE BITFIELD
APPEND FUNCTION FCALL OBJECT RANDOMKEY READONLY ASKING PFSELFTEST LOLWUT
""".split()  # noqa: SIM905


def test_nothing_that_could_harm_the_server_is_served(http: httpx.Client) -> None:
    assert ALLOWED.isdisjoint(HARMFUL)
    for name in HARMFUL:
        for spelling in (name, name.lower()):
            status, body = command(http, spelling, "x")
            assert (status, name in str(body["error"])) == (400, True)
    for sub in ("FLUSH", "KILL", "DEBUG", "flush"):
        assert command(http, "SCRIPT", sub)[0] == 400
    assert command(http, "SCRIPT")[0] == 400
    assert command(http, "FLUSHALL\r\nPING")[0] == 400
    assert http.get("/flushall").status_code == 400


def test_all_that_is_allowed_is_known_to_redis_and_does_not_block(raw: redis.Redis) -> None:
    for name in ALLOWED:
        info = raw.execute_command("COMMAND", "INFO", name)
        assert info, name
        flags = {str(flag) for flag in next(iter(info.values()))["flags"]}
        assert not flags & {"blocking", "admin", "pubsub"}, name


def test_through_scripts_the_user_of_redis_is_the_bound(http: httpx.Client) -> None:
    command(http, "SET", "a", "x")
    for harmful in ("'FLUSHALL'", "'KEYS', '*'", "'CONFIG', 'GET', '*'", "'SHUTDOWN'", "'DEBUG', 'SLEEP', '1'"):
        status, body = command(http, "EVAL", f"return redis.call({harmful})", 0)
        assert status == 400
        assert str(body["error"]).startswith("ERR ") or "NOPERM" in str(body["error"])
    assert command(http, "GET", "a") == (200, {"result": "x"})


# -- limits


def test_one_below_at_and_one_above_each_limit(http: httpx.Client) -> None:
    ping = ["PING"]
    for count in (MAX_COMMANDS - 1, MAX_COMMANDS):
        assert len(http.post("/pipeline", json=[ping] * count).json()) == count
    answer = http.post("/pipeline", json=[ping] * (MAX_COMMANDS + 1))
    assert answer.status_code == 413
    assert f"at most {MAX_COMMANDS} commands a request; this has {MAX_COMMANDS + 1}" in answer.json()["error"]

    for size in (MAX_ARGUMENT_BYTES - 1, MAX_ARGUMENT_BYTES):
        assert command(http, "SET", "big", "x" * size) == (200, {"result": "OK"})
    status, body = command(http, "SET", "big", "x" * (MAX_ARGUMENT_BYTES + 1))
    assert status == 400
    assert f"at most {MAX_ARGUMENT_BYTES} bytes; one here has {MAX_ARGUMENT_BYTES + 1}" in str(body["error"])

    fits = b'["PING"' + b" " * (MAX_BODY_BYTES - 8) + b"]"
    assert len(fits) == MAX_BODY_BYTES
    assert http.post("/", content=fits).json() == {"result": "PONG"}
    answer = http.post("/", content=fits + b" ")
    assert answer.status_code == 413
    assert str(MAX_BODY_BYTES) in answer.json()["error"]


def test_a_script_that_hangs_is_answered_in_time_and_killed(http: httpx.Client) -> None:
    start = time.monotonic()
    status, body = command(http, "EVAL", "while true do end", 0)
    assert time.monotonic() - start < 3
    assert status == 504
    assert "no answer within 2.0 s" in str(body["error"])
    until = time.monotonic() + 5
    while command(http, "SET", "a", "x") != (200, {"result": "OK"}):
        assert time.monotonic() < until
        time.sleep(0.05)


async def test_a_body_that_does_not_arrive_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.redis_rest.app.BODY_TIMEOUT_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        yield b'["GET",'
        await asyncio.sleep(5)

    transport = httpx.ASGITransport(create_app("redis://127.0.0.1:1", TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://rest", params={"_token": TOKEN}) as client:
        assert (await client.post("/", content=slow())).status_code == 408


async def test_more_requests_at_once_than_the_limit_are_503(server: RedisServer, url: str) -> None:
    server.freeze()
    try:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(params={"_token": TOKEN}, timeout=15, limits=limits) as client:
            calls = [client.get(f"{url}/get/a") for _ in range(MAX_REQUESTS_AT_ONCE + 10)]
            answers = await asyncio.gather(*calls)
    finally:
        server.thaw()
    codes = [a.status_code for a in answers]
    assert set(codes) == {503, 504}
    # fewer where the first have ended before the last are there
    assert codes.count(503) <= 10
    refused = next(a for a in answers if a.status_code == 503)
    assert refused.json() == {"error": f"ERR more than {MAX_REQUESTS_AT_ONCE} requests at once"}


# -- faults


def test_without_a_token_or_with_an_impossible_url_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match="UPSTASH_REDIS_REST_TOKEN is not set"):
        create_app("redis://127.0.0.1:1", "")
    with pytest.raises(ConfigError, match="REDIS_URL"):
        create_app("http://127.0.0.1:1", TOKEN)


def test_redis_gone_frozen_and_back(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, endpoint(server.url, tmp_path) as url:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=15) as http:
            assert command(http, "SET", "a", "x") == (200, {"result": "OK"})

            server.freeze()
            for asked in (["GET", "a"], ["GET", "b"]):
                start = time.monotonic()
                assert command(http, *asked)[0] == 504
                assert time.monotonic() - start < 3
            assert http.get("/health").status_code == 503
            server.thaw()
            # the answers to the timed-out calls are nobody's
            assert command(http, "STRLEN", "a") == (200, {"result": 1})
            assert http.get("/health").status_code == 200

            server.stop()
            start = time.monotonic()
            answer = http.post("/pipeline", json=[["GET", "a"]])
            assert (answer.status_code, answer.json()) == (503, {"error": "ERR redis is unavailable"})
            assert http.get("/health").json() == {"status": "redis-unavailable"}
            assert time.monotonic() - start < 1

            server.start()
            assert command(http, "GET", "a") == (200, {"result": None})
        log = (tmp_path / "rest.log").read_text()
        assert log.count("redis does not answer") == log.count("redis answers again") == 2


def test_scripts_are_known_after_a_restart(server: RedisServer, http: httpx.Client, tmp_path: Path) -> None:
    script = "#!lua flags=allow-key-locking\nreturn 'known'"
    sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    assert command(http, "EVAL", script, 0) == (200, {"result": "known"})
    with endpoint(server.url, tmp_path) as second, httpx.Client(base_url=second, params={"_token": TOKEN}) as other:
        assert command(other, "EVALSHA", sha.upper(), 0) == (200, {"result": "known"})
        assert other.post("/pipeline", json=[["EVALSHA", sha, 0]]).json() == [{"result": "known"}]


def test_a_script_s_error_names_the_line_it_was_written_on(http: httpx.Client) -> None:
    _, body = command(http, "EVAL", "#!lua flags=allow-key-locking\n\nerror('here')", 0)
    assert ":3: here" in str(body["error"])


def test_a_client_that_goes_away_in_the_middle_leaves_nothing_behind(url: str, http: httpx.Client) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as gone:
            head = f"POST /pipeline HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
            gone.sendall(head.encode() + b'[["GET"')
    assert command(http, "PING") == (200, {"result": "PONG"})
