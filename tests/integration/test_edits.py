"""Edits that wait together: one commit, each with an answer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.store import DIM, Store, etag, open_store, row
from warmstart.errors import Conflict, Duplicate, NotFound, Stale, TenantAssertion
from warmstart.exchange import MAX_VERSIONS
from warmstart.store import edits
from warmstart.store.edits import Edit, edit_all
from warmstart.store.history import History
from warmstart.store.predicates import Predicate


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path) as store:
        yield store


def unit(place: int) -> list[float]:
    return [float(n == place) for n in range(DIM)]


async def whole(store: Store, memory_id: str) -> dict[str, Any]:
    rows = await store.table.lance.query().where(f"id = '{memory_id}'").to_arrow()
    [found] = rows.to_pylist()
    return found  # type: ignore[no-any-return]


async def contents_before(store: Store, memory_id: str, user_id: str = "alice") -> list[str]:
    now = (await store.reader(user_id).rows([memory_id]))[memory_id]
    return [v["content"] for v in await History(store.table, user_id).page(now, None, MAX_VERSIONS)]


async def test_edits_of_many_memories_and_tenants_make_few_versions(store: Store) -> None:
    owners = dict.fromkeys(await store.save(*[f"alice {n}" for n in range(30)]), "alice")
    made = await store.writer.insert([row(f"bob {n}", user_id="bob") for n in range(30)])
    owners |= {i.id: "bob" for i in made}
    before = await store.table.lance.version()
    answers = await asyncio.gather(
        *(store.tenant(owner).edit(i, {"content": f"now {i}"}, None, etag) for i, owner in owners.items())
    )
    # the first is alone, since nothing waits yet; the rest is one group, and what gathers them comes on top
    assert await store.table.lance.version() - before <= 4
    assert [a["content"] for a in answers] == [f"now {i}" for i in owners]
    for memory_id, owner in owners.items():
        found = (await store.reader(owner).rows([memory_id]))[memory_id]
        assert found == answers[list(owners).index(memory_id)]
        assert [text.split()[0] for text in await contents_before(store, memory_id, owner)] == [owner]
    found = {c.id for c in await store.reader("bob").text_arm("now", [], 100)}
    assert found == {i for i, owner in owners.items() if owner == "bob"}


async def test_one_that_is_refused_is_alone(store: Store) -> None:
    good, trashed, stale, twin, taken, same = await store.save("good", "trashed", "stale", "twin", "taken", "same")
    [theirs] = [i.id for i in await store.writer.insert([row("secret", user_id="bob")])]
    old = etag((await store.reader().rows([stale]))[stale])
    await store.tenant().edit(stale, {"title": "newer"}, None, etag)
    await store.tenant().delete(trashed, None, etag)
    unchanged = (await store.reader().rows([same]))[same]

    def one(memory_id: str, values: dict[str, Any], if_match: str | None = None, user_id: str = "alice") -> Edit:
        return Edit(user_id, memory_id, values, if_match, etag)

    asked = [
        one(good, {"content": "better"}),
        one(trashed, {"title": "no"}),
        one(stale, {"title": "no"}, old),
        one("mem_" + "0" * 26, {"title": "no"}),
        one(theirs, {"title": "no"}),
        one(theirs, {"title": "mine"}, user_id="bob"),
        one(twin, {"content": "taken"}),
        one(same, {"content": "same"}),
    ]
    answers = await edited(store, asked)
    kinds = [type(a) if isinstance(a, Exception) else dict for a in answers]
    assert kinds == [dict, Conflict, Stale, NotFound, NotFound, dict, Duplicate, dict]
    assert answers[6].extra["id"] == taken
    assert answers[7] == unchanged
    assert await contents_before(store, good) == ["good"]
    assert await contents_before(store, twin) == await contents_before(store, same) == []
    assert (await store.reader("bob").rows([theirs]))[theirs]["title"] == "mine"


async def edited(store: Store, asked: Sequence[Edit]) -> list[Any]:
    async def run() -> list[Any]:
        return await edit_all(store.table, store.writer, asked)

    return await store.writer.change(run, None)


async def test_of_two_that_want_one_content_the_first_has_it(store: Store) -> None:
    one, two = await store.save("one", "two")
    answers = await edited(store, [Edit("alice", i, {"content": "same"}, None, etag) for i in (two, one)])
    assert answers[0]["id"] == two
    assert isinstance(answers[1], Duplicate)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd")), min_size=1, max_size=12))
def test_together_is_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    """As a model that makes them in turn: each memory's text at the end, and the texts before it.

    Memories are in namespaces of their own, where no two want the same content.
    """

    async def run() -> None:
        async with open_store(tmp_path_factory.mktemp("together")) as store:
            ids = [(await store.save("start", namespace=f"n{n}"))[0] for n in range(3)]
            texts = [["start"] for _ in ids]
            asked = []
            for number, text in steps:
                asked.append(Edit("alice", ids[number], {"content": text}, None, etag))
                if texts[number][0] != text:
                    texts[number].insert(0, text)
            answers = await edited(store, asked)
            assert [a["content"] for a in answers] == [text for _, text in steps]
            for memory_id, expected in zip(ids, texts, strict=True):
                now = (await store.reader().rows([memory_id]))[memory_id]["content"]
                assert [now, *await contents_before(store, memory_id)] == expected

    asyncio.run(run())


async def test_a_vector_stays_where_the_content_does(store: Store) -> None:
    kept, changed = [row(c, vector=unit(n)) for n, c in enumerate(("kept", "changed"))]
    await store.writer.insert([kept, changed])
    await edited(
        store,
        [
            Edit("alice", kept["id"], {"tags": ["t"]}, None, etag),
            Edit("alice", changed["id"], {"content": "other"}, None, etag),
        ],
    )
    assert (await whole(store, kept["id"]))["embedding"] == unit(0)
    found = await whole(store, changed["id"])
    assert (found["embedding"], found["embedding_status"]) == (None, "queued")
    near = await store.reader().vector_arm(unit(0), [], 10, exact=True)
    assert [c.id for c in near] == [kept["id"]]


async def test_a_foreign_row_ends_the_edit_that_it_came_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    [mine] = await store.save("mine")
    await store.writer.insert([theirs := row("secret", user_id="bob")])
    before = await store.all_rows("bob")
    asked = [Edit("alice", i, {"title": "new"}, None, etag) for i in (theirs["id"], mine)]
    with monkeypatch.context() as patched:
        patched.setattr(edits.where, "tenant", lambda _: Predicate("user_id IS NOT NULL"))
        refused, made = await edited(store, asked)
    assert isinstance(refused, TenantAssertion)
    assert made["title"] == "new"
    assert await store.all_rows("bob") == before


async def test_the_oldest_versions_go_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.store.history.MAX_VERSIONS", 3)
    ids = await store.save("one 0", "two 0")
    for step in range(1, 6):
        await edited(
            store,
            [
                Edit("alice", i, {"content": f"{name} {step}"}, None, etag)
                for i, name in zip(ids, ("one", "two"), strict=True)
            ],
        )
    for memory_id, name in zip(ids, ("one", "two"), strict=True):
        assert await contents_before(store, memory_id) == [f"{name} {n}" for n in (4, 3, 2)]
