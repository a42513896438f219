"""Index care and disk use: what stays bounded however long one writes, and what search finds meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from lancedb.index import IvfSq

from fakes.store import DIM, Store, etag, manifests, open_store, row
from warmstart.cli.inventory import _compact
from warmstart.config import Settings
from warmstart.store import maintenance as care
from warmstart.store import predicates as where
from warmstart.store import reads
from warmstart.store.changes import Vector
from warmstart.store.reads import Inspector
from warmstart.store.schema import content_hash

ACTIVE = [where.active()]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "db") as opened:
        yield opened


def directory(store: Store) -> Path:
    assert store.table.directory is not None
    return store.table.directory


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def files(path: Path) -> int:
    return sum(1 for p in path.rglob("*") if p.is_file())


def vectors(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


async def embedded(store: Store, count: int, user_id: str, seed: int = 1) -> tuple[list[str], np.ndarray]:
    made = vectors(count, seed)
    rows = [row(f"{user_id} {seed} {i}", user_id=user_id, vector=v.tolist()) for i, v in enumerate(made)]
    for start in range(0, count, 500):
        await store.writer.insert(rows[start : start + 500])
    return [r["id"] for r in rows], made


def nearest(ids: list[str], made: np.ndarray, query: np.ndarray, count: int = 50) -> list[str]:
    cosine = made @ query / np.linalg.norm(made, axis=1)
    return [ids[i] for i in np.argsort(-cosine, kind="stable")[:count]]


@pytest.mark.parametrize(("cycles", "updates"), [(6, 32), pytest.param(10, 304, marks=pytest.mark.slow)])
async def test_disk_use_is_bounded_under_updates(store: Store, cycles: int, updates: int) -> None:
    """Updates of 60 rows, compacted after each `updates` of them, old versions kept for 1 s.

    Disk use between two compactions is at most
      live + updates of (the time versions are kept + one interval) x (a row + a manifest + a deletion file),
    and has no term that grows with the updates ever made; an update's share of what is gathered is in that. For a
    million updates a day at the production settings (versions kept 600 s, compaction after 300 s at the latest:
    10,500 updates' worth) that is at most some 10,500 x 18 KiB = 190 MB above the live rows, and the table as each
    compaction of these 600 s left it: of 10,000 memories one every 24 s (200 rows unindexed in 17 s, and 50 times
    the 0.7 s that it takes, less what the rows above 200 shorten), 25 x 20 MB; of 100,000 one every 170 s, 4 x 210 MB.
    """
    ids = await store.save(*[f"memory {i} " + "x" * 500 for i in range(60)])
    maintenance = store.maintenance(retention_s=1)
    peaks, floors, counts, per_update = [], [], [], []
    for cycle in range(cycles):
        before = size(directory(store))
        for start in range(0, updates, 16):
            chunk = [ids[(cycle * updates + start + i) % 60] for i in range(16)]
            await asyncio.gather(*(store.tenant().edit(i, {"source": f"{cycle} {start}"}, None, etag) for i in chunk))
        peaks.append(size(directory(store)))
        per_update.append((peaks[-1] - before) / updates)
        await asyncio.sleep(1.05)
        await maintenance.optimize()
        floors.append(size(directory(store)))
        counts.append(files(directory(store)))
    print(f"\npeaks {[p // 1024 for p in peaks]} KiB\nfloors {[f // 1024 for f in floors]} KiB")
    print(f"files {counts}\nan update costs {np.mean(per_update) / 1024:.1f} KiB until it is compacted")
    bound = max(floors[:3]) + updates * max(per_update) * 1.2
    assert max(peaks) <= bound
    assert max(floors[3:]) <= 1.25 * max(floors[:3])
    assert max(counts[3:]) <= 1.25 * max(counts[:3])
    assert await store.reader().count(ACTIVE) == 60
    last = f"{cycles - 1} {updates - 16}"
    assert sum(r["source"] == last for r in await store.all_rows()) == 16


async def test_the_cost_of_an_update_does_not_grow_with_the_updates(store: Store) -> None:
    ids = await store.save(*[f"memory {i}" for i in range(20)])
    sizes = []
    for cycle in range(3):
        await asyncio.gather(*(store.tenant().edit(i, {"source": str(cycle)}, None, etag) for i in ids))
        await store.maintenance().optimize()
        sizes.append(manifests(directory(store))[0].stat().st_size)
    assert sizes[2] <= sizes[0] * 1.2


async def test_fragments_are_few_after_compaction(store: Store) -> None:
    for i in range(40):
        await store.save(f"memory {i}")
    before = await store.maintenance().state()
    assert before.small_fragments > 1
    assert (before.rows, before.unindexed_rows) == (40, 40)
    assert await store.maintenance().optimize() > 0
    after = await store.maintenance().state()
    assert after.fragments == 1
    assert (after.rows, after.unindexed_rows) == (40, 0)
    assert after.version > before.version
    assert len(await store.all_rows()) == 40


async def test_old_versions_go_with_their_time(store: Store) -> None:
    for i in range(15):
        await store.save(f"memory {i}")
    kept = await store.maintenance(retention_s=600).optimize(), (await store.maintenance().state()).versions
    assert kept[1] >= 15
    await asyncio.sleep(1.1)
    await store.maintenance(retention_s=1).optimize()
    assert (await store.maintenance().state()).versions <= 3


async def test_a_reader_goes_on_while_it_is_compacted(store: Store) -> None:
    ids = await store.save(*[f"zebra {i}" for i in range(30)])
    done = asyncio.Event()
    reads = 0

    async def look() -> None:
        nonlocal reads
        while not done.is_set():
            assert len(await store.reader().text_arm("zebra", ACTIVE, 50)) == 30
            assert set(await store.reader().rows(ids)) == set(ids)
            reads += 1

    watching = asyncio.create_task(look())
    for step in range(4):
        await asyncio.gather(*(store.tenant().edit(i, {"source": str(step)}, None, etag) for i in ids[:8]))
        await store.maintenance().optimize()
    done.set()
    await watching
    assert reads > 2


async def test_writes_that_come_while_it_is_compacted_are_kept(store: Store) -> None:
    async with open_store(directory(store)) as other:
        await store.save(*[f"memory {i}" for i in range(20)])

        async def write() -> None:
            for i in range(30):
                await other.save(f"meanwhile {i}")

        async def compact() -> None:
            for _ in range(6):
                await store.maintenance().optimize()

        await asyncio.gather(write(), compact())
        assert await store.reader().count(ACTIVE) == 50
        assert await other.reader().count(ACTIVE) == 50


# -- the vector index


async def test_the_vector_index_appears_above_its_threshold(store: Store) -> None:
    maintenance = store.maintenance(min_rows=300)
    ids, made = await embedded(store, 300, "alice")
    small, small_made = await embedded(store, 7, "bob", seed=2)
    assert await maintenance.care_for_vector_index() is None  # at the threshold search is still exact
    assert not await maintenance.has_vector_index()
    more, more_made = await embedded(store, 101, "alice", seed=3)
    ids, made = [*ids, *more], np.concatenate([made, more_made])
    assert await Inspector(store.table).largest_tenant() == 401
    assert await maintenance.care_for_vector_index() == "built"
    assert await maintenance.has_vector_index()
    assert await maintenance.care_for_vector_index() is None

    for query in vectors(5, seed=9):
        for exact in (True, False):
            found = await store.reader("bob").vector_arm(query.tolist(), ACTIVE, 50, exact=exact)
            assert [c.id for c in found] == nearest(small, small_made, query)  # none is dropped, index or not
        found = await store.reader("alice").vector_arm(query.tolist(), ACTIVE, 50, exact=True)
        assert [c.id for c in found] == nearest(ids, made, query)
        near = await store.reader("alice").vector_arm(query.tolist(), ACTIVE, 50, exact=False)
        assert len(near) == 50
        assert len({c.id for c in near} & set(nearest(ids, made, query))) >= 45


async def test_few_rows_are_found_in_whatever_part_of_the_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_IVF_PROBES", 1)
    ids, made = await embedded(store, 600, "alice")
    small, small_made = await embedded(store, 60, "bob", seed=2)
    await store.table.lance.create_index("embedding", config=IvfSq(distance_type="cosine", num_partitions=8))
    chosen = ids[::10]
    tagged = [where.active(), where.one_of("id", chosen)]
    for query in vectors(5, seed=9):
        found = await store.reader("bob").vector_arm(query.tolist(), ACTIVE, 50, exact=False)
        assert [c.id for c in found] == nearest(small, small_made, query)
        found = await store.reader("alice").vector_arm(query.tolist(), tagged, 50, exact=False)
        assert [c.id for c in found] == nearest(chosen, made[::10], query)


async def test_rows_newer_than_the_index_are_found_by_it(store: Store) -> None:
    maintenance = store.maintenance(min_rows=100)
    await embedded(store, 300, "alice")
    assert await maintenance.care_for_vector_index() == "built"
    [new] = await store.save("new")
    target = [5.0] + [0.1] * (DIM - 1)
    assert await store.backfill().set_vectors("alice", [Vector(new, "alice", content_hash("new"), target)]) == [new]
    for exact in (True, False):
        assert (await store.reader().vector_arm(target, ACTIVE, 50, exact=exact))[0].id == new
    await store.tenant().edit(new, {"content": "edited"}, None, etag)
    await maintenance.optimize()
    for exact in (True, False):
        assert new not in {c.id for c in await store.reader().vector_arm(target, ACTIVE, 50, exact=exact)}


async def test_the_vector_index_is_rebuilt_above_its_segments(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert care.MAX_INDEX_SEGMENTS == 15
    monkeypatch.setattr(care, "MAX_INDEX_SEGMENTS", 2)
    maintenance = store.maintenance(min_rows=100)
    ids, made = await embedded(store, 300, "alice")
    assert await maintenance.care_for_vector_index() == "built"
    actions = []
    for seed in range(2, 6):
        more, more_made = await embedded(store, 60, "alice", seed=seed)
        ids, made = [*ids, *more], np.concatenate([made, more_made])
        await maintenance.optimize()
        actions.append(await maintenance.care_for_vector_index())
    assert "rebuilt" in actions
    assert (await maintenance._vector_segments() or 0) <= 2
    query = vectors(1, seed=9)[0]
    found = await store.reader().vector_arm(query.tolist(), ACTIVE, 50, exact=False)
    assert len({c.id for c in found} & set(nearest(ids, made, query))) >= 45


async def test_rows_without_vectors_ask_for_no_index(store: Store) -> None:
    await store.save(*[f"memory {i}" for i in range(50)])
    maintenance = store.maintenance(min_rows=10)
    assert await maintenance.care_for_vector_index() is None
    assert not await maintenance.has_vector_index()


@pytest.mark.parametrize("count", [1, 2, 10])
async def test_an_index_over_hardly_anything_harms_nothing(store: Store, count: int) -> None:
    ids, made = await embedded(store, count, "alice")
    assert await store.maintenance(min_rows=count - 1 or 1).care_for_vector_index() == ("built" if count > 1 else None)
    found = await store.reader().vector_arm(made[0].tolist(), ACTIVE, 50, exact=False)
    assert [c.id for c in found] == nearest(ids, made, made[0])


# -- what killed writers leave


async def test_orphans_are_removed(store: Store) -> None:
    await store.save("kept")
    await store.save("also kept")
    table = directory(store) / "memories.lance"
    orphans = [table / "data" / ("0" * 24 + "f" * 26 + ".lance"), table / "data" / ("1" * 24 + "e" * 26 + ".lance")]
    for path in orphans:
        path.write_bytes(b"begun")
    await store.maintenance().optimize()
    assert all(path.exists() for path in orphans)  # nobody's, but for a week that is not certain
    await store.maintenance().remove_orphans()
    assert not any(path.exists() for path in orphans)
    assert {r["content"] for r in await store.all_rows()} == {"kept", "also kept"}
    assert await store.reader().count(ACTIVE) == 2


async def test_orphans_stay_beside_what_was_set_aside(tmp_path: Path) -> None:
    """They may be the rows of the version that could not be read."""
    async with open_store(tmp_path) as store:
        await store.save("kept")
        await store.save("lost")
    os.truncate(manifests(tmp_path)[0], 10)
    before = set((tmp_path / "memories.lance" / "data").iterdir())
    async with open_store(tmp_path) as store:
        assert len(store.table.repaired) == 1
        await store.maintenance().remove_orphans()
        assert set((tmp_path / "memories.lance" / "data").iterdir()) == before
        for path in (tmp_path / "set-aside").iterdir():
            path.unlink()
        await store.maintenance().remove_orphans()
        assert len(list((tmp_path / "memories.lance" / "data").iterdir())) < len(before) + 1
        assert [r["content"] for r in await store.all_rows()] == ["kept"]


async def test_a_store_is_compacted_by_hand_beside_a_writer(store: Store) -> None:
    for n in range(12):
        await store.save(f"one of many {n}")
    settings = Settings.model_validate({"lancedb_uri": str(directory(store)), "embedding_dim": DIM})
    done = await _compact(settings)
    assert (done["fragments"], done["unindexed_rows"]) == (1, 0)
    assert done["fragments_before"] > 1
    await store.save("and one more")
    assert len(await store.all_rows()) == 13
