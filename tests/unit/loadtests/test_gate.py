"""How the gate judges on a slow machine, and whom the load may meet."""

from __future__ import annotations

import httpx
import pytest

from loadtests import calibration, gate, targets
from loadtests.plan import planned_requests
from loadtests.scenario import ScenarioError, load


def test_slow_motion_has_as_many_requests_in_more_time() -> None:
    one = load(gate.NAME)
    slow = gate.stretched(one, 2.5)
    assert (slow.shape.peak, slow.shape.seconds, slow.warm_up_s) == (3.2, 300.0, 12.5)
    assert len(planned_requests(slow)) == pytest.approx(len(planned_requests(one)), rel=0.1)
    assert slow.seed != one.seed
    assert (slow.rules, slow.mix, slow.memories) == (one.rules, one.mix, one.memories)


def test_slowness_is_the_middle_of_the_tries_within_bounds() -> None:
    reference = calibration.REFERENCE_S
    assert calibration.slowness([reference * 1.5, reference * 50, reference * 1.2]) == pytest.approx(1.5)
    assert calibration.slowness([reference / 10] * 3) == 1.0
    assert calibration.slowness([reference * 100] * 3) == calibration.MOST


@pytest.mark.parametrize(
    ("url", "is_this_machine"),
    [
        ("http://127.0.0.1:8484", True), ("http://localhost:1", True), ("https://[::1]:443", True),
        ("http://127.0.0.1.example.org", False), ("http://localhost.example.org", False), ("http://10.0.0.1", False),
    ],
)  # fmt: skip
def test_loopback(url: str, is_this_machine: bool) -> None:
    assert targets.is_loopback(url) is is_this_machine


@pytest.mark.parametrize("confirmed", ["", "example.org", "memory.example.com"])
def test_another_machine_must_be_named_twice(confirmed: str) -> None:
    with (
        pytest.raises(ScenarioError, match=r"CONFIRM_HOST=memory\.example\.org"),
        targets.given("https://memory.example.org", ["key"], confirmed, print),
    ):
        raise AssertionError("it was let through")


def test_a_url_and_a_key_are_needed() -> None:
    for url, keys, said in (("memory", ["key"], "must be like"), ("http://127.0.0.1:1", [], "KEY is missing")):
        with pytest.raises(ScenarioError, match=said), targets.given(url, keys, "", print):
            raise AssertionError("it was let through")


@pytest.mark.parametrize(
    ("remaining", "said"), [(["600", "600"], ""), (["599", "598"], "rate limit"), (["600", "599"], "rate limit")]
)
def test_a_key_with_a_limit_is_refused(remaining: list[str], said: str) -> None:
    left = iter(remaining)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"RateLimit-Limit": "600", "RateLimit-Remaining": next(left)})

    with httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer)) as client:
        if said:
            with pytest.raises(ScenarioError, match=said):
                targets._refuse_limited(client)
        else:
            targets._refuse_limited(client)


def test_a_key_that_does_not_work_is_told() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(401, text="who?"))
    with (
        httpx.Client(base_url="http://127.0.0.1:1", transport=transport) as client,
        pytest.raises(ScenarioError, match="401 who"),
    ):
        targets._refuse_limited(client)
