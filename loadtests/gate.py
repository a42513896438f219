"""The load that every change must bear: `scenarios/gate.toml` on a server of its own, judged on a noisy machine.

The first try counts as it is. Where it missed something and the machine is found slower than the limits assume, there
is one more, in slow motion: as many requests at a rate that is lower by that factor, with limits of latency that are
higher by it, so that the machine is as busy as it was meant to be. No error and no lower rate is excused in it. Both
tries are told. On a machine that is as fast as it should be, the first try stands.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from loadtests import calibration, slo, targets
from loadtests.plan import planned_requests
from loadtests.report import Run
from loadtests.run import RESULTS, Options, loaded, seed
from loadtests.scenario import Scenario, load
from loadtests.seeding import Progress
from loadtests.shapes import Steady

NAME: Final = "gate"
#: From this slowness on a second try may have another outcome.
WORTH_A_TRY: Final = 1.25


def judged(tell: Progress, show: Callable[[Sequence[slo.Finding]], None], folder: Path | None = None) -> bool:
    wanted = load(NAME)
    folder = folder or RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{NAME}"
    # before and after the server lives: what it does itself would count as slowness of the machine
    by = calibration.slowness()
    first = _tried(wanted, folder / "first", tell)
    show(first.findings)
    tell(f"report: {folder / 'first' / 'report.html'}")
    by = max(by, calibration.slowness())
    if first.ok or by < WORTH_A_TRY:
        return first.ok
    tell(f"missed, but this machine is {by:.1f} times slower than the limits assume: once more, in slow motion")
    again = stretched(wanted, by)
    second = _tried(again, folder / "second", tell)
    by = max(by, calibration.slowness())
    planned = planned_requests(again)
    findings = slo.check(second.samples, again.slo_rules, second.timeline, planned, again.slo_refusals, by)
    findings.append(second.findings[-1])  # whether what was acknowledged is there
    show(findings)
    tell(f"limits of latency times {by:.1f}; report: {folder / 'second' / 'report.html'}")
    return not slo.missed(findings)


def _tried(wanted: Scenario, folder: Path, tell: Progress) -> Run:
    prefix = f"load-{secrets.token_hex(4)}"
    with targets.local(wanted.tenants, prefix) as target:
        seed(wanted, target, prefix, tell)
        return loaded(wanted, target, prefix, Options(NAME, folder), tell)


def stretched(one: Scenario, by: float) -> Scenario:
    """As many requests in so many times the time; other arrivals, or the same unlucky ones would come again."""
    shape = one.shape
    assert isinstance(shape, Steady)
    slower = shape.model_copy(update={"rate": shape.rate / by, "seconds": shape.seconds * by})
    return one.model_copy(update={"shape": slower, "warm_up_s": one.warm_up_s * by, "seed": one.seed + 1})
