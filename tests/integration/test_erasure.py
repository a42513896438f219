"""A tenant that is deleted is in no row, no file and no table any more; everybody else is as before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from fakes.store import DIM, Store, open_store, row
from integration.service import App, Tenant
from warmstart.cli.tenants import _delete
from warmstart.errors import Conflict
from warmstart.store import erasure
from warmstart.store import predicates as where
from warmstart.store.erasure import erase, refuse_copies

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "quokkaledger"


@pytest_asyncio.fixture(loop_scope="module")
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "db") as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "READERS_S", 0.2)


async def filled(store: Store) -> None:
    """Some of alice's rows among many of bob's, in one file, indexed."""
    for part in range(3):
        await store.writer.insert(
            [row(f"bob has {part} {n}", user_id="bob", vector=[1.0 + n] * DIM) for n in range(60)]
            + [row(f"{SECRET} {part} {n}", user_id="alice", vector=[2.0 + n] * DIM) for n in range(3)]
        )
    await compact(store)


async def compact(store: Store) -> None:
    """With nothing kept of what was before."""
    await store.writer.change(lambda: store.table.lance.optimize(cleanup_older_than=timedelta(milliseconds=1)), {})


def holding(folder: Path, text: str) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


async def test_no_file_holds_what_was_erased(store: Store, tmp_path: Path) -> None:
    await filled(store)
    table = tmp_path / "db" / "memories.lance"
    await store.writer.change(lambda: store.table.lance.delete(where.tenant("alice").sql), None)
    await compact(store)
    assert holding(table, SECRET), "what a delete and a compaction leave is what this is about"

    bobs = {r["id"]: r for r in await store.all_rows("bob")}
    care = store.maintenance(min_rows=100)
    await care.care_for_vector_index()
    done = await erase(store.table, store.writer, care, "alice")
    assert (done.left, done.older_files) == (0, 0)
    assert done.files > 0
    assert holding(table, SECRET) == []
    assert {r["id"]: r for r in await store.all_rows("bob")} == bobs
    assert len(await store.reader("bob").text_matches("bob", [where.active()], 500)) == 180
    assert await care.has_vector_index()


async def test_again_it_finds_nothing_and_shows_it(store: Store) -> None:
    await filled(store)
    first = await erase(store.table, store.writer, store.maintenance(), "alice")
    again = await erase(store.table, store.writer, store.maintenance(), "alice")
    assert (first.rows, again.rows) == (9, 0)
    assert (again.left, again.older_files) == (0, 0)


async def test_a_save_meanwhile_is_kept(store: Store) -> None:
    await filled(store)
    erasing = asyncio.create_task(erase(store.table, store.writer, store.maintenance(), "alice"))
    saved = [(await store.save(f"meanwhile {n}", user_id="bob"))[0] for n in range(5)]
    assert (await erasing).left == 0
    assert set(saved) <= {r["id"] for r in await store.all_rows("bob")}


@pytest.mark.parametrize(("folder", "named"), [("migrations/20260101T000000Z", "migrations"), ("set-aside/1", "aside")])
async def test_copies_beside_the_table_are_told_of_before_anything_is_done(
    store: Store, tmp_path: Path, folder: str, named: str
) -> None:
    refuse_copies(str(tmp_path / "db"))
    (tmp_path / "db" / folder).mkdir(parents=True)
    with pytest.raises(Conflict, match=named):
        refuse_copies(str(tmp_path / "db"))


async def test_the_command_deletes_beside_a_running_service(
    app: App, alice: Tenant, bob: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmstart.cli.tenants.REVOKED_S", 0.0)
    await alice.save(f"{SECRET} one")
    trashed = await alice.save(f"{SECRET} two")
    await alice.delete(f"/v1/memories/{trashed['id']}")
    for tenant in (alice, bob):  # a history of both
        edited = await tenant.save(f"{SECRET if tenant is alice else 'plain'}, before it was edited")
        await tenant.patch(f"/v1/memories/{edited['id']}", {"content": "nothing of it"})
    assert holding(Path(app.runtime.settings.lancedb) / "memory_history.lance", SECRET)
    kept = await bob.save("three")
    settings = app.runtime.settings
    done = await _delete(settings, True, alice.user_id)
    assert done["ok"], json.dumps(done)
    assert (done["table"]["rows"], done["bookkeeping"]["api_keys"], done["left"]) == (3, 1, 0)
    assert alice.user_id not in [t.id for t in await app.runtime.bookkeeping.tenants()]
    assert await bob.found("three") == [kept["id"]]
    assert (await bob.get(f"/v1/memories/{edited['id']}/history"))["versions"][0]["content"].startswith("plain")
    assert holding(Path(settings.lancedb), SECRET) == []
    again = await _delete(settings, True, alice.user_id)
    assert (again["ok"], again["table"]["rows"]) == (True, 0)
