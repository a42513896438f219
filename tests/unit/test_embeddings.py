"""Against a real HTTP server on loopback that misbehaves in every way we know."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.fakes.provider import FakeProvider, Mode, vector_of
from warmstart import embedding_wire
from warmstart.circuit import FAILURES_TO_OPEN, FIRST_PAUSE_S
from warmstart.config import Settings
from warmstart.embeddings import PROBE, Embedder
from warmstart.errors import CacheUnavailable, EmbeddingError
from warmstart.local_cache import Command, LocalCache
from warmstart.metrics import Metrics

#: Of half precision, the largest relative error.
HALF = 2**-11
DIM = 16
BUDGET_S = 30.0  # so long, a busy machine is no reason to fail


class SpiedCache(LocalCache):
    """The real stand-in, with what went through it."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.broken = False
        self.delay_s = 0.0

    async def pipeline(self, *commands: Command) -> list[Any]:
        self.commands.extend(commands)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.broken:
            raise CacheUnavailable("down")
        return await super().pipeline(*commands)

    def written(self) -> list[Command]:
        return [command for command in self.commands if command[0] == "SET"]


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(DIM) as provider:
        yield provider


@pytest.fixture
def cache() -> SpiedCache:
    return SpiedCache()


Make = Callable[..., Embedder]


@pytest.fixture
async def make(provider: FakeProvider, cache: SpiedCache) -> AsyncIterator[Make]:
    made: list[Embedder] = []

    def make(**changes: Any) -> Embedder:
        settings = Settings(embedding_dim=DIM, openai_base_url=provider.url, **changes)
        # Reading the certificate store for each of them would take most of the tests' time.
        transport = httpx.AsyncHTTPTransport(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        made.append(Embedder(settings, cache, base_url=settings.openai_base_url, transport=transport))
        return made[-1]

    yield make
    for embedder in made:
        await embedder.close()


@pytest.fixture
def embedder(make: Make) -> Embedder:
    return make()


def unit(vector: list[float]) -> list[float]:
    norm = math.hypot(*vector)
    return [x / norm for x in vector]


async def reason_of(call: Any) -> str:
    with pytest.raises(EmbeddingError) as caught:
        await call
    return caught.value.reason


async def break_circuit(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode = "status-503"
    for n in range(FAILURES_TO_OPEN):
        assert await reason_of(embedder.embed_query(f"breaking {n}", BUDGET_S)) == "status-503"


# The request


async def test_a_query_and_a_document_get_their_prefixes_and_nothing_else(
    embedder: Embedder, provider: FakeProvider
) -> None:
    query = await embedder.embed_query("deploy steps", BUDGET_S)
    [document] = await embedder.embed_documents(["deploy steps"], BUDGET_S)
    assert provider.texts == ["query: deploy steps", "passage: deploy steps"]
    assert query == pytest.approx(unit(vector_of("query: deploy steps", DIM)), rel=HALF)
    assert document == pytest.approx(unit(vector_of("passage: deploy steps", DIM)), rel=HALF)
    assert provider.requests[0].body == {
        "input": ["query: deploy steps"],
        "model": "intfloat/multilingual-e5-small",
        "encoding_format": "base64",
    }


async def test_a_key_is_sent_as_a_bearer_and_no_key_is_not_sent(make: Make, provider: FakeProvider) -> None:
    await make().embed_query("a", BUDGET_S)
    await make(openai_api_key="sk-test").embed_query("b", BUDGET_S)
    assert "authorization" not in provider.requests[0].headers
    assert provider.requests[1].headers["authorization"] == "Bearer sk-test"


async def test_it_brings_its_own_transport(provider: FakeProvider, cache: SpiedCache) -> None:
    embedder = Embedder(Settings(embedding_dim=DIM), cache, base_url=provider.url + "/")
    assert len(await embedder.embed_query("a", BUDGET_S)) == DIM
    await embedder.close()


async def test_each_request_is_timed_or_counted_by_what_went_wrong(provider: FakeProvider, cache: SpiedCache) -> None:
    metrics = Metrics()
    embedder = Embedder(Settings(embedding_dim=DIM), cache, base_url=provider.url, metrics=metrics)
    await embedder.embed_query("a", BUDGET_S)
    await embedder.embed_documents(["a"], BUDGET_S)
    provider.mode = "status-503"
    assert await reason_of(embedder.embed_query("b", BUDGET_S)) == "status-503"
    await embedder.close()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"warmstart_{name}", labels)

    assert value("embedding_seconds_count", kind="query") == 1
    assert value("embedding_seconds_count", kind="document") == 1
    assert value("embedding_failures_total", kind="query", reason="status-503") == 1


async def test_batches_are_split_at_the_limit_and_come_back_in_order(make: Make, provider: FakeProvider) -> None:
    provider.mode = "out-of-order"
    texts = [f"text {n}" for n in range(7)]
    vectors = await make(embed_batch_size=3).embed_documents(texts, BUDGET_S)
    assert [len(request.texts) for request in provider.requests] == [1, 2, 3, 1]
    for text, vector in zip(texts, vectors, strict=True):
        assert vector == pytest.approx(unit(vector_of(f"passage: {text}", DIM)), rel=HALF)


async def test_a_slow_provider_gets_few_texts_at_once(make: Make, provider: FakeProvider) -> None:
    """So that a query which comes meanwhile is soon its turn."""
    provider.delay_each_s = 0.1
    vectors = await make(embed_batch_size=32).embed_documents([f"text {n}" for n in range(12)], 10)
    sizes = [len(request.texts) for request in provider.requests]
    assert len(vectors) == sum(sizes) == 12
    assert sizes[0] == 1
    assert max(sizes) <= 3


async def test_long_texts_go_in_smaller_requests(embedder: Embedder, provider: FakeProvider) -> None:
    texts = [f"{n}" + "x" * 7_999 for n in range(9)] + ["y" * 50_000, "z"]
    assert len(await embedder.embed_documents(texts, BUDGET_S)) == 11
    assert [len(request.texts) for request in provider.requests] == [1, 2, 4, 2, 1, 1]


async def test_no_texts_need_no_provider(embedder: Embedder, provider: FakeProvider) -> None:
    assert await embedder.embed_documents([], BUDGET_S) == []
    assert provider.requests == []


async def test_any_text_can_be_sent(embedder: Embedder, provider: FakeProvider) -> None:
    texts = ["", "\x00", "\ud800", "😀", "記憶", '"quoted\\"', "x" * 8000]
    assert len(await embedder.embed_documents(texts, BUDGET_S)) == len(texts)
    assert [text for request in provider.requests for text in request.texts][3:5] == ["passage: 😀", "passage: 記憶"]


async def test_base64_and_lists_give_the_same_unit_vector(make: Make, provider: FakeProvider) -> None:
    exact = await make().embed_query("same", BUDGET_S)
    provider.mode = "floats"
    assert await make(embed_revision="2").embed_query("same", BUDGET_S) == exact
    assert math.hypot(*exact) == pytest.approx(1, abs=HALF)


# What can be wrong with an answer


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("wrong-width", "wrong-width"),
        ("wrong-count", "wrong-count"),
        ("empty", "wrong-count"),
        ("nan", "not-finite"),
        ("infinite", "not-finite"),
        ("zero", "zero-norm"),
        ("html", "malformed"),
        ("not-json", "malformed"),
        ("no-index", "malformed"),
        ("reset", "reset"),
        ("reset-mid-body", "reset"),
        ("status-400", "status-400"),
        ("status-401", "status-401"),
        ("status-404", "status-404"),
        ("status-413", "status-413"),
        ("status-422", "status-422"),
        ("status-429", "status-429"),
        ("status-500", "status-500"),
        ("status-503", "status-503"),
    ],
)
async def test_a_provider_at_fault_is_an_error_with_a_stable_reason(
    make: Make, provider: FakeProvider, cache: SpiedCache, mode: Mode, reason: str
) -> None:
    provider.mode = mode
    embedder = make()
    budget_s = 1.0 if reason == "reset" else BUDGET_S  # a provider that may be restarting is asked again, all the time
    with pytest.raises(EmbeddingError) as caught:
        await embedder.embed_query("a", budget_s)
    assert (caught.value.reason, caught.value.text_at_fault) == (reason, False)
    with pytest.raises(EmbeddingError) as caught:
        await make().embed_documents(["a", "b"], budget_s)
    assert (caught.value.reason, caught.value.text_at_fault) == (reason, False)
    assert cache.written() == []
    assert not embedder.healthy
    assert embedder.reason == reason
    assert embedder.since is not None


async def test_a_list_of_another_length_has_the_wrong_width(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode = "floats"
    provider.dim = DIM - 1
    assert await reason_of(embedder.embed_query("short", BUDGET_S)) == "wrong-width"


@pytest.mark.parametrize("value", [None, "!!!", "AAA=", {}, [1, "2"], [True] * DIM, [[1.0] * DIM], [10**400] * DIM])
def test_a_vector_of_another_kind_is_malformed(value: Any) -> None:
    answer = {"data": [{"index": 0, "embedding": value}]}
    with pytest.raises(EmbeddingError) as caught:
        embedding_wire._vectors(answer, 1, DIM)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("answer", [None, [], {}, {"data": {}}, {"data": [1]}])
def test_an_answer_of_another_kind_is_malformed(answer: Any) -> None:
    with pytest.raises(EmbeddingError) as caught:
        embedding_wire._vectors(answer, 1, DIM)
    assert caught.value.reason == "malformed"


def test_deeply_nested_json_is_malformed() -> None:
    with pytest.raises(EmbeddingError) as caught:
        embedding_wire._json(b"[" * 100_000)
    assert caught.value.reason == "malformed"


async def test_an_endless_answer_is_cut_off(
    embedder: Embedder, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_wire, "MAX_RESPONSE_BYTES", 3 * 2**20)
    provider.mode = "huge"
    assert await reason_of(embedder.embed_query("a", BUDGET_S)) == "malformed"


async def test_nobody_listening_is_unreachable(embedder: Embedder, provider: FakeProvider) -> None:
    provider.down()
    assert await reason_of(embedder.embed_query("a", BUDGET_S)) == "unreachable"


async def test_an_error_tells_neither_the_text_nor_the_key(make: Make, provider: FakeProvider) -> None:
    provider.mode = "status-400"
    with pytest.raises(EmbeddingError) as caught:
        await make(openai_api_key="sk-hidden").embed_query("my private words", BUDGET_S)
    assert "private" not in str(caught.value)
    assert "sk-hidden" not in str(caught.value)


# Time


@pytest.mark.parametrize("call", ["embed_query", "embed_documents"])
async def test_a_slow_provider_costs_no_more_than_the_budget(
    embedder: Embedder, provider: FakeProvider, call: str
) -> None:
    provider.delay_s = 3
    start = time.monotonic()
    argument: Any = "a" if call == "embed_query" else ["a", "b"]
    assert await reason_of(getattr(embedder, call)(argument, 0.2)) == "timeout"
    assert 0.19 < time.monotonic() - start < provider.delay_s


async def test_the_budget_is_one_for_all_batches_and_what_came_in_time_is_kept(
    make: Make, provider: FakeProvider
) -> None:
    provider.delay_s = 0.5
    results = await make(embed_batch_size=1).embed_each(["a", "b", "c", "d"], 1.25)
    kinds = [r.reason if isinstance(r, EmbeddingError) else "vector" for r in results]
    assert kinds == ["vector", "vector", "timeout", "timeout"]


async def test_a_query_that_missed_its_budget_still_serves_the_next_one(
    embedder: Embedder, provider: FakeProvider
) -> None:
    provider.delay_s = 0.3
    assert await reason_of(embedder.embed_query("a", 0.1)) == "timeout"
    await embedder.embed_query("a", 0.7)  # joins the request under way
    assert len(provider.requests) == 1


async def test_joining_a_request_that_runs_out_of_time_does_not_cost_the_joiner_his(
    make: Make, provider: FakeProvider
) -> None:
    embedder = make(embed_query_budget_ms=1)
    provider.delay_s = 0.4
    first = asyncio.create_task(reason_of(embedder.embed_query("a", 0.3)))
    await asyncio.sleep(0.1)
    assert len(await embedder.embed_query("a", 2.0)) == DIM
    assert await first == "timeout"


# One request for all who ask the same


async def test_equal_queries_share_a_request_and_cancelling_one_leaves_the_others(
    embedder: Embedder, provider: FakeProvider
) -> None:
    provider.delay_s = 0.2
    waiters = [asyncio.create_task(embedder.embed_query("same", BUDGET_S)) for _ in range(5)]
    await asyncio.sleep(0.05)
    waiters[0].cancel()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, list) and result == results[1] for result in results[1:])
    assert len(provider.requests) == 1


async def test_the_last_to_leave_ends_the_request_and_it_counts_as_no_failure(
    embedder: Embedder, provider: FakeProvider
) -> None:
    provider.delay_s = 1
    for n in range(FAILURES_TO_OPEN + 1):
        waiter = asyncio.create_task(embedder.embed_query(f"left {n}", BUDGET_S))
        await asyncio.sleep(0.02)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    provider.delay_s = 0
    assert len(await embedder.embed_query("left 0", BUDGET_S)) == DIM
    assert embedder.healthy


async def test_different_queries_do_not_share(embedder: Embedder, provider: FakeProvider) -> None:
    one, two = await asyncio.gather(embedder.embed_query("a", 2), embedder.embed_query("b", 2))
    assert one != two
    assert len(provider.requests) == 2


async def test_closing_ends_what_is_under_way(embedder: Embedder, provider: FakeProvider) -> None:
    provider.delay_s = 5
    waiter = asyncio.create_task(reason_of(embedder.embed_query("a", BUDGET_S)))
    await asyncio.sleep(0.05)
    await embedder.close()
    assert await asyncio.wait_for(waiter, 1) == "closed"
    assert await reason_of(embedder.embed_documents(["a"], BUDGET_S)) == "closed"


# The text at fault


@pytest.mark.parametrize("mode", ["status-400", "status-413", "status-422", "status-500", "reset", "nan"])
async def test_one_bad_text_is_found_and_the_others_get_their_vectors(
    embedder: Embedder, provider: FakeProvider, mode: Mode
) -> None:
    provider.mode, provider.only_for = mode, "poison"
    texts = [f"text {n}" for n in range(9)]
    texts.insert(4, "the poison itself")
    results = await embedder.embed_each(texts, BUDGET_S)
    failed = results.pop(4)
    assert isinstance(failed, EmbeddingError)
    assert failed.text_at_fault
    assert all(isinstance(result, list) for result in results)
    with pytest.raises(EmbeddingError) as caught:
        await embedder.embed_documents(texts, BUDGET_S)
    assert caught.value.text_at_fault


@pytest.mark.parametrize("mode", ["status-400", "reset", "nan"])
async def test_a_single_bad_text_is_told_from_a_bad_provider(
    embedder: Embedder, provider: FakeProvider, mode: Mode
) -> None:
    provider.mode, provider.only_for = mode, "poison"
    [result] = await embedder.embed_each(["poison"], BUDGET_S)
    assert isinstance(result, EmbeddingError)
    assert result.text_at_fault
    assert f"passage: {PROBE}" in provider.texts
    with pytest.raises(EmbeddingError) as caught:
        await embedder.embed_query("poison", BUDGET_S)
    assert caught.value.text_at_fault


async def test_refused_texts_never_open_the_circuit_for_others(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode, provider.only_for = "status-413", "poison"
    for n in range(3 * FAILURES_TO_OPEN):
        assert await reason_of(embedder.embed_query(f"poison {n}", BUDGET_S)) == "status-413"
    provider.delay_s = 0.2  # so that all are refused together
    at_once = (embedder.embed_query(f"more poison {n}", BUDGET_S) for n in range(12))
    for error in await asyncio.gather(*at_once, return_exceptions=True):
        assert isinstance(error, EmbeddingError)
        assert error.text_at_fault
    assert len(await embedder.embed_query("fine", BUDGET_S)) == DIM
    assert embedder.healthy


@pytest.mark.parametrize("texts", [["a"], ["a", "b"]])
async def test_a_reset_by_chance_is_no_fault_of_the_text(
    embedder: Embedder, provider: FakeProvider, texts: list[str]
) -> None:
    provider.mode = "reset"
    asyncio.get_running_loop().call_later(0.4, lambda: setattr(provider, "mode", "ok"))
    assert len(await embedder.embed_documents(texts, BUDGET_S)) == len(texts)


async def test_a_deadly_text_kills_no_more_often_than_needed(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode, provider.only_for = "reset", "poison"
    await embedder.embed_each([*(f"text {n}" for n in range(5)), "poison", *"abc"], BUDGET_S)
    deadly = [request for request in provider.requests if "passage: poison" in request.texts]
    assert len(deadly) == 3  # with the others, alone, and alone again to be sure


async def test_a_provider_that_takes_less_at_once_still_gets_everything(
    embedder: Embedder, provider: FakeProvider
) -> None:
    provider.max_batch = 4
    assert len(await embedder.embed_documents([f"text {n}" for n in range(20)], BUDGET_S)) == 20


async def test_a_provider_that_is_down_is_asked_once_for_a_large_call(make: Make, provider: FakeProvider) -> None:
    provider.mode = "status-503"
    results = await make(embed_batch_size=2).embed_each([f"text {n}" for n in range(20)], BUDGET_S)
    assert {r.reason for r in results if isinstance(r, EmbeddingError)} == {"status-503"}
    assert len(results) == 20
    assert len(provider.requests) == 1


# The circuit


async def test_a_dead_provider_soon_costs_nothing_and_logs_once(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode = "status-503"
    with capture_logs() as logs:
        for n in range(FAILURES_TO_OPEN):
            assert await reason_of(embedder.embed_query(f"a {n}", BUDGET_S)) == "status-503"
        start = time.monotonic()
        for n in range(50):
            assert await reason_of(embedder.embed_query(f"b {n}", BUDGET_S)) == "circuit-open"
    assert time.monotonic() - start < 0.5
    assert len(provider.requests) == FAILURES_TO_OPEN
    assert len(logs) == 1


async def test_it_heals_by_itself(embedder: Embedder, provider: FakeProvider) -> None:
    await break_circuit(embedder, provider)
    provider.mode = "ok"
    assert await reason_of(embedder.embed_query("early", BUDGET_S)) == "circuit-open"
    await asyncio.sleep(FIRST_PAUSE_S + 0.05)
    assert len(await embedder.embed_query("late", BUDGET_S)) == DIM
    assert embedder.healthy
    assert (embedder.reason, embedder.since) == ("", None)


async def test_slow_documents_leave_queries_alone(embedder: Embedder, provider: FakeProvider) -> None:
    provider.delay_s, provider.only_for = 2, "passage: "
    for n in range(FAILURES_TO_OPEN):
        assert await reason_of(embedder.embed_documents([f"a {n}"], 0.05)) == "timeout"
    assert await reason_of(embedder.embed_documents(["b"], 0.05)) == "circuit-open"
    assert len(await embedder.embed_query("quick", BUDGET_S)) == DIM


async def test_a_429_without_a_time_counts_as_a_failure(embedder: Embedder, provider: FakeProvider) -> None:
    provider.mode = "status-429"
    for n in range(FAILURES_TO_OPEN):
        assert await reason_of(embedder.embed_query(f"a {n}", BUDGET_S)) == "status-429"
    assert await reason_of(embedder.embed_query("b", BUDGET_S)) == "circuit-open"


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_opens_the_circuit_for_queries_and_documents(
    embedder: Embedder, provider: FakeProvider, form: str
) -> None:
    then = datetime.now(UTC) + timedelta(seconds=20)
    provider.mode, provider.retry_after = "status-429", "20" if form == "seconds" else format_datetime(then)
    assert await reason_of(embedder.embed_query("a", BUDGET_S)) == "status-429"
    provider.mode = "ok"
    assert await reason_of(embedder.embed_query("b", BUDGET_S)) == "circuit-open"
    assert await reason_of(embedder.embed_documents(["b"], BUDGET_S)) == "circuit-open"


@pytest.mark.parametrize("value", ["", "soon", "-5", "²", "9" * 500])
def test_a_strange_retry_after_does_no_harm(value: str) -> None:
    seconds = embedding_wire._retry_after(value)
    assert seconds is None or math.isfinite(seconds)


# The caches


async def test_a_querys_vector_is_cached_under_a_hash_for_its_time(
    embedder: Embedder, provider: FakeProvider, cache: SpiedCache
) -> None:
    first = await embedder.embed_query("my private words", BUDGET_S)
    await asyncio.sleep(0)
    assert await embedder.embed_query("my private words", BUDGET_S) == first
    assert len(provider.requests) == 1
    [(_, key, value, option, ttl)] = cache.written()
    assert (option, ttl) == ("EX", 5)
    assert str(key).startswith("ws:q:")
    assert len(str(key)) == len("ws:q:") + 64
    assert list(struct.unpack(f"<{DIM}f", base64.b64decode(str(value)))) == first
    assert "private" not in json.dumps(cache.commands)


async def test_documents_are_cached_and_asked_for_in_one_command(
    embedder: Embedder, provider: FakeProvider, cache: SpiedCache
) -> None:
    first = await embedder.embed_documents(["a", "b", "a"], BUDGET_S)
    assert first[0] == first[2]
    assert provider.texts == ["passage: a", "passage: b"]
    await asyncio.sleep(0)
    cache.commands.clear()
    again = await embedder.embed_documents(["b", "c", "a"], BUDGET_S)
    assert [again[0], again[2]] == [first[1], first[0]]
    assert provider.texts[2:] == ["passage: c"]
    assert [command[0] for command in cache.commands][:1] == ["MGET"]
    await asyncio.sleep(0)
    assert [command[0] for command in cache.commands] == ["MGET", "SET"]
    assert str(cache.written()[0][1]).startswith("ws:e:")
    assert cache.written()[0][3:] == ("EX", 7 * 86_400)


async def test_another_space_shares_no_vector(make: Make, cache: SpiedCache, provider: FakeProvider) -> None:
    for changes in ({}, {"embed_revision": "other"}, {"embed_model": "e5-other"}):
        await make(**changes).embed_query("a", BUDGET_S)
        await make(**changes).embed_documents(["a"], BUDGET_S)
        await asyncio.sleep(0)
    assert len({command[1] for command in cache.written()}) == 6


@pytest.mark.parametrize(
    "value",
    [
        base64.b64encode(struct.pack("<3f", 1, 0, 0)).decode(),
        base64.b64encode(struct.pack(f"<{DIM}f", *[math.nan] * DIM)).decode(),
        base64.b64encode(struct.pack(f"<{DIM}f", *[0.0] * DIM)).decode(),
        base64.b64encode(b"odd").decode(),
        "no base64",
        "",
    ],
)
async def test_a_cached_value_of_another_length_or_kind_is_a_miss(
    embedder: Embedder, provider: FakeProvider, cache: SpiedCache, value: str
) -> None:
    good = await embedder.embed_query("a", BUDGET_S)
    await asyncio.sleep(0)
    await cache.pipeline(("SET", cache.written()[0][1], value))
    assert await embedder.embed_query("a", BUDGET_S) == good
    assert len(provider.requests) == 2


async def test_a_dead_cache_changes_nothing(embedder: Embedder, provider: FakeProvider, cache: SpiedCache) -> None:
    cache.broken = True
    assert await embedder.embed_query("a", BUDGET_S) == await embedder.embed_query("a", BUDGET_S)
    assert len(await embedder.embed_documents(["a"], BUDGET_S)) == 1
    assert len(provider.requests) == 3


async def test_a_slow_cache_is_a_miss_and_leaves_time_for_the_provider(
    make: Make, provider: FakeProvider, cache: SpiedCache
) -> None:
    cache.delay_s = 3
    start = time.monotonic()
    assert len(await make(cache_budget_ms=50).embed_query("a", 1.0)) == DIM
    assert time.monotonic() - start < 0.5
