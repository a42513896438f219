"""Copies, records and decisions of backup, drill and restore; with real restic and Postgres: tests/containers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.store import Store, open_store
from ops.vm import backup, datacopy, restore, task
from ops.vm.backup_settings import Wanted
from ops.vm.database import differences, libpq_environment, rows_of_script
from ops.vm.datacopy import copy_data, write_lock
from ops.vm.repository import Backups, Repository, Snapshot
from ops.vm.secrets import read, write
from ops.vm.stack import Refused, Stack, VmError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    made = tmp_path / "_data"
    (made / "lancedb").mkdir(parents=True, mode=0o700)
    return made


# -- the copy


async def saving(store: Store, acknowledged: list[str], over: asyncio.Event, name: str) -> None:
    number = 0
    while not over.is_set():
        acknowledged += await store.save(f"{name} {number}")
        number += 1


async def compacting(store: Store, over: asyncio.Event) -> int:
    """And removing each version that is over a second old, which a copy without the lock would not survive."""
    times = 0
    while not over.is_set():
        await store.maintenance(retention_s=1).optimize()
        times += 1
        await asyncio.sleep(0.05)
    return times


async def test_each_copy_opens_with_all_that_was_answered_before_it(volume: Path, tmp_path: Path) -> None:
    acknowledged: list[str] = []
    over = asyncio.Event()
    async with open_store(volume / "lancedb") as store:
        writers = [asyncio.create_task(saving(store, acknowledged, over, f"writer {n}")) for n in range(2)]
        maintenance = asyncio.create_task(compacting(store, over))
        for number in range(6):
            await asyncio.sleep(0.3)
            before = set(acknowledged)
            copy = tmp_path / f"copy{number}"
            copied = await asyncio.to_thread(copy_data, volume, volume / "lancedb", copy)
            assert copied.held_s < 5
            async with open_store(copy / "lancedb") as opened:
                assert opened.table.repaired == []
                assert before <= {row["id"] for row in await opened.all_rows()}
        over.set()
        await asyncio.gather(*writers)
        assert await maintenance > 3


async def test_what_is_written_to_a_copy_does_not_reach_the_original(volume: Path, tmp_path: Path) -> None:
    async with open_store(volume / "lancedb") as store:
        await store.save("first", "second")
    (volume / "keys.json").write_text("{}")
    before = contents(volume)
    copy = tmp_path / "copy"
    copy_data(volume, volume / "lancedb", copy)
    async with open_store(copy / "lancedb") as store:
        await store.save("third")
        await store.maintenance(retention_s=1).optimize()
    (copy / "keys.json").write_text("[]")
    assert contents(volume) == before
    # so they are links, and cost no room
    assert any(path.suffix == ".lance" and path.stat().st_nlink == 2 for path in before)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_keeps_modes_and_leaves_locks_behind(volume: Path, tmp_path: Path) -> None:
    (volume / "lancedb/write.lock").touch()
    (volume / "server.lock").touch()
    (volume / "keys.json").write_text("{}")
    (volume / "keys.json").chmod(0o600)
    (volume / "logs").mkdir(mode=0o750)
    os.utime(volume / "keys.json", (1, 1))
    copy_data(volume, volume / "lancedb", tmp_path / "copy")
    assert sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")) == [
        "keys.json", "lancedb", "logs",
    ]  # fmt: skip
    assert ((tmp_path / "copy/logs").stat().st_mode & 0o777) == 0o750
    assert ((tmp_path / "copy/lancedb").stat().st_mode & 0o777) == 0o700
    status = (tmp_path / "copy/keys.json").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o600, 1)


def test_a_store_that_stays_locked_is_no_reason_to_wait_for_ever(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datacopy, "LOCK_TIMEOUT_S", 0.1)
    with write_lock(volume / "lancedb"), pytest.raises(VmError, match="a migration is under way"):
        copy_data(volume, volume / "lancedb", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_the_lock_is_the_one_that_the_store_takes(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_store(volume / "lancedb") as store:
        with write_lock(volume / "lancedb"):
            saving = asyncio.create_task(store.save("waits"))
            await asyncio.sleep(0.3)
            assert not saving.done()
        await saving


def test_a_volume_on_another_file_system_is_refused(volume: Path) -> None:
    (volume / "lancedb/memories.lance").mkdir()
    (volume / "lancedb/memories.lance/a.lance").touch()
    elsewhere = Path("/dev/shm") / f"warmstart-test-{os.getpid()}"
    try:
        with pytest.raises(VmError, match="is a file system of its own"):
            copy_data(volume, volume / "lancedb", elsewhere)
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


# -- children


def test_what_a_killed_backup_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ops.vm.children import run_child\n"
        f"run_child(['sh', '-c', 'echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 600'], 'sleep',"
        " timeout_s=600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    wait_for(pid_file.exists)
    child = int(pid_file.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not runs(child))


def runs(pid: int) -> bool:
    try:
        # a zombie is waiting for nobody but init
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def test_only_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "LOCK_TIMEOUT_S", 0.1)
    stack = Stack(tmp_path, "test")
    with (
        task.only_one(stack, "a drill"), pytest.raises(Refused, match="under way already: a drill, process"),
        task.only_one(stack, "a backup"),
    ):  # fmt: skip
        raise AssertionError
    with task.only_one(stack, "a backup"):
        pass


# -- records


def test_a_failure_keeps_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "lib" / "backup.json"
    task.record(path, {"ok": False, "at": "1", "reason": "no restic"})
    assert json.loads(path.read_text()) == {"ok": False, "at": "1", "reason": "no restic", "last_success": None}
    task.record(path, {"ok": True, "at": "2"})
    task.record(path, {"ok": False, "at": "3"})
    task.record(path, {"ok": False, "at": "4"})
    found = json.loads(path.read_text())
    assert (found["at"], found["last_success"]) == ("4", {"ok": True, "at": "2"})
    assert [p.name for p in path.parent.iterdir()] == ["backup.json"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (600, "10 min"), (7_500, "2 h 5 min"), (200_000, "2 days 7 h"), (-3, "0 s")]
)
def test_times_are_said_in_words(seconds: float, words: str) -> None:
    assert task.ago(seconds) == words


def test_sizes_are_said_in_words() -> None:
    assert [task.size(n) for n in (0, 999, 1_500, 2_000_000, 3.2e9)] == ["0 B", "999 B", "1.5 kB", "2.0 MB", "3.2 GB"]


# -- the disk


def test_a_disk_that_is_too_full_is_refused_before_anything_is_done(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volume / "old").write_bytes(b"x" * 4_000_000)
    os.utime(volume / "old", (1_000, 1_000))
    apps: Any = SimpleNamespace(volume=volume)
    repository = made_repository(tmp_path, str(tmp_path / "repository"))
    free = backup.RESERVE_BYTES + 1_000_000
    monkeypatch.setattr(backup.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(VmError, match=r"4\.0 MB of new data"):
        backup._check_disk(apps, repository, None)
    # in the repository already
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/config").touch()
    backup._check_disk(apps, repository, datetime.now(UTC) - timedelta(hours=1))


# -- the repository


def made_repository(tmp_path: Path, url: str) -> Repository:
    return Repository(url, {"RESTIC_PASSWORD": "secret"}, tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("sftp:backup@nas:/warmstart", "backup@nas", "22"),
        ("sftp://backup@nas.example.com:2222//warmstart", "backup@nas.example.com", "2222"),
        ("sftp:nas:relative/path", "nas", "22"),
    ],
)
def test_an_sftp_place_is_reached_with_the_key_given_for_it(url: str, host: str, port: str, tmp_path: Path) -> None:
    (tmp_path / "offsite.key").touch()
    [_, option] = made_repository(tmp_path, url)._options()
    assert option.startswith("sftp.command=ssh -o BatchMode=yes ")
    assert option.endswith(f" -i {tmp_path}/offsite.key -p {port} {host} -s sftp")


def test_a_name_of_a_repository_has_no_password(tmp_path: Path) -> None:
    assert made_repository(tmp_path, "rest:https://me:hidden@host/x").name == "rest:https://host/x"
    assert "secret" not in repr(made_repository(tmp_path, "/r"))


class Listed(Repository):
    def snapshots(self) -> list[Snapshot]:
        day = datetime(2026, 1, 1, tzinfo=UTC)
        rows = {"aaa1": 5, "aab2": None, "bbb3": 0}
        return [Snapshot(name, day + timedelta(days=n), rows[name]) for n, name in enumerate(rows)]


def test_the_newest_snapshot_is_chosen_that_has_memories(tmp_path: Path) -> None:
    listed = Listed("/r", {}, tmp_path, tmp_path)
    assert listed.snapshot().id == "bbb3"
    assert listed.snapshot(with_memories=True).id == "aab2"
    assert listed.snapshot("bbb", with_memories=True).id == "bbb3"
    with pytest.raises(Refused, match="several"):
        listed.snapshot("aa")
    with pytest.raises(VmError, match="no snapshot cc in /r"):
        listed.snapshot("cc")


def test_restic_speaks_of_nanoseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        {"id": "b", "time": "2026-01-02T03:04:05.123456789+02:00", "tags": ["warmstart", "rows=7"]},
        {"id": "a", "time": "2026-01-02T01:00:00Z"},
    ]
    monkeypatch.setattr(Repository, "run", lambda *words, **options: json.dumps(said))
    assert made_repository(tmp_path, "/r").snapshots() == [
        Snapshot("a", datetime(2026, 1, 2, 1, tzinfo=UTC), None),
        Snapshot("b", datetime(2026, 1, 2, 1, 4, 5, 123456, tzinfo=UTC), 7),
    ]


# -- what backup.env says


def test_the_farthest_repository_is_the_one_that_counts(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "test")
    stack.etc.mkdir(parents=True)
    with pytest.raises(Refused, match="RESTIC_REPOSITORY and RESTIC_PASSWORD"):
        Backups.of(stack)
    write(stack.etc / "backup.env", 'RESTIC_REPOSITORY=/r\nRESTIC_PASSWORD=a="b\nKEEP_DAILY=3\n')
    alone = Backups.of(stack)
    assert alone.farthest.url == alone.named("").url == "/r"
    assert alone.local.secrets == {"RESTIC_PASSWORD": 'a="b'}
    assert alone.policy["KEEP_DAILY"] == "3"
    with pytest.raises(Refused, match="no offsite repository"):
        alone.named("offsite")
    both = Backups.of(stack, {"OFFSITE_REPOSITORY": "s3:https://host/bucket", "RESTIC_PASSWORD": "other"})
    assert both.farthest.url == both.named("offsite").url == "s3:https://host/bucket"
    assert both.named("local").url == "/r"
    assert both.named("/third").secrets == {"RESTIC_PASSWORD": "other"}


GIVEN = {
    "RESTIC_REPOSITORY": "", "OFFSITE_REPOSITORY": "s3:https://host/b", "KEEP_DAILY": "7", "KEEP_WEEKLY": "4",
    "KEEP_MONTHLY": "6", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden", "OFFSITE_SSH_KEY": "private",
}  # fmt: skip


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    """On a machine whose repository is there, so that restic is not needed."""
    stack = Stack(tmp_path, "test")
    stack.etc.mkdir(parents=True)
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config").touch()
    return Wanted.of(stack, json.dumps({**GIVEN, "RESTIC_REPOSITORY": str(repository)}))


def test_settings_are_laid_down_once(wanted: Wanted) -> None:
    pending = wanted.pending()
    assert "make RESTIC_PASSWORD" in pending
    assert "put AWS_SECRET_ACCESS_KEY" in pending
    assert "hidden" not in str(pending)
    made = wanted.apply()["made"]
    assert len(made) == 48
    assert read(wanted.path)["RESTIC_PASSWORD"] == made
    assert {path.stat().st_mode & 0o777 for path in (wanted.path, wanted.key_path)} == {0o600}
    assert wanted.key_path.read_text() == "private\n"
    text = wanted.path.read_text()
    assert wanted.pending() == []
    assert wanted.apply() == {"made": ""}
    assert wanted.path.read_text() == text


def test_a_change_of_the_inventory_keeps_the_secrets_that_are_not_in_it(wanted: Wanted) -> None:
    made = wanted.apply()["made"]
    repository = wanted.given["RESTIC_REPOSITORY"]
    fewer = Wanted(wanted.stack, {"RESTIC_REPOSITORY": repository, "OFFSITE_REPOSITORY": "", "KEEP_DAILY": "2"})
    assert set(fewer.pending()) == {"set OFFSITE_REPOSITORY", "set KEEP_DAILY"}
    fewer.apply()
    found = read(wanted.path)
    assert (found["RESTIC_PASSWORD"], found["AWS_SECRET_ACCESS_KEY"], found["KEEP_DAILY"]) == (made, "hidden", "2")


def test_a_password_that_the_repository_does_not_know_is_refused(wanted: Wanted) -> None:
    wanted.apply()
    other = Wanted(wanted.stack, {**wanted.given, "RESTIC_PASSWORD": "mine"})
    for act in (other.pending, other.apply):
        with pytest.raises(Refused, match="is not the one on the machine"):
            act()


@pytest.mark.parametrize("text", ["", "[]", '{"PATH": "/x"}'])
def test_settings_of_another_form_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no JSON object"):
        Wanted.of(Stack(tmp_path, "test"), text)


# -- the database


def test_rows_are_counted_as_the_dump_has_them() -> None:
    script = (
        b"SET x = 1;\nCOPY public.api_keys (id, hash) FROM stdin;\nk1\tCOPY public.x (a) FROM stdin;\n"
        b"k2\t\\\\.\n\\.\n\n"
        b'COPY public."Odd" (a) FROM stdin;\n\\.\nSELECT 1;\n'
    )
    assert rows_of_script(io.BytesIO(script)) == {"public.api_keys": 2, "public.Odd": 0}


def test_differences_name_the_table() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert differences({"a": 1}, {"a": 3, "b": 0}) == "a has 1 instead of 3, b has none instead of 0"


def test_a_url_is_handed_on_without_an_argument() -> None:
    url = "postgresql://me%40x:p%3Aw%2Fd@ep-1.eu.example.com/main?sslmode=require&channel_binding=require&x=1"
    assert libpq_environment(url) == {
        "PGUSER": "me@x", "PGPASSWORD": "p:w/d", "PGHOST": "ep-1.eu.example.com", "PGPORT": "5432",
        "PGDATABASE": "main", "PGSSLMODE": "require", "PGCHANNELBINDING": "require",
    }  # fmt: skip
    assert libpq_environment("postgres://a@h1:1,[::1]:2/d")["PGHOST"] == "h1,::1"
    with pytest.raises(Refused, match="DATABASE_URL"):
        libpq_environment("host=x password=y")


# -- restore


@pytest.mark.parametrize("text", ["not json", '{"PATH": "/x"}', "[1]"])
def test_what_comes_by_standard_input_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(Refused, match="RESTIC_PASSWORD"):
        restore._given()


def test_a_password_comes_by_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"RESTIC_PASSWORD": "x"}'))
    assert restore._given() == {"RESTIC_PASSWORD": "x"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert restore._given() == {}


@pytest.mark.parametrize(("marked", "running", "resumed"), [(1, 0, True), (1, 1, False), (0, 0, False)])
def test_a_killed_restore_is_resumed_unless_the_service_has_run_since(
    marked: int, running: int, resumed: bool, tmp_path: Path
) -> None:
    stack: Any = SimpleNamespace(
        state=tmp_path, current=lambda: "first", containers=lambda name: [SimpleNamespace(running=bool(running))]
    )
    if marked:
        (tmp_path / "restore-under-way").touch()
    made = restore.Restore(stack, None, None, task.Progress())  # type: ignore[arg-type]
    assert made._resumed is resumed
    made.apps = SimpleNamespace(volume=tmp_path, store_path="lancedb")  # type: ignore[assignment]
    made._live_data = lambda: "3 memories"  # type: ignore[method-assign]
    if resumed:
        made._refuse_live_data("")
    else:
        with pytest.raises(Refused, match="there are 3 memories on this host"):
            made._refuse_live_data("")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("renames", range(6))
def test_memories_are_swapped_wherever_it_is_killed(
    renames: int, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before is set aside whole, and never what a killed restore had put there."""
    (volume / "lancedb/old").touch()
    (volume / "keys.json").write_text("old")
    restored = tmp_path / "restore/data"
    monkeypatch.setattr(restore.os, "chown", lambda *words: None)
    swap: Any = object.__new__(restore.Restore)
    swap.apps = SimpleNamespace(volume=volume)

    def fetched() -> None:
        shutil.rmtree(restored.parent, ignore_errors=True)
        (restored / "lancedb").mkdir(parents=True)
        (restored / "lancedb/new").touch()
        (restored / "keys.json").write_text("new")

    left = threading.local()
    left.count = renames
    rename = Path.rename

    def killing(path: Path, target: Path) -> Path:
        left.count -= 1
        if left.count < 0:
            raise Killed
        return rename(path, target)

    fetched()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killing)
        try:
            swap._swap_memories(restored)
        except Killed:
            pass
        else:
            assert renames >= 5
    fetched()
    swap._swap_memories(restored)
    assert sorted(p.name for p in volume.rglob("*")) == ["keys.json", "lancedb", "new"]
    assert (volume / "keys.json").read_text() == "new"
    aside = tmp_path / "before-restore"
    assert sorted(p.name for p in aside.rglob("*")) == ["keys.json", "lancedb", "old"]
    assert (aside / "keys.json").read_text() == "old"
    assert volume.stat().st_mode & 0o777 == 0o700
