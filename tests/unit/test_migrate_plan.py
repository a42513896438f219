"""What a migration needs of the disk, and what it does where that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.migrations import NEW, space
from warmstart import allocation
from warmstart.errors import ConfigError, DiskFull
from warmstart.migrate.plan import SPARE_BYTES, Plan, action_of


def plan(free: int, action: str = "recreate", *, allowed: int = 1 << 40) -> Plan:
    return Plan(space(8), space(4, NEW), action, 10, 1_000, 2_000, 320, free, 500_000, allowed)


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


@pytest.mark.parametrize(("allowed", "fits"), [(500_000, True), (499_999, False)])
def test_too_little_memory_is_refused_before_anything(tmp_path: Path, allowed: int, fits: bool) -> None:
    made = plan(1 << 40, allowed=allowed)
    assert (made.fits, made.disk_fits) == (fits, True)
    if fits:
        made.refuse_too_small(tmp_path)
    else:
        with pytest.raises(ConfigError, match=r"500,000 bytes of memory.*499,999 are allowed.*API_MEMORY"):
            made.refuse_too_small(tmp_path)
        with pytest.raises(ConfigError):
            made.refuse_too_little_memory()


def test_a_container_allows_less_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(allocation, "_CONTAINER", limit)
    machine = allocation.allowed_memory()
    assert machine > 1 << 30
    for text, allowed in (("max\n", machine), (f"{512 << 20}\n", 512 << 20), (f"{machine * 2}\n", machine)):
        limit.write_text(text)
        assert allocation.allowed_memory() == allowed


def test_nothing_needs_nothing() -> None:
    assert plan(0, "nothing", allowed=0).fits


def test_the_same_width_is_reset_in_place() -> None:
    assert action_of(space(8), space(8)) == "nothing"
    assert action_of(space(8), space(8, NEW)) == "reset"
    assert action_of(space(8), space(4)) == "recreate"
