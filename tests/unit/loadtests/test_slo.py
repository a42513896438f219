"""Limits, windows, refusals and rates, on samples made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests import slo
from loadtests.slo import Finding, Limit, Refusal, Rule, Sample, Timeline

HUNDRED_SECONDS = Timeline(100.0)
BROKEN = Timeline(100.0, 40.0, 60.0, warm_up_s=5.0)


def sample(due_s: float, latency_ms: float = 10.0, endpoint: str = "search", status: int = 200) -> Sample:
    return Sample(due_s, endpoint, latency_ms, latency_ms, status, status in (200, 201))


def steady(count: int, latency_ms: float = 10.0, seconds: float = 100.0, **more: object) -> list[Sample]:
    return [sample(i * seconds / count, latency_ms, **more) for i in range(count)]  # type: ignore[arg-type]


def check(
    samples: list[Sample], limit: Limit, timeline: Timeline = HUNDRED_SECONDS, **more: object
) -> dict[tuple[str, str], Finding]:
    planned = more.pop("planned", [s.due_s for s in samples])
    rules = more.pop("rules", [Rule("all", {"search": limit})])
    found = slo.check(samples, rules, timeline, planned, **more)  # type: ignore[arg-type]
    return {(f.window, f.what): f for f in found}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_a_sample_that_enough_others_do_not_pass(values: list[float], q: float) -> None:
    value = slo.quantile(sorted(values), q)
    assert value in values
    assert sum(v <= value for v in values) >= q * len(values)


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(slo.quantile([], 0.5))


def test_percentiles_are_of_what_succeeded_and_the_rest_is_an_error() -> None:
    found = slo.figures([sample(0, 10), sample(1, 20), sample(2, 1, status=503)], seconds=10)
    assert (found.requests, found.errors, found.p50_ms, found.max_ms, found.rate) == (3, 1, 10, 20, 0.2)
    assert found.statuses == {"200": 2, "503": 1}


def test_limits_hold_and_are_missed() -> None:
    slow_tail = [*steady(960, 50.0), *steady(40, 300.0)]
    found = check(slow_tail, Limit(p50_ms=50, p95_ms=150, p99_ms=200))
    assert {what: f.ok for (_, what), f in found.items()} == {
        "rate /s": True, "errors %": True, "p50 ms": True, "p95 ms": True, "p99 ms": False,
    }  # fmt: skip


@pytest.mark.parametrize(("limit", "count"), [(Limit(p50_ms=50), 10), (Limit(p95_ms=50), 100), (Limit(p99_ms=50), 500)])
def test_a_percentile_of_too_few_requests_proves_nothing(limit: Limit, count: int) -> None:
    assert all(f.ok for f in check(steady(count), limit).values())
    [missed] = [f for f in check(steady(count - 1), limit).values() if not f.ok]
    assert missed.what.startswith("n for p")
    assert (missed.limit, missed.measured) == (count, count - 1)


def test_one_error_is_one_too_many() -> None:
    found = check([*steady(200), sample(50, status=500)], Limit(p95_ms=50))
    assert not found["all", "errors %"].ok


def test_the_warm_up_counts_for_errors_alone() -> None:
    timeline = Timeline(100.0, warm_up_s=10.0)
    assert not slo.missed(check([*steady(200), sample(5, 9_000.0)], Limit(p95_ms=50), timeline).values())
    found = check([*steady(200), sample(5, status=500)], Limit(), timeline)
    assert [f.what for f in slo.missed(found.values())] == ["errors %"]


def test_what_no_rule_names_may_not_fail_either() -> None:
    found = slo.check(
        [*steady(200), sample(50, endpoint="mcp open", status=404)], [Rule("all", {"search": Limit()})],
        HUNDRED_SECONDS, [],
    )  # fmt: skip
    assert [f.ok for f in found if f.endpoint == "mcp open"] == [False]


def test_a_rate_that_was_not_reached_fails() -> None:
    planned = [i / 10 for i in range(1000)]
    assert check(steady(1000), Limit(), planned=planned)["all", "rate /s"].ok
    assert not check(steady(900), Limit(), planned=planned)["all", "rate /s"].ok
    # sent all of them, answered half of them after the end
    late = [*steady(500), *steady(500, latency_ms=100_000.0)]
    assert not check(late, Limit(), planned=planned)["all", "rate /s"].ok
    assert not slo.check([], [], HUNDRED_SECONDS, [])[0].ok


def test_both_protocols_are_held_to_one_limit() -> None:
    mixed = [*steady(50), *steady(50, endpoint="mcp search")]
    assert check(mixed, Limit(p95_ms=50))["all", "p95 ms"].ok


def test_windows() -> None:
    assert [BROKEN.bounds(w) for w in ("all", "before", "fault", "after")] == [
        (5, 100), (5, 40), (40, 60 + slo.SETTLE_S), (60 + slo.SETTLE_S, 100),
    ]  # fmt: skip
    assert HUNDRED_SECONDS.bounds("before") == (0, 100)
    assert HUNDRED_SECONDS.bounds("fault") == (0, 0)


def test_a_slow_fault_does_not_count_before_it() -> None:
    samples = [sample(i / 10, 900.0 if 40 <= i / 10 < 70 else 10.0) for i in range(1000)]
    rules = [Rule(w, {"search": Limit(p95_ms=50)}) for w in ("before", "fault", "after")]
    found = check(samples, Limit(), BROKEN, rules=rules)
    assert [found[w, "p95 ms"].ok for w in ("before", "fault", "after")] == [True, False, True]


def test_a_refusal_is_right_in_its_window_alone_and_must_be_seen() -> None:
    refusal = Refusal("fault", "save", 507)
    during = sample(50, endpoint="save", status=507)
    everywhere = [Rule("all", {"save": Limit()})]
    assert slo.missed(check([during], Limit(), BROKEN, rules=everywhere, refusals=[refusal]).values()) == []
    for samples, what in (
        ([during, sample(20, endpoint="save", status=507)], "errors %"),  # before it
        ([during, sample(50, endpoint="save", status=500)], "errors %"),  # another one
        ([sample(50, endpoint="save", status=201)], "507 seen"),
    ):
        [missed] = slo.missed(check(samples, Limit(), BROKEN, rules=everywhere, refusals=[refusal]).values())
        assert missed.what == what


def test_slowness_scales_latency_and_no_errors() -> None:
    samples = [*steady(200, 80.0), sample(50, status=500)]
    found = check(samples, Limit(p95_ms=50), slowness=2.0)
    assert found["all", "p95 ms"].ok
    assert found["all", "p95 ms"].limit == 100
    assert not found["all", "errors %"].ok


def test_the_limits_of_the_contract() -> None:
    assert slo.HEALTHY["search"] == Limit(p95_ms=150, p99_ms=400)
    assert slo.HEALTHY["save"] == Limit(p95_ms=200)
    assert slo.DEGRADED["search"] == Limit(p95_ms=2_000)


@pytest.mark.parametrize(("created", "ok"), [(101, False), (102, True), (104, True), (105, False)])
def test_what_was_acknowledged_is_there_once(created: int, ok: bool) -> None:
    samples = [
        sample(1, endpoint="save", status=201), sample(2, endpoint="mcp save"), sample(3, endpoint="batch"),
        sample(4, endpoint="save", status=0), sample(5, endpoint="save", status=503),
        sample(6, endpoint="save", status=413), sample(7, endpoint="search"),
    ]  # fmt: skip
    assert slo.written(samples, created).ok is ok


def test_the_knee_is_the_last_step_before_the_first_that_failed() -> None:
    limits = {"search": Limit(p95_ms=50)}
    rates = [(0.0, 10.0, 10.0), (10.0, 20.0, 20.0), (20.0, 30.0, 30.0)]
    samples = [
        *(sample(i / 10) for i in range(100)),
        *(sample(10 + i / 20, 200.0) for i in range(200)),
        *(sample(20 + i / 30) for i in range(300)),
    ]
    found = slo.steps(samples, rates, limits)
    assert [step.held for step in found] == [True, False, True]
    assert slo.knee(found) == 10.0
    assert slo.knee(found[1:]) is None


def test_a_step_whose_answers_fail_does_not_hold() -> None:
    samples = [sample(i / 10, status=200 if i % 2 else 503) for i in range(100)]
    assert not slo.steps(samples, [(0.0, 10.0, 10.0)], {"search": Limit(p95_ms=50)})[0].held
