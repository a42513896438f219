"""Small commits are written once more as one: few fragments, and every row there once, as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes.store import DIM, Store, etag, open_store, row
from warmstart.store import gather
from warmstart.store.changes import Vector
from warmstart.store.gather import COMMITS

UNIT = [1.0] + [0.0] * (DIM - 1)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "store") as opened:
        yield opened


async def fragments(store: Store) -> int:
    return (await store.maintenance().state()).fragments


async def content(store: Store) -> list[dict[str, Any]]:
    """Every row of the table, vectors and all."""
    rows: list[dict[str, Any]] = (await store.table.lance.query().to_arrow()).to_pylist()
    return sorted(rows, key=lambda r: r["id"])


async def test_many_saves_leave_few_fragments_and_every_row_as_it_was(store: Store) -> None:
    saved = [row(f"memory {i}", user_id=f"tenant-{i % 3}", vector=UNIT if i % 2 else None) for i in range(60)]
    for one in saved:
        await store.writer.insert([one])
    assert await fragments(store) <= 2 * COMMITS
    expected = sorted((dict(one) for one in saved), key=lambda r: r["id"])
    assert await content(store) == expected


async def test_what_was_edited_trashed_and_removed_meanwhile_stays_so(store: Store) -> None:
    ids = [(await store.save(f"memory {i}"))[0] for i in range(COMMITS - 1)]
    tenant = store.tenant()
    await tenant.delete(ids[1], None, etag)
    await tenant.delete_for_good(ids[2], None, etag)
    edited = await tenant.edit(ids[3], {"content": "another text"}, None, etag)
    for i in range(COMMITS):
        await store.save(f"more {i}")
    assert await fragments(store) <= COMMITS + 1
    rows = {r["id"]: r for r in await store.all_rows()}
    assert rows[ids[1]]["deleted_at"] is not None
    assert ids[2] not in rows
    assert (rows[ids[3]]["content"], etag(rows[ids[3]])) == ("another text", etag(edited))
    assert len(rows) == 2 * COMMITS - 2


async def test_a_vector_that_came_meanwhile_is_kept(store: Store) -> None:
    ids = await store.save(*(f"memory {i}" for i in range(3)))
    rows = {r["id"]: r for r in await store.all_rows()}
    vectors = [Vector(i, "alice", rows[i]["content_hash"], UNIT) for i in ids]
    assert sorted(await store.backfill().set_vectors("alice", vectors)) == sorted(ids)
    for i in range(2 * COMMITS):
        await store.save(f"more {i}")
    having = {r["id"] for r in await content(store) if r["embedding"] == UNIT}
    assert having == set(ids)


async def test_what_a_compaction_folded_in_is_left_alone(store: Store) -> None:
    for i in range(COMMITS - 1):
        await store.save(f"memory {i}")
    await store.maintenance().optimize()
    await store.save("one more")
    state = await store.maintenance().state()
    assert (state.rows, state.unindexed_rows) == (COMMITS, 1)
    assert len(await store.all_rows()) == COMMITS


async def test_a_row_is_rewritten_a_few_times_whatever_comes_after_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten: list[int] = []
    plain = gather.Gatherer.run

    async def counted(self: gather.Gatherer, *arguments: Any) -> None:
        rewritten.append(sum(len(rows) for commits in self._levels if len(commits) >= COMMITS for rows in commits))
        await plain(self, *arguments)

    monkeypatch.setattr(gather.Gatherer, "run", counted)
    count = 3 * COMMITS**2
    for i in range(count):
        await store.save(f"memory {i}")
    # the last one is still under way when its save is answered
    for _ in range(100):
        if sum(rewritten) >= 2 * count:
            break
        await asyncio.sleep(0.05)
    assert await fragments(store) <= 3 * COMMITS
    assert sorted(set(rewritten)) == [COMMITS, COMMITS**2]
    assert sum(rewritten) == 2 * count
    assert len(await store.all_rows()) == count


async def test_what_is_not_small_is_left_alone(store: Store) -> None:
    for i in range(COMMITS + 1):
        await store.save(*(f"memory {i} {k}" for k in range(gather.SMALL + 1)))
    assert await fragments(store) == COMMITS + 1


async def test_a_failure_loses_nothing_and_writing_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(gather.Gatherer, "run", fails)
    for i in range(3 * COMMITS):
        await store.save(f"memory {i}")
    assert len(await store.all_rows()) == 3 * COMMITS


async def test_two_processes_gather_what_each_wrote(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store") as first, open_store(tmp_path / "store") as second:
        for i in range(5 * COMMITS):
            await (first, second)[i % 2].save(f"memory {i}")
        assert await fragments(first) <= 2 * COMMITS + 2
        assert sorted(r["content"] for r in await second.all_rows()) == sorted(
            f"memory {i}" for i in range(5 * COMMITS)
        )
