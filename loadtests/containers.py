"""The stack of the container tests as a target, and its faults: what they do there is done here under load."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from loadtests import seeding, targets
from loadtests.run import ROOT, LoadFailed
from loadtests.scenario import Fault, Scenario

sys.path[:0] = [str(ROOT / part) for part in ("tests", "tests/containers", "compose")]

import build  # noqa: E402
from stack import FILES, UP, Stack, command, prepared  # noqa: E402

from containers import releases  # noqa: E402
from containers.faults import container, inflicted  # noqa: E402
from containers.matrix import Row  # noqa: E402

PROJECT: Final = "warmstart-load"
EDGE: Final = "172.30.88"
METRICS_PORTS: Final = {"api": 8484, "worker": 8485}
#: To which a migration goes: the same model under another name, since no other is there.
OTHER_REVISION: Final = "another-revision"
MIGRATION_S: Final = 600.0


@contextmanager
def target(scenario: Scenario, prefix: str, tell: seeding.Progress) -> Iterator[targets.Target]:
    """Seconds where engine and images are there, minutes on a fresh machine."""
    fault = scenario.fault.do if scenario.fault else ""
    try:
        build.ensure_engine()
        build.build_images()
    except build.BuildError as error:
        raise LoadFailed(f"the stack can't run here: {error}") from None
    with tempfile.TemporaryDirectory(prefix="warmstart-load-") as name, ExitStack() as undo:
        project = releases.PROJECT if fault == "rollout" else PROJECT
        stack = prepared(Path(name), project, EDGE, RATE_LIMIT_PER_MINUTE=str(targets.STORM_LIMIT))
        vm = undo.enter_context(_up(stack, Path(name), fault))
        tell(f"the stack serves at {stack.url}")
        yield _target(vm.stack if vm else stack, vm, scenario, prefix)


@contextmanager
def _up(stack: Stack, folder: Path, fault: str) -> Iterator[releases.Vm | None]:
    if fault == "rollout":
        root = folder / "vm"
        root.mkdir()
        labels = {name: f"LABEL release={name}" for name in ("first", "second")}
        with releases.released(stack, root, labels) as vm:
            yield vm
        return
    if fault == "disk-full":
        stack.files = (*FILES, ROOT / "tests/containers/small.yml")
    down = ("down", "--volumes", "--remove-orphans", "--timeout", "10")
    stack.compose(*down)  # of a run that was killed
    try:
        stack.compose(*UP.split())
        stack.fetch_authority()
        yield None
    finally:
        stack.compose(*down)


def _target(stack: Stack, vm: releases.Vm | None, scenario: Scenario, prefix: str) -> targets.Target:
    made = targets.provision(
        ["docker", "exec", "--interactive", container(stack, "api"), "python3", "-c"],
        targets.tenant_names(prefix, scenario.tenants),
    )  # fmt: skip
    ids = [tenant["id"] for tenant in made["tenants"]]

    def source(service: str) -> str:
        name = vm.serving if vm and service == "api" else service
        return f"http://{stack.address(name)}:{METRICS_PORTS[service]}/metrics"

    def seed(items: Any) -> int:
        inserted = seeding.into_store(items, ids, _one_off(stack, "--entrypoint", "python3", "worker", "-c"))
        if scenario.fault and scenario.fault.do == "migration":
            # as the operator does: the new model is configured, then the memories are moved to it
            stack.env_file.write_text(f"{stack.env_file.read_text()}\nEMBED_REVISION={OTHER_REVISION}\n")
            stack.compose(*UP.split(), "api", "worker")
        return inserted

    return targets.Target(
        stack.url, [tenant["key"] for tenant in made["tenants"]], seed,
        {name: lambda name=name: source(name) for name in METRICS_PORTS},  # type: ignore[misc] # its default binds it
        made["limited_key"], stack.authority.read_text(), stack=stack, releases=vm,
    )  # fmt: skip


def _one_off(stack: Stack, *words: str) -> Sequence[str]:
    """A container of its own, with the settings and volumes of the worker."""
    files = [word for file in stack.files for word in ("-f", str(file))]
    return [*stack.base_command, *files, "-p", stack.project, "run", "--rm", "--no-deps", "-T", *words]


@contextmanager
def broken(where: targets.Target, fault: Fault) -> Iterator[None]:
    match fault.do:
        case "rollout":
            where.releases.deploy("second")
            yield
        case "migration":
            command(*_one_off(where.stack, "worker", "migrate", "dimension", "--to", "384"), timeout_s=MIGRATION_S)
            yield
        case _:
            with inflicted(where.stack, Row(fault.to, fault.do)):
                yield
