"""What a run must hold, and whether it did. Pure: samples in, findings out.

Percentiles are exact (of all samples, no buckets) and of what succeeded; what
failed counts as an error, and an answer that never came as both an error and a
lower rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Window = Literal["all", "before", "fault", "after"]

#: Of what was due, so much must have been answered in time: less, and the run proved nothing about its rate.
MIN_RATE: Final = 0.95
#: Requests without which a percentile is one request's luck: so many beyond it.
_BEYOND: Final = 5
#: Seconds after a fault is undone that still belong to it: what waited in queues is answered then.
SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times in seconds from the start of the load, latencies in milliseconds."""

    due_s: float
    endpoint: str
    #: From when it was due, not from when it could be sent.
    latency_ms: float
    #: From when it was sent.
    service_ms: float
    #: Of HTTP, or of the problem in a tool's result; 0 where nothing came.
    status: int
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """Milliseconds; None: not looked at. Of errors, none is ever allowed."""

    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None

    @property
    def quantiles(self) -> dict[float, float]:
        given = {0.5: self.p50_ms, 0.95: self.p95_ms, 0.99: self.p99_ms}
        return {q: limit for q, limit in given.items() if limit is not None}


#: One operation over two protocols is held to one limit; all other endpoints stand for themselves.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {"search": ("search", "mcp search"), "save": ("save", "mcp save")}

#: At 20 requests a second with 10,000 memories on two cores.
HEALTHY: Final[Mapping[str, Limit]] = {
    "search": Limit(p95_ms=150, p99_ms=400), "save": Limit(p95_ms=200), "context": Limit(p95_ms=500),
    "page": Limit(p95_ms=400),
}  # fmt: skip
#: At 8 requests a second, where the service, its model and the load itself share two cores: a text of 60 tokens
#: takes the model 0.1 s of one, the longest of what is saved here three times that.
SHARED: Final[Mapping[str, Limit]] = {
    "search": Limit(p50_ms=150, p95_ms=350), "save": Limit(p95_ms=900), "context": Limit(p95_ms=500),
    "page": Limit(p95_ms=400),
}  # fmt: skip
#: With a dependency gone: within SEARCH_BUDGET_MS, CONTEXT_BUDGET_MS, EMBED_SAVE_BUDGET_MS and the way there.
DEGRADED: Final[Mapping[str, Limit]] = {
    "search": Limit(p95_ms=2_000), "save": Limit(p95_ms=2_000), "context": Limit(p95_ms=750),
    "page": Limit(p95_ms=2_000),
}  # fmt: skip
TABLES: Final[Mapping[str, Mapping[str, Limit]]] = {"healthy": HEALTHY, "shared": SHARED, "degraded": DEGRADED}


def members(group: str) -> tuple[str, ...]:
    """Endpoints of a group."""
    return GROUPS.get(group, (group,))


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one endpoint in one window."""

    requests: int
    errors: int
    #: Answers a second that were right.
    rate: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    statuses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """In this window a group of endpoints may answer so, and that is right."""

    window: Window
    group: str
    status: int

    def matches(self, sample: Sample) -> bool:
        return sample.status == self.status and sample.endpoint in members(self.group)


@dataclass(frozen=True, slots=True)
class Rule:
    """A table of limits that holds in a window."""

    window: Window
    limits: Mapping[str, Limit]


@dataclass(frozen=True, slots=True)
class Finding:
    window: Window
    endpoint: str
    what: str
    limit: float
    measured: float
    ok: bool

    def __str__(self) -> str:
        verdict = "held  " if self.ok else "missed"
        return (
            f"{verdict} {self.window:<7} {self.endpoint:<12} {self.what:<10} {self.measured:>9.1f} ({self.limit:,.1f})"
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the load ran, and when the first fault began and the last ended, in seconds; None: there was none."""

    seconds: float
    fault_from: float | None = None
    fault_until: float | None = None
    #: The first seconds, in which caches and connections are cold, count for no limit but the errors.
    warm_up_s: float = 0.0

    def bounds(self, window: Window) -> tuple[float, float]:
        begin, end = self.fault_from, self.fault_until
        if window == "all" or begin is None or end is None:
            # without a fault all is before it
            return (self.warm_up_s, self.seconds) if window in ("all", "before") else (0.0, 0.0)
        settled = min(end + SETTLE_S, self.seconds)
        return {"before": (self.warm_up_s, begin), "fault": (begin, settled), "after": (settled, self.seconds)}[window]


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` is not above; NaN of none."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else math.nan


def enough_for(q: float) -> int:
    """Requests that the quantile needs."""
    return math.ceil(_BEYOND / (1 - q))


def within(samples: Iterable[Sample], bounds: tuple[float, float]) -> list[Sample]:
    return [s for s in samples if bounds[0] <= s.due_s < bounds[1]]


def figures(samples: Sequence[Sample], seconds: float) -> Figures:
    """Of samples of one endpoint that were due within so many seconds."""
    ordered = sorted(s.latency_ms for s in samples if s.ok)
    statuses: dict[str, int] = {}
    for sample in samples:
        name = str(sample.status or sample.note or "no answer")
        statuses[name] = statuses.get(name, 0) + 1
    return Figures(
        requests=len(samples),
        errors=len(samples) - len(ordered),
        rate=len(ordered) / seconds if seconds > 0 else 0.0,
        p50_ms=quantile(ordered, 0.5),
        p95_ms=quantile(ordered, 0.95),
        p99_ms=quantile(ordered, 0.99),
        max_ms=ordered[-1] if ordered else math.nan,
        statuses=dict(sorted(statuses.items())),
    )


def by_endpoint(samples: Iterable[Sample], timeline: Timeline, window: Window = "all") -> dict[str, Figures]:
    begin, end = timeline.bounds(window)
    grouped: dict[str, list[Sample]] = {}
    for sample in within(samples, (begin, end)):
        grouped.setdefault(sample.endpoint, []).append(sample)
    return {name: figures(grouped[name], end - begin) for name in sorted(grouped)}


def of_group(samples: Iterable[Sample], name: str, timeline: Timeline, window: Window) -> Figures:
    begin, end = timeline.bounds(window)
    mine = members(name)
    return figures([s for s in within(samples, (begin, end)) if s.endpoint in mine], end - begin)


def excused(samples: Iterable[Sample], refusals: Sequence[Refusal], timeline: Timeline) -> list[Sample]:
    """Without the refusals that are right where they happened: they are no errors, and no answers to measure."""

    def is_right(sample: Sample) -> bool:
        return any(
            r.matches(sample) and timeline.bounds(r.window)[0] <= sample.due_s < timeline.bounds(r.window)[1]
            for r in refusals
        )

    return [s for s in samples if s.ok or not is_right(s)]


def check(
    samples: Sequence[Sample],
    rules: Sequence[Rule],
    timeline: Timeline,
    planned: Sequence[float],
    refusals: Sequence[Refusal] = (),
    slowness: float = 1.0,
) -> list[Finding]:
    """That the run was one, its errors, the refusals that must be seen, each limit of each rule.

    `planned`: when the requests of the plan were due, in seconds. `slowness`
    scales the limits of latency alone.
    """
    counted = excused(samples, refusals, timeline)
    found = [_rate(samples, timeline, planned), *_errors(counted)]
    for refusal in refusals:
        seen = sum(map(refusal.matches, within(samples, timeline.bounds(refusal.window))))
        found.append(Finding(refusal.window, refusal.group, f"{refusal.status} seen", 1, seen, seen >= 1))
    for rule in rules:
        for name, limit in rule.limits.items():
            measured = of_group(counted, name, timeline, rule.window)
            # what the plan has none of is no failure; what it should have had and hasn't shows in the rate
            if measured.requests:
                found += _against(rule.window, name, measured, limit, slowness)
    return found


def _errors(samples: Sequence[Sample]) -> list[Finding]:
    """Of each endpoint, over all the time: the warm-up and all windows."""
    found = []
    for endpoint in sorted({s.endpoint for s in samples}):
        some = [s for s in samples if s.endpoint == endpoint]
        failed = sum(not s.ok for s in some)
        found.append(Finding("all", endpoint, "errors %", 0, 100 * failed / len(some), failed == 0))
    return found


def _rate(samples: Sequence[Sample], timeline: Timeline, planned: Sequence[float]) -> Finding:
    """Answers a second, right or refused, of what the plan wanted, each given before the load was over."""
    begin, end = timeline.bounds("all")
    wanted = sum(begin <= due < end for due in planned)
    answered = sum(
        s.status > 0 and s.due_s + s.latency_ms / 1000 < timeline.seconds for s in within(samples, (begin, end))
    )
    seconds = max(end - begin, 1e-9)
    enough = wanted > 0 and answered >= MIN_RATE * wanted
    return Finding("all", "(all)", "rate /s", MIN_RATE * wanted / seconds, answered / seconds, enough)


def _against(window: Window, name: str, measured: Figures, limit: Limit, slowness: float) -> list[Finding]:
    found = []
    answered = measured.requests - measured.errors
    for q, most in limit.quantiles.items():
        needed = enough_for(q)
        if answered < needed:
            found.append(Finding(window, name, f"n for p{q * 100:.0f}", needed, answered, False))
            continue
        value = {0.5: measured.p50_ms, 0.95: measured.p95_ms, 0.99: measured.p99_ms}[q]
        found.append(Finding(window, name, f"p{q * 100:.0f} ms", most * slowness, value, value <= most * slowness))
    return found


#: Memories that one right answer acknowledges.
WRITES: Final[Mapping[str, int]] = {"save": 1, "mcp save": 1, "batch": 100}


def written(samples: Iterable[Sample], created: int) -> Finding:
    """`created`: by how many memories the tenants have more. No acknowledged one may be missing, and none be twice.

    What was not answered, or with a server's error, may be there or not.
    """
    writes = [s for s in samples if s.endpoint in WRITES]
    acknowledged = sum(WRITES[s.endpoint] for s in writes if s.ok)
    unknown = sum(WRITES[s.endpoint] for s in writes if not s.ok and (s.status == 0 or s.status >= 500))
    return Finding(
        "all", "(writes)", "are there", acknowledged, created, acknowledged <= created <= acknowledged + unknown
    )


def missed(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if not finding.ok]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a ramp."""

    rate: float
    achieved: float
    p95_ms: float
    held: bool


def steps(
    samples: Sequence[Sample], rates: Sequence[tuple[float, float, float]], limits: Mapping[str, Limit]
) -> list[Step]:
    """`rates`: (from, until, requests a second) of each step. It held where rate, errors and every p95 did."""
    found = []
    for begin, end, rate in rates:
        some = within(samples, (begin, end))
        achieved = sum(s.ok and s.due_s + s.latency_ms / 1000 < end + 1 for s in some) / (end - begin)
        p95s = {
            name: quantile(sorted(s.latency_ms for s in some if s.endpoint == name and s.ok), 0.95) for name in limits
        }
        held = achieved >= MIN_RATE * len(some) / (end - begin) and all(
            not p95s[name] > (limit.p95_ms or math.inf) for name, limit in limits.items()
        )
        worst = max((v for v in p95s.values() if not math.isnan(v)), default=math.nan)
        found.append(Step(rate, achieved, worst, held))
    return found


def knee(found: Sequence[Step]) -> float | None:
    """The highest rate that held with all below it; None where the first did not."""
    best = None
    for step in found:
        if not step.held:
            break
        best = step.rate
    return best
