"""`warmstart migrate dimension` on real stores, cut off at every point: each row is there once, as it was."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes.migrations import NEW, OLD, Command, contents, make_store, migrated, rows_of, space
from fakes.store import row as new_row
from integration.conftest import TestServer
from integration.service import fresh_database, until
from warmstart.errors import Conflict, DiskFull, Migrating, StoreUnavailable
from warmstart.migrate import Migrator, dump
from warmstart.store import marker
from warmstart.store import predicates as where
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.store.maintenance import Maintenance
from warmstart.store.reads import Reader
from warmstart.store.schema import Row
from warmstart.store.table import open_table
from warmstart.store.writer import Writer

WIDE, NARROW = 1536, 384
STEPS = ("dump", "recreate", "reload", "reload", "index", "verify")
KILLS = 100
IN_PLACE = ("dump", "reset", "index", "verify")


@asynccontextmanager
async def no_postgres() -> AsyncIterator[Bookkeeping]:
    raise StoreUnavailable("not here")
    yield


def quiet(step: str, done: int, total: int) -> None:
    pass


def migrator(command: Command, progress: Callable[[str, int, int], None] = quiet) -> Migrator:
    return Migrator(command.settings(), no_postgres, progress)


async def made(home: Path, count: int, dim: int = 8) -> list[Row]:
    rows = rows_of(count, dim)
    await make_store(home / "lancedb", rows, space(dim))
    return rows


# -- from beginning to end


async def test_the_seeds_case_keeps_all_but_the_vectors(tmp_path: Path) -> None:
    rows = await made(tmp_path, 1_203, WIDE)
    command = Command(tmp_path, NARROW)
    planned = command.run("--to", "384", "--plan")
    assert (planned["action"], planned["rows"], planned["fits"]) == ("recreate", 1_203, True)
    assert not (command.store / marker.DUMPS).exists()
    done = command.run()
    assert (done["outcome"], done["rows"], done["resumed"]) == ("migrated", 1_203, False)
    assert (done["source"]["dim"], done["target"]["dim"]) == (WIDE, NARROW)
    assert await contents(command.store) == migrated(rows)
    table = await open_table(str(command.store), space(3))
    assert table.space == space(NARROW, NEW)
    assert (table.is_migrating, marker.standing(command.store)) == (False, None)
    assert {i.name for i in await table.lance.list_indices()} == {
        "user_id_idx", "id_idx", "content_hash_idx", "search_text_idx",
    }  # fmt: skip
    found = await Reader(table, "tenant-1").text_matches("Brot", [where.active()], 1_000)
    wanted = [r for r in rows if r["user_id"] == "tenant-1" and not r["deleted_at"] and "Brot" in r["search_text"]]
    assert {memory_id for memory_id, _ in found} == {r["id"] for r in wanted}


async def test_a_large_table_comes_back_in_few_files(tmp_path: Path) -> None:
    rows = await made(tmp_path, 12_000, 1)
    assert (await migrator(Command(tmp_path, 4)).migrate(4)).rows == 12_000
    table = await open_table(str(tmp_path / "lancedb"), space(4, NEW))
    state = await Maintenance(table, Writer(table, space(4, NEW)), 0, 0).state()
    assert (state.rows, state.unindexed_rows) == (12_000, 0)
    assert state.fragments <= 20
    assert await contents(tmp_path / "lancedb") == migrated(rows)


@pytest.mark.slow
async def test_memory_grows_by_the_text_index_alone(tmp_path: Path) -> None:
    taken = []
    for count in (10_000, 60_000):
        await made(tmp_path / str(count), count, 64)
        taken.append(peak_kb(Command(tmp_path / str(count), 32)))
    assert taken[1] - taken[0] < 50_000 * 2, taken


def peak_kb(command: Command) -> int:
    """Of the command's memory, until it ends well."""
    peak = 0
    with command.start() as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *map(int, re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE))])
            time.sleep(0.05)
    assert process.returncode == 0
    return peak


async def test_the_dump_stays_private_and_gives_every_row(tmp_path: Path) -> None:
    rows = await made(tmp_path, 40)
    done = await migrator(Command(tmp_path, 4)).migrate(4)
    folder = Path(done.dump or "")
    assert modes(folder) == (0o700, {0o600})
    manifest = dump.manifest_of(folder)
    dump.check(folder, manifest)
    [kept] = dump.rows_behind(folder, 0)
    assert [r["created_at"] for r in kept] == sorted((r["created_at"] for r in rows), reverse=True)
    by_id = {r["id"]: r for r in rows}
    assert all(r | {"embedding": by_id[r["id"]]["embedding"]} == by_id[r["id"]] for r in kept)


def modes(folder: Path) -> tuple[int, set[int]]:
    return stat.S_IMODE(folder.stat().st_mode), {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def test_there_already_is_nothing_to_do(tmp_path: Path) -> None:
    command = Command(tmp_path, 4)
    assert command.run()["outcome"] == "nothing"  # no table either: the first start makes it
    assert not command.store.exists()
    await made(tmp_path, 5)
    assert (await migrator(command).migrate(4)).outcome == "migrated"
    before = sorted(path.name for path in command.store.rglob("*.manifest"))
    again = await migrator(command).migrate(4)
    assert (again.outcome, again.rows, again.queued) == ("nothing", 5, 4)
    assert sorted(path.name for path in command.store.rglob("*.manifest")) == before
    assert (await migrator(command).plan(4)).action == "nothing"


@pytest.mark.parametrize("arguments", [("--to", "512"), ("--to", "512", "--plan")])
async def test_another_width_than_the_configured_one_says_what_to_set_first(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    await made(tmp_path, 1)
    error = Command(tmp_path, 384).run(*arguments, code=2)["error"]
    assert "EMBEDDING_DIM=512" in error["detail"]


async def test_an_empty_table(tmp_path: Path) -> None:
    await made(tmp_path, 0)
    assert (await migrator(Command(tmp_path, 4)).migrate(4)).outcome == "migrated"
    assert (await open_table(str(tmp_path / "lancedb"), space(3))).space == space(4, NEW)


async def test_another_model_of_the_same_width_drops_nothing(tmp_path: Path) -> None:
    rows = await made(tmp_path, 620)
    command = Command(tmp_path, 8)
    table = await open_table(str(command.store), space(8))
    seen = set()

    def watch(step: str, done: int, total: int) -> None:
        seen.add((step, marker.standing(command.store) is not None))

    assert (await migrator(command, watch).migrate(8)).outcome == "migrated"
    assert {step for step, _ in seen} == set(IN_PLACE)
    assert all(stands or step == "dump" for step, stands in seen)
    assert await contents(command.store) == migrated(rows)
    assert (await open_table(str(command.store), space(3))).space == space(8, NEW)
    await table.refresh()
    assert table.space == space(8, NEW)
    # and on from there to another width, and back
    assert (await migrator(command.with_space(4, OLD)).migrate(4)).outcome == "migrated"
    assert (await open_table(str(command.store), space(3))).space == space(4, OLD)
    assert (await migrator(command).rollback()).target == space(8, NEW)
    assert await contents(command.store) == migrated(rows)


# -- cut off


class Killed(BaseException):
    """Stands in for a death between two calls, where a real one would only be slow."""


@pytest.mark.parametrize("dim", [4, pytest.param(8, marks=pytest.mark.slow)])
async def test_cut_off_between_any_two_reports(tmp_path: Path, dim: int) -> None:
    rows = await made(tmp_path, 1_100)
    reports = 0
    for stop in range(1, 200):
        calls = 0

        def progress(step: str, done: int, total: int, stop: int = stop) -> None:
            nonlocal calls
            calls += 1
            if calls == stop:
                raise Killed

        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "lancedb", tmp_path / "copy" / "lancedb")
        copy = Command(tmp_path / "copy", dim)
        try:
            await migrator(copy, progress).migrate(dim)
        except Killed:
            reports += 1
        else:
            break
        assert_nothing_lost(copy.store, await contents(copy.store), rows)
        assert (await migrator(copy).migrate(dim)).outcome == "migrated"
        assert await contents(copy.store) == migrated(rows)
    assert reports >= 10


def assert_nothing_lost(store: Path, found: list[Row], rows: list[Row]) -> None:
    standing = marker.standing(store)
    if standing is None:
        assert len(found) == len(rows)
        return
    folder = store / standing.dump
    manifest = dump.manifest_of(folder)
    dump.check(folder, manifest)
    assert manifest.rows == len(rows)


@pytest.mark.slow
async def test_killed_at_every_step_and_in_between(tmp_path: Path) -> None:
    rows = rows_of(1_300, 1)
    wide = [r | {"embedding": r["embedding"] and r["embedding"] * WIDE} for r in rows]
    await make_store(tmp_path / "whole" / "lancedb", wide, space(WIDE))
    dice = random.Random(KILLS)
    done = 0
    while done < KILLS:
        home = tmp_path / "home"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", home)
        command = Command(home, NARROW)
        for step in STEPS:
            if killed_in(command, step, dice.choice([0.0, 0.0, dice.uniform(0, 0.1), dice.uniform(0, 0.5)])):
                done += 1
            assert_nothing_lost(command.store, await contents(command.store), rows)
        ended = command.run()
        assert ended["outcome"] in ("migrated", "nothing")
        assert await contents(command.store) == migrated(rows)
        assert marker.standing(command.store) is None
        place = home / "lancedb" / (marker.last(command.store) or pytest.fail("no record")).dump
        dump.check(place, dump.manifest_of(place))
        assert len(list(place.parent.iterdir())) == 1


def killed_in(command: Command, step: str, after_s: float) -> bool:
    """Whether the command was still running `after_s` after it said that it begins `step`."""
    process = command.start()
    assert process.stderr is not None
    with process, process.stderr:
        for line in process.stderr:
            if line.startswith(step):
                break
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
        return process.wait() == -signal.SIGKILL


async def test_a_second_migrator_is_refused(tmp_path: Path) -> None:
    await made(tmp_path, 10)
    refused = []

    def second(step: str, done: int, total: int) -> None:
        if step == "reload" and not refused:
            refused.append(Command(tmp_path, 4).run(code=4)["error"])

    await migrator(Command(tmp_path, 4), second).migrate(4)
    assert "another migration" in refused[0]["detail"]
    assert str(os.getpid()) in refused[0]["detail"]


async def stopped(command: Command, at: str) -> None:
    def progress(step: str, done: int, total: int) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        await migrator(command, progress).migrate(command.dim)


# -- the way back


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["id"])


@pytest.mark.parametrize("at", ["dump", "recreate", "reload", "index", "verify"])
async def test_back_from_where_it_was_cut_off(tmp_path: Path, at: str) -> None:
    rows = await made(tmp_path, 1_100)
    command = Command(tmp_path, 4)
    await stopped(command, at)
    back = await migrator(command).rollback()
    table = await open_table(str(command.store), space(3))
    assert table.space == space(8)
    if at == "dump":
        assert back.outcome == "nothing"
    else:
        assert (back.outcome, back.target) == ("rolled-back", space(8))
    found = await contents(command.store)
    if at in ("dump", "recreate"):  # nothing was changed yet, so the vectors are there still
        assert [r["embedding"] is None for r in found] == [r["embedding"] is None for r in in_order(rows)]
    else:
        assert found == migrated(rows)
    assert (await migrator(command).rollback()).outcome == "nothing"  # the same again
    assert (await migrator(command).migrate(4)).outcome == "migrated"  # and forward after all


async def test_back_from_a_migration_that_ended_keeps_what_was_written_since(tmp_path: Path) -> None:
    rows = await made(tmp_path, 30)
    command = Command(tmp_path, 4)
    await migrator(command).migrate(4)
    table = await open_table(str(command.store), space(4, NEW))
    writer = Writer(table, space(4, NEW))
    writer.start()
    later = new_row("written since", vector=[0.5] * 4)
    await writer.insert([later])
    await writer.close()
    assert (await migrator(command).rollback()).outcome == "rolled-back"
    assert await contents(command.store) == migrated([*rows, later])
    assert (await open_table(str(command.store), space(3))).space == space(8)
    again = await migrator(command).rollback()
    assert (again.outcome, again.rows) == ("nothing", 31)


async def test_a_rollback_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    rows = await made(tmp_path, 1_100)
    command = Command(tmp_path, 4)
    await stopped(command, "verify")

    def progress(step: str, done: int, total: int) -> None:
        if step == "reload" and done:
            raise Killed

    with pytest.raises(Killed):
        await migrator(command, progress).rollback()
    with pytest.raises(Conflict, match="--rollback"):
        await migrator(command).migrate(4)
    back = await migrator(command).rollback()
    assert (back.outcome, back.resumed, back.target) == ("rolled-back", True, space(8))
    assert await contents(command.store) == migrated(rows)


async def test_another_target_than_the_one_under_way_is_refused(tmp_path: Path) -> None:
    await made(tmp_path, 10)
    await stopped(Command(tmp_path, 4), "reload")
    with pytest.raises(Conflict, match="--to 4"):
        await migrator(Command(tmp_path, 2)).migrate(2)


# -- what else may be wrong


async def test_a_full_disk_during_the_dump_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await made(tmp_path, 20)
    command = Command(tmp_path, 4)
    monkeypatch.setattr(dump, "_create", lambda _: open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with pytest.raises(DiskFull, match="nothing was changed"):
        await migrator(command).migrate(4)
    assert marker.standing(command.store) is None
    assert list((command.store / marker.DUMPS).iterdir()) == []
    assert len(await contents(command.store)) == len(rows)
    table = await open_table(str(command.store), space(8))
    assert not table.is_migrating
    writer = Writer(table, space(8))
    writer.start()
    await writer.insert([new_row("writes go on")])
    await writer.close()


async def test_a_disk_that_is_too_small_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(tmp_path, 20)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.total - 1_000, 1_000))
    assert not (await migrator(Command(tmp_path, 4)).plan(4)).fits
    with pytest.raises(DiskFull, match="too small"):
        await migrator(Command(tmp_path, 4)).migrate(4)
    assert not (tmp_path / "lancedb" / marker.DUMPS).exists()


@pytest.mark.root
async def test_a_disk_that_fills_up_while_rows_come_back_is_waited_out(small_disk: Path) -> None:
    rows = await made(small_disk, 2_000)
    ballast = small_disk / "ballast"

    def fill_up(step: str, done: int, total: int) -> None:
        if step == "reload" and 0 < done < total and not ballast.exists():
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    command = Command(small_disk, 4)
    with pytest.raises(DiskFull) as full:
        await migrator(command, fill_up).migrate(4)
    assert "run the same command again" in str(full.value)
    assert_nothing_lost(command.store, await contents(command.store), rows)
    assert marker.standing(command.store) is not None
    ballast.unlink()
    assert (await migrator(command).migrate(4)).outcome == "migrated"
    assert await contents(command.store) == migrated(rows)


async def test_who_does_not_know_of_markers_is_noticed_before_the_drop(tmp_path: Path) -> None:
    await made(tmp_path, 20)
    command = Command(tmp_path, 4)
    await stopped(command, "recreate")
    await make_store(command.store, [new_row("behind the dump")], space(8))
    with pytest.raises(StoreUnavailable, match="nothing was changed"):
        await migrator(command).migrate(4)
    assert (await migrator(command).migrate(4)).rows == 21


async def test_rows_that_are_not_those_of_the_dump_are_reloaded(tmp_path: Path) -> None:
    rows = await made(tmp_path, 700)
    command = Command(tmp_path, 4)
    await stopped(command, "verify")
    table = await open_table(str(command.store), space(8))
    await table.lance.delete(where.equals("id", rows[3]["id"]).sql)
    done = await migrator(command).migrate(4)
    assert (done.outcome, done.resumed) == ("migrated", True)
    assert await contents(command.store) == migrated(rows)


async def test_a_damaged_dump_is_not_reloaded(tmp_path: Path) -> None:
    await made(tmp_path, 20)
    command = Command(tmp_path, 4)
    await stopped(command, "recreate")
    [file] = (command.store / marker.DUMPS).rglob("*.ndjson")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(StoreUnavailable, match="damaged"):
        await migrator(command).migrate(4)
    assert len(await contents(command.store)) == 20
    assert (await migrator(command).rollback()).outcome == "rolled-back"  # nothing was touched


# -- others, while it runs


async def test_nobody_else_makes_the_table_while_the_marker_stands(tmp_path: Path) -> None:
    await made(tmp_path, 20)
    command = Command(tmp_path, 4)
    await stopped(command, "reload")
    shutil.rmtree(command.store / "memories.lance")
    with pytest.raises(Migrating, match="warmstart migrate dimension"):
        await open_table(str(command.store), space(4, NEW))
    assert not (command.store / "memories.lance").exists()


async def test_writes_are_refused_from_the_dump_to_the_end_and_handles_stay_good(tmp_path: Path) -> None:
    rows = await made(tmp_path, 1_100)
    command = Command(tmp_path, 4)
    table = await open_table(str(command.store), space(8))
    writer = Writer(table, space(8))
    writer.start()

    def progress(step: str, done: int, total: int) -> None:
        assert table.is_migrating  # from the dump on, of which there is no marker

    async def write(content: str) -> Any:
        return await writer.insert([new_row(content, vector=[0.5] * 8)])

    await write("before")
    await stopped(command, "reload")
    with pytest.raises(Migrating) as caught:
        await write("while it stands")
    assert caught.value.extra["retry_after"] > 0
    assert (table.migration is not None, await table.share_back()) == (True, 0.0)
    await migrator(command, progress).migrate(4)
    await table.refresh()
    assert (table.migration, table.space, await table.share_back()) == (None, space(4, NEW), None)
    # vectors of the old space are left out, the row is kept
    after = await write("after")
    await writer.close()
    found = await contents(command.store)
    assert len(found) == len(rows) + 2
    assert [r["embedding_status"] for r in found if r["id"] == after[0].id] == ["queued"]
    assert all(r["embedding"] is None for r in found)


async def test_status_rows_are_queued_anew(tmp_path: Path, postgres_session: TestServer) -> None:
    await made(tmp_path, 30)
    dsn = await fresh_database(postgres_session.dsn)
    books = Bookkeeping(dsn)
    await books.open()

    async def written() -> bool:
        return not books.waiting

    try:
        for n in range(12_000):
            books.note(f"mem_{n}", "tenant-1", "ready" if n % 2 else "failed", attempts=3, reason="x", space="{}")
        await until(written, 30)
        done = Command(tmp_path, 4, DATABASE_URL=dsn).run()
        assert done["statuses"] == 12_000
        assert await books.status_counts("tenant-1") == {"queued": 12_000}
        assert await books.reset_statuses() == 0
    finally:
        await books.close()


async def test_without_postgres_the_worker_is_left_to_it(tmp_path: Path) -> None:
    await made(tmp_path, 3)
    assert Command(tmp_path, 4).run()["statuses"] is None


def test_the_trash_keeps_its_times() -> None:
    """What the comparisons above stand on: the made rows have all of it."""
    rows = rows_of(100, 1)
    assert {r["expires_at"] - r["deleted_at"] > timedelta(days=1) for r in rows if r["deleted_at"]} == {True}
    assert {r["embedding_status"] for r in rows} == {"ready", "failed", "queued"}
