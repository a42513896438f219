"""What a power cut or a full disk does to the table, and what opening makes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lancedb
import pytest
from structlog.testing import capture_logs

from fakes.store import DIM, SPACE, Store, etag, manifests, open_store, row
from warmstart.errors import DiskFull, StoreUnavailable
from warmstart.store import predicates as where
from warmstart.store import repair, table, writer
from warmstart.store.repair import is_whole
from warmstart.store.table import open_table

ACTIVE = [where.active()]
VECTOR = [1.0] * DIM


async def seeded(directory: Path, rows: int = 6) -> list[str]:
    """A table of `rows` rows whose newest version is an edit of the first: new data, and a deletion file."""
    async with open_store(directory) as store:
        ids = await store.save(*[f"zebra {i}" for i in range(rows)])
        await store.tenant().edit(ids[0], {"tags": ["newest"]}, None, etag)
    return ids


async def state(directory: Path) -> dict[str, list[str]]:
    """id → tags of every row, by a fresh handle; the store can be written to as well."""
    async with open_store(directory) as store:
        rows = {r["id"]: r["tags"] for r in await store.all_rows()}
        assert {c.id for c in await store.reader().text_arm("zebra", ACTIVE, 50)} == set(rows)
        [new] = await store.save("written after the repair")
        await store.maintenance().optimize()
        assert new in {r["id"] for r in await store.all_rows()}
        await store.tenant().delete_for_good(new, None, etag)
    return rows


def newest(directory: Path, pattern: str) -> Path:
    return max((directory / "memories.lance").glob(pattern), key=lambda p: p.stat().st_mtime_ns)


def cut(path: Path, share: float) -> bytes:
    """Cut `path` to `share` of its length; what is left of it."""
    os.truncate(path, int(path.stat().st_size * share))
    return path.read_bytes()


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("pattern", ["_versions/*.manifest", "data/*.lance", "_deletions/*"])
async def test_a_newest_version_that_is_cut_short_is_left_out(tmp_path: Path, pattern: str, share: float) -> None:
    ids = await seeded(tmp_path)
    manifest = manifests(tmp_path)[0]
    aside = tmp_path / "set-aside" / manifest.name
    damaged = newest(tmp_path, pattern)
    left = cut(damaged, share)
    kept_manifest = manifest.read_bytes()
    with capture_logs() as logs:
        opened = await open_table(str(tmp_path), SPACE)
    assert opened.repaired == [str(aside)]
    assert [e["event"] for e in logs if e["log_level"] == "error"] == ["store.repaired"]
    assert aside.read_bytes() == kept_manifest
    if damaged != manifest:
        assert damaged.read_bytes() == left
    assert await state(tmp_path) == {i: [] for i in ids}  # the edit is gone, its row is not
    assert (await open_table(str(tmp_path), SPACE)).repaired == []


async def test_a_data_file_that_never_reached_the_disk(tmp_path: Path) -> None:
    ids = await seeded(tmp_path)
    newest(tmp_path, "data/*.lance").unlink()
    assert len((await open_table(str(tmp_path), SPACE)).repaired) == 1
    assert await state(tmp_path) == {i: [] for i in ids}


async def test_a_group_that_was_not_synced_goes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many versions of one group: none was answered, so all that were cut short may go."""
    ids = await seeded(tmp_path)
    async with open_store(tmp_path) as store:
        monkeypatch.setattr(writer, "_sync", lambda *_: None)
        # edits would be one version
        await asyncio.gather(*(store.tenant().delete(i, None, etag) for i in ids[1:]))
        monkeypatch.undo()
    unsynced = manifests(tmp_path)[: len(ids) - 1]
    for manifest in unsynced[:-1]:
        cut(manifest, 0)
    opened = await open_table(str(tmp_path), SPACE)
    assert len(opened.repaired) == len(ids) - 2
    async with open_store(tmp_path) as store:
        assert await store.reader().count([where.is_not_null("deleted_at")]) == 1  # the first of the group was whole
        assert await store.reader().count([where.active()]) == len(ids) - 1


async def test_repaired_twice_keeps_both_files(tmp_path: Path) -> None:
    await seeded(tmp_path)
    for _ in range(2):
        cut(manifests(tmp_path)[0], 0.5)
        assert len((await open_table(str(tmp_path), SPACE)).repaired) == 1
        async with open_store(tmp_path) as store:
            await store.save("the same number again")
    assert len(list((tmp_path / "set-aside").iterdir())) == 2


@pytest.mark.parametrize("marker", ["kept", "empty", "missing", "of a table before"])
async def test_damage_to_what_was_saved_long_ago_throws_nothing_away(tmp_path: Path, marker: str) -> None:
    """Going back can't help there: the newer versions stay, and a person decides."""
    ids = await seeded(tmp_path)
    async with open_store(tmp_path) as store:
        for step in range(30):
            await store.save(f"later {step}")
    synced = tmp_path / "synced-version"
    if marker == "empty":
        os.truncate(synced, 0)
    elif marker == "missing":
        synced.unlink()
    elif marker == "of a table before":
        synced.write_bytes(b"%020d" % 10**6)
    old = min((tmp_path / "memories.lance" / "data").glob("*.lance"), key=lambda p: p.stat().st_mtime_ns)
    whole = old.read_bytes()
    cut(old, 0.5)
    before = [(m.name, m.read_bytes()) for m in manifests(tmp_path)]
    for _ in range(3):  # a service manager starts it again and again
        with pytest.raises(StoreUnavailable, match="Restore a backup") as refused:
            await open_table(str(tmp_path), SPACE)
        assert old.name in str(refused.value)
        assert [(m.name, m.read_bytes()) for m in manifests(tmp_path)] == before
    old.write_bytes(whole)
    async with open_store(tmp_path) as store:
        assert set(ids) <= {r["id"] for r in await store.all_rows()}
        assert await store.reader().count([]) == len(ids) + 30


async def test_of_what_was_synced_only_the_newest_may_go(tmp_path: Path) -> None:
    """However near a whole version is."""
    ids = await seeded(tmp_path)
    async with open_store(tmp_path) as store:
        for step in range(3):
            await store.save(f"later {step}")
    for manifest in manifests(tmp_path)[:2]:
        cut(manifest, 0.5)
    before = [(m.name, m.read_bytes()) for m in manifests(tmp_path)]
    with pytest.raises(StoreUnavailable, match="Restore a backup"):
        await open_table(str(tmp_path), SPACE)
    assert [(m.name, m.read_bytes()) for m in manifests(tmp_path)] == before
    (tmp_path / "synced-version").unlink()  # where it is not known, what is whole is taken
    assert len((await open_table(str(tmp_path), SPACE)).repaired) == 2
    assert await store_count(tmp_path) == len(ids) + 1


async def store_count(directory: Path) -> int:
    async with open_store(directory) as store:
        return await store.reader().count([])


@pytest.mark.parametrize("hint", ["missing", "empty", "nonsense", "too new", "too old"])
async def test_the_version_hint_does_not_matter(tmp_path: Path, hint: str) -> None:
    ids = await seeded(tmp_path)
    path = tmp_path / "memories.lance" / "_versions" / "latest_version_hint.json"
    contents = {"empty": "", "nonsense": "{", "too new": '{"version":999}', "too old": '{"version":1}'}
    path.unlink() if hint == "missing" else path.write_text(contents[hint])
    assert (await open_table(str(tmp_path), SPACE)).repaired == []
    assert await state(tmp_path) == {i: ["newest"] if i == ids[0] else [] for i in ids}


@pytest.mark.parametrize("share", [0, 0.5])
async def test_a_transaction_file_that_is_cut_short_does_not_matter(tmp_path: Path, share: float) -> None:
    ids = await seeded(tmp_path)
    cut(newest(tmp_path, "_transactions/*"), share)
    assert (await open_table(str(tmp_path), SPACE)).repaired == []
    assert await state(tmp_path) == {i: ["newest"] if i == ids[0] else [] for i in ids}


async def index_files(directory: Path) -> list[Path]:
    async with open_store(directory) as store:
        await store.writer.insert([row(f"zebra vector {i}", vector=[i + 1.0, *VECTOR[1:]]) for i in range(300)])
        await store.maintenance().optimize()
        await store.maintenance(min_rows=10).care_for_vector_index()
    return sorted(p for p in (directory / "memories.lance" / "_indices").rglob("*") if p.is_file())


async def test_a_damaged_index_is_made_anew_and_costs_no_row(tmp_path: Path) -> None:
    await seeded(tmp_path)
    names = {(p.parent.name, p.name) for p in await index_files(tmp_path)}
    assert len({n for _, n in names}) > 3
    async with open_store(tmp_path) as store:
        rows = {r["id"] for r in await store.all_rows()}
        nearest = await store.reader().vector_arm(VECTOR, ACTIVE, 50, exact=True)
    for number, (folder, name) in enumerate(sorted(names)):
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        shutil.copytree(tmp_path / "memories.lance", copy / "memories.lance")
        cut(copy / "memories.lance" / "_indices" / folder / name, 0.5)
        async with open_store(copy) as store:
            assert store.table.repaired == [], name
            assert {r["id"] for r in await store.all_rows()} == rows
            assert {c.id for c in await store.reader().text_arm("zebra", ACTIVE, 1_000)} == rows
            assert await store.reader().vector_arm(VECTOR, ACTIVE, 50, exact=True) == nearest
            assert len(await store.reader().vector_arm(VECTOR, ACTIVE, 50, exact=False)) == 50
            assert (await store.writer.insert([row("zebra 1")]))[0].duplicate
            columns = {tuple(i.columns) for i in await store.table.lance.list_indices()}
            assert {("user_id",), ("id",), ("content_hash",), ("search_text",)} <= columns
            await store.maintenance().optimize()
        shutil.rmtree(copy)


def leftovers(directory: Path) -> None:
    """What killed writers leave: parts of files that no version names."""
    data = directory / "memories.lance" / "data"
    whole = min(data.glob("*.lance"))
    (data / ("0" * 24 + "f" * 26 + ".lance")).write_bytes(whole.read_bytes()[:100])
    (data / ("1" * 24 + "e" * 26 + ".lance")).write_bytes(b"")
    (directory / "memories.lance" / "_deletions").mkdir(exist_ok=True)
    (directory / "memories.lance" / "_deletions" / "0-1-12345.arrow").write_bytes(b"")


async def test_leftovers_of_killed_writers_are_no_damage(tmp_path: Path) -> None:
    ids = await seeded(tmp_path)
    leftovers(tmp_path)
    assert (await open_table(str(tmp_path), SPACE)).repaired == []
    assert await state(tmp_path) == {i: ["newest"] if i == ids[0] else [] for i in ids}


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        OSError(5, "Input/output error"),
        RuntimeError("lance error: LanceError(IO): Generic LocalFileSystem error: failed to fill whole buffer"),
        RuntimeError("lance error: LanceError(IO): No space left on device (os error 28)"),
        ValueError("Table 'memories' was not found"),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("where_it_fails", ["open_table", "count_rows", "list_indices"])
@pytest.mark.parametrize("with_leftovers", [False, True])
async def test_a_passing_error_never_costs_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where_it_fails: str, with_leftovers: bool
) -> None:
    ids = await seeded(tmp_path)
    if with_leftovers:
        leftovers(tmp_path)
    before = [(m.name, m.read_bytes()) for m in manifests(tmp_path)]
    owner: Any = lancedb.AsyncConnection if where_it_fails == "open_table" else lancedb.AsyncTable

    async def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(owner, where_it_fails, fails)
        with pytest.raises((StoreUnavailable, DiskFull, MemoryError)):
            await open_table(str(tmp_path), SPACE)
    assert [(m.name, m.read_bytes()) for m in manifests(tmp_path)] == before
    assert not (tmp_path / "set-aside").exists()
    assert await state(tmp_path) == {i: ["newest"] if i == ids[0] else [] for i in ids}


async def test_a_creation_that_was_killed_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "memories.lance" / "_versions").mkdir(parents=True)
    (tmp_path / "memories.lance" / "_transactions").mkdir()
    async with open_store(tmp_path) as store:
        assert len(await store.save("x")) == 1


async def test_an_index_that_was_not_made_is_made(tmp_path: Path) -> None:
    ids = await seeded(tmp_path)
    async with open_store(tmp_path) as store:
        await store.table.lance.drop_index("search_text_idx")
        await store.table.lance.drop_index("id_idx")
    assert await state(tmp_path) == {i: ["newest"] if i == ids[0] else [] for i in ids}


def test_every_kind_of_file_is_known_by_its_end(tmp_path: Path) -> None:
    """Against files that LanceDB itself wrote: a new release with other ends would show here."""

    async def files() -> list[Path]:
        await seeded(tmp_path)
        return await index_files(tmp_path)

    for path in asyncio.run(files()):
        assert is_whole(path), path
    for pattern in ("data/*", "_deletions/*", "_versions/*.manifest"):
        for path in (tmp_path / "memories.lance").glob(pattern):
            assert is_whole(path), path
    named = {p for m in manifests(tmp_path) for p in repair._named(m)}
    there = {p for pattern in ("data/*", "_deletions/*") for p in (tmp_path / "memories.lance").glob(pattern)}
    assert named == there


async def test_many_deletions_are_named_too(tmp_path: Path) -> None:
    """A fragment that lost much of itself keeps its deletions in another kind of file."""
    async with open_store(tmp_path) as store:
        ids = await store.save(*[f"m{i}" for i in range(450)])
        for chunk in (ids[:200], ids[200:400]):
            predicate = where.one_of("id", chunk)
            await store.table.lance.delete(predicate.sql)
    named = set(repair._named(manifests(tmp_path)[0]))
    files = list((tmp_path / "memories.lance" / "_deletions").iterdir())
    assert any(f in named for f in files)
    cut(newest(tmp_path, "_deletions/*"), 0)
    opened = await open_table(str(tmp_path), SPACE)
    assert len(opened.repaired) == 1
    assert await opened.lance.count_rows() == 250


# -- a full disk


def fill(disk: Path, leave: int) -> Path:
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    size = free.f_bavail * free.f_frsize - leave
    with ballast.open("wb") as file:
        file.write(b"\0" * size)
    return ballast


async def write_until_full(store: Store, tag: str) -> list[str]:
    """Ids of what was answered before the disk was full."""
    answered: list[str] = []
    for step in range(2_000):
        try:
            answered += await store.save(f"{tag} {step} " + "x" * 2_000)
        except DiskFull:
            return answered
    raise AssertionError("the disk was never full")


@pytest.mark.root
async def test_a_full_disk_is_said_loses_nothing_and_ends(small_disk: Path) -> None:
    home = small_disk / "db"
    async with open_store(home) as store:
        saved = await store.save("first", "second")
        ballast = fill(small_disk, leave=400_000)
        saved += await write_until_full(store, "one")
        for attempt in range(5):
            with pytest.raises(DiskFull, match="nothing was written"):
                await store.save(
                    f"more {attempt} " + "y" * 7_000, *[f"m{attempt} {i}" + "z" * 7_000 for i in range(20)]
                )
        with pytest.raises(DiskFull):
            await store.maintenance(retention_s=1).optimize()
        assert {r["id"] for r in await store.all_rows()} >= set(saved)
        assert len(await store.reader().text_arm("first", ACTIVE, 50)) == 1
        before = manifests(home)
        table_ = await open_table(str(home), SPACE)  # full disk or not, what is there can be read
        assert table_.repaired == []
        assert manifests(home) == before

        ballast.unlink()
        saved += await store.save("works again")
        await store.tenant().edit(saved[0], {"tags": ["t"]}, None, etag)
        await store.maintenance(retention_s=1).optimize()
        rows = await store.all_rows()
    async with open_store(home) as store:
        assert store.table.repaired == []
        again = await store.all_rows()
        assert again == rows
        contents = [r["content"] for r in again]
        assert {r["id"] for r in again} >= set(saved)
        assert len(contents) == len(set(contents))


@pytest.mark.root
async def test_edits_on_a_full_disk_are_whole(small_disk: Path) -> None:
    async with open_store(small_disk / "db") as store:
        ids = await store.save(*[f"m{i}" for i in range(20)])
        ballast = fill(small_disk, leave=200_000)
        acknowledged: dict[str, str] = {}
        refused = False
        for step in range(250):
            memory_id = ids[step % 20]
            try:
                await store.tenant().edit(memory_id, {"source": str(step)}, None, etag)
                acknowledged[memory_id] = str(step)
            except DiskFull:
                refused = True
        assert refused
        ballast.unlink()
        rows = {r["id"]: r["source"] for r in await store.all_rows()}
        assert len(rows) == 20
        assert all(int(rows[i]) >= int(source) for i, source in acknowledged.items())


@pytest.mark.root
async def test_no_room_to_open_is_said(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ballast = fill(small_disk, leave=8_192)
    with pytest.raises(DiskFull):
        await open_table(str(small_disk / "db"), SPACE)
    ballast.unlink()
    async with open_store(small_disk / "db") as store:
        assert len(await store.save("x")) == 1


FAULTS: list[tuple[Callable[[], BaseException], type[Exception]]] = [
    (lambda: OSError(28, "No space left on device"), DiskFull),
    (lambda: OSError(122, "Disk quota exceeded"), DiskFull),
    (lambda: OSError(5, "Input/output error"), StoreUnavailable),
    (lambda: RuntimeError("anything"), StoreUnavailable),
]


@pytest.mark.parametrize(("fault", "problem"), FAULTS)
async def test_a_sync_that_fails_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], BaseException], problem: type[Exception]
) -> None:
    def fails(*_: Any) -> None:
        raise fault()

    async with open_store(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr(writer, "sync_filesystem", fails)
            with pytest.raises(problem):
                await store.save("x")
        assert len(await store.save("y")) == 1


async def test_only_local_stores_have_a_lock_so_far() -> None:
    with pytest.raises(StoreUnavailable, match="only local directories"):
        await open_table("s3://bucket/db", SPACE)
    assert table.local_directory("file:///tmp/x") == Path("/tmp/x")
