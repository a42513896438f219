"""Search as a caller meets it: its rungs, scores, filters and queries, over real tables."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lancedb.index import FTS
from lancedb.query import MatchQuery
from structlog.testing import capture_logs

from fakes.provider import FakeProvider
from integration.conftest import TestServer
from integration.service import (
    DIM,
    App,
    Tenant,
    down,
    fresh_database,
    problem_type,
    running,
    settings_for,
    until,
)
from warmstart.search import MAX_SCANS
from warmstart.store.reads import Reader
from warmstart.store.schema import FTS_OPTIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEST, SECOND, LAST = 1 / 61, 1 / 62, 1 / 110


async def keyword(tenant: Tenant, query: str, **fields: Any) -> Any:
    """A search whose query gets no vector, from the cache neither."""
    assert tenant.app.provider is not None
    await tenant.app.forget()
    with down(tenant.app.provider):
        return await tenant.search(query, **fields)


def ids(answer: Any) -> list[str]:
    return [hit["id"] for hit in answer["hits"]]


# -- rung 2: with the embedder dead, the order is that of full-text alone

WORDS = [
    "walrus", "walruses", "ice", "Fish", "résumé", "resume", "migrate", "migrations", "E1234", "get_user_by_id",
    "the", "Speicher", "内存", "检索", "tusk", "TUSK", "(ice", "fish!", "a", "数据库连接",
]  # fmt: skip
#: Marks are folded before the engine sees a query, which a raw query isn't.
ASKED = [word for word in WORDS if word != "résumé"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=7).map(" ".join)


# each example saves: making a failing one smaller would take minutes
@settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    batches=st.lists(st.lists(texts, min_size=1, max_size=25, unique=True), min_size=1, max_size=3),
    trashed=st.sets(st.integers(0, 74), max_size=3),
    # a word said twice counts once, and twice in a raw query
    query=st.lists(st.sampled_from(ASKED), min_size=1, max_size=5, unique_by=str.lower).map(" ".join),
)
async def test_a_dead_embedder_leaves_full_text_alone(
    app: App, batches: list[list[str]], trashed: set[int], query: str
) -> None:
    await app.compact()
    tenant = await app.tenant()
    made: list[str] = []
    for batch in batches:
        made += await tenant.batch(*batch)
    await app.embed_all()
    for i in trashed:
        if i < len(made):
            await tenant.delete(f"/v1/memories/{made[i]}")
    raw = await (
        app.runtime.table.lance.query()
        .nearest_to_text(MatchQuery(query, "search_text"))
        .where(f"user_id = '{tenant.user_id}' AND deleted_at IS NULL")
        .limit(10_000)
        .select(["id", "created_at", "_score"])
        .to_list()
    )
    raw.sort(key=lambda r: r["id"])
    raw.sort(key=lambda r: r["created_at"], reverse=True)
    raw.sort(key=lambda r: r["_score"], reverse=True)
    answer = await keyword(tenant, query, limit=50)
    assert answer["degraded"] == ["embedding"]
    assert answer["mode"] == ("keyword" if raw else "scan")
    if raw:
        assert ids(answer) == [r["id"] for r in raw[:50]]
        ranks = range(1, len(answer["hits"]) + 1)
        assert [h["ranks"] for h in answer["hits"]] == [{"vector": None, "text": rank} for rank in ranks]
        assert [h["score"] for h in answer["hits"]] == [1 / (60 + rank) for rank in ranks]


# -- the modes


async def test_both_arms_are_hybrid_and_one_found_by_both_is_first(app: App, alice: Tenant) -> None:
    await alice.batch("the walrus eats", "fish live in water", "ice is cold")
    await app.embed_all()
    # the circuit may still be open from a test before
    answer = await until(lambda: hybrid(alice, "the walrus eats"), timeout_s=40)
    assert answer["degraded"] == []
    best = answer["hits"][0]
    assert best["content"] == "the walrus eats"
    assert best["ranks"] == {"vector": 1, "text": 1}
    assert best["score"] == 2 / 61


async def test_a_tenant_without_vectors_is_hybrid_and_not_degraded(alice: Tenant) -> None:
    assert await alice.search("walrus") == {
        "hits": [], "mode": "hybrid", "degraded": [], "took_ms": pytest.approx(0, abs=5000)
    }  # fmt: skip
    [walrus] = await alice.batch("a walrus without a vector")
    answer = await alice.search("walrus")
    assert (answer["mode"], answer["degraded"], ids(answer)) == ("hybrid", [], [walrus])
    assert answer["hits"][0]["score"] == BEST


async def test_no_query_vector_is_keyword_logged_and_counted(app: App, alice: Tenant) -> None:
    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    before = app.metric("searches_total", mode="keyword")
    degraded = app.metric("degraded_total", operation="search", reason="embedding")
    with capture_logs() as logs:
        answer = await keyword(alice, "walrus")
    assert (answer["mode"], answer["degraded"], ids(answer)) == ("keyword", ["embedding"], [walrus])
    assert [e["reason"] for e in logs if e["event"] == "search.embedding.degraded"] == ["embedding"]
    assert app.metric("searches_total", mode="keyword") == before + 1
    assert app.metric("degraded_total", operation="search", reason="embedding") == degraded + 1
    assert (await until(lambda: hybrid(alice, "walrus")))["hits"][0]["ranks"] == {"vector": 1, "text": 1}


async def hybrid(tenant: Tenant, query: str) -> Any:
    answer = await tenant.search(query)
    return answer if answer["mode"] == "hybrid" else None


async def test_without_its_index_full_text_is_no_rung_of_its_own_loss(
    postgres_session: TestServer, tmp_path: Path, quick_circuits: None
) -> None:
    """Whatever the engine does without the index: what is there is found, on a rung that says how."""
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            tenant = await app.tenant()
            [walrus] = await tenant.batch("the walrus")
            await app.embed_all()
            await app.runtime.table.lance.drop_index("search_text_idx")
            answer = await tenant.search("walrus")
            assert answer["mode"] in ("hybrid", "vector")
            assert answer["degraded"] == ([] if answer["mode"] == "hybrid" else ["text"])
            assert ids(answer) == [walrus]
            answer = await keyword(tenant, "walrus")
            assert answer["mode"] in ("keyword", "scan")
            assert "embedding" in answer["degraded"]
            assert ids(answer) == [walrus]
            assert (await keyword(tenant, "nothing of it"))["mode"] == "scan"
            # more terms than are kept: these are counted with the index's own tokenizer
            many = " ".join(["walrus", *(f"w{i}" for i in range(60))])
            assert ids(await tenant.search(many)) == [walrus]
            assert ids(await keyword(tenant, many)) == [walrus]
            await app.runtime.table.lance.create_index("search_text", config=FTS(**FTS_OPTIONS))
            answer = await until(lambda: hybrid(tenant, "walrus"))
            assert answer["hits"][0]["ranks"] == {"vector": 1, "text": 1}


async def test_a_failed_text_arm_is_vector(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses full-text queries, and answers all others."""
    query_class = type(app.runtime.table.lance.query())

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("lance error: the inverted index can't be read")

    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    with monkeypatch.context() as patch:
        patch.setattr(query_class, "nearest_to_text", refuse)
        answer = await alice.search("walrus")
        assert (answer["mode"], answer["degraded"], ids(answer)) == ("vector", ["text"], [walrus])
        assert answer["hits"][0]["ranks"] == {"vector": 1, "text": None}
        answer = await alice.search("walrus", min_score=0.02)
        assert (answer["degraded"], ids(answer)) == (["text", "min_score"], [walrus])
        answer = await keyword(alice, "walrus")
        assert (answer["mode"], sorted(answer["degraded"])) == ("scan", ["embedding", "text"])
        assert ids(answer) == [walrus]


async def test_a_failed_vector_arm_is_keyword(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    query_class = type(app.runtime.table.lance.query())

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("lance error: the vectors can't be read")

    [walrus] = await alice.batch("the walrus")
    await app.embed_all()
    monkeypatch.setattr(query_class, "nearest_to", refuse)
    answer = await alice.search("walrus", namespace="default")  # a filter is the table's to apply
    assert (answer["mode"], answer["degraded"], ids(answer)) == ("keyword", ["vector"], [walrus])


async def test_embedding_switched_off_is_keyword_and_not_degraded(postgres_session: TestServer, tmp_path: Path) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    async with running(settings_for(tmp_path, dsn, None, embedding_enabled=False)) as app:
        tenant = await app.tenant()
        saved = await tenant.save("the walrus")
        assert saved["embedding_status"] == "queued"
        answer = await tenant.search("walrus")
        assert (answer["mode"], answer["degraded"], ids(answer)) == ("keyword", [], [saved["id"]])
        assert (await tenant.search("walrus", min_score=0.03))["degraded"] == ["min_score"]
        answer = await tenant.search("alru")
        assert (answer["mode"], answer["degraded"], ids(answer)) == ("scan", [], [saved["id"]])
        health = await tenant.get("/v1/health")
        assert (health["status"], health["mode"], health["degraded"]) == ("ok", "keyword", [])
        states = {d["name"]: d["status"] for d in health["dependencies"]}
        assert states["embedding"] == "off"
        assert (await tenant.get("/readyz"))["status"] == "ok"
        assert (await tenant.post("/v1/context", {"query": "walrus"}))["ids"] == [saved["id"]]
        await app.embed_all()
        assert (await tenant.get(f"/v1/memories/{saved['id']}"))["embedding_status"] == "queued"


# -- rung 3: the scan

SCANNED = [
    # query, what is found, what would be found by a query language
    ("00%", "xx4000%yy", "xx4000zz"),
    ("a_b", "xxa_byy", "xxazbyy"),
    ('q"w', 'xxq"wyy', "xxqzwyy"),
    ("it's", "xxit's-it", "xxitzs"),
    ("x.*y", "aax.*yaa", "aaxzzyaa"),
    ("b]z", "ab]zz", "abzz"),
    ("\\d", "zz\\dzz", "zz7zz"),
    ("ALRU", "the walrus", "the whale"),
    ("ésum", "my résumé", "my consumption"),
]


@pytest.mark.parametrize(("query", "there", "decoy"), SCANNED)
async def test_a_scan_reads_its_query_literally(alice: Tenant, query: str, there: str, decoy: str) -> None:
    found, _ = await alice.batch(there, decoy)
    answer = await keyword(alice, query)
    assert (answer["mode"], answer["degraded"]) == ("scan", ["embedding"])
    assert ids(answer) == [found]
    assert answer["hits"][0]["score"] is None
    assert answer["hits"][0]["ranks"] == {"vector": None, "text": None}


async def test_a_scan_is_ordered_by_importance_then_recency(alice: Tenant) -> None:
    made = {}
    for name, importance in (("b", 0.5), ("a", 0.9), ("c", 0.5), ("d", 0.1)):
        made[name] = (await alice.save(f"xxneedle{name}", importance=importance))["id"]
    answer = await keyword(alice, "need")
    assert ids(answer) == [made[n] for n in "acbd"]
    assert ids(await keyword(alice, "need", limit=2)) == [made[n] for n in "ac"]


async def test_a_scan_matches_any_of_the_terms(alice: Tenant) -> None:
    first, second, _ = await alice.batch("aaoneaa", "bbtwobb", "ccthreecc")
    assert set(ids(await keyword(alice, "one two"))) == {first, second}


async def test_nothing_found_is_an_empty_answer(alice: Tenant) -> None:
    await alice.batch("the walrus")
    answer = await keyword(alice, "zzzz")
    assert (answer["mode"], answer["hits"], answer["degraded"]) == ("scan", [], ["embedding"])


async def test_a_scan_reads_the_newest_rows_only(postgres_session: TestServer, tmp_path: Path) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    async with running(settings_for(tmp_path, dsn, None, scan_rows=5, embedding_enabled=False)) as app:
        tenant = await app.tenant()
        other = await app.tenant()
        made = [(await tenant.save(f"xxneedle{i}", importance=1 - i / 10))["id"] for i in range(7)]
        await other.save("xxneedle of another")  # the bound is the tenant's own
        assert ids(await tenant.search("need")) == made[2:]


# -- scores


async def test_every_score_is_arithmetic(app: App, alice: Tenant) -> None:
    """60 rows that both arms rank: what comes back follows from the ranks beside it."""
    await alice.batch(*(f"walrus {' '.join(f'filler{j}' for j in range(i))}" for i in range(60)))
    await app.embed_all()
    answer = await alice.search("walrus", limit=50)
    hits = answer["hits"]
    assert (answer["mode"], len(hits)) == ("hybrid", 50)
    for hit in hits:
        given_ranks = [rank for rank in hit["ranks"].values() if rank is not None]
        assert given_ranks
        assert all(1 <= rank <= 50 for rank in given_ranks)
        assert hit["score"] == pytest.approx(sum(1 / (60 + rank) for rank in given_ranks), abs=1e-12)
        assert LAST <= hit["score"] <= 2 / 61
    for arm in ("vector", "text"):
        ranks = [hit["ranks"][arm] for hit in hits if hit["ranks"][arm] is not None]
        assert len(set(ranks)) == len(ranks)
    order = [(-hit["score"], hit["id"]) for hit in hits]  # one batch: all of one moment
    assert order == sorted(order)


async def test_one_arm_ranks_fifty(alice: Tenant) -> None:
    await alice.batch(*(f"walrus number{i}" for i in range(60)))
    scores = [hit["score"] for hit in (await keyword(alice, "walrus", limit=50))["hits"]]
    assert scores == [1 / (60 + rank) for rank in range(1, 51)]
    assert [round(s, 5) for s in (scores[0], scores[1], scores[-1])] == [0.01639, 0.01613, 0.00909]


async def test_min_score_in_one_arm(alice: Tenant) -> None:
    made = await alice.batch(*(f"walrus {'filler ' * i}" for i in range(5)))
    for min_score, count, degraded in (
        (0, 5, ["embedding"]),
        (0.00909, 5, ["embedding"]),
        (0.016, 2, ["embedding"]),
        (SECOND, 2, ["embedding"]),
        (BEST, 1, ["embedding"]),
        (0.0164, 5, ["embedding", "min_score"]),
        (2 / 61, 5, ["embedding", "min_score"]),
    ):
        answer = await keyword(alice, "walrus", min_score=min_score)
        assert (answer["degraded"], ids(answer)) == (degraded, made[:count]), min_score


async def test_min_score_in_both_arms(app: App, alice: Tenant) -> None:
    contents = [f"walrus {' '.join(f'f{j}' for j in range(i))}".strip() for i in range(8)]
    await alice.batch(*contents, *(f"other thing{i}" for i in range(8)))
    await app.embed_all()
    every = (await alice.search("walrus", limit=50))["hits"]
    for min_score in (0.0, 0.012, 0.016, BEST, 0.0164, 0.02, 0.031, 2 / 61):
        answer = await alice.search("walrus", limit=50, min_score=min_score)
        assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
        assert ids(answer) == [h["id"] for h in every if h["score"] >= min_score]
    kept = (await alice.search("walrus", limit=50, min_score=0.016))["hits"]
    both = [h for h in every if None not in h["ranks"].values()]
    assert {h["id"] for h in both} <= {h["id"] for h in kept}
    assert all(h in both or min(r for r in h["ranks"].values() if r) <= 2 for h in kept)


@pytest.mark.parametrize("min_score", [0.0328, 0.03279, 0.5, 1, 1e308])
async def test_a_min_score_that_nothing_reaches_is_refused(alice: Tenant, min_score: float) -> None:
    problem = await alice.search("walrus", min_score=min_score, status=422)
    assert problem["field"] == "min_score"
    assert "0.03279" in problem["detail"]
    assert "first in both" in problem["detail"]


# -- filters

MOMENT = datetime(2026, 5, 1, 12, tzinfo=UTC)


def instant(microseconds: int) -> str:
    return (MOMENT + timedelta(microseconds=microseconds)).isoformat()


def rows_to_filter() -> list[dict[str, Any]]:
    kinds = itertools.product(["work", "home"], ["decision", "gotcha"], [["x"], ["x", "it's"], []])
    return [
        {
            "content": f"the walrus number {i}",
            "namespace": namespace,
            "type": kind,
            "tags": tags,
            "entities": ["C++", "getUser()"] if i % 2 else [],
            "source": ["cli", "", "o'brien"][i % 3],
            "importance": i / 20,
            "occurred_at": instant(i),
        }
        for i, (namespace, kind, tags) in enumerate(kinds)
    ]


FILTERS: dict[str, tuple[dict[str, Any], Any]] = {
    "namespace": ({"namespace": "work"}, lambda r: r["namespace"] == "work"),
    "type": ({"type": "gotcha"}, lambda r: r["type"] == "gotcha"),
    "types": ({"type": ["gotcha", "goal"]}, lambda r: r["type"] == "gotcha"),
    "tag": ({"tags": ["x"]}, lambda r: "x" in r["tags"]),
    "tags": ({"tags": ["it's", "x"]}, lambda r: len(r["tags"]) == 2),
    "entities": ({"entities": ["getUser()"]}, lambda r: bool(r["entities"])),
    "source": ({"source": "o'brien"}, lambda r: r["source"] == "o'brien"),
    "min_importance": ({"min_importance": 0.3}, lambda r: r["importance"] >= 0.3),
    "occurred_from": ({"occurred_from": instant(4)}, lambda r: r["occurred_at"] >= instant(4)),
    "occurred_to": ({"occurred_to": instant(4)}, lambda r: r["occurred_at"] < instant(4)),
    "window": (
        {"occurred_from": instant(4), "occurred_to": instant(5)},
        lambda r: r["occurred_at"] == instant(4),
    ),
}
TOGETHER = ["namespace", "types", "tag", "min_importance", "occurred_to"]


@pytest.mark.parametrize("rung", ["hybrid", "keyword", "scan"])
async def test_filters_alone_and_together(app: App, alice: Tenant, rung: str) -> None:
    rows = rows_to_filter()
    made = dict(zip(await alice.batch(*rows), rows, strict=True))
    await app.embed_all()
    query = "alru" if rung == "scan" else "walrus"
    search = alice.search if rung == "hybrid" else lambda q, **f: keyword(alice, q, **f)
    cases = [([name], *FILTERS[name]) for name in FILTERS]
    everything: dict[str, Any] = {}
    for name in TOGETHER:
        everything |= FILTERS[name][0]
    everything |= {"occurred_to": instant(11)}
    cases.append((TOGETHER, everything, lambda r: all(FILTERS[n][1](r) for n in TOGETHER[:4])))
    for names, body, matches in cases:
        answer = await search(query, limit=50, **body)
        expected = {i for i, row in made.items() if matches(row)}
        assert set(ids(answer)) == expected, names
        assert answer["mode"] == (rung if expected else answer["mode"])
    assert len(ids(await search(query, limit=50))) == len(rows)


async def test_filters_come_before_ranking(app: App, alice: Tenant) -> None:
    """200 rows, of which the three that match are the worst of all."""
    few = [
        {"content": f"a walrus among {' '.join(f'w{i}x{j}' for j in range(60))}", "namespace": "few", "tags": ["t"],
         "entities": ["e"], "type": "goal", "source": "s", "importance": 0.9, "occurred_at": instant(0)}
        for i in range(3)
    ]  # fmt: skip
    expected = set(await alice.batch(*few))
    for start in (0, 100):
        await alice.batch(*({"content": f"walrus {i}", "occurred_at": instant(9)} for i in range(start, start + 97)))
    await app.embed_all()
    assert not expected & set(ids(await alice.search("walrus", limit=50)))
    for body in (
        {"namespace": "few"}, {"tags": ["t"]}, {"entities": ["e"]}, {"type": "goal"}, {"source": "s"},
        {"min_importance": 0.8}, {"occurred_to": instant(1)},
    ):  # fmt: skip
        answer = await alice.search("walrus", limit=50, **body)
        assert set(ids(answer)) == expected, body
        assert all(None not in hit["ranks"].values() for hit in answer["hits"]), body
        assert set(ids(await keyword(alice, "walrus", limit=50, **body))) == expected, body


# -- freshness, and the same answer to the same question


async def test_what_was_just_saved_is_found_by_every_process(
    app: App, alice: Tenant, postgres_session: TestServer
) -> None:
    async with running(app.runtime.settings, app.provider) as other:
        there = other.same_tenant(alice)
        for i in range(5):
            saved = await alice.save(f"walrus{i} is new")
            assert (await there.found(f"walrus{i}"))[0] == saved["id"]
            assert (await alice.found(f"walrus{i}"))[0] == saved["id"]
            await there.patch(f"/v1/memories/{saved['id']}", {"content": f"seal{i} instead"})
            assert ids(await keyword(alice, f"seal{i}")) == [saved["id"]]
            assert (await keyword(alice, f"walrus{i}"))["hits"] == []
            await there.delete(f"/v1/memories/{saved['id']}")
            assert saved["id"] not in await alice.found(f"seal{i}")


async def test_the_same_question_gets_the_same_answer(app: App, alice: Tenant) -> None:
    await alice.batch(*(f"walrus {i % 7} and fish {i % 5} {i}" for i in range(90)))
    await app.embed_all()
    answers = [await alice.search("walrus fish 3", limit=50) for _ in range(3)]
    at_once = await asyncio.gather(*(alice.search("walrus fish 3", limit=50) for _ in range(5)))
    assert all(answer["hits"] == answers[0]["hits"] for answer in [*answers, *at_once])


# -- queries are text, never a language

QUERIES = [
    "w", "w" * 16_384, "walrus " * 2_340, '"walrus"', '"', "''", "walrus AND NOT fish", "+walrus -fish", "walrus~2",
    "wal*", "content:walrus", "((((", "]]]", "{", "walrus) OR (1=1", "'; DROP TABLE memories; --", "🦭",
    "👩‍👩‍👧‍👦 walrus",
    "海象", "바다코끼리", "セイウチ", "ม้าน้ำ", "def f(x): return x['a']", "C:\\path\\to", "a/b/c.py:12",
    " ", "\n\t", "\u202e",
    "\ufdfa", "%", "_", "NULL", "\\", "^", "?", "walrus?", "\x01", "-" * 200, "\u0301", "𝔴𝔞𝔩𝔯𝔲𝔰",
]  # fmt: skip


@pytest.mark.parametrize("alive", [True, False])
async def test_any_text_is_a_query(app: App, alice: Tenant, alive: bool) -> None:
    await alice.batch("the walrus", "fish", "海象 is a walrus", "100% of it")
    await app.embed_all()
    for query in QUERIES:
        answer = await (alice.search(query) if alive else keyword(alice, query))
        assert answer["degraded"] == ([] if alive else ["embedding"]), query[:50]
    for query in ('"walrus"', "walrus AND NOT fish", "+walrus -fish", "walrus?", "walrus) OR (1=1", "𝔴𝔞𝔩𝔯𝔲𝔰"):
        answer = await (alice.search(query) if alive else keyword(alice, query))
        assert "the walrus" in [hit["content"] for hit in answer["hits"]], query


async def test_nul_and_lone_surrogates_leave_the_query(app: App, alice: Tenant) -> None:
    await alice.batch("the walrus", "fish")
    await app.embed_all()
    headers = {"content-type": "application/json"}
    plain = (await alice.search("the walrus"))["hits"]
    for query in ("the wal\x00rus", "\x00the walrus\x00", "the wal\ud800rus", "\udfffthe walrus"):
        response = await alice.http.post("/v1/search", content=json.dumps({"query": query}), headers=headers)
        assert response.status_code == 200
        assert response.json()["hits"] == plain
    for query in ("\x00", "\ud800\x00"):
        response = await alice.http.post("/v1/search", content=json.dumps({"query": query}), headers=headers)
        assert (response.status_code, problem_type(response.json())) == (422, "invalid")


async def test_of_too_many_terms_the_rarest_of_the_tenant_are_kept(app: App, alice: Tenant, bob: Tenant) -> None:
    """40 terms; the first 32 are in one memory each, the others in two. For bob it is the other way round."""
    rare = [f"rk{i:02}" for i in range(32)]
    common = [f"cm{i:02}" for i in range(8)]
    kept = await alice.batch(*(f"{word} here" for word in rare))
    await alice.batch(*(f"{word} {place}" for word in common for place in ("here", "there")))
    for start in range(0, 32, 8):
        words = rare[start : start + 8]
        await bob.batch(*(f"{word} {place}" for word in words for place in ("a1", "b2", "c3")))
    bobs = await bob.batch(*(f"{word} here" for word in common))
    query = " ".join([*common, *rare])
    assert set(ids(await keyword(alice, query, limit=50))) == set(kept)
    assert set(bobs) <= set(ids(await keyword(bob, query, limit=50)))


LANGUAGES = [
    ("my resume is here", "résumé"),
    ("my résumé is here", "resume"),
    ("RÉSUMÉ of the year", "resume"),
    ("we migrate the table", "migrations"),
    ("two migrations ran", "migrate"),
    ("向量数据库在重启后丢失了索引，需要重新建立", "索引"),
    ("向量数据库在重启后丢失了索引，需要重新建立", "数据库"),
    ("サーバーのメモリが足りないので再起動した", "メモリ"),
    ("データベースの接続が切れた", "接続"),
    ("데이터베이스 연결이 끊어졌습니다", "데이터베이스"),
    ("데이터베이스를 다시 시작했다", "데이터베이스"),
    ("ฐานข้อมูลหยุดทำงานหลังจากรีสตาร์ท", "ฐานข้อมูล"),
    ("ฐานข้อมูลหยุดทำงานหลังจากรีสตาร์ท", "ทำงาน"),
    ("call getUserById first", "user"),
    ("call getUserById first", "getUserById"),
    ("set MAX_POOL_SIZE to 4", "pool size"),
    ("failed with ERR_CONN_4711", "ERR_CONN_4711"),
    ("in src/app/main.py line 3", "main.py"),
    ("written in C++ of course", "C++"),
    ("über den Speicher", "uber"),
]


@pytest.mark.parametrize(("content", "query"), LANGUAGES)
async def test_words_are_found_with_the_embedder_dead(alice: Tenant, content: str, query: str) -> None:
    [there, _] = await alice.batch(content, "something else entirely, 别的东西, 다른 것, อื่น, ほか")
    assert ids(await keyword(alice, query)) == [there]


async def test_scans_take_turns_and_none_begins_too_late(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a load that makes both arms late, scans must not keep them late."""
    under_way = most = begun = 0
    newest_texts = Reader.newest_texts

    async def slow(self: Reader, *args: Any) -> Any:
        nonlocal under_way, most, begun
        under_way, begun = under_way + 1, begun + 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(0.6)
            return await newest_texts(self, *args)
        finally:
            under_way -= 1

    monkeypatch.setattr(Reader, "newest_texts", slow)
    await alice.save("a walrus")
    assert app.provider is not None
    with down(app.provider):
        answers = await asyncio.gather(*(alice.search("zzqx") for _ in range(8 * MAX_SCANS)))
        await until(lambda: is_zero(lambda: under_way))
    assert {answer["mode"] for answer in answers} == {"scan"}
    assert most <= MAX_SCANS
    assert begun < 8 * MAX_SCANS, "those without time left began none"


async def is_zero(number: Callable[[], int]) -> bool:
    return number() == 0
