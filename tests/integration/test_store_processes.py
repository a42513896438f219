"""Several processes on one table: all at once, and killed with -9 at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warmstart
from fakes.store import SPACE, open_store
from warmstart.errors import StoreUnavailable
from warmstart.store import predicates as where
from warmstart.store.lock import FileLock
from warmstart.store.table import open_table

TESTS = Path(__file__).resolve().parent.parent
ACTIVE = [where.active()]


class Processes:
    """Starts writers, by a process that forks them, and ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory.parent / "logs"
        self.logs.mkdir()
        self.running: dict[str, int] = {}
        path = f"{TESTS}{os.pathsep}{Path(warmstart.__file__).parent.parent}"
        self._forker = subprocess.Popen(
            [sys.executable, str(TESTS / "fakes" / "store_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def start(self, mode: str, name: str) -> None:
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        self._forker.stdin.write(f"{mode} {self.directory} {self.logs / name} {name}\n")
        self._forker.stdin.flush()
        self.running[name] = int(self._forker.stdout.readline())

    def kill(self, name: str) -> None:
        pid = self.running.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid))

    def entries(self, name: str) -> list[dict[str, Any]]:
        path = self.logs / name
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def all_entries(self) -> list[dict[str, Any]]:
        return [e for path in self.logs.iterdir() for e in self.entries(path.name)]

    def wait_for_entry(self, name: str, op: str) -> None:
        wait_for(lambda: any(e["op"] == op for e in self.entries(name)))

    def close(self) -> None:
        for pid in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forker.communicate(timeout=10)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "db").mkdir()
    started = Processes(tmp_path / "db")
    yield started
    started.close()


async def check(processes: Processes) -> dict[str, int]:
    """Everything that was answered is there, once; nothing is there twice. What was answered, counted."""
    answered = processes.all_entries()
    async with open_store(processes.directory) as store:
        assert store.table.repaired == []
        rows = await store.all_rows()
        by_id = {r["id"]: r for r in rows}
        twice = {i: n for i, n in Counter(r["id"] for r in rows).items() if n > 1}
        assert not twice
        contents = Counter(r["content"] for r in rows)
        assert {c: n for c, n in contents.items() if n > 1} == {}
        edits: dict[str, int] = {}
        for entry in answered:
            if entry["op"] == "insert":
                assert by_id[entry["id"]]["content"] == entry["content"]
            elif entry["op"] == "edit":
                edits[entry["id"]] = max(edits.get(entry["id"], 0), entry["source"])
        for memory_id, source in edits.items():
            # later than answered is allowed: the edit that was under way
            assert int(by_id[memory_id]["source"]) >= source
        assert await store.reader().count([]) == len(rows)
        if shared := next((r for r in rows if r["content"].startswith("shared")), None):
            found = await store.reader().text_arm(shared["content"], ACTIVE, 50)
            assert shared["id"] in {c.id for c in found}
        assert len(await store.save("it can still be written to")) == 1
    return dict(Counter(e["op"] for e in answered))


async def test_three_processes_at_once(processes: Processes) -> None:
    names = ["one", "two", "three"]
    for name in names:
        processes.start("batch", name)
    for name in names:
        processes.wait_for_entry(name, "done")
    processes.running.clear()
    answered = await check(processes)
    assert answered["insert"] == 3 * 4 * 30
    async with open_store(processes.directory) as store:
        rows = await store.all_rows()
    assert len(rows) == 4 * 25 + 3 * 4 * 5 + 1  # the shared ones once, each own, and that of the check
    shared = {tuple(e["id"] for e in processes.entries(n) if e.get("content", "").startswith("batch")) for n in names}
    assert len(shared) == 1  # all three were told the same ids


async def kill_writers(processes: Processes, kills: int, writes: int, pause_s: float) -> dict[str, int]:
    """Two writers at any time; one is killed at a moment nobody chose, and another takes its place."""
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    names = (f"w{n}" for n in range(10**6))
    for _ in range(2):
        processes.start("write", next(names))
    answered = 0
    done = 0
    while done < kills or answered < writes:
        victim = chance.choice(sorted(processes.running))
        if chance.random() < 0.8:  # most have written by then, some are still opening the table
            deadline = time.monotonic() + 5
            while not processes.entries(victim) and time.monotonic() < deadline:
                time.sleep(0.005)  # noqa: ASYNC251  nothing else runs in this process
        await asyncio.sleep(chance.uniform(0, pause_s))
        processes.kill(victim)
        processes.start("write", next(names))
        done += 1
        if done % 20 == 0 or done >= kills:
            answered = len(processes.all_entries())
            async with open_store(processes.directory) as store:  # as the worker does, beside the writers
                assert store.table.repaired == []
                await store.maintenance(retention_s=60).optimize()
    for name in sorted(processes.running):
        processes.kill(name)
        done += 1
    counts = await check(processes)
    print(f"seed {seed}: {done} kills, {counts} answered")
    return counts


async def test_kill_9_of_writers(processes: Processes) -> None:
    counts = await kill_writers(processes, kills=12, writes=50, pause_s=0.25)
    assert counts["insert"] > 0
    assert counts["edit"] > 0


@pytest.mark.slow
async def test_kill_9_of_writers_two_hundred_times(processes: Processes) -> None:
    counts = await kill_writers(processes, kills=200, writes=5_000, pause_s=0.8)
    assert sum(counts.values()) >= 5_000


async def test_the_lock_of_a_killed_process_is_free(processes: Processes) -> None:
    processes.start("hold", "holder")
    processes.wait_for_entry("holder", "held")
    with pytest.raises(StoreUnavailable, match="another process"):
        async with FileLock(processes.directory, timeout_s=0.2).hold():
            pass
    processes.kill("holder")
    async with asyncio.timeout(1), FileLock(processes.directory).hold():
        pass
    assert (await open_table(str(processes.directory), SPACE)).repaired == []


async def test_a_process_that_never_pauses_starves_nobody(processes: Processes) -> None:
    for name in ("hammer1", "hammer2"):
        processes.start("hammer", name)
        processes.wait_for_entry(name, "held")
    waits = []
    for _ in range(15):
        started = time.monotonic()
        async with FileLock(processes.directory).hold():
            waits.append(time.monotonic() - started)
        await asyncio.sleep(0.01)
    print(f"longest wait {max(waits):.3f} s")
    assert max(waits) < 2
    before = len(processes.entries("hammer1"))
    await asyncio.sleep(0.3)
    assert len(processes.entries("hammer1")) > before  # they were at it all the time


async def test_a_stopped_reader_blocks_no_writer(processes: Processes) -> None:
    """A process that is frozen without the lock is nobody's problem."""
    processes.start("write", "frozen")
    processes.wait_for_entry("frozen", "edit")
    pid = processes.running["frozen"]
    for _ in range(50):
        os.kill(pid, signal.SIGSTOP)
        try:
            async with FileLock(processes.directory, timeout_s=0.3).hold():
                break
        except StoreUnavailable:
            os.kill(pid, signal.SIGCONT)  # it was frozen with the lock in its hand
            await asyncio.sleep(random.uniform(0.01, 0.1))  # not at the same place of its turn again
    else:
        raise AssertionError("never frozen without the lock")
    async with open_store(processes.directory) as store:
        assert len(await store.save("beside the frozen one")) == 1
