"""One run from its first memory to its last file: seed, load, break, judge, purge, report."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from loadtests import report, sampler, seeding, slo
from loadtests.plan import VARIABLE, Plan, planned_requests
from loadtests.purge import PurgeFailed, counts, purge
from loadtests.scenario import Fault, Scenario
from loadtests.targets import Target

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / ".cache" / "loadtests"
LOCUSTFILE: Final = Path(__file__).with_name("locustfile.py")
START_S: Final = 30.0
#: After its last second: for requests that are still waited for, and Locust's own end.
END_S: Final = 60.0

Breaker = Callable[[Target, Fault], AbstractContextManager[None]]


class LoadFailed(Exception):
    """The load itself did not run, and what it said."""


@dataclass(frozen=True)
class Options:
    name: str
    folder: Path


def no_faults(target: Target, fault: Fault) -> AbstractContextManager[None]:
    raise LoadFailed("faults are for the stack in containers only: run the scenario without URL")


def run(
    scenario: Scenario,
    target: Target,
    prefix: str,
    options: Options,
    tell: seeding.Progress,
    breaker: Breaker = no_faults,
) -> report.Run:
    """Raises SeedingFailed, LoadFailed or PurgeFailed; limits that were missed are in the result."""
    with target.clients() as clients:
        before = [counts(client) for client in clients]
        try:
            seed(scenario, target, prefix, tell)
            result = loaded(scenario, target, prefix, options, tell, breaker)
        finally:
            if not target.throwaway:
                tell(f"{purge(clients, prefix):,} memories of the run purged")
        if not target.throwaway and (after := [counts(client) for client in clients]) != before:
            raise PurgeFailed(f"memories (active, trashed) were {before} before the run and are {after}")
    return result


def seed(scenario: Scenario, target: Target, prefix: str, tell: seeding.Progress) -> None:
    began = time.monotonic()
    items = seeding.data_set(scenario.seed, f"{prefix}-seed", len(target.keys), scenario.memories)
    created = target.seed(items)
    if created != scenario.memories:
        raise seeding.SeedingFailed(f"of {scenario.memories} memories {created} were created")
    tell(f"{created:,} memories in {len(target.keys)} tenants, {time.monotonic() - began:.0f} s")


def loaded(
    scenario: Scenario,
    target: Target,
    prefix: str,
    options: Options,
    tell: seeding.Progress,
    breaker: Breaker = no_faults,
) -> report.Run:
    """The load on what is seeded, and its report."""
    options.folder.mkdir(parents=True, exist_ok=True)
    with target.clients() as clients:
        before = sum(active for active, _ in map(counts, clients))
        measured = _measured(scenario, target, prefix, options, breaker)
        created = sum(active for active, _ in map(counts, clients)) - before
    result = replace(measured, findings=[*measured.findings, slo.written(measured.samples, created)])
    report.write(result, options.folder)
    return result


def _measured(scenario: Scenario, target: Target, prefix: str, options: Options, breaker: Breaker) -> report.Run:
    facts = _facts(target, scenario)
    with tempfile.TemporaryDirectory(prefix="warmstart-load-") as name:
        plan = Plan(
            scenario=scenario, url=target.url, keys=target.keys, limited_key=target.limited_key,
            authority=target.authority, prefix=f"{prefix}-load", folder=Path(name),
        )  # fmt: skip
        with target.clients() as clients:
            health = clients[0] if not target.sources else None
            with sampler.Sampler(target.sources, health) as looking:
                fault = _follow(plan, target, breaker)
        began = float(plan.begun_file.read_text())
        samples = report.read_samples(plan.requests_file)
        (options.folder / "requests.csv").write_bytes(plan.requests_file.read_bytes())
    readings = sampler.write(options.folder / "readings.csv", looking.readings, began)
    since, until = fault or (None, None)
    timeline = slo.Timeline(scenario.shape.seconds, since, until, scenario.warm_up_s)
    findings = slo.check(samples, scenario.slo_rules, timeline, planned_requests(scenario), scenario.slo_refusals)
    late = slo.quantile(sorted(s.latency_ms - s.service_ms for s in samples), 0.99)
    facts |= {
        "sent late, p99": f"{late:.0f} ms",
        "load": f"{os.getloadavg()[0]:.1f} at the end (1 minute), {facts.pop('load_before')} before",
    }
    return report.Run(options.name, scenario, samples, readings, timeline, findings, facts)


def _follow(plan: Plan, target: Target, breaker: Breaker) -> tuple[float, float] | None:
    """Starts the load, breaks what is to be broken, waits for the end; when the fault was, in seconds."""
    path = plan.folder / "plan.json"
    path.touch(mode=0o600)
    path.write_text(plan.model_dump_json())
    with (plan.folder / "locust.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--users", "1", "--only-summary"],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, VARIABLE: str(path), "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "app")))},
        )  # fmt: skip
        try:
            began = _begun(process, plan)
            fault = _broken(plan, target, breaker, began)
            process.wait(max(0.0, began + plan.scenario.shape.seconds - time.time()) + END_S)
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"the load did not end\n{_said(plan)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise LoadFailed(f"the load ended with {process.returncode}\n{_said(plan)}")
    return fault


def _begun(process: subprocess.Popen[bytes], plan: Plan) -> float:
    deadline = time.monotonic() + START_S
    while not (plan.begun_file.exists() and (text := plan.begun_file.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise LoadFailed(f"the load did not begin\n{_said(plan)}")
        time.sleep(0.05)
    return float(text)


def _broken(plan: Plan, target: Target, breaker: Breaker, began: float) -> tuple[float, float] | None:
    fault = plan.scenario.fault
    if fault is None:
        return None
    time.sleep(max(0.0, began + fault.at_s - time.time()))
    since = time.time() - began
    with breaker(target, fault):
        if fault.until_s is not None:
            time.sleep(max(0.0, began + fault.until_s - time.time()))
    until = time.time() - began
    if until >= plan.scenario.shape.seconds:
        raise LoadFailed(f"the fault lasted until second {until:.0f}, when the load was over: give it more seconds")
    return since, until


def _said(plan: Plan) -> str:
    return (plan.folder / "locust.log").read_text(errors="replace")[-3000:]


def _facts(target: Target, scenario: Scenario) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target.url
        if not target.throwaway
        else ("stack in containers" if target.stack else "warmstart serve"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "versions": f"warmstart {version('warmstart')}, locust {version('locust')}",
        "data": f"{scenario.memories:,} memories, {len(target.keys)} tenants",
        "plan": f"{scenario.shape.words} for {scenario.shape.seconds:,g} s",
        "load_before": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
