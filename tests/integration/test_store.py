"""The store as its callers use it: reads, writes, the trash, duplicates, tenants, groups, the lock."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lancedb.query import MatchQuery

from fakes.store import DIM, SPACE, Store, etag, open_store, row
from warmstart.config import Space
from warmstart.errors import (
    Conflict,
    Duplicate,
    Expired,
    NotFound,
    Stale,
    StoreUnavailable,
    TenantAssertion,
)
from warmstart.memory import MAX_BATCH, MAX_CONTENT, MAX_FACT, MAX_FACTS, MAX_TAG, MAX_TAGS, ListRequest, SearchRequest
from warmstart.store import changes
from warmstart.store import lock as locks
from warmstart.store import predicates as where
from warmstart.store.changes import Vector
from warmstart.store.frequencies import Frequencies
from warmstart.store.lock import FileLock
from warmstart.store.predicates import Predicate
from warmstart.store.reads import Inspector, Reader, filters_of, filters_of_list
from warmstart.store.schema import SHOWN, content_hash, now
from warmstart.store.table import open_table
from warmstart.store.writer import MAX_PENDING, Writer

ACTIVE = [where.active()]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "db") as opened:
        yield opened


def unit(*values: float) -> list[float]:
    return [*values, *([0.0] * (DIM - len(values)))]


# -- what is written is read


async def test_a_row_comes_back_byte_for_byte(store: Store) -> None:
    given = row(
        "naïve\r\ncafé \\' OR 1=1 -- 日本語 😀\t",
        title="a'b\\",
        facts=["it's", "\\"],
        tags=["'", "x\\') OR (1=1) --"],
        entities=["C++"],
        importance=0.3,
        source="\"cli'",
        metadata={"k": "'\\'", "n": [1, None]},
        namespace="a.b-c_d",
        occurred_at=datetime(1815, 12, 10, 1, 2, 3, 4, tzinfo=UTC),
    )
    await store.writer.insert([given])
    kept = (await store.reader().rows([given["id"]]))[given["id"]]
    assert set(kept) == set(SHOWN)
    assert kept["importance"] == pytest.approx(0.3, abs=1e-7)
    assert {k: v for k, v in kept.items() if k != "importance"} == {k: given[k] for k in SHOWN if k != "importance"}


async def test_the_largest_row_there_can_be(store: Store) -> None:
    batch = [
        row(
            chr(0x4E00 + i) * MAX_CONTENT,
            facts=["f" * MAX_FACT] * MAX_FACTS,
            tags=["t" * MAX_TAG] * MAX_TAGS,
            entities=["e" * MAX_TAG] * MAX_TAGS,
        )
        for i in range(MAX_BATCH)
    ]
    assert not any(i.duplicate for i in await store.writer.insert(batch))
    assert await store.reader().count(ACTIVE) == MAX_BATCH


async def test_empty_lists_are_asked_and_answered(store: Store) -> None:
    assert await store.writer.insert([]) == []
    assert await store.reader().rows([]) == {}
    assert await store.reader().page(ACTIVE, "recency", None, 10) == []
    assert await store.reader().group(["namespace"], ACTIVE) == {}
    assert await store.reader().text_arm("anything", ACTIVE, 50) == []
    assert await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True) == []
    assert (await store.reader().newest_texts(ACTIVE, 100)).num_rows == 0
    assert await store.backfill().set_vectors("alice", []) == []
    await store.backfill().set_failed("alice", {})
    await store.backfill().purge([], now())
    assert await store.backfill().retry_failed() == 0
    assert await Inspector(store.table).expired_ids(now(), 10) == []
    assert await Inspector(store.table).next_queued_tenant("") is None
    assert await Inspector(store.table).largest_tenant() == 0


async def test_lists_can_be_emptied_and_filled_by_an_edit(store: Store) -> None:
    [memory_id] = await store.save("x", tags=["a"], facts=["f"], entities=["e"])
    await store.tenant().edit(memory_id, {"tags": [], "facts": [], "entities": []}, None, etag)
    kept = (await store.reader().rows([memory_id]))[memory_id]
    assert (kept["tags"], kept["facts"], kept["entities"]) == ([], [], [])
    await store.tenant().edit(memory_id, {"tags": ["'", "\\"]}, None, etag)
    assert (await store.reader().rows([memory_id]))[memory_id]["tags"] == ["'", "\\"]


async def test_other_handles_see_each_commit_at_once(tmp_path: Path) -> None:
    async with open_store(tmp_path) as one, open_store(tmp_path) as other:
        for step in range(5):
            made = row(f"the zebra crosses {step}", vector=unit(1, step))
            await one.writer.insert([made])
            assert made["id"] in await other.reader().rows([made["id"]])
            assert made["id"] in [c.id for c in await other.reader().text_arm("zebra", ACTIVE, 50)]
            found = await other.reader().vector_arm(unit(1, step), ACTIVE, 50, exact=True)
            assert made["id"] == found[0].id

            await other.tenant().edit(made["id"], {"content": f"a giraffe instead {step}"}, None, etag)
            assert made["id"] not in [c.id for c in await one.reader().text_arm("zebra", ACTIVE, 50)]
            assert made["id"] in [c.id for c in await one.reader().text_arm("giraffe", ACTIVE, 50)]
            assert made["id"] not in [c.id for c in await one.reader().vector_arm(unit(1), ACTIVE, 50, exact=True)]

            await one.tenant().delete(made["id"], None, etag)
            assert await other.reader().count(ACTIVE) == 0


async def test_rows_are_found_before_and_after_compaction(store: Store) -> None:
    ids = []
    for step in range(6):
        ids += await store.save(f"walrus number {step}")
        if step == 3:
            await store.maintenance().optimize()
    assert {c.id for c in await store.reader().text_arm("walrus", ACTIVE, 50)} == set(ids)
    await store.tenant().edit(ids[0], {"content": "an otter"}, None, etag)
    assert {c.id for c in await store.reader().text_arm("walrus", ACTIVE, 50)} == set(ids[1:])
    assert [c.id for c in await store.reader().text_arm("otter", ACTIVE, 50)] == [ids[0]]


@pytest.mark.parametrize(
    ("content", "query"),
    [
        ("please resume the upload", "résumé"),
        ("a résumé was sent", "resume"),
        ("we migrate on Monday", "migrations"),
        ("three migrations failed", "migrate"),
        ("数据库连接池的大小是二十", "连接池"),
        ("デプロイの前にマイグレーションを実行する", "マイグレーション"),
        ("데이터베이스를 백업합니다", "데이터베이스"),
        ("ฐานข้อมูลสำรองทุกคืน", "ฐานข้อมูล"),
        ("call getUserById first", "getUserById"),
        ("call getUserById first", "user"),
        ("call get_user_by_id first", "get_user_by_id"),
        ("ERR_CONN_42 means the pool is empty", "ERR_CONN_42"),
        ("written in C++", "c++"),
        ("see app/warmstart/store.py", "store.py"),
        ("mail a.b@example.com", "a.b@example.com"),
        ("version 1.2.3-rc1", "1.2.3-rc1"),
    ],
)
async def test_words_meet(store: Store, content: str, query: str) -> None:
    from warmstart.terms import query_text

    [memory_id, _] = await store.save(content, "something else altogether")
    assert [c.id for c in await store.reader().text_arm(query_text(query), ACTIVE, 50)] == [memory_id]


@pytest.mark.parametrize(
    "query",
    ["((", ")", "a AND", "OR", "NOT", "+-*/", "[x", "{", "^~", "a:b", "field:", "\\", "'", "%", "🙂", "   ",
     "a" * 16_384, "x " * 8_192, "\x01", "*", "?", "/re/", "𝕏", "\u202e"],
)  # fmt: skip
async def test_no_query_is_a_language(store: Store, query: str) -> None:
    from warmstart.terms import query_text

    await store.save("one memory")
    if query_text(query).strip():
        assert isinstance(await store.reader().text_arm(query_text(query), ACTIVE, 50), list)


# -- the arms


async def test_the_text_arm_is_a_raw_query(store: Store) -> None:
    words = ["alpha", "beta", "gamma", "delta"]
    rows = [
        row(f"{words[i % 4]} {words[i % 3]} note {i}", user_id=user, namespace=f"n{i % 5}")
        for user in ("alice", "bob")
        for i in range(120)
    ]
    await store.writer.insert(rows[:130])
    await store.maintenance().optimize()
    await store.writer.insert(rows[130:])
    for query in ("alpha", "beta gamma", "note 7", "delta delta alpha"):
        raw = await (
            store.table.lance.query()
            .nearest_to_text(MatchQuery(query, "search_text"))
            .where("user_id = 'alice' AND deleted_at IS NULL")
            .limit(10_000)
            .select(["id", "created_at", "_score"])
            .to_list()
        )
        raw.sort(key=lambda r: r["id"])
        raw.sort(key=lambda r: r["created_at"], reverse=True)
        raw.sort(key=lambda r: r["_score"], reverse=True)
        ours = await store.reader().text_arm(query, ACTIVE, 50)
        assert [(c.id, c.score) for c in ours] == [(r["id"], r["_score"]) for r in raw[:50]]


async def test_the_vector_arm_is_exact(store: Store) -> None:
    random = np.random.default_rng(7)
    vectors = random.normal(size=(300, DIM)).astype(np.float32)
    rows = [row(f"m{i}", user_id="alice" if i % 3 else "bob", vector=v.tolist()) for i, v in enumerate(vectors)]
    await store.writer.insert([*rows, row("no vector yet")])
    query = random.normal(size=DIM).astype(np.float32)
    cosine = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    expected = [rows[i]["id"] for i in np.argsort(-cosine) if rows[i]["user_id"] == "alice"][:50]
    found = await store.reader().vector_arm(query.tolist(), ACTIVE, 50, exact=True)
    assert [c.id for c in found] == expected


@pytest.mark.parametrize("arm", ["text", "vector"])
@pytest.mark.parametrize("count", [50, 51, 130])
async def test_ties_go_by_age_then_id_even_across_the_cut(store: Store, arm: str, count: int) -> None:
    base = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        # a namespace each, or all would be one memory; few moments, so that ids decide too
        row("one and the same text", namespace=f"n{i}", at=base + timedelta(days=i * 7 % 5), vector=unit(1, 1))
        for i in range(count)
    ]
    for start in range(0, count, 40):
        await store.writer.insert(rows[start : start + 40])
    rows.sort(key=lambda r: r["id"])
    rows.sort(key=lambda r: r["created_at"], reverse=True)
    if arm == "text":
        found = await store.reader().text_arm("same text", ACTIVE, 50)
    else:
        found = await store.reader().vector_arm(unit(1, 1), ACTIVE, 50, exact=True)
    assert [c.id for c in found] == [r["id"] for r in rows[:50]]


async def test_ties_behind_better_rows(store: Store) -> None:
    """The cut falls into a group of ties that starts in the middle."""
    best = [row(f"walrus walrus walrus {i}", namespace=f"b{i}", vector=unit(1, i / 1000)) for i in range(30)]
    tied = [row("walrus in a longer text of words", namespace=f"n{i}", vector=unit(0, 1)) for i in range(90)]
    await store.writer.insert(best + tied)
    expected = sorted(tied, key=lambda r: r["id"])
    expected.sort(key=lambda r: r["created_at"], reverse=True)
    for found in (
        await store.reader().text_arm("walrus", ACTIVE, 50),
        await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True),
    ):
        assert {c.id for c in found[:30]} == {r["id"] for r in best}
        assert [c.id for c in found[30:]] == [r["id"] for r in expected[:20]]


async def test_a_vector_without_direction_finds_nothing_and_harms_nothing(store: Store) -> None:
    await store.writer.insert([row("a", vector=unit(1)), row("b", vector=unit())])
    assert await store.reader().vector_arm(unit(), ACTIVE, 50, exact=True) == []
    assert len(await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True)) == 1


FILTERED: list[tuple[dict[str, Any], set[str]]] = [
    ({"namespace": "work"}, {"b", "c"}),
    ({"type": "decision"}, {"b"}),
    ({"type": ["decision", "code"]}, {"b", "c"}),
    ({"tags": ["x"]}, {"a", "b"}),
    ({"tags": ["x", "it's"]}, {"b"}),
    ({"tags": []}, {"a", "b", "c", "d"}),
    ({"entities": ["C++"]}, {"c"}),
    ({"source": "cli"}, {"a"}),
    ({"source": ""}, {"b", "c", "d"}),
    ({"min_importance": 0.3}, {"b", "c", "d"}),
    ({"min_importance": 0.30001}, {"c", "d"}),
    ({"min_importance": 1.0}, {"c"}),
    ({"occurred_from": datetime(2025, 1, 1, tzinfo=UTC)}, {"a", "b", "d"}),
    ({"occurred_to": datetime(2025, 1, 1, tzinfo=UTC)}, {"c"}),
    (
        {"occurred_from": datetime(1, 1, 1, tzinfo=UTC), "occurred_to": datetime(9999, 1, 1, tzinfo=UTC)},
        {"a", "b", "c", "d"},
    ),
    ({"namespace": "work", "tags": ["x"], "min_importance": 0.1}, {"b"}),
]


async def test_filters_hold_in_each_arm_and_in_lists(store: Store) -> None:
    jan = datetime(2025, 1, 1, tzinfo=UTC)
    rows = {
        "a": row("word a", tags=["x"], source="cli", importance=0.1, occurred_at=jan, vector=unit(1)),
        "b": row("word b", namespace="work", type="decision", tags=["x", "it's"], importance=0.3,
                 occurred_at=jan + timedelta(microseconds=1), vector=unit(1, 0.1)),
        "c": row("word c", namespace="work", type="code", entities=["C++"], importance=1.0,
                 occurred_at=jan - timedelta(microseconds=1), vector=unit(1, 0.2)),
        "d": row("word d", vector=unit(1, 0.3)),
    }  # fmt: skip
    gone = row("word gone", tags=["x", "it's"], namespace="work", importance=1.0, vector=unit(1))
    foreign = row("word a", user_id="bob", tags=["x"], source="cli", vector=unit(1))
    await store.writer.insert([*rows.values(), gone, foreign])
    await store.tenant().delete(gone["id"], None, etag)
    names = {r["id"]: name for name, r in rows.items()}
    for fields, expected in FILTERED:
        filters = filters_of(SearchRequest(query="word", **fields))
        text = await store.reader().text_arm("word", filters, 50)
        vector = await store.reader().vector_arm(unit(1), filters, 50, exact=True)
        texts = await store.reader().newest_texts(filters, 50)
        assert {names[c.id] for c in text} == expected, fields
        assert {names[c.id] for c in vector} == expected, fields
        assert {names[i] for i in texts["id"].to_pylist()} == expected, fields

    async def listed(**fields: Any) -> set[str]:
        page = await store.reader().page(filters_of_list(ListRequest(**fields)), "recency", None, 50)
        return {names.get(r["id"], "gone") for r in page}

    assert await listed() == {"a", "b", "c", "d"}
    assert await listed(include_deleted=True) == {"a", "b", "c", "d", "gone"}
    assert await listed(only_deleted=True) == {"gone"}
    assert await listed(only_deleted=True, include_deleted=True) == {"gone"}
    assert await listed(tag="it's") == {"b"}
    assert await listed(namespace="work", include_deleted=True) == {"b", "c", "gone"}
    assert await listed(type="code") == {"c"}
    assert await listed(source="cli") == {"a"}


async def test_the_filter_comes_before_the_arm_is_cut(store: Store) -> None:
    """The few rows that match are found behind hundreds that don't."""
    crowd = [row("walrus", namespace=f"n{i}", vector=unit(1)) for i in range(400)]
    few = [row(f"a walrus of mine {i}", tags=["mine"], vector=unit(0.1, 1)) for i in range(5)]
    others = [row("walrus", user_id=f"user{i}", vector=unit(1)) for i in range(90)]
    await store.writer.insert([*crowd, *few, *others])
    filters = filters_of(SearchRequest(query="walrus", tags=["mine"]))
    wanted = {r["id"] for r in few}
    assert {c.id for c in await store.reader().text_arm("walrus", filters, 50)} == wanted
    assert {c.id for c in await store.reader().vector_arm(unit(1), filters, 50, exact=True)} == wanted


async def test_the_scan_reads_the_newest(store: Store) -> None:
    base = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [row(f"m{i}", at=base + timedelta(seconds=i)) for i in range(30)]
    await store.writer.insert(rows)
    newest = await store.reader().newest_texts(ACTIVE, 10)
    assert set(newest["id"].to_pylist()) == {r["id"] for r in rows[-10:]}


# -- pages


@pytest.mark.parametrize("order", ["recency", "importance"])
async def test_paging_gives_every_row_once_while_rows_come_in(store: Store, order: Any) -> None:
    base = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        row(f"m{i}", at=base + timedelta(microseconds=i % 4), importance=[0.1, 0.3, 0.3, 1 / 3, 0.0][i % 5])
        for i in range(83)
    ]
    await store.writer.insert(rows)
    for limit in (1, 7, 83, 84):
        seen: list[str] = []
        after: tuple[Any, ...] | None = None
        while page := await store.reader().page(ACTIVE, order, after, limit):
            assert len(page) <= limit
            seen += [r["id"] for r in page]
            last = page[-1]
            after = (last["created_at"], last["id"])
            if order == "importance":
                after = (last["importance"], *after)
            if limit == 7:
                await store.save(f"late {len(seen)}")  # newer than all, so before the first page
        old = [i for i in seen if i in {r["id"] for r in rows}]
        assert len(seen) == len(set(seen))
        expected = sorted(rows, key=lambda r: r["id"])
        expected.sort(key=lambda r: r["created_at"], reverse=True)
        if order == "importance":
            expected.sort(key=lambda r: np.float32(r["importance"]), reverse=True)
        assert old == [r["id"] for r in expected]


async def test_groups_count_what_matches(store: Store) -> None:
    await store.save(*"abc", namespace="one")
    await store.save(*"ab", namespace="two", type="code")
    await store.save("x", user_id="bob")
    [trashed] = await store.save("d", namespace="one")
    await store.tenant().delete(trashed, None, etag)
    assert await store.reader().group(["namespace", "type"], ACTIVE) == {("one", "fact"): 3, ("two", "code"): 2}
    assert await store.reader().group(["namespace"], [where.is_not_null("deleted_at")]) == {("one",): 1}


# -- duplicates


async def test_a_content_is_one_active_row_of_a_tenant_and_namespace(store: Store) -> None:
    [first] = await store.writer.insert([row("x")])
    [again] = await store.writer.insert([row("x", title="another", tags=["t"])])
    assert (again.id, again.duplicate) == (first.id, True)
    assert not (await store.writer.insert([row("x", namespace="other")]))[0].duplicate
    assert not (await store.writer.insert([row("x", user_id="bob")]))[0].duplicate
    assert not (await store.writer.insert([row("x ")]))[0].duplicate
    assert not (await store.writer.insert([row("é")]))[0].duplicate
    assert not (await store.writer.insert([row("e\u0301")]))[0].duplicate


async def test_duplicates_within_a_batch_answer_with_the_first(store: Store) -> None:
    answers = await store.writer.insert([row("x"), row("y"), row("x"), row("x")])
    assert [a.duplicate for a in answers] == [False, False, True, True]
    assert {answers[0].id} == {a.id for a in answers[2:]}
    assert await store.reader().count(ACTIVE) == 2


async def test_a_trashed_content_may_be_saved_anew_and_then_not_restored(store: Store) -> None:
    [old] = await store.save("x")
    await store.tenant().delete(old, None, etag)
    [new] = await store.save("x")
    assert new != old
    with pytest.raises(Duplicate) as refused:
        await store.tenant().restore(old)
    assert refused.value.extra["id"] == new
    await store.tenant().delete(new, None, etag)
    assert (await store.tenant().restore(old))["deleted_at"] is None
    assert await store.reader().count(ACTIVE) == 1


async def test_an_edit_into_another_rows_content_is_refused(store: Store) -> None:
    [one, two] = await store.save("x", "y")
    [elsewhere] = await store.save("x", namespace="other")
    for values in ({"content": "x"}, {"content": "x", "tags": ["t"]}):
        with pytest.raises(Duplicate) as refused:
            await store.tenant().edit(two, values, None, etag)
        assert refused.value.extra["id"] == one
    with pytest.raises(Duplicate) as refused:
        await store.tenant().edit(elsewhere, {"namespace": "default"}, None, etag)
    assert refused.value.extra["id"] == one
    assert (await store.reader().rows([two]))[two]["content"] == "y"
    await store.tenant().edit(one, {"content": "x", "tags": ["mine"]}, None, etag)  # its own is no other's


async def test_eight_writers_of_one_batch_make_each_row_once(tmp_path: Path) -> None:
    contents = [f"memory {i}" for i in range(100)]
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(tmp_path)) for _ in range(8)]
        answers = await asyncio.gather(*(s.writer.insert([row(c) for c in contents]) for s in stores))
        for position in range(100):
            assert len({a[position].id for a in answers}) == 1
            assert sum(not a[position].duplicate for a in answers) == 1
        rows = await stores[0].all_rows()
        assert sorted(r["content"] for r in rows) == sorted(contents)


async def test_concurrent_saves_of_one_content_in_one_process(store: Store) -> None:
    answers = await asyncio.gather(*(store.writer.insert([row("x")]) for _ in range(50)))
    assert len({a.id for [a] in answers}) == 1
    assert sum(not a.duplicate for [a] in answers) == 1


async def test_concurrent_edits_to_one_content_leave_one(store: Store) -> None:
    ids = await store.save(*[f"m{i}" for i in range(10)])
    done = await asyncio.gather(
        *(store.tenant().edit(i, {"content": "same"}, None, etag) for i in ids), return_exceptions=True
    )
    assert sum(isinstance(d, Duplicate) for d in done) == 9
    assert await store.reader().count([where.equals("content", "same")]) == 1


# -- edits, the trash, namespaces


async def test_an_edit_of_content_queues_its_vector_anew(store: Store) -> None:
    made = row("walrus", vector=unit(1))
    await store.writer.insert([made])
    edited = await store.tenant().edit(made["id"], {"tags": ["t"]}, None, etag)
    assert edited["embedding_status"] == "ready"
    assert len(await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True)) == 1
    edited = await store.tenant().edit(made["id"], {"content": "otter"}, None, etag)
    assert edited["embedding_status"] == "queued"
    assert edited["content_hash"] == content_hash("otter")
    assert edited == (await store.reader().rows([made["id"]]))[made["id"]]
    assert await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True) == []
    assert await store.reader().text_arm("walrus", ACTIVE, 50) == []
    assert len(await store.reader().text_arm("otter", ACTIVE, 50)) == 1


@pytest.mark.parametrize(
    ("given", "edit", "title"),
    [
        (None, {"content": "new first\nline"}, "new first"),
        ("Mine", {"content": "new first\nline"}, "Mine"),
        (None, {"content": "new", "title": "Theirs"}, "Theirs"),
        (None, {"tags": ["t"]}, "old first"),
    ],
)
async def test_a_title_cut_from_the_content_follows_it(
    store: Store, given: str | None, edit: dict[str, Any], title: str
) -> None:
    [memory_id] = await store.save("old first\nline", title=given)
    assert (await store.tenant().edit(memory_id, edit, None, etag))["title"] == title
    assert (await store.reader().rows([memory_id]))[memory_id]["title"] == title


async def test_other_fields_reach_full_text_at_once(store: Store) -> None:
    [memory_id] = await store.save("content")
    await store.tenant().edit(memory_id, {"title": "walrus", "tags": ["otter"], "entities": ["C++"]}, None, etag)
    for word in ("walrus", "otter", "cplusplus", "content"):
        assert [c.id for c in await store.reader().text_arm(word, ACTIVE, 50)] == [memory_id]


async def test_every_edit_is_another_etag_and_a_stale_one_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = now()
    monkeypatch.setattr(changes, "now", lambda: frozen)  # even where the clock stands still
    [memory_id] = await store.save("x")
    tags = [etag((await store.reader().rows([memory_id]))[memory_id])]
    for step in range(5):
        edited = await store.tenant().edit(memory_id, {"tags": [str(step)]}, tags[-1], etag)
        tags.append(etag(edited))
    assert len(set(tags)) == 6
    for stale in (tags[0], '"nonsense"', f"{tags[1]}, {tags[2]}"):
        with pytest.raises(Stale):
            await store.tenant().edit(memory_id, {"tags": ["never"]}, stale, etag)
        with pytest.raises(Stale):
            await store.tenant().delete(memory_id, stale, etag)
        with pytest.raises(Stale):
            await store.tenant().delete_for_good(memory_id, stale, etag)
    assert (await store.reader().rows([memory_id]))[memory_id]["tags"] == ["4"]
    for fresh in ("*", f"{tags[0]}, {tags[-1]}"):
        await store.tenant().edit(memory_id, {"tags": ["4"]}, fresh, etag)
    await store.tenant().delete(memory_id, tags[-1], etag)


async def test_of_two_edits_of_one_state_one_wins(store: Store) -> None:
    [memory_id] = await store.save("x")
    seen = etag((await store.reader().rows([memory_id]))[memory_id])
    done = await asyncio.gather(
        *(store.tenant().edit(memory_id, {"tags": [str(i)]}, seen, etag) for i in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(d, Stale) for d in done) == 7


async def test_the_trash(store: Store) -> None:
    [memory_id] = await store.save("x")
    before = now()
    trashed = await store.tenant().delete(memory_id, None, etag)
    assert before <= trashed["deleted_at"] <= now()
    assert trashed["expires_at"] == trashed["deleted_at"] + timedelta(days=30)
    assert await store.tenant().delete(memory_id, None, etag) == trashed
    assert await store.reader().text_arm("x", ACTIVE, 50) == []
    with pytest.raises(Conflict, match="restore it first"):
        await store.tenant().edit(memory_id, {"tags": ["t"]}, None, etag)
    restored = await store.tenant().restore(memory_id)
    assert restored["deleted_at"] is restored["expires_at"] is None
    assert await store.tenant().restore(memory_id) == restored
    await store.tenant().delete(memory_id, None, etag)
    await store.tenant().delete_for_good(memory_id, None, etag)
    with pytest.raises(NotFound):
        await store.tenant().restore(memory_id)
    assert await store.reader().count([]) == 0


async def test_restore_ends_with_the_thirty_days(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    [memory_id] = await store.save("x")
    expires = (await store.tenant().delete(memory_id, None, etag))["expires_at"]
    monkeypatch.setattr(changes, "now", lambda: expires)
    with pytest.raises(Expired):
        await store.tenant().restore(memory_id)
    monkeypatch.setattr(changes, "now", lambda: expires - timedelta(microseconds=1))
    assert (await store.tenant().restore(memory_id))["deleted_at"] is None


async def test_the_sweep_removes_what_expired_and_spares_what_was_restored(store: Store) -> None:
    ids = await store.save(*"abcd")
    trash = store.tenant(trash=timedelta(0))
    for memory_id in ids[:2]:
        await trash.delete(memory_id, None, etag)
    await store.tenant().delete(ids[2], None, etag)
    at = now()
    assert sorted(await Inspector(store.table).expired_ids(at, 10)) == sorted(ids[:2])
    assert len(await Inspector(store.table).expired_ids(at, 1)) == 1
    await store.backfill().purge(ids, at)
    assert {r["id"] for r in await store.all_rows()} == set(ids[2:])


async def test_namespaces_are_renamed_whole_and_never_merged(store: Store) -> None:
    ids = await store.save(*"abc", namespace="old")
    [foreign] = await store.save("a", namespace="old", user_id="bob")
    await store.tenant().delete(ids[0], None, etag)
    with pytest.raises(NotFound):
        await store.tenant().rename_namespace("nothing", "else")
    assert await store.tenant().rename_namespace("old", "new") == 3
    assert {r["namespace"] for r in await store.all_rows()} == {"new"}
    assert (await store.reader("bob").rows([foreign]))[foreign]["namespace"] == "old"
    await store.save("z", namespace="taken")
    for name, to in (("new", "taken"), ("taken", "new"), ("new", "new")):
        with pytest.raises(Conflict, match="exists already"):
            await store.tenant().rename_namespace(name, to)
    assert await store.tenant().delete_namespace("new") == 2
    assert await store.tenant().delete_namespace("new") == 0
    with pytest.raises(Conflict):  # what is in the trash may come back, so its name is still taken
        await store.tenant().rename_namespace("taken", "new")
    with pytest.raises(NotFound):
        await store.tenant().delete_namespace("nothing")


async def test_no_moment_without_the_row(store: Store) -> None:
    [memory_id] = await store.save("zebra 0")
    done = asyncio.Event()
    reads = 0

    async def look() -> None:
        nonlocal reads
        while not done.is_set():
            assert memory_id in await store.reader().rows([memory_id])
            assert [c.id for c in await store.reader().text_arm("zebra", ACTIVE, 50)] == [memory_id]
            assert await store.reader().count(ACTIVE) == 1
            reads += 1

    watching = asyncio.create_task(look())
    for step in range(1, 25):
        await store.tenant().edit(memory_id, {"content": f"zebra {step}"}, None, etag)
    done.set()
    await watching
    assert reads > 3


# -- tenants


async def test_other_tenants_rows_are_not_there(store: Store) -> None:
    [theirs] = await store.save("secret", user_id="bob")
    with pytest.raises(NotFound):
        await store.tenant().edit(theirs, {"content": "mine"}, None, etag)
    for attempt in (store.tenant().delete, store.tenant().delete_for_good):
        with pytest.raises(NotFound):
            await attempt(theirs, None, etag)
    with pytest.raises(NotFound):
        await store.tenant().restore(theirs)
    assert await store.reader().rows([theirs]) == {}
    stolen = Vector(theirs, "alice", content_hash("secret"), unit(1))
    assert await store.backfill().set_vectors("alice", [stolen]) == []
    await store.backfill().set_failed("alice", {theirs: content_hash("secret")})
    [kept] = await store.all_rows("bob")
    assert (kept["content"], kept["embedding_status"]) == ("secret", "queued")


READS = {
    "vector_arm exact": lambda s: s.reader().vector_arm(unit(1), ACTIVE, 50, exact=True),
    "vector_arm": lambda s: s.reader().vector_arm(unit(1), ACTIVE, 50, exact=False),
    "text_arm": lambda s: s.reader().text_arm("secret", ACTIVE, 50),
    "newest_texts": lambda s: s.reader().newest_texts(ACTIVE, 50),
    "rows": lambda s: s.reader().rows([s.theirs]),
    "page": lambda s: s.reader().page(ACTIVE, "recency", None, 50),
    "page by importance": lambda s: s.reader().page(ACTIVE, "importance", None, 50),
    "group": lambda s: s.reader().group(["namespace"], ACTIVE),
    "the duplicate check of a save": lambda s: s.writer.insert([row("secret")]),
    "the duplicate check of an edit": lambda s: s.tenant().edit(s.mine, {"content": "secret"}, None, etag),
    "edit": lambda s: s.tenant().edit(s.theirs, {"tags": ["t"]}, None, etag),
    "delete": lambda s: s.tenant().delete(s.theirs, None, etag),
    "delete_for_good": lambda s: s.tenant().delete_for_good(s.theirs, None, etag),
    "restore": lambda s: s.tenant().restore(s.theirs),
    "backfill": lambda s: s.backfill().set_vectors(
        "alice", [Vector(s.theirs, "alice", content_hash("secret"), unit(1))]
    ),
    "frequencies": lambda s: Frequencies(s.table, 100)._count("alice"),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
async def test_a_foreign_row_ends_every_read(store: Store, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the predicate gone, the second check is what is left, and it gives nothing away."""
    await store.writer.insert([theirs := row("secret", user_id="bob", vector=unit(1))])
    await store.writer.insert([queued := row("secret", user_id="bob", namespace="queued")])
    [mine] = await store.save("mine")
    store.theirs = queued["id"] if read == "backfill" else theirs["id"]  # type: ignore[attr-defined]
    store.mine = mine  # type: ignore[attr-defined]
    before = await store.all_rows("bob")
    with monkeypatch.context() as patched:
        patched.setattr(where, "tenant", lambda _: Predicate("user_id IS NOT NULL"))
        with pytest.raises(TenantAssertion, match="nothing was returned"):
            await READS[read](store)
    assert await store.all_rows("bob") == before


# -- vectors


@pytest.mark.parametrize("width", [0, 1, DIM - 1, DIM + 1, 384])
async def test_a_vector_of_another_width_is_refused_everywhere(store: Store, width: int) -> None:
    [memory_id] = await store.save("x")
    wrong = [1.0] * width
    with pytest.raises(ValueError, match="width 8"):
        await store.writer.insert([row("y", vector=wrong)])
    with pytest.raises(ValueError, match="width 8"):
        await store.backfill().set_vectors("alice", [Vector(memory_id, "alice", content_hash("x"), wrong)])
    with pytest.raises(ValueError, match="width 8"):
        await store.backfill(dim=max(1, width)).set_vectors(
            "alice", [Vector(memory_id, "alice", content_hash("x"), wrong)]
        )
    [kept] = await store.all_rows()
    assert kept["embedding_status"] == "queued"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_vector_that_is_no_number_spoils_nobody_elses_save(store: Store, value: float) -> None:
    poison = row("poison", vector=unit(value))
    done = await asyncio.gather(
        *(store.writer.insert([row(f"fine {i}")]) for i in range(5)),
        store.writer.insert([poison]),
        *(store.writer.insert([row(f"good {i}")]) for i in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(d, ValueError) for d in done) == 1
    assert await store.reader().count(ACTIVE) == 10
    [memory_id] = await store.save("later")
    with pytest.raises(ValueError, match="finite"):
        await store.backfill().set_vectors("alice", [Vector(memory_id, "alice", content_hash("later"), unit(value))])


async def test_vectors_of_another_space_are_queued_instead(tmp_path: Path) -> None:
    async with open_store(tmp_path, vectors=False) as store:
        await store.writer.insert([row("x", vector=[1.0] * 384)])
        [kept] = await store.all_rows()
        assert kept["embedding_status"] == "queued"
        assert await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True) == []


async def test_the_table_keeps_its_own_space(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        [memory_id] = await store.save("x")
        await store.tenant().edit(memory_id, {"tags": ["t"]}, None, etag)
        await store.backfill().set_vectors("alice", [Vector(memory_id, "alice", content_hash("x"), unit(1))])
        await store.maintenance().optimize()
    for other in (Space("other", "1", DIM, "", ""), Space("test-model", "1", 16, "", ""), SPACE):
        assert (await open_table(str(tmp_path), other)).space == SPACE


async def test_backfill_writes_only_what_is_still_embedded(store: Store) -> None:
    ids = await store.save("kept", "edited", "removed", "trashed", "failed")
    vectors = [
        Vector(i, "alice", content_hash(c), unit(1, n))
        for n, (i, c) in enumerate(zip(ids, ("kept", "edited", "removed", "trashed", "failed"), strict=True))
    ]
    await store.tenant().edit(ids[1], {"content": "edited since"}, None, etag)
    await store.tenant().delete_for_good(ids[2], None, etag)
    await store.tenant().delete(ids[3], None, etag)
    await store.backfill().set_failed("alice", {ids[4]: content_hash("failed")})
    written = await store.backfill().set_vectors("alice", vectors)
    assert sorted(written) == sorted([ids[0], ids[3]])
    assert await store.backfill().set_vectors("alice", vectors) == []  # a second worker comes too late
    status = {r["id"]: r["embedding_status"] for r in await store.all_rows()}
    assert status == {ids[0]: "ready", ids[1]: "queued", ids[3]: "ready", ids[4]: "failed"}
    assert [c.id for c in await store.reader().vector_arm(unit(1), ACTIVE, 50, exact=True)] == [ids[0]]
    assert await store.backfill().retry_failed() == 1
    await store.backfill().set_failed("alice", {ids[1]: content_hash("edited")})  # its content is another by now
    assert (await store.reader().rows([ids[1]]))[ids[1]]["embedding_status"] == "queued"


async def test_backfill_changes_nothing_but_the_vector(store: Store) -> None:
    made = row(
        "x\\'", tags=["'"], facts=["f"], metadata={"a": 1}, importance=0.7, occurred_at=datetime(1600, 1, 1, tzinfo=UTC)
    )
    await store.writer.insert([made])
    before = await store.all_rows()
    await store.backfill().set_vectors("alice", [Vector(made["id"], "alice", content_hash("x\\'"), unit(1))])
    assert await store.all_rows() == [before[0] | {"embedding_status": "ready"}]


async def test_the_queue_goes_round_the_tenants(store: Store) -> None:
    for user in ("a", "b'", "c"):
        await store.save("x", user_id=user)
    inspector = Inspector(store.table)
    assert [await inspector.next_queued_tenant(after) for after in ("", "a", "b'", "c")] == ["a", "b'", "c", None]
    assert await inspector.largest_tenant() == 0  # none has a vector
    assert sorted([s async for batch in inspector.statuses() for s in batch], key=lambda s: s[1])[0][1:] == (
        "a",
        "queued",
    )


# -- groups, cancellation, the queue, the lock


async def test_many_single_saves_make_few_versions(store: Store) -> None:
    before = await store.table.lance.version()
    await asyncio.gather(*(store.writer.insert([row(f"m{i}")]) for i in range(200)))
    made = await store.table.lance.version() - before
    assert await store.reader().count(ACTIVE) == 200
    assert made < 20


async def test_one_failure_in_a_group_is_its_own(store: Store) -> None:
    [memory_id] = await store.save("x")
    done = await asyncio.gather(
        store.tenant().edit("mem_none", {"tags": []}, None, etag),
        store.tenant().edit(memory_id, {"tags": ["t"]}, None, etag),
        store.writer.insert([row("y")]),
        store.tenant().edit(memory_id, {"tags": ["never"]}, '"stale"', etag),
        return_exceptions=True,
    )
    assert [type(d) for d in done] == [NotFound, dict, list, Stale]
    assert (await store.reader().rows([memory_id]))[memory_id]["tags"] == ["t"]


async def test_a_cancelled_caller_neither_loses_nor_doubles(store: Store) -> None:
    for step in range(20):
        task = asyncio.create_task(store.writer.insert([row(f"m{step}")]))
        await asyncio.sleep(step / 2_000)  # before, amid and after the commit
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    answers = [await store.writer.insert([row(f"m{step}")]) for step in range(20)]
    assert all(a.duplicate for [a] in answers)
    assert await store.reader().count(ACTIVE) == 20


async def test_a_cancelled_edit_is_whole(store: Store) -> None:
    [memory_id] = await store.save("x")
    for step in range(10):
        task = asyncio.create_task(store.tenant().edit(memory_id, {"content": f"c{step}"}, None, etag))
        await asyncio.sleep(step / 1_000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.save("y")  # behind all of them in the queue
    kept = (await store.reader().rows([memory_id]))[memory_id]
    assert kept["content"] == "c9"
    assert kept["content_hash"] == content_hash("c9")


async def test_a_full_queue_is_said_and_nothing_of_it_written(store: Store) -> None:
    directory = store.table.directory
    assert directory is not None
    async with FileLock(directory).hold():
        first = asyncio.create_task(store.writer.insert([row("first")]))
        await asyncio.sleep(0.05)  # taken by the writer, which waits for the lock
        waiting = [asyncio.create_task(store.writer.insert([row(f"m{i}")])) for i in range(MAX_PENDING)]
        await asyncio.sleep(0)
        for attempt in (store.writer.insert([row("too many")]), store.tenant().delete("mem_x", None, etag)):
            with pytest.raises(StoreUnavailable, match="waiting already") as refused:
                await attempt
            assert refused.value.extra["retry_after"] == 1
    await asyncio.gather(first, *waiting)
    assert await store.reader().count(ACTIVE) == MAX_PENDING + 1


async def test_a_closed_writer_writes_what_it_took_and_refuses_more(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        tasks = [asyncio.create_task(store.writer.insert([row(f"m{i}")])) for i in range(30)]
        await asyncio.sleep(0)
        await store.writer.close()
        await asyncio.gather(*tasks)
        with pytest.raises(StoreUnavailable, match="stopping"):
            async with asyncio.timeout(5):
                await store.writer.insert([row("late")])
        assert await store.reader().count(ACTIVE) == 30


async def test_who_waits_too_long_for_the_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_TIMEOUT_S", 0.2)
    table = await open_table(str(tmp_path), SPACE)
    table.lock = FileLock(tmp_path, timeout_s=0.2)
    writer = Writer(table, SPACE)
    writer.start()
    async with FileLock(tmp_path).hold():
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="write lock"):
            await writer.insert([row("x")])
        assert 0.15 < time.monotonic() - started < 2
    assert not (await writer.insert([row("x")]))[0].duplicate
    await writer.close()


async def test_the_lock_is_one_at_a_time_and_ends_with_its_holder(tmp_path: Path) -> None:
    inside = 0

    async def hold() -> None:
        nonlocal inside
        async with FileLock(tmp_path).hold():
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            inside -= 1

    await asyncio.gather(*(hold() for _ in range(25)))
    with pytest.raises(RuntimeError, match="within"):
        async with FileLock(tmp_path).hold():
            raise RuntimeError("within")
    task = asyncio.create_task(_hold_forever(tmp_path))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(1), FileLock(tmp_path).hold():
        pass


async def _hold_forever(directory: Path) -> None:
    async with FileLock(directory).hold():
        await asyncio.sleep(3600)


# -- term frequencies


async def test_frequencies_count_memories_not_words(store: Store) -> None:
    await store.save("walrus walrus walrus", "walrus otter", "otter qzborderzq")
    await store.save("walrus", user_id="bob")
    frequencies = Frequencies(store.table, 100)
    frequency = await frequencies.of("alice")
    assert (frequency("walrus"), frequency("otter"), frequency("never")) == (2, 2, 0)
    texts = ["one two", "", "qzborderzq", "getUserById", "数据库"]
    terms = await frequencies.terms(texts)
    assert len(terms) == len(texts)
    assert (terms[0], terms[1]) == (["one", "two"], [])
    await frequencies.close()


async def test_reading_alone_needs_no_writer(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await store.save("x")
    table = await open_table(str(tmp_path), SPACE)
    assert await Reader(table, "alice").count([]) == 1
