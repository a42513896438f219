"""What a migration needs of the disk, and what it does where that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.migrations import NEW, space
from warmstart.errors import DiskFull
from warmstart.migrate.plan import SPARE_BYTES, Plan, action_of


def plan(free: int, action: str = "recreate") -> Plan:
    return Plan(space(8), space(4, NEW), action, 10, 1_000, 2_000, 320, free)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False), (1, True)])
def test_it_fits_or_is_refused_with_both_figures(tmp_path: Path, spare: int, fits: bool) -> None:
    made = plan(3_320 + SPARE_BYTES + spare)
    assert made.fits is fits
    assert made.to_dict()["fits"] is fits
    if fits:
        made.refuse_too_small(tmp_path)
    else:
        with pytest.raises(DiskFull, match=rf"{made.needed_bytes:,} bytes are needed.*nothing was changed"):
            made.refuse_too_small(tmp_path)


def test_nothing_needs_nothing() -> None:
    assert plan(0, "nothing").fits


def test_the_same_width_is_reset_in_place() -> None:
    assert action_of(space(8), space(8)) == "nothing"
    assert action_of(space(8), space(8, NEW)) == "reset"
    assert action_of(space(8), space(4)) == "recreate"
