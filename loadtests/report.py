"""What is left of a run: `run.json`, `figures.csv`, and one page to look at that needs no other host."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final, get_args

from loadtests import plots, slo
from loadtests.sampler import Reading
from loadtests.scenario import Scenario
from loadtests.shapes import Ramp
from loadtests.slo import Figures, Finding, Sample, Timeline, Window
from loadtests.users.fields import FIELDS

STYLE: Final = Path(__file__).with_name("report.css")
#: Points of a line, at most.
BUCKETS: Final = 70
FIGURE_FIELDS: Final = (
    "window", "endpoint", "requests", "errors", "rate", "p50_ms", "p95_ms", "p99_ms", "max_ms", "statuses",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    name: str
    scenario: Scenario
    samples: Sequence[Sample]
    readings: Sequence[Reading]
    timeline: Timeline
    findings: Sequence[Finding]
    #: Machine, versions, time, counts: what a reader asks for.
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not slo.missed(self.findings)

    @property
    def windows(self) -> list[Window]:
        return list(get_args(Window)) if self.timeline.fault_from is not None else ["all"]

    def figures(self) -> list[tuple[Window, str, Figures]]:
        return [
            (window, endpoint, found)
            for window in self.windows
            for endpoint, found in slo.by_endpoint(self.samples, self.timeline, window).items()
        ]

    @property
    def steps(self) -> list[slo.Step]:
        shape = self.scenario.shape
        if not isinstance(shape, Ramp):
            return []
        return slo.steps(self.samples, shape.plateaus(), slo.HEALTHY)


def read_samples(path: Path) -> list[Sample]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != FIELDS:
            raise ValueError(f"{path} is no record of requests")
        return [
            Sample(
                float(r["due_s"]), r["endpoint"], float(r["latency_ms"]), float(r["service_ms"]), int(r["status"]),
                r["ok"] == "1", r["note"],
            )
            for r in rows
        ]  # fmt: skip


def write(run: Run, folder: Path) -> None:
    figures = run.figures()
    with (folder / "figures.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(FIGURE_FIELDS)
        for window, endpoint, f in figures:
            times = (_ms(v) for v in (f.p50_ms, f.p95_ms, f.p99_ms, f.max_ms))
            statuses = " ".join(f"{status}:{count}" for status, count in f.statuses.items())
            rows.writerow((window, endpoint, f.requests, f.errors, f"{f.rate:.2f}", *times, statuses))
    summary = {
        "name": run.name,
        "ok": run.ok,
        "facts": run.facts,
        "scenario": run.scenario.model_dump(mode="json"),
        "timeline": asdict(run.timeline),
        "figures": [{"window": w, "endpoint": e, **_finite(asdict(f))} for w, e, f in figures],
        "findings": [_finite(asdict(f)) for f in run.findings],
        "steps": [_finite(asdict(step)) for step in run.steps],
    }
    (folder / "run.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    (folder / "report.html").write_text(page(run))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _ms(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else ""


def page(run: Run) -> str:
    missed = len(slo.missed(run.findings))
    verdict = "held" if run.ok else f"{missed} limit{'s' * (missed > 1)} missed"
    scenario = run.scenario
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(run.name)}: {escape(scenario.title)}</title><style>{STYLE.read_text()}</style></head><body>",
        f'<h1>{escape(scenario.title)} <span class="{"ok" if run.ok else "miss"}">{verdict}</span></h1>',
        f"<p><b>Breaks:</b> {escape(scenario.breaks)}. <b>Must hold:</b> {escape(scenario.holds)}.</p>",
        _facts(run.facts),
        "<h2>Limits</h2>",
        _findings(run.findings),
        *_steps(run),
        "<h2>Over time</h2>",
        "<p>Latency counts from when a request was due, so time spent waiting to be sent is in it.</p>",
        *_charts(run),
        "<h2>Figures</h2>",
        _figures(run),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = []
    for i, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f'<tr class="{classes[i] if classes else ""}">{cells}</tr>')
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _findings(findings: Sequence[Finding]) -> str:
    rows = [
        (f.window, f.endpoint, f.what, f"{f.measured:,.1f}", f"{f.limit:,.1f}", "held" if f.ok else "missed")
        for f in findings
    ]
    head = ("window", "requests", "what", "measured", "limit", "")
    return _table(head, rows, ["ok" if f.ok else "miss" for f in findings])


def _steps(run: Run) -> list[str]:
    if not (found := run.steps):
        return []
    best = slo.knee(found)
    said = f"The limits hold up to {best:g} requests a second." if best else "The first step missed its limits."
    rows = [(f"{s.rate:g}", f"{s.achieved:.1f}", f"{s.p95_ms:,.0f}", "held" if s.held else "missed") for s in found]
    classes = ["ok" if s.held else "miss" for s in found]
    return [
        "<h2>The knee</h2>", f"<p>{said}</p>",
        _table(("requests/s due", "right answers/s", "worst p95, ms", ""), rows, classes),
    ]  # fmt: skip


def _figures(run: Run) -> str:
    rows = [
        (
            window, endpoint, f"{f.requests:,}", str(f.errors), f"{f.rate:.2f}",
            *(_ms(v) for v in (f.p50_ms, f.p95_ms, f.p99_ms, f.max_ms)),
            ", ".join(f"{status} × {count}" for status, count in f.statuses.items()),
        )
        for window, endpoint, f in run.figures()
    ]  # fmt: skip
    head = ("window", "endpoint", "requests", "failed", "right/s", "p50 ms", "p95", "p99", "max", "statuses")
    return _table(head, rows)


# -- the charts


def _charts(run: Run) -> list[str]:
    seconds, timeline = run.timeline.seconds, run.timeline
    band = None
    if timeline.fault_from is not None and timeline.fault_until is not None and run.scenario.fault:
        fault = run.scenario.fault
        label = fault.do if fault.to == "api" else f"{fault.to} {fault.do.removeprefix('disk-')}"
        band = plots.Band(label, timeline.fault_from, timeline.fault_until)
    charts = []
    rules = run.scenario.slo_rules
    limits = rules[0].limits if rules else slo.HEALTHY
    for name in ("search", "save", "context"):
        members = slo.members(name)
        some = [s for s in run.samples if s.endpoint in members and s.ok]
        if some:
            limit = limits[name].p95_ms if name in limits else None
            marks = [plots.Mark(f"p95 limit {limit:g}", limit)] if limit else []
            title = f"Latency: {' and '.join(members)}"
            lines = _latency(some, seconds)
            charts.append(plots.chart(title, "ms, logarithmic", lines, seconds, band=band, marks=marks, log=True))
    charts.append(plots.chart("Throughput", "answers a second", _throughput(run), seconds, band=band))
    charts += _states(run, band)
    return charts


def _width(seconds: float) -> float:
    return max(1.0, seconds / BUCKETS)


def _buckets(samples: Sequence[Sample], seconds: float) -> list[tuple[float, list[Sample]]]:
    """(middle, samples due in it) of each."""
    width = _width(seconds)
    found: list[list[Sample]] = [[] for _ in range(math.ceil(seconds / width))]
    for sample in samples:
        if 0 <= sample.due_s < seconds:
            found[int(sample.due_s / width)].append(sample)
    return [((i + 0.5) * width, some) for i, some in enumerate(found)]


def _latency(samples: Sequence[Sample], seconds: float) -> list[plots.Line]:
    buckets = [(at, sorted(s.latency_ms for s in some)) for at, some in _buckets(samples, seconds)]

    def line(label: str, q: float, dots: bool = False) -> plots.Line:
        return plots.Line(label, [(at, slo.quantile(some, q) if some else None) for at, some in buckets], dots)

    return [line("half within", 0.5), line("95 % within", 0.95), line("slowest", 1.0, dots=True)]


def _throughput(run: Run) -> list[plots.Line]:
    width, shape = _width(run.timeline.seconds), run.scenario.shape
    buckets = _buckets(run.samples, run.timeline.seconds)
    right = [(at, sum(s.ok for s in some) / width) for at, some in buckets]
    failed = [(at, sum(not s.ok for s in some) / width) for at, some in buckets]
    planned = [(at, shape.rate_at(at)) for at, _ in buckets]
    return [plots.Line("right", right), plots.Line("refused, failed", failed), plots.Line("planned", planned)]


def _states(run: Run, band: plots.Band | None) -> list[str]:
    seconds = run.timeline.seconds
    processes = sorted({r.process for r in run.readings})

    def lines(pick: str) -> list[plots.Line]:
        found = []
        for process in processes:
            mine = [r for r in run.readings if r.process == process and 0 <= r.second <= seconds]
            points = [(r.second, getattr(r, pick)) for r in mine]
            if any(v is not None for _, v in points):
                found.append(plots.Line(process, points))
        return found

    charts = []
    if queued := lines("queued"):
        charts.append(plots.chart("Queue: memories that wait for their vector", "", queued, seconds, band=band))
    if memory := lines("memory_mb"):
        charts.append(
            plots.chart("Resident memory of each process", "MB, mapped files included", memory, seconds, band=band)
        )
    return charts
