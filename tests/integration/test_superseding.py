"""A memory that another replaces: not found by any rung, reachable all the same, and back when the other goes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fakes.store import Store, etag, open_store, row
from integration.service import MISSING, App, Tenant, down, problem_type
from warmstart.errors import Conflict, Duplicate, Invalid, NotFound
from warmstart.store import predicates as where
from warmstart.store.links import links_of
from warmstart.store.schema import Row
from warmstart.worker import Worker

#: On a busy machine, too, every arm is to answer.
SETTINGS = {"search_budget_ms": 20_000, "arm_budget_ms": 10_000, "embed_query_budget_ms": 5_000}

service = pytest.mark.asyncio(loop_scope="module")


async def found_by_every_rung(app: App, tenant: Tenant, query: str, part: str) -> list[set[str]]:
    """hybrid, hybrid with a filter, keyword, scan, and a context's."""
    assert app.provider is not None
    found = [set(await tenant.found(query)), set(await tenant.found(query, min_importance=0.1))]
    found.append(set((await tenant.post("/v1/context", {"query": query, "budget_ms": 5_000}))["ids"]))
    await app.forget()
    with down(app.provider):
        keyword, scan = await tenant.search(query), await tenant.search(part)
        assert (keyword["mode"], scan["mode"]) == ("keyword", "scan")
        found += [{hit["id"] for hit in answer["hits"]} for answer in (keyword, scan)]
    await tenant.app.embed_all()
    return found


@service
async def test_what_is_superseded_is_found_by_no_rung_and_stays_reachable(app: App, alice: Tenant) -> None:
    old = await alice.save("the walrus pool opens at eight", metadata={"a": 1}, namespace="zoo")
    other = await alice.save("the walrus eats clams")
    new = await alice.save("the walrus pool opens at nine", supersedes=old["id"])
    assert new["supersedes"] == old["id"]
    assert "superseded_by" not in new
    for found in await found_by_every_rung(app, alice, "walrus pool", "alru"):
        assert old["id"] not in found
        assert new["id"] in found
    shown = await alice.get(f"/v1/memories/{old['id']}")
    assert shown["superseded_by"] == new["id"]
    assert shown["metadata"] == {"a": 1}
    assert {old["id"], new["id"], other["id"]} <= set(await alice.page())
    recalled = (await alice.get("/v1/recall", namespace="zoo"))["memories"]
    assert [m["superseded_by"] for m in recalled] == [new["id"]]
    assert (await alice.get("/v1/health"))["queued"] == 0
    got = await alice.mcp("memory_get", id=old["id"])
    assert f"superseded_by: {new['id']}" in got["content"][0]["text"]


@service
async def test_it_ranks_again_when_its_replacement_goes_and_not_when_that_is_back(app: App, alice: Tenant) -> None:
    old = await alice.save("harbour fees are ten")
    new = await alice.save("harbour fees are twelve", supersedes=old["id"])
    await alice.delete(f"/v1/memories/{new['id']}")
    back = await alice.get(f"/v1/memories/{old['id']}")
    assert back["embedding_status"] == "queued"
    assert "superseded_by" not in back
    for found in await found_by_every_rung(app, alice, "harbour fees", "arbou"):
        assert found == {old["id"]}
    await alice.post(f"/v1/memories/{new['id']}/restore", None)
    for found in await found_by_every_rung(app, alice, "harbour fees", "arbou"):
        assert found == {new["id"]}
    await alice.delete(f"/v1/memories/{new['id']}", hard="true")
    for found in await found_by_every_rung(app, alice, "harbour fees", "arbou"):
        assert found == {old["id"]}


@service
async def test_an_edit_of_what_is_superseded_does_not_bring_it_back(app: App, alice: Tenant) -> None:
    old = await alice.save("lamps are green")
    new = await alice.save("lamps are blue", supersedes=old["id"])
    edited = await alice.patch(f"/v1/memories/{old['id']}", {"content": "lamps are red", "metadata": {"b": 2}})
    assert (edited["superseded_by"], edited["metadata"]) == (new["id"], {"b": 2})
    await alice.post(f"/v1/memories/{old['id']}/history/1/restore", None)
    for found in await found_by_every_rung(app, alice, "lamps", "amps"):
        assert found == {new["id"]}
    assert (await alice.get("/v1/health"))["queued"] == 0


@service
async def test_a_save_said_again_is_one_and_its_content_holds_once_more(app: App, alice: Tenant) -> None:
    tabs = await alice.save("we indent with tabs")
    spaces = await alice.save("we indent with spaces", supersedes=tabs["id"])
    again = await alice.save("we indent with spaces", 200, supersedes=tabs["id"])
    assert (again["id"], again["duplicate"]) == (spaces["id"], True)
    # without `supersedes` nothing is revived, but it is said
    known = await alice.save("we indent with tabs", 200)
    assert known["superseded_by"] == spaces["id"]
    revived = await alice.save("we indent with tabs", 200, supersedes=spaces["id"])
    assert (revived["id"], revived["supersedes"]) == (tabs["id"], spaces["id"])
    assert "superseded_by" not in revived
    for found in await found_by_every_rung(app, alice, "we indent", "ndent"):
        assert found == {tabs["id"]}


@service
async def test_what_cannot_be_superseded_and_nothing_is_written(alice: Tenant, bob: Tenant) -> None:
    theirs = await bob.save("bob's own")
    old, trashed = await alice.save("one"), await alice.save("two")
    await alice.delete(f"/v1/memories/{trashed['id']}")
    new = await alice.save("one, newer", supersedes=old["id"])
    before = await alice.get("/v1/memories", include_deleted="true")
    for unknown in (MISSING, theirs["id"]):
        body = await alice.save("never", 422, supersedes=unknown)
        assert (body["field"], body["detail"]) == ("supersedes", f"supersedes: no memory {unknown}")
    assert problem_type(await alice.save("never", 409, supersedes=trashed["id"])) == "conflict"
    taken = await alice.save("never", 409, supersedes=old["id"])
    assert (problem_type(taken), taken["id"]) == ("conflict", new["id"])
    assert (await alice.save("one, newer", 422, supersedes=new["id"]))["field"] == "supersedes"
    assert (await alice.save("never", 422, supersedes="nonsense"))["field"] == "supersedes"
    assert (await alice.save("never", 422, metadata={"warmstart:links": {}}))["field"] == "metadata"
    batch = {"memories": [{"content": "never 1"}, {"content": "never 2", "supersedes": MISSING}]}
    assert (await alice.post("/v1/memories/batch", batch, 422))["field"] == "memories.1.supersedes"
    batch = {"memories": [{"content": f"never {n}", "supersedes": new["id"]} for n in range(2)]}
    await alice.post("/v1/memories/batch", batch, 422)
    assert await alice.get("/v1/memories", include_deleted="true") == before


@service
async def test_in_a_batch_and_over_mcp(alice: Tenant) -> None:
    old = await alice.batch("alpha one", "alpha two")
    new = await alice.batch(*({"content": f"alpha {n}", "supersedes": i} for n, i in enumerate(old, 3)))
    assert set(await alice.found("alpha")) == set(new)
    saved = await alice.mcp("memory_save", content="alpha five", supersedes=new[0])
    assert set(await alice.found("alpha")) == {new[1], saved["structuredContent"]["id"]}


@service
async def test_a_namespace_to_the_trash_gives_back_what_its_memories_replaced(alice: Tenant) -> None:
    old = await alice.batch(*(f"beta {n}" for n in range(60)))
    new = await alice.batch(
        *({"content": f"beta new {n}", "supersedes": i, "namespace": "n"} for n, i in enumerate(old))
    )
    newest = await alice.save("beta newest", supersedes=new[0], namespace="default")
    await alice.delete("/v1/namespaces/n", 200)
    found = set(await alice.found("beta", limit=50)) | set(await alice.found("beta newest", limit=50))
    assert newest["id"] in found
    assert old[0] not in found  # what replaced its replacement still holds
    assert found <= {*old, newest["id"]}
    shown = await alice.get(f"/v1/memories/{old[0]}")
    assert shown["superseded_by"] == newest["id"]


@service
async def test_a_migration_does_not_give_it_a_vector(app: App, alice: Tenant) -> None:
    old = await alice.save("gamma rays are old")
    new = await alice.save("gamma rays are new", supersedes=old["id"])
    # as a migration leaves every row
    await app.runtime.writer.change(lambda: _queue_all(app), None)
    await app.embed_all()
    kept = await app.runtime.table.lance.query().where(where.one_of("id", [old["id"], new["id"]]).sql).to_list()
    assert {r["id"]: (r["embedding"] is None, r["embedding_status"]) for r in kept} == {
        old["id"]: (True, "ready"),
        new["id"]: (False, "ready"),
    }
    assert set(await alice.found("gamma rays")) == {new["id"]}
    assert await Worker(app.runtime).backfill() == 0


async def _queue_all(app: App) -> None:
    await app.runtime.table.lance.update(
        where="true", updates_sql={"embedding": "NULL", "embedding_status": "'queued'"}
    )


@service
async def test_what_an_older_release_left_hidden_is_found_again(app: App, alice: Tenant) -> None:
    old = await alice.save("delta was old")
    new = await alice.save("delta is new", supersedes=old["id"])
    kept = await alice.save("delta stays", supersedes=(await alice.save("delta before"))["id"])
    await app.runtime.table.lance.delete(where.equals("id", new["id"]).sql)  # as one would that knows no links
    worker = Worker(app.runtime)
    assert [await worker.release_from_nothing() for _ in range(3)] == [0, 1, 0]
    await app.embed_all()
    assert set(await alice.found("delta")) == {old["id"], kept["id"]}


# -- whatever is done in whatever order


def check(rows: list[Row]) -> None:
    by_id = {r["id"]: r for r in rows}
    for start in rows:
        linked = links_of(start["metadata"])
        assert (start["search_text"] == "") == (linked.superseded_by is not None), start
        seen, at = {start["id"]}, linked.superseded_by
        if at is not None:
            assert by_id[at]["deleted_at"] is None, "hidden behind what is gone"
            assert start["embedding"] is None
        while at is not None:
            assert at not in seen, "a ring"
            seen.add(at)
            at = links_of(by_id[at]["metadata"]).superseded_by


@pytest.mark.parametrize("seed", range(2))
async def test_links_never_form_a_ring_nor_hide_behind_what_is_gone(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    done = 0
    async with open_store(tmp_path) as store:
        tenant = store.tenant()
        for _ in range(40):
            known = [r["id"] for r in await store.all_rows()]
            target = dice.choice(known) if known else None
            action = dice.choice(["save", "save", "save", "trash", "restore", "hard", "edit", "namespace"])
            content, space = f"text {dice.randrange(8)}", dice.choice(["a", "b"])
            try:
                if action == "save" or target is None:
                    new = row(content, namespace=space, supersedes=target)
                    await tenant.save([new], ["supersedes"])
                elif action == "trash":
                    await tenant.delete(target, None, etag)
                elif action == "restore":
                    await tenant.restore(target)
                elif action == "hard":
                    await tenant.delete_for_good(target, None, etag)
                elif action == "edit":
                    await tenant.edit(target, {"content": content, "metadata": {"n": 1}}, None, etag)
                elif dice.random() < 0.3:
                    await tenant.delete_namespace(space)
            except (Conflict, Duplicate, Invalid, NotFound):
                continue
            done += 1
            rows: list[Row] = (await store.table.lance.query().to_arrow()).to_pylist()
            check(rows)
            await compact(store)
    assert done > 20


async def compact(store: Store) -> None:
    if (await store.maintenance().state()).small_fragments > 10:
        await store.maintenance().optimize()
