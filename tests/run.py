"""Runs the tests tier by tier, goes on after a tier that failed, and ends with a table of all of them.

What this machine can't run is named in one line; where REQUIRE names it (`REQUIRE=containers,services`), that is a
failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: No tests of pytest's: they measure, judge, and try again by themselves.
MEASURED: Final = {"load": ("loadtests", "gate"), "bench": ("loadtests.bench", "--check")}
#: Longest time of a tier without the slow tests, several times what it takes; a hang ends with a stack for each thread.
TIER_LIMITS_S: Final = {
    "unit": 300,
    "integration": 900,
    "browser": 600,
    "containers": 900,
    "vm": 900,
    "load": 900,
    "bench": 300,
}
#: Tiers whose tests wait as much as they compute and share nothing: two processes, each with whole modules of them.
SHARED_OUT: Final = ("unit", "integration")
PROCESSES: Final = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder")
SLOW_LIMIT_S: Final = 4 * 3600
#: So many failures of a tier are looked at again, since a shared machine can stand still for seconds; both are told.
MAX_SECOND_TRIES: Final = 5
#: A single test that takes longer has its stacks shown, and goes on.
STACKS_AFTER_S: Final = 240
#: For pytest to end fixtures and to say which test was interrupted.
GRACE_S: Final = 45


@dataclass(frozen=True)
class Outcome:
    tier: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def row(self) -> str:
        return f"{self.tier:<12} {self.passed:>7} {self.failed:>7} {self.seconds:>7.0f} s  {self.note}".rstrip()


def no_redis() -> str:
    return "" if shutil.which("redis-server") else "redis-server is not installed"


def no_browser() -> str:
    return "" if shutil.which("chromium") else "chromium is not installed"


def not_root() -> str:
    return "" if os.geteuid() == 0 else "they mount file systems, which only root may"


def no_engine() -> str:
    if not _works("docker", "info"):
        return "no container engine answers `docker info`"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "their images are built from Debian's packages, as root on Debian or Ubuntu"
    return ""


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def no_machine() -> str:
    return no_engine() or ("" if shutil.which("ssh") else "ssh is not installed")


def not_asked_for() -> str:
    return "it measures: name it, where nothing else runs (tests/run.py load bench)"


#: Tests that not every machine can run: their marker, and what is lacking here, in a few words.
LACKING: Final[dict[str, Callable[[], str]]] = {
    "services": no_redis, "root": not_root, "browser": no_browser, "containers": no_engine, "vm": no_machine,
    **dict.fromkeys(MEASURED, not_asked_for),
}  # fmt: skip
#: A tier that is left out as a whole where its part is lacking.
WHOLE: Final = frozenset({"browser"})
#: Tiers in containers, with the module of tests/ that makes what they need.
BUILDERS: Final = {"containers": "containers.build", "vm": "vm.image"}


class Runner:
    def __init__(self, *, slow: bool, coverage: bool, required: set[str]) -> None:
        self._slow, self._coverage, self._required = slow, coverage, required
        self._without = [] if slow else ["slow"]
        self.outcomes: list[Outcome] = []

    def leave_out_what_is_lacking(self) -> None:
        for marker in ("services", "root"):
            if lacking := LACKING[marker]():
                self._without.append(marker)
                self._not_run(marker, f"tests marked `{marker}`: {lacking}")

    def _not_run(self, name: str, why: str) -> None:
        required = name in self._required
        print(f"Not run: {why}" + (" (but REQUIRE names it)" if required else ""), flush=True)
        if required:
            self.outcomes.append(Outcome(name, failed=1, note="not run, but required"))

    def tier(self, name: str) -> None:
        if name in BUILDERS and not self._ready(name):
            return
        if name in WHOLE and (lacking := LACKING[name]()):
            self._not_run(name, f"{name}: {lacking}")
            return
        print(f"\n== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            began = time.monotonic()
            # what is measured is what runs in one process
            shared_out = name in SHARED_OUT and not self._coverage
            status, note = self._pytest(name, report, *(PROCESSES if shared_out else ()))
            passed, failed = counts(report)
            if 0 < failed <= MAX_SECOND_TRIES and not note:
                print(f"\n== {name}: {failed} failed, and are tried once more, alone", flush=True)
                report.unlink()
                status, note = self._pytest(name, report, "--last-failed")
                again, still = counts(report)
                if again + still:
                    note = note or f"{failed} failed at first, {still} again"
                    passed, failed = passed + failed - still, still
        if status and not failed:  # it ended before it could count: a fault while collecting, or a kill
            failed, note = 1, note or f"pytest ended with {status}"
        self.outcomes.append(Outcome(name, passed, failed, time.monotonic() - began, note))

    def measured(self, name: str, *, named: bool) -> None:
        if not named and name not in self._required:
            self._not_run(name, f"{name}: {LACKING[name]()}")
            return
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", *MEASURED[name]], cwd=ROOT)
        status, note = _waited(process, TIER_LIMITS_S[name])
        passed = status == 0 and not note
        self.outcomes.append(Outcome(name, int(passed), int(not passed), time.monotonic() - began, note))

    def _ready(self, name: str) -> bool:
        if name in self._required:
            # installs and starts an engine, so whether one runs now is no matter
            if subprocess.run([sys.executable, "-m", BUILDERS[name]], cwd=ROOT / "tests").returncode == 0:
                return True
            self._not_run(name, f"{name}: engine or images can't be had here, see above")
            return False
        if lacking := LACKING[name]():
            self._not_run(name, f"{name}: {lacking}")
        return not lacking

    def _pytest(self, name: str, report: Path, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m"]
        if self._coverage and name not in BUILDERS:
            command += ["coverage", "run", "--append", "-m"]
        command += [
            "pytest",
            f"tests/{name}",
            *options,
            f"--junitxml={report}",
            "-o",
            f"faulthandler_timeout={STACKS_AFTER_S}",
        ]
        if self._without:
            command += ["-m", " and ".join(f"not {marker}" for marker in self._without)]
        limit_s = SLOW_LIMIT_S if self._slow else TIER_LIMITS_S[name]
        return _waited(subprocess.Popen(command, cwd=ROOT), limit_s)


def _waited(process: subprocess.Popen[bytes], limit_s: float) -> tuple[int, str]:
    """Its status, and a word where it was stopped."""
    try:
        return process.wait(limit_s), ""
    except subprocess.TimeoutExpired:
        print(f"Over {limit_s} s: interrupting it", flush=True)
        process.send_signal(signal.SIGINT)
        return _end(process), f"stopped after {limit_s} s"
    except KeyboardInterrupt:  # the terminal told it, too
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def counts(report: Path) -> tuple[int, int]:
    """Passed and failed; an error in a fixture is a failure. Skipped tests are failures, too: none is meant to be."""
    if not report.exists():
        return 0, 0
    passed = failed = 0
    for suite in ET.parse(report).getroot().iter("testsuite"):  # noqa: S314 - pytest's own file
        bad = sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad
    return passed, failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=f"{', '.join(TIER_LIMITS_S)}; all where none is named")
    parser.add_argument("--slow", action="store_true", help="the slow tests as well")
    parser.add_argument("--coverage", action="store_true", help="measure what unit and integration tests reach")
    options = parser.parse_args(arguments)
    if unknown := set(options.tiers) - set(TIER_LIMITS_S):
        parser.error(f"no such tier: {', '.join(sorted(unknown))}")
    required = set(filter(None, re.split(r"[\s,]+", os.environ.get("REQUIRE", ""))))
    if unknown := required - set(LACKING):
        parser.error(f"REQUIRE names what there is not: {', '.join(sorted(unknown))}")
    runner = Runner(slow=options.slow, coverage=options.coverage, required=required)
    if options.coverage:
        subprocess.run([sys.executable, "-m", "coverage", "erase"], cwd=ROOT, check=True)
    runner.leave_out_what_is_lacking()
    for name in options.tiers or TIER_LIMITS_S:
        if name in MEASURED:
            runner.measured(name, named=name in options.tiers)
        else:
            runner.tier(name)
    if options.coverage:
        report = [sys.executable, "-m", "coverage", "report", "--skip-covered", "--skip-empty"]
        subprocess.run(report, cwd=ROOT, check=True)
    return summary(runner.outcomes)


def summary(outcomes: Sequence[Outcome]) -> int:
    print(f"\n{'tier':<12} {'passed':>7} {'failed':>7} {'time':>9}")
    for outcome in outcomes:
        print(outcome.row)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{sum(outcome.passed for outcome in outcomes)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
