"""Runbooks are true: each is run as printed, on a machine that has the fault it is about.

pytest tests/vm/test_runbooks.py --write-times      and the index says how long each took
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from runbooks import index
from runbooks.book import books, read
from runbooks.faults import FAULTS
from runbooks.play import play
from runbooks.world import World, prepared, tool
from vm import deploys
from vm.machine import Machine, RunMachine

#: These are run in every test run; the others take longer in all.
QUICK = ("api-down", "search-degraded", "worker-down")
RUN = [name for name in books() if not read(name).not_run]


@pytest.fixture(scope="module")
def world(
    images: None, machine: Machine, run_machine: RunMachine, clone: Callable[[], deploys.Tree],
    tmp_path_factory: pytest.TempPathFactory, make_inventory: deploys.MakeInventory,
) -> World:  # fmt: skip
    origin = clone()
    tree = origin.clone(tmp_path_factory.mktemp("operator") / "warmstart")
    tool(tree.path)
    return prepared(World(machine, tree, origin, make_inventory, make_inventory(machine), run_machine))


@pytest.fixture
def healthy(world: World) -> Iterator[World]:
    yield world
    world.heal()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUN])
def test_a_runbook_does_what_it_says(name: str, healthy: World, pytestconfig: pytest.Config) -> None:
    with FAULTS[name](healthy) as values:
        seconds = play(read(name), healthy.reader(dict(values or {})))
    print(f"{name}: {seconds:.0f} s")
    if pytestconfig.getoption("--write-times"):
        index.write_time(name, seconds)
