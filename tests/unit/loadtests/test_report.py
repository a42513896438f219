"""What a run leaves: files that can be read again, and a page that needs nobody else."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtests import compare, plots, report, scenario, slo
from loadtests.plan import planned_requests
from loadtests.sampler import Reading, metric
from loadtests.slo import Sample
from loadtests.users.caller import Record


def made(name: str = "degraded-embeddings", slow: float = 1.0) -> report.Run:
    one = scenario.load(name)
    fault = one.fault
    timeline = slo.Timeline(one.shape.seconds, fault and fault.at_s, fault and fault.until_s, one.warm_up_s)
    due = planned_requests(one)
    endpoints = ("search", "mcp search", "search", "save", "context")
    samples = [
        Sample(at, endpoints[i % 5], (20 + i % 40) * slow, 20.0, 200, True, "hybrid") for i, at in enumerate(due)
    ]
    samples[7] = replace(samples[7], ok=False, status=500, note='<script>alert("x")</script>')
    readings = [Reading(t, "api", 5.0 + t, 250.0, 2.0) for t in range(0, 100, 2)] + [
        Reading(50, "api", None, None, None)
    ]
    findings = slo.check(samples, one.slo_rules, timeline, due)
    return report.Run(name, one, samples, readings, timeline, findings, {"machine": "<two> cores"})


@pytest.fixture(scope="module")
def run() -> report.Run:
    return made()


@pytest.fixture(scope="module")
def folder(run: report.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    report.write(run, path)
    return path


def test_requests_are_read_as_they_were_written(tmp_path: Path, run: report.Run) -> None:
    path = tmp_path / "requests.csv"
    with path.open("w", newline="") as file:
        record = Record(file)
        for sample in run.samples[:20]:
            record.add(sample)
    read = report.read_samples(path)
    assert [(s.endpoint, s.status, s.ok, s.note) for s in read] == [
        (s.endpoint, s.status, s.ok, s.note) for s in run.samples[:20]
    ]
    assert read[3].due_s == pytest.approx(run.samples[3].due_s, abs=1e-3)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no record"):
        report.read_samples(path)


def test_figures_are_those_of_the_samples(run: report.Run, folder: Path) -> None:
    with (folder / "figures.csv").open() as file:
        rows = {(r["window"], r["endpoint"]): r for r in csv.DictReader(file)}
    assert {window for window, _ in rows} == {"all", "before", "fault", "after"}
    mine = [s for s in run.samples if s.endpoint == "context" and s.due_s >= run.timeline.warm_up_s]
    assert rows["all", "context"]["requests"] == str(len(mine))
    summary = json.loads((folder / "run.json").read_text())
    assert summary["ok"] is run.ok
    assert {f["endpoint"] for f in summary["figures"]} == {endpoint for _, endpoint in rows}


def test_the_page_is_whole_and_asks_no_other_host(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://|<script", text)
    assert "&lt;two&gt; cores" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)  # noqa: S314 - our own
    captions = re.findall(r"<figcaption>(.*?) <small>", text)
    assert captions == [
        "Latency: search and mcp search", "Latency: save and mcp save", "Latency: context", "Throughput",
        "Queue: memories that wait for their vector", "Resident memory of each process",
    ]  # fmt: skip
    assert text.count('<rect class="fault"') == len(captions)
    assert "1 limit missed" in text


def test_a_ramp_tells_its_knee() -> None:
    text = report.page(made("ramp"))
    assert "The limits hold up to 80 requests a second." in text
    assert text.count("<tr class=") > 8


def test_a_run_without_faults_has_one_window_and_no_band() -> None:
    text = report.page(made("baseline"))
    assert '<rect class="fault"' not in text
    assert "<td>before</td>" not in text


def points(svg: str) -> list[tuple[float, float]]:
    [path] = re.findall(r'<path class="a" d="(.*?)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_line_goes_where_its_values_are_and_breaks_where_none_is() -> None:
    svg = plots.chart("t", "", [plots.Line("l", [(0, 0.0), (50, 100.0), (60, None), (100, 50.0)])], 100)
    (x0, y0), (x1, y1), (x2, y2) = points(svg)
    assert (x0, x2) == (plots.LEFT, plots.WIDTH - plots.RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 < y2 < y0
    assert y2 == pytest.approx((y0 + y1) / 2)
    assert svg.count("M") == 2


def test_on_a_logarithmic_scale_each_tenfold_is_as_far() -> None:
    svg = plots.chart("t", "", [plots.Line("l", [(0, 1.0), (50, 10.0), (100, 100.0)])], 100, log=True)
    (_, y0), (_, y1), (_, y2) = points(svg)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (0, 999), (0, 123_456), (0, 0)])
def test_ticks_are_round_few_and_reach_the_ends(low: float, high: float) -> None:
    found = plots.ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 7


def test_labels_do_not_cover_each_other() -> None:
    lines = [plots.Line(f"line {i}", [(0, 5.0), (100, 5.0 + i / 100)]) for i in range(4)]
    svg = plots.chart("t", "", lines, 100)
    ys = sorted(float(y) for y in re.findall(rf'x="{plots.WIDTH - plots.RIGHT + 8}" y="([\d.]+)">line', svg))
    assert len(ys) == 4
    assert all(b - a >= plots.LABEL_GAP - 0.2 for a, b in pairwise(ys))


def test_a_metric_is_found_by_its_whole_name() -> None:
    text = '# HELP a b\nwarmstart_queued_memories_x 9\nwarmstart_queued_memories 12\nb{c="d"} 1\n'
    assert metric(text, "warmstart_queued_memories") == 12
    assert metric(text, "b") is None


# -- comparing


def rows(a: Path, b: Path) -> Sequence[compare.Row]:
    return compare.compare(compare.read(a), compare.read(b))


def test_a_run_is_no_worse_than_itself(folder: Path) -> None:
    assert not any(row.worse for row in rows(folder, folder / "run.json"))


def test_what_got_slower_is_worse_and_what_got_faster_is_not(folder: Path, tmp_path: Path) -> None:
    report.write(made(slow=2.0), tmp_path)
    slower = rows(folder, tmp_path)
    assert {row.what for row in slower if row.worse} == {"p50 ms", "p95 ms", "p99 ms"}
    assert not any(row.worse for row in rows(tmp_path, folder))
    assert "2.00  worse" in compare.table(list(slower))


def test_small_differences_and_new_failures() -> None:
    assert not compare.Row("all", "save", "p95 ms", 100.0, 124.0).worse
    assert not compare.Row("all", "save", "p95 ms", 1.0, 5.0).worse
    assert compare.Row("all", "save", "p95 ms", 100.0, 126.0).worse
    assert compare.Row("all", "save", "p95 ms", 100.0, None).worse
    assert not compare.Row("all", "save", "p95 ms", None, 100.0).worse
    assert compare.Row("all", "save", "failed %", 0.0, 0.1).worse


def test_runs_of_another_load_are_not_compared(folder: Path, tmp_path: Path) -> None:
    report.write(made("baseline"), tmp_path)
    with pytest.raises(compare.NotComparable, match="shape"):
        rows(folder, tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(compare.NotComparable, match="no report"):
        compare.read(tmp_path)
