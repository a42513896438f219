from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from warmstart.circuit import FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, Admission, Circuit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    return Circuit("test", clock)


def fail(circuit: Circuit) -> None:
    admission = circuit.admit()
    assert admission is not None
    circuit.failed(admission, "timeout")


def test_it_opens_after_failures_in_a_row_and_not_before(circuit: Circuit) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        fail(circuit)
    circuit.succeeded()
    for _ in range(FAILURES_TO_OPEN - 1):
        fail(circuit)
    assert circuit.admit() is Admission.NORMAL
    fail(circuit)
    assert circuit.admit() is None


def test_one_trial_at_a_time_after_each_pause(circuit: Circuit, clock: Clock) -> None:
    for _ in range(FAILURES_TO_OPEN):
        fail(circuit)
    clock.now += FIRST_PAUSE_S - 0.01
    assert circuit.admit() is None
    clock.now += 0.02
    assert circuit.admit() is Admission.TRIAL
    assert circuit.admit() is None
    circuit.released(Admission.TRIAL)
    assert circuit.admit() is Admission.TRIAL
    circuit.succeeded()
    assert circuit.admit() is Admission.NORMAL


def test_the_pause_doubles_up_to_the_longest_and_starts_again_after_a_success(circuit: Circuit, clock: Clock) -> None:
    for _ in range(FAILURES_TO_OPEN):
        fail(circuit)
    pauses = []
    for _ in range(8):
        start = clock.now
        while (admission := circuit.admit()) is None:
            clock.now += 0.5
        pauses.append(clock.now - start)
        circuit.failed(admission, "timeout")
    assert pauses == [1, 2, 4, 8, 16, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    circuit.succeeded()
    for _ in range(FAILURES_TO_OPEN):
        fail(circuit)
    clock.now += FIRST_PAUSE_S
    assert circuit.admit() is Admission.TRIAL


def test_late_failures_of_those_let_in_before_do_not_end_a_trial(circuit: Circuit, clock: Clock) -> None:
    late = circuit.admit()
    assert late is Admission.NORMAL
    for _ in range(FAILURES_TO_OPEN):
        fail(circuit)
    clock.now += FIRST_PAUSE_S
    assert circuit.admit() is Admission.TRIAL
    circuit.failed(late, "timeout")
    assert circuit.admit() is None


def test_a_hold_opens_at_once_for_at_most_the_longest_pause(circuit: Circuit, clock: Clock) -> None:
    circuit.hold("status-429", 3600)
    circuit.hold("status-429", 1)  # a shorter one doesn't shorten it
    clock.now += MAX_PAUSE_S - 0.1
    assert circuit.admit() is None
    clock.now += 0.1
    assert circuit.admit() is Admission.TRIAL


def test_only_changes_of_state_are_logged(circuit: Circuit, clock: Clock) -> None:
    with capture_logs() as logs:
        for _ in range(FAILURES_TO_OPEN):
            fail(circuit)
        for _ in range(50):
            clock.now += MAX_PAUSE_S
            fail(circuit)
        circuit.succeeded()
        circuit.succeeded()
    assert [entry["event"] for entry in logs] == ["circuit.opened", "circuit.closed"]
