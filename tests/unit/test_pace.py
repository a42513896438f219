"""What is told of a long queue."""

from __future__ import annotations

from warmstart.pace import TELL_EVERY_S, WORTH_TELLING, Pace, Progress


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_short_queue_is_not_worth_a_word() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now += 3600
    assert pace.seen(WORTH_TELLING - 1) is None


def test_the_estimate_is_of_the_rate_since_the_queue_grew_long() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.add(7)  # before it: of no account
    assert pace.seen(0) is None
    clock.now += TELL_EVERY_S
    pace.add(50)
    assert pace.seen(1000) == Progress(left=1000, done=50, per_second=5.0, left_s=200)
    clock.now += TELL_EVERY_S / 2
    assert pace.seen(990) is None, "told a moment ago"
    clock.now += TELL_EVERY_S / 2
    pace.add(10)
    assert pace.seen(940) == Progress(left=940, done=60, per_second=3.0, left_s=313)


def test_a_queue_that_stands_still_has_no_end() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now += TELL_EVERY_S
    assert pace.seen(500) == Progress(left=500, done=0, per_second=0.0, left_s=None)
