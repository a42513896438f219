"""Tenants held in memory: as current as the last acknowledged write of any process, and answering as the table does."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from structlog.testing import capture_logs

import warmstart
from fakes.store import DIM, Store, etag, open_store, row
from integration.service import App, Tenant
from integration.test_store_processes import Processes
from warmstart.config import Space
from warmstart.errors import Problem, StoreUnavailable, TenantAssertion
from warmstart.store import journal, predicates, resident
from warmstart.store import predicates as where
from warmstart.store.changes import Vector
from warmstart.store.reads import TIES, Candidate, Reader
from warmstart.store.resident import Residents
from warmstart.store.schema import TIMESTAMP, now
from warmstart.store.snapshot import OVERHEAD, Snapshot
from warmstart.store.table import open_table
from warmstart.store.writer import Writer

T = TypeVar("T")
TESTS = Path(__file__).resolve().parent.parent
ACTIVE = [where.active()]
ROOM = 64 << 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to go to the table, but where that is what is tested."""
    monkeypatch.setattr(resident, "LOAD_WAIT_S", 30.0)


@asynccontextmanager
async def open_both(directory: Path, max_bytes: int = ROOM) -> AsyncIterator[tuple[Store, Residents]]:
    async with open_store(directory) as store:
        residents = Residents(store.table, max_bytes)
        yield store, residents
        await residents.close()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[tuple[Store, Residents]]:
    async with open_both(tmp_path / "db") as opened:
        yield opened


@pytest.fixture
async def store(here: tuple[Store, Residents]) -> Store:
    return here[0]


@pytest.fixture
async def residents(here: tuple[Store, Residents]) -> Residents:
    return here[1]


@pytest.fixture
async def there(store: Store, tmp_path: Path) -> AsyncIterator[tuple[Store, Residents]]:
    """Another handle on the same directory, which knows nothing of the first, as of another process."""
    async with open_both(tmp_path / "db") as opened:
        yield opened


def contents(snapshot: Snapshot | None) -> dict[str, Any]:
    """Everything in a snapshot, by id; and that its parts fit together."""
    assert snapshot is not None
    ids = [i.decode() for i in snapshot.ids.tolist()]
    assert ids == sorted(set(ids))
    rows = snapshot.get(ids)
    assert list(rows) == ids
    texts = snapshot.text_candidates([(i, 0.0) for i in ids], len(ids))
    assert texts is not None
    found_by = {c.id: c.evidence for c in texts}
    created = pa.array([rows[i]["created_at"] for i in ids], TIMESTAMP)
    assert snapshot.created_us.tolist() == created.cast(pa.int64()).to_pylist()
    assert len(snapshot.with_vector) == len(snapshot.vectors) == len(snapshot.lengths)
    assert snapshot.with_vector.tolist() == sorted(set(snapshot.with_vector.tolist()))
    assert np.array_equal(snapshot.lengths, np.linalg.norm(snapshot.vectors.astype(np.float32), axis=1))
    stored = snapshot.vectors.astype(np.float32)
    vectors = {ids[place]: v.tobytes() for place, v in zip(snapshot.with_vector, stored, strict=True)}
    return {i: (rows[i], found_by[i], vectors.get(i)) for i in ids}


async def in_table(store: Store, user: str = "alice") -> dict[str, Any]:
    return contents(Snapshot.of(await store.reader(user).whole(ACTIVE)))


async def held(residents: Residents, user: str = "alice") -> dict[str, Any]:
    return contents(await residents.get(user))


def chance_vectors(count: int, dim: int = DIM, seed: int = 0) -> list[list[float]]:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32).tolist()


@contextmanager
def lines_lost(store: Store) -> Iterator[None]:
    """As for a writer that is killed behind its commit."""

    def killed(*_: Any) -> None:
        raise OSError(errno.EIO, "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.table.journal, "append", killed)
        yield


class Gate:
    """Holds up what `Reader.whole` gives, until it is opened; counts the reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = asyncio.Event(), asyncio.Event()
        self.reads = 0
        whole = Reader.whole

        async def gated(reader: Reader, filters: Any) -> pa.Table:
            self.reads += 1
            rows = await whole(reader, filters)
            self.reached.set()
            await self.opened.wait()
            return rows

        patch.setattr(Reader, "whole", gated)


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch, store: Store) -> Gate:
    return Gate(monkeypatch)


# -- against the table, after anything


class ResidentMachine(RuleBasedStateMachine):
    """Two handles, each of which holds both tenants; every step is by one of them."""

    ids = Bundle("ids")
    users = st.sampled_from(["alice", "bob"])
    sides = st.integers(0, 1)
    names = st.sampled_from(["default", "one", "two"])
    words = st.sampled_from(["walrus", "otter it's", "panda", "日本語"])

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.opened = [open_both(self.directory) for _ in range(2)]
        both = [self.run(o.__aenter__()) for o in self.opened]
        self.stores: list[Store] = [store for store, _ in both]
        self.residents: list[Residents] = [residents for _, residents in both]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def attempt(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run(work)
        except Problem as problem:
            return problem

    def teardown(self) -> None:
        for opened in self.opened:
            self.run(opened.__aexit__(None, None, None))
        self.runner.close()
        shutil.rmtree(self.directory)

    @rule(target=ids, side=sides, user=users, items=st.lists(st.tuples(words, names, st.booleans()), min_size=1))
    def save(self, side: int, user: str, items: list[tuple[str, str, bool]]) -> Any:
        rows = [
            row(c, user_id=user, namespace=n, vector=chance_vectors(1, seed=len(c))[0] if v else None)
            for c, n, v in items
        ]
        return multiple(*(a.id for a in self.run(self.stores[side].writer.insert(rows))))

    @rule(side=sides, user=users, memory_id=ids, content=words | st.none(), name=names, source=st.sampled_from("ab"))
    def edit(self, side: int, user: str, memory_id: str, content: str | None, name: str, source: str) -> None:
        values = {"source": source, "namespace": name} | ({"content": content} if content else {})
        self.attempt(self.stores[side].tenant(user).edit(memory_id, values, None, etag))

    @rule(side=sides, user=users, memory_id=ids)
    def delete(self, side: int, user: str, memory_id: str) -> None:
        self.attempt(self.stores[side].tenant(user).delete(memory_id, None, etag))

    @rule(side=sides, user=users, memory_id=ids)
    def restore(self, side: int, user: str, memory_id: str) -> None:
        self.attempt(self.stores[side].tenant(user).restore(memory_id))

    @rule(side=sides, user=users, memory_id=ids)
    def destroy(self, side: int, user: str, memory_id: str) -> None:
        self.attempt(self.stores[side].tenant(user).delete_for_good(memory_id, None, etag))

    @rule(side=sides, user=users, name=names, to=st.sampled_from(["one", "two", "three"]))
    def rename(self, side: int, user: str, name: str, to: str) -> None:
        self.attempt(self.stores[side].tenant(user).rename_namespace(name, to))

    @rule(side=sides, user=users, name=names)
    def delete_namespace(self, side: int, user: str, name: str) -> None:
        self.attempt(self.stores[side].tenant(user).delete_namespace(name))

    @rule(side=sides, user=users, late=st.booleans(), give_up=st.booleans())
    def backfill(self, side: int, user: str, late: bool, give_up: bool) -> None:
        store = self.stores[side]
        queued = {r["id"]: r for r in self.run(store.all_rows(user)) if r["embedding_status"] == "queued"}
        hashes = {i: "late" if late else r["content_hash"] for i, r in queued.items()}
        if give_up:
            self.run(store.backfill().set_failed(user, hashes))
        else:
            vectors = [Vector(i, user, h, chance_vectors(1, seed=7)[0]) for i, h in hashes.items()]
            self.run(store.backfill().set_vectors(user, vectors))

    @rule(side=sides)
    def retry_failed(self, side: int) -> None:
        self.run(self.stores[side].backfill().retry_failed())

    @rule(side=sides, memory_ids=st.lists(ids))
    def purge(self, side: int, memory_ids: list[str]) -> None:
        self.run(self.stores[side].backfill().purge(memory_ids, now()))

    @rule(side=sides)
    def optimize(self, side: int) -> None:
        self.run(self.stores[side].maintenance().optimize())

    @rule(side=sides, name=names)
    def at_once(self, side: int, name: str) -> None:
        """One group of several changes, for both tenants."""

        async def all_of_them() -> None:
            store = self.stores[side]
            await asyncio.gather(
                store.save("at once", namespace=name),
                store.tenant("alice").delete_namespace(name),
                store.save("at once too", user_id="bob"),
                store.tenant("bob").rename_namespace(name, "three"),
                return_exceptions=True,
            )

        self.run(all_of_them())

    @rule(side=sides)
    def open_a_third(self, side: int) -> None:
        async def opened() -> None:
            async with open_store(self.directory) as store:
                await store.save("by a third")

        self.run(opened())

    @rule(side=sides, user=users, word=words, memory_id=ids, which=st.sampled_from(["save", "delete", "edit"]))
    def killed_behind_a_commit_and_tried_again(
        self, side: int, user: str, word: str, memory_id: str, which: str
    ) -> None:
        """The other handle finds it done already, changes nothing, and answers: from then on it is acknowledged."""
        work = {
            "save": lambda s: s.writer.insert([row(f"{word} again", user_id=user)]),
            "delete": lambda s: s.tenant(user).delete(memory_id, None, etag),
            "edit": lambda s: s.tenant(user).edit(memory_id, {"source": "killed"}, None, etag),
        }[which]
        with lines_lost(self.stores[side]):
            self.attempt(work(self.stores[side]))
        self.attempt(work(self.stores[1 - side]))

    @rule()
    def remove_the_journal(self) -> None:
        (self.directory / "journal").unlink(missing_ok=True)
        for residents in self.residents:
            for user in ("alice", "bob"):
                assert self.run(residents.get(user)) is None
                assert residents.peek(user) is None
        self.run(self.stores[0].save("a new line"))

    @invariant()
    def what_is_held_is_what_is_there(self) -> None:
        for user in ("alice", "bob"):
            expected = self.run(in_table(self.stores[0], user))
            for residents in self.residents:
                if (peeked := residents.peek(user)) is not None:
                    assert contents(peeked) == expected
                assert self.run(held(residents, user)) == expected
                assert contents(residents.peek(user)) == expected


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ResidentMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


def test_what_is_held_is_what_is_in_the_table() -> None:
    run_machine(4, 10)


@pytest.mark.slow
def test_what_is_held_is_what_is_in_the_table_at_length() -> None:
    run_machine(60, 40)


# -- other processes


class Child:
    """Another process on the same directory."""

    def __init__(self, directory: Path) -> None:
        path = f"{TESTS}{os.pathsep}{Path(warmstart.__file__).parent.parent}"
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "fakes" / "resident_child.py"), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def do(self, verb: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def child(store: Store, tmp_path: Path) -> Iterator[Child]:
    started = Child(tmp_path / "db")
    yield started
    started.close()


async def alternate(store: Store, residents: Residents, child: Child, rounds: int) -> int:
    """Each process writes, and the other looks at once; how many looks there were."""
    chance = random.Random(rounds)
    alive: dict[str, str] = {}
    trashed: dict[str, str] = {}
    looks = 0
    for step in range(rounds):
        theirs = step % 2 == 0
        verb = chance.choice(["save", "save", "edit", "edit", "delete", "restore", "destroy"])
        if step % 50 == 49:
            await asyncio.to_thread(child.do, "optimize")
        if verb == "save" or not alive or (verb == "restore" and not trashed):
            content, vector = f"walrus {step}", chance_vectors(1, seed=step)[0] if step % 3 else None
            if theirs:
                memory_id = await asyncio.to_thread(child.do, "save", content, vector)
            else:
                memory_id = (await store.writer.insert([row(content, vector=vector)]))[0].id
            alive[memory_id] = ""
        else:
            memory_id = chance.choice(sorted(trashed if verb == "restore" else alive))
            arguments = [memory_id, str(step)] if verb == "edit" else [memory_id]
            if theirs:
                await asyncio.to_thread(child.do, verb, *arguments)
            elif verb == "edit":
                await store.tenant().edit(memory_id, {"source": str(step)}, None, etag)
            elif verb == "restore":
                await store.tenant().restore(memory_id)
            elif verb == "delete":
                await store.tenant().delete(memory_id, None, etag)
            else:
                await store.tenant().delete_for_good(memory_id, None, etag)
            if verb == "edit":
                alive[memory_id] = str(step)
            elif verb == "restore":
                alive[memory_id] = trashed.pop(memory_id)
            else:
                (trashed if verb == "delete" else {})[memory_id] = alive.pop(memory_id)
        every = [*alive, *trashed, memory_id]
        if theirs:
            snapshot = await residents.get("alice")
            assert snapshot is not None
            seen = {r["id"]: r["source"] for r in snapshot.get(every).values()}
        else:
            seen = await asyncio.to_thread(child.do, "held", *every)
        assert seen == alive, (step, verb, theirs)
        looks += 1
    assert await held(residents) == await in_table(store)
    return looks


async def test_what_one_process_wrote_the_other_sees_at_once(store: Store, residents: Residents, child: Child) -> None:
    assert await alternate(store, residents, child, 36) == 36


@pytest.mark.slow
async def test_what_one_process_wrote_the_other_sees_at_once_six_hundred_times(
    store: Store, residents: Residents, child: Child
) -> None:
    assert await alternate(store, residents, child, 600) == 600


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "db").mkdir(exist_ok=True)
    started = Processes(tmp_path / "db")
    yield started
    started.close()


async def watch_kills(store: Store, residents: Residents, processes: Processes, kills: int) -> int:
    """Writers that are killed at any moment; what each was answered is held at the next look. How many answers."""
    chance = random.Random()
    answered = 0

    async def look(name: str) -> None:
        entries = processes.entries(name)
        snapshot = await residents.get("alice")
        assert snapshot is not None
        sources: dict[str, int] = {}
        inserted = [e["id"] for e in entries if e["op"] == "insert"]
        assert snapshot.get(inserted).keys() == set(inserted)
        for entry in entries:
            if entry["op"] != "insert":
                sources[entry["id"]] = max(sources.get(entry["id"], 0), entry["source"])
        rows = snapshot.get(list(sources))
        assert all(int(rows[i]["source"]) >= source for i, source in sources.items())

    for kill in range(kills):
        name = f"w{kill}"
        processes.start("write", name)
        processes.wait_for_entry(name, "insert")
        until = time.monotonic() + chance.uniform(0, 0.25)
        while time.monotonic() < until:
            await look(name)
        processes.kill(name)
        await look(name)
        entries = processes.entries(name)
        answered += len(entries)
        # what it may have committed last, unanswered: whoever is told that it is there finds it
        steps = [int(e["content"].split()[-1]) for e in entries if e["op"] == "insert"]
        last = [f"{name} {caller} {step}" for caller in range(4) for step in {0, *steps, max(steps) + 1}]
        for content in chance.sample(last, min(12, len(last))):
            [inserted] = await store.writer.insert([row(content)])
            snapshot = await residents.get("alice")
            assert snapshot is not None
            assert snapshot.get([inserted.id])
        assert await held(residents) == await in_table(store)
        await store.maintenance().optimize()
    return answered


async def test_killed_writers_leave_nothing_stale(store: Store, residents: Residents, processes: Processes) -> None:
    assert await watch_kills(store, residents, processes, 2) > 2


@pytest.mark.slow
async def test_killed_writers_leave_nothing_stale_forty_times(
    store: Store, residents: Residents, processes: Processes
) -> None:
    assert await watch_kills(store, residents, processes, 40) > 40


# -- writers that end between a commit and its line


@pytest.mark.parametrize("which", ["duplicate", "trashed", "edited"])
async def test_an_answer_that_rests_on_an_unnoted_commit(
    store: Store, residents: Residents, there: tuple[Store, Residents], which: str
) -> None:
    """The second try changes nothing, and yet it tells of a change that nobody has heard of."""
    [memory_id] = await store.save("the walrus")
    await held(residents)
    work = {
        "duplicate": lambda s: s.save("a seal"),
        "trashed": lambda s: s.tenant().delete(memory_id, None, etag),
        "edited": lambda s: s.tenant().edit(memory_id, {"source": "x"}, None, etag),
    }[which]
    with lines_lost(there[0]), pytest.raises(StoreUnavailable):
        await work(there[0])
    answer = await work(store)
    now_held = await held(residents)
    assert now_held == await in_table(store)
    if which == "duplicate":
        assert answer[0] in now_held
    elif which == "trashed":
        assert memory_id not in now_held
    else:
        assert now_held[memory_id][0]["source"] == "x"


async def test_a_gap_drops_what_is_held(store: Store, residents: Residents, there: tuple[Store, Residents]) -> None:
    await store.save("the walrus")
    await held(residents)
    with lines_lost(there[0]), pytest.raises(StoreUnavailable):
        await there[0].save("a seal")
    await store.save("of bob", user_id="bob")
    assert residents.peek("alice") is None
    assert await held(residents) == await in_table(store)
    assert len(await held(residents)) == 2


async def test_a_full_disk_ends_all_trust_until_the_next_line(
    store: Store, residents: Residents, there: tuple[Store, Residents], tmp_path: Path
) -> None:
    await store.save("the walrus")
    for each in (residents, there[1]):
        await held(each)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        await there[0].save("a seal")  # it is in the table, and answered
    assert not (tmp_path / "db" / "journal").exists()
    for each in (residents, there[1]):
        for _ in range(2):
            assert await each.get("alice") is None
            assert each.peek("alice") is None
    await store.save("of bob", user_id="bob")
    for each in (residents, there[1]):
        assert len(await held(each)) == 2


async def test_the_journal_begins_anew(
    store: Store, residents: Residents, there: tuple[Store, Residents], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 200)
    for step in range(12):
        [memory_id] = await (store, there[0])[step % 2].save(f"walrus {step}")
        for each in (residents, there[1]):
            assert memory_id in await held(each)


# -- loads


async def test_the_table_is_asked_while_a_load_is_slow(
    store: Store, residents: Residents, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "LOAD_WAIT_S", 0.05)
    [memory_id] = await store.save("the walrus")
    started = time.monotonic()
    assert await residents.get("alice") is None
    assert 0.04 < time.monotonic() - started < 1
    [later] = await store.save("a seal")
    assert await residents.get("alice") is None  # the load is of before
    assert residents.peek("alice") is None
    gate.opened.set()
    monkeypatch.setattr(resident, "LOAD_WAIT_S", 30)
    assert set(await held(residents)) == {memory_id, later}


async def test_concurrent_gets_share_a_load(store: Store, residents: Residents, gate: Gate) -> None:
    await store.save("the walrus")
    gets = [asyncio.create_task(residents.get("alice")) for _ in range(20)]
    await gate.reached.wait()
    gate.opened.set()
    snapshots = await asyncio.gather(*gets)
    assert gate.reads == 1
    assert all(s is snapshots[0] for s in snapshots)
    await store.save("a seal")
    patched = await asyncio.gather(*(residents.get("alice") for _ in range(20)))
    assert gate.reads == 2
    assert all(s is patched[0] and s is not snapshots[0] for s in patched)


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_write_during_a_load_or_a_patch(
    store: Store, residents: Residents, there: tuple[Store, Residents], gate: Gate, loaded: bool
) -> None:
    """It is acknowledged behind the read and before its end: who asks then sees it."""
    [first] = await store.save("the walrus")
    if loaded:
        gate.opened.set()
        await held(residents)
        gate.opened.clear()
        gate.reached.clear()
        await there[0].tenant().edit(first, {"source": "1"}, None, etag)
    early = asyncio.create_task(residents.get("alice"))
    await gate.reached.wait()
    [second] = await there[0].save("a seal")
    await there[0].tenant().edit(first, {"source": "2"}, None, etag)
    late = asyncio.create_task(residents.get("alice"))
    await asyncio.sleep(0.02)
    assert not late.done()
    gate.opened.set()
    assert set(contents(await early)) == {first}
    seen = contents(await late)
    assert set(seen) == {first, second}
    assert seen[first][0]["source"] == "2"
    assert await held(residents) == await in_table(store)


async def test_a_drop_during_a_load(store: Store, residents: Residents, gate: Gate) -> None:
    [memory_id] = await store.save("the walrus", namespace="one")
    early = asyncio.create_task(residents.get("alice"))
    await gate.reached.wait()
    await store.tenant().rename_namespace("one", "two")
    late = asyncio.create_task(residents.get("alice"))
    gate.opened.set()
    await early
    assert contents(await late)[memory_id][0]["namespace"] == "two"
    assert (await held(residents))[memory_id][0]["namespace"] == "two"


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_load_that_fails(
    store: Store, residents: Residents, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    [first] = await store.save("the walrus")
    if loaded:
        await held(residents)
    [second] = await store.save("a seal")

    async def fail(*_: Any) -> pa.Table:
        raise StoreUnavailable("no")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(Reader, "whole", fail)
        for _ in range(2):
            assert await residents.get("alice") is None
            assert residents.peek("alice") is None
    assert [entry["event"] for entry in logs] == ["resident.load.failed"] * 2
    assert set(await held(residents)) == {first, second}


async def test_a_caller_that_goes_away_stops_no_load(store: Store, residents: Residents, gate: Gate) -> None:
    await store.save("the walrus")
    get = asyncio.create_task(residents.get("alice"))
    await gate.reached.wait()
    get.cancel()
    with pytest.raises(asyncio.CancelledError):
        await get
    gate.opened.set()
    assert len(await held(residents)) == 1
    assert gate.reads == 1


async def test_a_load_that_is_cancelled_is_not_held(store: Store, residents: Residents, gate: Gate) -> None:
    await store.save("the walrus")
    gate.opened.set()
    await held(residents)
    await store.save("a seal")
    gate.opened.clear()
    gate.reached.clear()
    get = asyncio.create_task(residents.get("alice"))
    await gate.reached.wait()
    await residents.close()
    with pytest.raises(asyncio.CancelledError):
        await get
    assert residents.peek("alice") is None
    gate.opened.set()
    assert len(await held(residents)) == 2


async def test_so_many_tenants_are_read_at_once(store: Store, residents: Residents, gate: Gate) -> None:
    users = [f"user{i}" for i in range(6)]
    await store.writer.insert([row("the walrus", user_id=user) for user in users])
    gets = [asyncio.create_task(residents.get(user)) for user in users]
    await gate.reached.wait()
    await asyncio.sleep(0.05)
    assert gate.reads == resident.MAX_LOADS
    gate.opened.set()
    assert all(len(contents(s)) == 1 for s in await asyncio.gather(*gets))


async def test_so_many_searches_wait(
    store: Store, residents: Residents, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "MAX_WAITING", 3)
    await store.save("the walrus")
    gets = [asyncio.create_task(residents.get("alice")) for _ in range(3)]
    await gate.reached.wait()
    assert await residents.get("alice") is None
    gate.opened.set()
    assert all(len(contents(s)) == 1 for s in await asyncio.gather(*gets))
    assert len(await held(residents)) == 1


async def test_more_changes_than_a_predicate_holds(
    store: Store, residents: Residents, there: tuple[Store, Residents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of many rows while nobody searches: it is read whole."""
    await store.save("the walrus")
    await held(residents)
    for start in range(0, 2_500, 500):
        rows = [row(f"walrus {start + i}") for i in range(500)]
        await there[0].writer.insert(rows)
    await there[0].save("of bob", user_id="bob")
    assert len(await held(residents)) == 2_501


# -- bounds


async def test_who_was_asked_for_longest_ago_goes_first(store: Store, tmp_path: Path) -> None:
    users = ["alice", "bob", "carol"]
    vectors = chance_vectors(50)
    for user in users:
        await store.writer.insert([row(f"walrus {i}", user_id=user, vector=v) for i, v in enumerate(vectors)])
    size = Snapshot.of(await store.reader().whole(ACTIVE)).size
    residents = Residents(store.table, int(size * 2.5))
    for user in users:
        assert len(await held(residents, user)) == 50
    assert [residents.peek(u) is not None for u in users] == [False, True, True]
    await held(residents, "bob")
    await held(residents, "alice")
    assert [residents.peek(u) is not None for u in users] == [True, True, False]
    await residents.close()


async def test_a_tenant_too_large_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.writer.insert([row(f"walrus {i}", vector=v) for i, v in enumerate(chance_vectors(300))])
    await store.save("of bob", user_id="bob")
    residents = Residents(store.table, 3 * OVERHEAD)
    gate = Gate(monkeypatch)
    gate.opened.set()
    assert len(await held(residents)) == 300
    assert len(await held(residents, "bob")) == 1
    for _ in range(3):
        assert await residents.get("alice") is None
        assert residents.peek("alice") is None
    assert gate.reads == 2
    assert residents.peek("bob") is not None
    # with much of it changed it is looked at again
    await store.tenant().delete_namespace("default")
    assert await held(residents) == {}
    await residents.close()


async def test_tenants_without_rows_take_room_too(store: Store) -> None:
    residents = Residents(store.table, 10 * OVERHEAD)
    for i in range(30):
        assert await held(residents, f"nobody{i}") == {}
    assert len(residents._held) <= 10
    await residents.close()


@pytest.mark.parametrize("vectors", [True, False])
async def test_size_is_what_it_takes(store: Store, vectors: bool) -> None:
    """By what the allocators say; within a third."""
    count = 2_000
    for start in range(0, count, 500):
        made = chance_vectors(500, seed=start)
        await store.writer.insert(
            [row(f"walrus {start + i} {'x' * 80}", vector=v if vectors else None) for i, v in enumerate(made)]
        )
    rows = await store.reader().whole(ACTIVE)
    Snapshot.of(rows.slice(0, 10))
    gc.collect()
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    snapshot = Snapshot.of(rows)
    gc.collect()
    python, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken = python + pa.total_allocated_bytes() - arrow
    print(f"size {snapshot.size}, taken {taken}, python {python}")
    assert 0.75 < snapshot.size / taken < 1.33


# -- tenants


async def test_a_tenant_never_sees_anothers_rows(store: Store, residents: Residents) -> None:
    for user in ("alice", "bob"):
        await store.save("the walrus", user_id=user)
        await store.writer.insert([row("a seal", user_id=user, vector=chance_vectors(1)[0])])
    found: dict[str, dict[str, Any]] = {user: await held(residents, user) for user in ("alice", "bob", "alice' --")}
    assert found["alice' --"] == {}
    for user in ("alice", "bob"):
        assert {r["user_id"] for r, *_ in found[user].values()} == {user}
        assert len(found[user]) == 2
    snapshot = await residents.get("alice")
    assert snapshot is not None
    assert snapshot.get(list(found["bob"])) == {}
    assert {c.id for c in snapshot.nearest(chance_vectors(1)[0], 9)} <= set(found["alice"])


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_foreign_row_in_a_load_is_refused(
    store: Store, residents: Residents, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    await store.save("of bob", user_id="bob")
    [memory_id] = await store.save("the walrus")
    if loaded:
        await held(residents)
    everybody = predicates.Predicate("true")
    with monkeypatch.context() as patch:
        if loaded:  # a patch asks for ids; with the tenant's predicate gone it must name a foreign one
            await store.tenant().edit(memory_id, {"source": "x"}, None, etag)
            patch.setattr(predicates, "one_of", lambda *_: everybody)
        patch.setattr(predicates, "tenant", lambda _: everybody)
        for _ in range(2):
            with pytest.raises(TenantAssertion):
                await residents.get("alice")
            assert residents.peek("alice") is None
    assert {r["user_id"] for r, *_ in (await held(residents)).values()} == {"alice"}


# -- the same answers as the table's


#: The engine and numpy round a cosine differently.
ROUNDING = 2e-6


def agree(held: list[Candidate], table: list[Candidate]) -> bool:
    """The same scores in the same places, and other ids only where scores are as good as equal."""
    cosines = {c.id: 1 + c.score for c in table}
    return len(held) == len(table) and all(
        abs(h.score - cosines[t.id]) <= ROUNDING and abs(cosines.get(h.id, cosines[t.id]) - h.score) <= ROUNDING
        for h, t in zip(held, table, strict=True)
    )


@pytest.mark.parametrize("precision", [np.float16, np.float32])
@pytest.mark.parametrize("dim", [1, 16, 384, 1024])
async def test_the_nearest_are_those_of_the_table(tmp_path: Path, dim: int, precision: type) -> None:
    """Random rows, some without a vector, many equal, some of zeros."""
    space = Space("test-model", "1", dim, "", "")
    table = await open_table(str(tmp_path), space)
    writer = Writer(table, space)
    writer.start()
    rng = np.random.default_rng(dim)
    kinds = rng.standard_normal((12, dim)).astype(np.float32)
    kinds[3] = 0
    at = now()
    rows = []
    for i in range(220):
        kind = kinds[rng.integers(12)] if i % 3 else rng.standard_normal(dim).astype(np.float32)
        vector = None if i % 5 == 0 else kind.astype(precision).tolist()
        rows.append(row(f"walrus {i}", vector=vector, at=at if i % 2 else now()))
    for start in range(0, 220, 40):
        await writer.insert(rows[start : start + 40])
    residents = Residents(table, ROOM)
    snapshot = await residents.get("alice")
    assert snapshot is not None
    assert snapshot.vectors.dtype == precision
    reader = Reader(table, "alice")
    for query in [*kinds[:5].tolist(), *rng.standard_normal((3, dim)).tolist(), [1e-3] * dim, [1e3] * dim]:
        for depth in (1, 50, 100, 500):
            ours = snapshot.nearest(query, depth)
            theirs = await reader.vector_arm(query, ACTIVE, depth, exact=True)
            assert agree(ours, theirs), (depth, query[:3])
            assert [c.order for c in ours] == sorted(c.order for c in ours)
            assert all(c.evidence.dtype == np.float32 for c in ours)
            assert all(abs(np.linalg.norm(c.evidence) - 1) < 1e-5 for c in ours)
    await residents.close()
    await writer.close()


async def test_half_precision_is_left_where_something_would_be_lost(store: Store, residents: Residents) -> None:
    [half], [single] = np.float16(chance_vectors(1)).tolist(), chance_vectors(1, seed=1)
    large = [1e6, *[0.0] * (DIM - 1)]  # half precision ends at 65,504
    for number, (vector, precision) in enumerate([(half, np.float16), (single, np.float32), (large, np.float32)]):
        await store.writer.insert([row(f"walrus {number}", vector=vector)])
        snapshot = await residents.get("alice")
        assert snapshot is not None
        assert snapshot.vectors.dtype == precision
        assert await held(residents) == await in_table(store)


async def test_equal_vectors_stand_by_age_across_the_cut(store: Store, residents: Residents) -> None:
    """More of them than are wanted, after patches that moved them about."""
    vector = chance_vectors(1, seed=9)[0]
    made = [row(f"walrus {i}", vector=vector) for i in range(150)]
    shuffled = random.Random(1).sample(made, 150)
    for start in range(0, 150, 30):
        await store.writer.insert(shuffled[start : start + 30])
        await held(residents)
    for r in random.Random(2).sample(made, 10):
        await store.tenant().edit(r["id"], {"source": "moved"}, None, etag)
        await held(residents)
    snapshot = await residents.get("alice")
    assert snapshot is not None
    for query in (vector, chance_vectors(1, seed=10)[0]):
        found = snapshot.nearest(query, 100)
        newest = sorted(made, key=lambda r: r["id"])
        newest.sort(key=lambda r: r["created_at"], reverse=True)
        assert [c.id for c in found] == [r["id"] for r in newest[:100]]
        assert len({c.score for c in found}) == 1


async def test_an_empty_tenant_and_one_without_vectors(store: Store, residents: Residents) -> None:
    for _ in range(2):
        snapshot = await residents.get("alice")
        assert snapshot is not None
        assert snapshot.nearest([1.0] * DIM, 5) == []
        assert snapshot.nearest([0.0] * DIM, 5) == []
        assert snapshot.get(["mem_x"]) == {}
        assert snapshot.text_candidates([], 5) == []
        [memory_id] = await store.save("the walrus")
    vectors = [Vector(memory_id, "alice", row("the walrus")["content_hash"], [1.0] * DIM)]
    assert await store.backfill().set_vectors("alice", vectors) == [memory_id]
    snapshot = await residents.get("alice")
    assert snapshot is not None
    assert [c.id for c in snapshot.nearest([1.0] * DIM, 5)] == [memory_id]
    await store.tenant().delete(memory_id, None, etag)
    snapshot = await residents.get("alice")
    assert snapshot is not None
    assert contents(snapshot) == {}


async def test_the_rows_of_a_snapshot_are_those_of_the_table(store: Store, residents: Residents) -> None:
    """Every column, of every type."""
    made = await store.save(
        "the walrus", tags=["a", "it's"], entities=["C++"], facts=["f"], importance=0.1, metadata={"a": [1, None]}
    )
    made += await store.save("日本語 😀", namespace="one", source="x", type="goal")
    snapshot = await residents.get("alice")
    assert snapshot is not None
    assert snapshot.get([*made, "mem_gone"]) == await store.reader().rows(made)
    assert list(snapshot.get(made[::-1])) == made[::-1]


async def test_the_text_arm_of_a_snapshot_is_that_of_the_table(store: Store, residents: Residents) -> None:
    texts = [f"walrus {'ice ' * (i % 4)}{'fish ' * (i % 3)}{i}" for i in range(60)]
    ids = await store.save(*texts)
    for memory_id in ids[:5]:
        await store.tenant().delete(memory_id, None, etag)
    snapshot = await residents.get("alice")
    assert snapshot is not None
    answered = 0
    for words in ("walrus", "ice", "fish ice", "17", "walrus 3", "nothing"):
        for depth, more in itertools.product((1, 3, 10, 50, 100), (1, TIES)):
            matches = await store.reader().text_matches(words, ACTIVE, depth + more)
            found = snapshot.text_candidates(matches, depth)
            table = await store.reader().text_arm(words, ACTIVE, depth)
            if found is not None:
                answered += 1
                assert found == table
                assert [c.evidence for c in found] == [c.evidence for c in table]
    assert answered >= 24
    [newer] = await store.save("a newer walrus")
    assert snapshot.text_candidates([(newer, 1.0)], 5) is None


# -- in a search


WORDS = ["walrus", "ice", "fish", "tusk", "seal", "whale", "herd", "beach", "snow", "storm"]
Answer = dict[str, Any]


async def both_ways(app: App, tenant: Tenant, query: str, **body: Any) -> tuple[Answer, Answer]:
    """The same search with the tenant held, and from the table alone."""
    residents = app.runtime.search._residents
    await residents.get(tenant.user_id)
    assert residents.peek(tenant.user_id) is not None
    with_held = await tenant.search(query, limit=50, **body)

    async def nothing(*_: Any) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residents, "get", nothing)
        patch.setattr(Residents, "peek", lambda *_: None)
        without = await tenant.search(query, limit=50, **body)
    for answer in (with_held, without):
        answer.pop("took_ms")
    return with_held, without


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(2))
async def test_a_search_finds_the_same_with_the_tenant_held_and_without(
    app: App, alice: Tenant, bob: Tenant, seed: int
) -> None:
    chance = random.Random(seed)

    def memory(i: int) -> dict[str, Any]:
        # in three namespaces, so that equal contents, and so equal vectors, are many
        return {
            "content": " ".join(chance.choices(WORDS, k=chance.randint(1, 5))),
            "namespace": ["one", "two", "three"][i % 3],
            "type": chance.choice(["goal", "gotcha"]),
            "tags": chance.sample(["a", "b"], chance.randint(0, 2)),
            "importance": i % 10 / 10,
        }

    def unique(count: int) -> list[dict[str, Any]]:
        made = [memory(i) for i in range(count)]
        return list({(m["namespace"], m["content"]): m for m in made}.values())

    count = [12, 99][seed]
    made = await alice.batch(*unique(count))
    if seed:
        made += await alice.batch(*unique(99))
    await bob.batch(*unique(20))
    await app.embed_all()
    made = list(dict.fromkeys(made + await alice.batch(*({"content": f"queued {word}"} for word in WORDS))))
    for memory_id in chance.sample(made, 5):
        await alice.delete(f"/v1/memories/{memory_id}")
    for memory_id in chance.sample(made, 5):
        await alice.http.patch(f"/v1/memories/{memory_id}", json={"source": "edited"})
    modes = set()
    for query in [*chance.sample(WORDS, 2), "the storm on the beach", "queued herd", "!!"]:
        for body in ({}, {"namespace": "one"}, {"type": "goal", "tags": ["a"]}, {"min_score": 0.015}):
            with_held, without = await both_ways(app, alice, query, **body)
            assert with_held == without, (query, body)
            modes.add(with_held["mode"])
    assert "hybrid" in modes


@pytest.mark.asyncio(loop_scope="module")
async def test_the_order_is_the_same_after_patches_and_reloads(app: App, alice: Tenant) -> None:
    made = await alice.batch(*(f"{' '.join(WORDS[i % 7 : i % 7 + 3])} {i % 11}x{i}" for i in range(90)))
    await app.embed_all()
    residents = app.runtime.search._residents
    first = (await alice.search("walrus ice 3x", limit=50))["hits"]
    for step in range(3):
        # a patch moves a row to the end of what is held
        await alice.patch(f"/v1/memories/{made[step * 7]}", {"source": "x"})
        await alice.patch(f"/v1/memories/{made[step * 7]}", {"source": ""})
        again = (await alice.search("walrus ice 3x", limit=50))["hits"]
        assert [(h["id"], h["score"]) for h in again] == [(h["id"], h["score"]) for h in first]
    residents._held.clear()
    again = (await alice.search("walrus ice 3x", limit=50))["hits"]
    assert [(h["id"], h["score"]) for h in again] == [(h["id"], h["score"]) for h in first]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_tenant_is_not_held(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    await alice.batch("the walrus", "a seal")
    await app.embed_all()
    search = app.runtime.search
    large = app.runtime.settings.vector_index_min_rows + 1
    monkeypatch.setitem(search._sizes, alice.user_id, (time.monotonic() + 3600, large))
    assert (await alice.search("walrus"))["mode"] == "hybrid"
    assert search._residents.peek(alice.user_id) is None
    monkeypatch.setitem(search._sizes, alice.user_id, (time.monotonic() + 3600, large - 1))
    assert (await alice.search("walrus"))["mode"] == "hybrid"
    assert search._residents.peek(alice.user_id) is not None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_search_goes_on_where_a_load_fails(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    await alice.batch("the walrus", "a seal")
    await app.embed_all()

    async def fail(*_: Any) -> pa.Table:
        raise StoreUnavailable("no")

    monkeypatch.setattr(Reader, "whole", fail)
    answer = await alice.search("walrus")
    assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
    assert len(answer["hits"]) == 2
