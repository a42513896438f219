"""Each dependency × each fault × each operation, as the table says, and well again by itself afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import httpx
import pytest
from stack import ROOT, Stack, command, wait_until

from containers.faults import container, inflicted
from containers.matrix import (
    DEPENDENCIES,
    EVERY_RUN_OPERATIONS,
    EXCLUDED,
    FAULTS,
    HEAL_LIMIT_S,
    OPERATIONS,
    Cell,
    Row,
    cell,
    cells,
    every_run_rows,
    rows,
)
from containers.operations import STRANGER, Outcome, Visitor, events, load, series

#: What was measured, for degradation_page.py.
MEASURED = ROOT / ".cache" / "degradation"
#: Until the heartbeat of a dependency that nobody waits for has missed it.
NOTICE_S = 20.0


Moves = Callable[[Stack], None]


@pytest.fixture(scope="session")
def neighbour_of() -> Moves:
    """Gives a stack another tenant, with memories that every search here would find."""
    done: set[str] = set()

    def settle_in(stack: Stack) -> None:
        if stack.project in done:
            return
        done.add(stack.project)
        tenant = stack.execute("api", "warmstart", "tenants", "create", "neighbour", "--json").splitlines()[-1]
        other = stack.create_key("neighbour", "--tenant", json.loads(tenant)["id"])
        with stack.client(other) as http:
            memories = [{"content": f"Walrus {STRANGER} {i}"} for i in range(10)]
            http.post("/v1/memories/batch", json={"memories": memories}).raise_for_status()

    return settle_in


@pytest.mark.parametrize("row", every_run_rows(), ids=lambda row: row.id)
def test_search_save_and_mcp(row: Row, stack: Stack, key: str, neighbour_of: Moves) -> None:
    neighbour_of(stack)
    go_through(stack, key, row, EVERY_RUN_OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in rows() if row.fault != "disk-full"], ids=lambda row: row.id)
def test_all_operations(row: Row, stack: Stack, key: str, neighbour_of: Moves) -> None:
    neighbour_of(stack)
    keep(row, go_through(stack, key, row, OPERATIONS))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in rows() if row.fault == "disk-full"], ids=lambda row: row.id)
def test_all_operations_with_a_full_disk(row: Row, small_stack: Stack, small_key: str, neighbour_of: Moves) -> None:
    """On volumes that can be filled without filling this machine's."""
    neighbour_of(small_stack)
    keep(row, go_through(small_stack, small_key, row, OPERATIONS))


def keep(row: Row, measured: dict[str, float]) -> None:
    MEASURED.mkdir(parents=True, exist_ok=True)
    (MEASURED / f"{row.id}.json").write_text(json.dumps(measured))


def go_through(stack: Stack, key: str, row: Row, operations: Sequence[str]) -> dict[str, float]:
    """Seconds of each operation, and until all was well again."""
    visitor = Visitor(stack, key)
    try:
        began = time.time()
        measured = {}
        with inflicted(stack, row) as again:
            for operation in operations:
                # while the api itself starts anew, the others' requests may well fail
                under_load = row.fault == "killed" and operation != "start"
                with load(visitor) if under_load else nullcontext():
                    again()
                    measured[operation] = check(stack, visitor, cell(row, operation))
            check_noticed(stack, visitor, row, began)
            if row.queues and "batch" in operations:
                assert visitor.http.get("/v1/health").json()["queued"] >= 5
        measured["healed"] = heal(visitor)
    finally:
        visitor.close()
        if row.fault == "killed":
            # a start by hand also sets the count of restarts back, which others look at
            command("docker", "restart", container(stack, row.dependency))
            wait_until("it answers", lambda: answers(stack, row.dependency), HEAL_LIMIT_S)
            with stack.client(key) as http:
                wait_until("all is well", lambda: http.get("/v1/health").json()["status"] == "ok", HEAL_LIMIT_S)
    return {name: round(seconds, 3) for name, seconds in measured.items()}


def check(stack: Stack, visitor: Visitor, expected: Cell) -> float:
    fresh = expected.operation == "start"
    before = {} if fresh else series(stack)
    began = time.time()
    outcome = visitor.run(expected.operation)
    assert outcome.status in expected.statuses, f"{expected.id}: {outcome.status} {outcome.body[:500]}"
    assert STRANGER not in outcome.body
    assert outcome.seconds <= expected.within_s, f"{expected.id}: {outcome.seconds:.2f} s"
    check_search(expected, outcome)
    after = series(stack)
    assert after.get("warmstart_tenant_assertions_total") == 0
    still = [name for name in expected.counted if after.get(name, 0) <= before.get(name, 0)]
    assert not still, f"{expected.id}: not counted: {still}"
    # the engine writes the log down in its own time
    wait_until(f"the log has {expected.logged}", lambda: set(expected.logged) <= events(stack, began), 5, every_s=0.1)
    return outcome.seconds


def check_search(expected: Cell, outcome: Outcome) -> None:
    if not expected.modes:
        return
    assert outcome.mode in expected.modes, f"{expected.id}: {outcome.mode} {outcome.degraded}"
    wanted = set(expected.degraded) if outcome.mode == "keyword" else set()
    assert set(outcome.degraded) == wanted, f"{expected.id}: {outcome.mode} {outcome.degraded}"


def check_noticed(stack: Stack, visitor: Visitor, row: Row, began: float) -> None:
    """Health names what is down, and so do the metrics and the log."""
    if row.noticed is None:
        return
    name, event = row.noticed

    def is_down() -> bool:
        health = visitor.http.get("/v1/health").json()
        return {d["name"]: d["status"] for d in health["dependencies"]}[name] == "down"

    wait_until(f"health says that {name} is down", is_down, NOTICE_S)
    ready = visitor.http.get("/readyz")
    assert (ready.status_code, ready.json()["degraded"].get(name)) == (200, "down")
    assert series(stack)[f'warmstart_dependency_up{{name="{name}"}}'] == 0
    assert event in events(stack, began)


def heal(visitor: Visitor) -> float:
    """Seconds until everything is at rung 1 and all that was acknowledged is there once, embedded and booked."""
    began = time.monotonic()

    def is_well() -> bool:
        # no search: nobody's question may be needed for it
        health = visitor.http.get("/v1/health").json()
        assert (health["status"], health["mode"], health["queued"]) == ("ok", "hybrid", 0), health
        return True

    wait_until("it is well again", is_well, HEAL_LIMIT_S)
    outcome = visitor.search()
    assert (outcome.mode, outcome.degraded) == ("hybrid", ())
    left = HEAL_LIMIT_S - (time.monotonic() - began)
    wait_until("all is there, once, and embedded", lambda: visitor.settle() is None, left)
    return time.monotonic() - began


def answers(stack: Stack, service: str) -> bool:
    """By the health check of its container, where it has one."""
    state = stack.inspect(service)["State"]
    if "Health" in state:
        return bool(state["Health"]["Status"] == "healthy")
    return httpx.get(f"http://{stack.address(service)}:8080/health", trust_env=False).is_success


# -- the table itself


def test_every_cell_is_tested_or_excluded_with_a_reason() -> None:
    product = len(DEPENDENCIES) * len(FAULTS) * len(OPERATIONS)
    tested = cells()
    assert len(tested) == product - len(EXCLUDED) * len(OPERATIONS)
    assert len({c.id for c in tested}) == len(tested)
    assert all(len(reason) > 20 for reason in EXCLUDED.values())
    assert not any(500 in c.statuses for c in tested)


def test_every_run_takes_each_dependency_stopped_and_paused() -> None:
    taken = {(row.dependency, row.fault) for row in every_run_rows()}
    wanted = {(d, f) for d in DEPENDENCIES for f in ("stopped", "paused")}
    # a volume can be neither; that it is full is in every run (test_chaos.py)
    assert wanted - taken == {("disk", "stopped"), ("disk", "paused")}
