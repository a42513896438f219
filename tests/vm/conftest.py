"""Machines to deploy to, and trees to deploy from. Where they can't be had, tests fail: none is skipped.

pytest tests/vm --machine full      on an emulated machine with a kernel of its own; takes long
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from containers import build
from containers.stack import model_folder
from vm import deploys, full, image, machine

HERE = Path(__file__).parent
KINDS = {"container": (machine.Container, machine.prepare), "full": (full.Emulated, full.prepare)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--machine", choices=list(KINDS), default="container", help="what the deploy tests deploy to")
    parser.addoption("--write-times", action="store_true", help="into the index of the runbooks: how long each took")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vm: needs a machine to deploy to; run by `make test-vm`")
    config.addinivalue_line(
        "markers", "emulated: what a kernel of its own may change; the rest hangs on time limits that emulation breaks"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vm)


# -- machines


@pytest.fixture(scope="session")
def images() -> None:
    """Engine and the images that are deployed; seconds where both are there."""
    build.ensure_engine()
    build.build_images()


@pytest.fixture(scope="session")
def run_machine(request: pytest.FixtureRequest) -> machine.RunMachine:
    """A new machine of that name, on until the block ends."""
    kind, prepare = KINDS[request.config.getoption("--machine")]
    prepare()

    @contextmanager
    def run(name: str) -> Iterator[machine.Machine]:
        made = kind(name)
        try:
            made.start()
            yield made
        finally:
            made.remove()

    return run


@pytest.fixture(scope="session", name="machine")
def session_machine(run_machine: machine.RunMachine) -> Iterator[machine.Machine]:
    """The one that tests deploy to, one after the other."""
    with run_machine("main") as made:
        yield made


@pytest.fixture
def fresh_machine(run_machine: machine.RunMachine) -> Iterator[Callable[[str], machine.Machine]]:
    """Bare ones, removed after the test."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(run_machine(name))


# -- the operator's side


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> deploys.Tree:
    """The files of this tree when the tests began. Tests that change something take a `clone`."""
    return deploys.working_tree(tmp_path_factory.mktemp("tree") / "warmstart")


@pytest.fixture(scope="session")
def clone(tree: deploys.Tree, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], deploys.Tree]:
    """Clones of `tree`, all at the same commit."""
    return lambda: tree.clone(tmp_path_factory.mktemp("clone") / "warmstart")


@pytest.fixture(scope="session")
def make_inventory(tmp_path_factory: pytest.TempPathFactory) -> deploys.MakeInventory:
    """The inventory of a machine, with the test images; `fields` as in ops/inventory.py."""

    def make(target: machine.Machine, *, operator: str = image.OPERATORS[0], **fields: Any) -> Path:
        folder = tmp_path_factory.mktemp("inventory")
        path = folder / "inventory.py"
        return deploys.write_inventory(path, target, model_folder(folder), operator=operator, **fields)

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """The machine's last words beside a failure."""
    report = yield
    if report.when == "call" and report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, machine.Machine):
                report.sections.append((value.name, value.last_words()))
    return report
