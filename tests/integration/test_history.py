"""Earlier texts of memories: kept before each edit, whatever cuts it off, and gone with their memory."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lancedb
import pytest
from structlog.testing import capture_logs

from fakes.migrations import Command
from fakes.store import Store, etag, open_store
from integration.service import App, Tenant
from integration.test_migrate import no_postgres, quiet
from ops.vm.datacopy import copy_data
from warmstart.errors import Migrating, TenantAssertion
from warmstart.exchange import MAX_VERSIONS
from warmstart.migrate import Migrator
from warmstart.store import history, inventory, marker
from warmstart.store import predicates as where
from warmstart.store.history import History, kept_ids
from warmstart.store.predicates import Predicate
from warmstart.store.schema import HISTORY
from warmstart.worker import Worker

service = pytest.mark.asyncio(loop_scope="module")


async def versions(tenant: Tenant, memory_id: str, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await tenant.get(f"/v1/memories/{memory_id}/history", **params))["versions"]
    return found


# -- as its users have it


@service
async def test_each_edit_keeps_what_it_replaces(alice: Tenant) -> None:
    made = await alice.save(
        "the deploy runs at nine", title="Deploys", tags=["ops"], facts=["sharp"], metadata={"n": 1}, importance=0.1
    )
    path = f"/v1/memories/{made['id']}"
    assert await versions(alice, made["id"]) == []
    second = await alice.patch(path, {"content": "the deploy runs at ten"})
    await alice.patch(path, {"tags": ["ops", "ci"], "metadata": {"n": 2}})
    found = await versions(alice, made["id"])
    assert [(v["version"], v["content"], v["tags"]) for v in found] == [
        (2, "the deploy runs at ten", ["ops"]),
        (1, "the deploy runs at nine", ["ops"]),
    ]
    assert found[1] == {k: v for k, v in made.items() if k in found[1]} | {"version": 1}
    assert found[0]["updated_at"] == second["updated_at"]
    # what changes nothing, and what is no edit, keeps nothing
    await alice.patch(path, {"tags": ["ops", "ci"]})
    await alice.delete(path)
    await alice.post(f"{path}/restore", None)
    assert len(await versions(alice, made["id"])) == 2


@service
async def test_restoring_a_version_is_an_edit(alice: Tenant) -> None:
    made = await alice.save("first", title="One", tags=["a"], facts=["f"], namespace="old-name")
    path = f"/v1/memories/{made['id']}"
    await alice.patch(path, {"content": "second", "title": "Two", "tags": []})
    await alice.patch("/v1/namespaces/old-name", {"name": "new-name"})
    now = await alice.post(f"{path}/history/1/restore", None)
    assert [now[k] for k in ("content", "title", "tags", "facts")] == ["first", "One", ["a"], ["f"]]
    assert now["namespace"] == "new-name"
    assert [v["content"] for v in await versions(alice, made["id"])] == ["second", "first"]
    await alice.patch("/v1/namespaces/new-name", {"name": "old-name"})  # it is all as it was, and yet no version less
    assert [v["content"] for v in await versions(alice, made["id"])] == ["second", "first"]
    await alice.patch("/v1/namespaces/old-name", {"name": "new-name"})
    assert (await alice.get(path))["content_hash"] == made["content_hash"]
    stale = await alice.http.post(f"{path}/history/2/restore", headers={"If-Match": '"1"'})
    assert stale.status_code == 412
    assert (await alice.post(f"{path}/history/9/restore", None, 404))["detail"].endswith(f"{MAX_VERSIONS} are kept")
    await alice.save("second", namespace="new-name")
    assert (await alice.post(f"{path}/history/2/restore", None, 409))["type"].endswith("duplicate")


@service
async def test_pages_and_the_limit_of_versions(alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_VERSIONS", 5)
    made = await alice.save("text 0")
    edits = 8
    for number in range(1, edits + 1):
        await alice.patch(f"/v1/memories/{made['id']}", {"content": f"text {number}"})
    seen: list[int] = []
    cursor: dict[str, str] = {}
    while True:
        page = await alice.get(f"/v1/memories/{made['id']}/history", limit=2, **cursor)
        seen += [v["version"] for v in page["versions"]]
        if (after := page["next_cursor"]) is None:
            break
        cursor = {"cursor": after}
    assert seen == list(range(8, 3, -1))
    assert (await alice.get(f"/v1/memories/{made['id']}/history", 422, cursor="x"))["field"] == "cursor"


@service
async def test_over_mcp(alice: Tenant) -> None:
    made = await alice.save("mcp before")
    fresh = await alice.mcp("memory_get", id=made["id"], history=True)
    assert "never edited" in fresh["content"][0]["text"]
    await alice.mcp("memory_update", id=made["id"], content="mcp after")
    found = await alice.mcp("memory_get", id=made["id"], history=True)
    assert "mcp before" in found["content"][0]["text"]
    assert [v["content"] for v in found["structuredContent"]["history"]] == ["mcp before"]
    assert "history" not in (await alice.mcp("memory_get", id=made["id"]))["structuredContent"]


@service
async def test_history_goes_with_its_memory(app: App, alice: Tenant, bob: Tenant) -> None:
    gone, swept, kept = [(await alice.save(f"soon edited {n}"))["id"] for n in range(3)]
    foreign = (await bob.save("edited by bob"))["id"]
    for tenant, memory_id in ((alice, gone), (alice, swept), (alice, kept), (bob, foreign)):
        await tenant.patch(f"/v1/memories/{memory_id}", {"title": "edited"})
    await alice.delete(f"/v1/memories/{gone}", hard="true")
    await alice.delete(f"/v1/memories/{swept}")
    past = {"expires_at": where.literal(datetime(2020, 1, 1, tzinfo=UTC))}
    await app.runtime.table.lance.update(where=where.equals("id", swept).sql, updates_sql=past)
    assert await Worker(app.runtime).sweep() == 1
    left = {memory_id async for ids in kept_ids(app.runtime.table.history) for memory_id in ids}
    assert left & {gone, swept, kept, foreign} == {kept, foreign}


@service
async def test_the_worker_removes_what_an_older_release_left(app: App, alice: Tenant) -> None:
    stays, gone = [(await alice.save(f"older release {n}"))["id"] for n in range(2)]
    for memory_id in (stays, gone):
        await alice.patch(f"/v1/memories/{memory_id}", {"title": "edited"})
    await app.runtime.table.lance.delete(where.equals("id", gone).sql)  # as a release would that knows no history
    assert await Worker(app.runtime).remove_history_of_nothing() == 1
    assert len(await versions(alice, stays)) == 1
    assert await Worker(app.runtime).remove_history_of_nothing() == 0


@service
async def test_a_foreign_version_ends_the_request(app: App, alice: Tenant, bob: Tenant) -> None:
    mine, theirs = (await alice.save("mine"))["id"], (await bob.save("the secret walrus"))["id"]
    for tenant, memory_id in ((alice, mine), (bob, theirs)):
        await tenant.patch(f"/v1/memories/{memory_id}", {"title": "edited"})
    lance = await app.runtime.table.history.find()
    assert lance is not None
    await lance.update(where=where.equals("memory_id", theirs).sql, updates_sql={"memory_id": where.literal(mine)})
    assert [v["content"] for v in await versions(alice, mine)] == ["mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history.where, "tenant", lambda _: Predicate("true"))
        row = (await alice.get(f"/v1/memories/{mine}")) | {"user_id": alice.user_id}
        with pytest.raises(TenantAssertion), capture_logs():
            await History(app.runtime.table, alice.user_id).page(row, None, 10)


# -- what cuts it off


async def edited(directory: Path, edits: int = 3) -> str:
    """A store with one memory and its earlier texts."""
    async with open_store(directory) as store:
        [memory_id] = await store.save("text 0")
        for number in range(1, edits + 1):
            await store.tenant().edit(memory_id, {"content": f"text {number}"}, None, etag)
    return memory_id


async def texts(store: Store, memory_id: str) -> tuple[str, list[str]]:
    """The text now, and those before it, newest first."""
    row = (await store.reader().rows([memory_id]))[memory_id]
    before = await History(store.table, "alice").page(row, None, MAX_VERSIONS)
    return row["content"], [v["content"] for v in before]


async def test_an_edit_cut_off_after_the_text_was_kept_shows_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_id = await edited(tmp_path, 1)

    def cut_off(*_: Any) -> Any:
        raise RuntimeError("killed")

    async with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store.table.lance, "merge_insert", cut_off)
            for _ in range(2):
                with pytest.raises(Exception, match="nothing was lost"), capture_logs():
                    await store.tenant().edit(memory_id, {"content": "never"}, None, etag)
        assert await texts(store, memory_id) == ("text 1", ["text 0"])
        # the row's time moves without an edit
        await store.tenant().delete(memory_id, None, etag)
        await store.tenant().restore(memory_id)
        assert await texts(store, memory_id) == ("text 1", ["text 0"])
        await store.tenant().edit(memory_id, {"content": "text 2"}, None, etag)
        assert await texts(store, memory_id) == ("text 2", ["text 1", "text 0"])


TESTS = Path(__file__).resolve().parents[1]
CHILD = """
import asyncio, sys
from pathlib import Path
from fakes.store import etag, open_store
async def main():
    async with open_store(Path(sys.argv[1])) as store:
        number = int(sys.argv[3])
        while True:
            number += 1
            await store.tenant().edit(sys.argv[2], {"content": f"text {number}"}, None, etag)
            print(number, flush=True)
asyncio.run(main())
"""


async def test_no_text_is_lost_to_kills(tmp_path: Path) -> None:
    """Every text that was ever there is there still: as the memory, or among its versions, once."""
    memory_id = await edited(tmp_path, 0)
    dice, last = random.Random(1), 0
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    for _ in range(2):
        child = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path), memory_id, str(last)],
            stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert child.stdout is not None
        for _ in range(dice.randrange(2, 6)):
            last = int(await asyncio.to_thread(child.stdout.readline))
        await asyncio.sleep(dice.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        told = child.communicate()[0].split()
        last = int(told[-1]) if told else last
        async with open_store(tmp_path) as store:
            now, before = await texts(store, memory_id)
            last = int(now.split()[1])  # the edit that was cut off may have come through
            assert before == [f"text {n}" for n in range(last - 1, -1, -1)]


@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*.lance"])
async def test_a_power_cut_in_the_history_leaves_out_its_newest_version(tmp_path: Path, pattern: str) -> None:
    memory_id = await edited(tmp_path)
    newest = max((tmp_path / f"{HISTORY}.lance").glob(pattern), key=lambda p: p.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size // 2)
    with capture_logs():
        async with open_store(tmp_path) as store:
            assert len(store.table.repaired) == 1
            assert await texts(store, memory_id) == ("text 3", ["text 1", "text 0"])
            await store.tenant().edit(memory_id, {"content": "text 4"}, None, etag)
            assert (await texts(store, memory_id))[1][0] == "text 3"


async def test_a_history_that_cannot_be_repaired_is_set_aside_and_memories_are_served(tmp_path: Path) -> None:
    memory_id = await edited(tmp_path)
    for path in (tmp_path / f"{HISTORY}.lance" / "data").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    with capture_logs() as logs:
        async with open_store(tmp_path) as store:
            assert "store.history.set_aside" in {e["event"] for e in logs}
            assert store.table.repaired == [str(tmp_path / "set-aside" / f"{HISTORY}.lance")]
            assert await texts(store, memory_id) == ("text 3", [])
            await store.tenant().edit(memory_id, {"content": "text 4"}, None, etag)
            assert await texts(store, memory_id) == ("text 4", ["text 3"])


async def test_a_damaged_index_of_the_history_is_made_anew(tmp_path: Path) -> None:
    memory_id = await edited(tmp_path)
    async with open_store(tmp_path) as store:
        await store.maintenance().optimize()
    for path in (tmp_path / f"{HISTORY}.lance" / "_indices").rglob("*.lance"):
        os.truncate(path, path.stat().st_size // 2)
    with capture_logs():
        async with open_store(tmp_path) as store:
            assert await texts(store, memory_id) == ("text 3", ["text 2", "text 1", "text 0"])


async def test_an_older_release_goes_on_beside_it(tmp_path: Path) -> None:
    """It opens the one table it knows; what it writes is seen, and the history stays."""
    memory_id = await edited(tmp_path)
    old = await (await lancedb.connect_async(str(tmp_path))).open_table("memories")
    await old.update(where=where.equals("id", memory_id).sql, updates_sql={"source": "'older'"})
    async with open_store(tmp_path) as store:
        assert await texts(store, memory_id) == ("text 3", ["text 2", "text 1", "text 0"])


# -- what copies and checks the store


async def test_copies_and_inventories_hold_it(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    memory_id = await edited(volume / "lancedb")
    before = await inventory.take(str(volume / "lancedb"))
    assert before["versions"] == 3
    copy_data(volume, volume / "lancedb", tmp_path / "copy")
    after = await inventory.take(str(tmp_path / "copy" / "lancedb"))
    assert inventory.differences(before, after) == []
    async with open_store(tmp_path / "copy" / "lancedb") as store:
        assert await texts(store, memory_id) == ("text 3", ["text 2", "text 1", "text 0"])
        await store.tenant().edit(memory_id, {"title": "otherwise"}, None, etag)
    # the copy's own files, not the volume's
    assert inventory.differences(before, await inventory.take(str(volume / "lancedb"))) == []
    told = inventory.differences(before, await inventory.take(str(tmp_path / "copy" / "lancedb")))
    assert any("versions: 3 before, 4 now" in line for line in told)
    # an inventory of a release without history says nothing of it
    for tenant in before["tenants"].values():
        del tenant["versions"], tenant["history"]
    shutil.rmtree(volume / "lancedb" / f"{HISTORY}.lance")
    assert inventory.differences(before, await inventory.take(str(volume / "lancedb"))) == []


async def test_an_inventory_finds_a_version_that_is_not_what_was_kept(tmp_path: Path) -> None:
    await edited(tmp_path)
    lance = await (await lancedb.connect_async(str(tmp_path))).open_table(HISTORY)
    await lance.update(where=where.equals("version", 2).sql, updates_sql={"content": "'another'"})
    found = await inventory.take(str(tmp_path))
    assert not found["ok"]
    assert "version 2 does not have the hash" in found["faults"][0]


async def test_a_migration_leaves_it_alone(tmp_path: Path) -> None:
    memory_id = await edited(tmp_path / "lancedb")
    command = Command(tmp_path, 4)
    done = await Migrator(command.settings(), no_postgres, quiet).migrate(4)
    assert (done.outcome, done.rows) == ("migrated", 1)
    async with open_store(command.store, vectors=False) as store:
        assert store.table.space.dim == 4
        assert await texts(store, memory_id) == ("text 3", ["text 2", "text 1", "text 0"])
        await store.tenant().edit(memory_id, {"content": "text 4"}, None, etag)
        assert (await texts(store, memory_id))[1][0] == "text 3"


async def test_while_a_migration_runs_nothing_of_it_is_written(tmp_path: Path) -> None:
    memory_id = await edited(tmp_path)
    async with open_store(tmp_path) as store:
        with marker.only_migrator(tmp_path), pytest.raises(Migrating):
            await store.tenant().edit(memory_id, {"content": "text 4"}, None, etag)
        with marker.only_migrator(tmp_path), pytest.raises(Migrating):
            await store.backfill().remove_orphans([memory_id])
        assert await texts(store, memory_id) == ("text 3", ["text 2", "text 1", "text 0"])


async def test_maintenance_keeps_it_small(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        [memory_id] = await store.save("text 0")
        for number in range(30):
            await store.tenant().edit(memory_id, {"content": f"text {number + 1}"}, None, etag)
        await asyncio.sleep(1.1)
        await store.maintenance(retention_s=1).optimize()
        lance = await store.table.history.find()
        assert lance is not None
        stats: Any = await lance.stats()
        assert stats["fragment_stats"]["num_fragments"] == 1
        assert len(list((tmp_path / f"{HISTORY}.lance" / "_versions").glob("*.manifest"))) < 10
        version = await lance.version()
        await store.maintenance().optimize()
        assert len((await texts(store, memory_id))[1]) == 30
        assert version <= await lance.version()
