"""Every scenario says what it breaks, when, and what must hold; a wrong one is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests import scenario, slo
from loadtests.plan import planned_requests, visits
from loadtests.scenario import Scenario
from loadtests.users.rest import SEARCH_SHARE

REQUIRED = {
    "baseline", "degraded-embeddings", "degraded-redis", "postgres-down", "rolling-upgrade", "full-disk",
    "migration-under-load", "ramp", "spike", "soak", "gate",
}  # fmt: skip
GOOD = """
title = "t"
breaks = "b"
holds = "h"
memories = 10
[shape]
kind = "steady"
rate = 5.0
seconds = 20.0
[mix]
cli = 1.0
[[rules]]
window = "all"
limits = "healthy"
"""


def test_all_of_them_are_there() -> None:
    assert set(scenario.names()) == REQUIRED


def shares(one: Scenario) -> dict[str, float]:
    """Of all requests, those of each group that has limits."""
    visits = {kind: weight / sum(one.mix.values()) / one.requests_each for kind, weight in one.mix.items()}
    agents, cli = visits.get("agent", 0.0), visits.get("cli", 0.0)
    return {
        "search": 2 * agents + SEARCH_SHARE * cli,
        "save": agents + (1 - SEARCH_SHARE) * cli,
        "context": visits.get("hook", 0.0),
        "page": visits.get("reader", 0.0),
    }


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_scenario_can_hold_what_it_says(name: str) -> None:
    one = scenario.load(name)
    assert one.title
    assert one.breaks
    assert one.holds
    fault = one.fault
    until = None if fault is None else fault.until_s or fault.at_s + 30
    timeline = slo.Timeline(one.shape.seconds, fault and fault.at_s, until, one.warm_up_s)
    # with the plan's own number of requests, answered at once, each rule has enough of them
    share = shares(one)
    for rule in one.slo_rules:
        begin, end = timeline.bounds(rule.window)
        due = sum(begin <= second < end for second in planned_requests(one))
        for endpoint, limit in rule.limits.items():
            for q in limit.quantiles:
                refused = any(r.window == rule.window and r.group == endpoint for r in one.slo_refusals)
                assert refused or not share[endpoint] or due * share[endpoint] >= slo.enough_for(q), (
                    rule.window,
                    endpoint,
                    q,
                )


def test_the_gate_is_the_baseline_in_short() -> None:
    gate, baseline = scenario.load("gate"), scenario.load("baseline")
    assert (gate.mix, gate.memories) == (baseline.mix, baseline.memories)
    # its model and its load share the cores with it
    assert (gate.shape.peak, baseline.shape.peak) == (8.0, 20.0)
    assert [rule.limits for rule in (*gate.rules, *baseline.rules)] == ["shared", "healthy"]


def test_numbers_can_be_set_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(GOOD)
    changed = scenario.load(str(path), [("rate", 7.0), ("memories", 1000.0)])
    assert (changed.shape.peak, changed.memories) == (7.0, 1_000)
    with pytest.raises(scenario.ScenarioError, match=r"shape\.steady\.pace"):
        scenario.load(str(path), [("pace", 7.0)])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memories = 10", "memories = -1", "memories"),
        ("cli = 1.0", "robot = 1.0", "mix.robot"),
        ("cli = 1.0", "cli = 0.0", "no user"),
        ('limits = "healthy"', 'limits = "fast"', "rules.0.limits"),
        ('limits = "healthy"', 'limits = "healthy"\nonly = ["delete"]', "not in the table: delete"),
        ("seconds = 20.0", "", "seconds"),
        ("[mix]", "[fault]\ndo = 'stopped'\nat_s = 5.0\n[mix]", "needs until_s"),
        ("[mix]", "[fault]\ndo = 'stopped'\nat_s = 5.0\nuntil_s = 4.0\n[mix]", "after at_s"),
        ("[mix]", "[fault]\ndo = 'stopped'\nat_s = 5.0\nuntil_s = 30.0\n[mix]", "over before the load is"),
        ("[mix]", "[mix", "one.toml"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(scenario.ScenarioError, match=said):
        scenario.load(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(scenario.ScenarioError, match="baseline, degraded-embeddings"):
        scenario.load("nonsense")


def test_visits_follow_the_mix_and_requests_the_rate() -> None:
    one = scenario.load("baseline")
    kinds = [kind for _, kind in visits(one)]
    assert kinds == [kind for _, kind in visits(one)]
    total = sum(one.mix.values())
    for kind, weight in one.mix.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(weight / total, abs=0.03)
    assert len(planned_requests(one)) == pytest.approx(one.shape.seconds * one.shape.peak, rel=0.1)
