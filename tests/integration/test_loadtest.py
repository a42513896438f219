"""A whole run, small: through the API of a real server, with Locust in a process of its own, and nothing left of it."""

from __future__ import annotations

import json
from pathlib import Path

from loadtests import report, scenario, targets
from loadtests.plan import planned_requests
from loadtests.purge import counts
from loadtests.run import Options, run

SMALL = [("memories", 20), ("rate", 6.0), ("seconds", 6.0)]


def test_a_run_against_a_url_reports_and_leaves_nothing(tmp_path: Path) -> None:
    one = scenario.load("baseline", SMALL).model_copy(update={"warm_up_s": 1.0, "tenants": 2})
    said: list[str] = []
    with targets.local(one.tenants, "load-test") as server:
        with targets.given(server.url, server.keys, "", said.append) as target:
            target.limited_key = server.limited_key
            result = run(one, target, "load-test", Options("baseline", tmp_path), said.append)
        with server.clients() as clients:
            assert [counts(client) for client in clients] == [(0, 0)] * 2
    saved = sum(s.endpoint in ("save", "mcp save") for s in result.samples)
    assert said[-1] == f"{20 + saved} memories of the run purged"
    # what the plan had was sent, in both generations of MCP, and was right; how fast is no matter here
    sent = {s.endpoint for s in result.samples}
    assert {"search", "context", "mcp open", "mcp search", "mcp save"} <= sent
    assert {s.status for s in result.samples if s.endpoint == "mcp open"} == {200, 202}
    assert [s for s in result.samples if not s.ok] == []
    assert len([s for s in result.samples if s.endpoint != "mcp open"]) == len(planned_requests(one))
    # whether in time is no matter of a test on a machine that does other things, too
    assert {f.what: f.ok for f in result.findings}["are there"]
    # the server's own figures came along
    assert any(r.memory_mb and r.memory_mb > 50 for r in result.readings)
    assert {path.name for path in tmp_path.iterdir()} == {
        "requests.csv", "readings.csv", "figures.csv", "run.json", "report.html",
    }  # fmt: skip
    assert report.read_samples(tmp_path / "requests.csv") == result.samples
    assert json.loads((tmp_path / "run.json").read_text())["facts"]["data"] == "20 memories, 2 tenants"
