"""The page of the degradation matrix is that of the table and of the last measured times."""

from __future__ import annotations

from containers.degradation_page import PAGE, load_results, render
from containers.matrix import HEAL_LIMIT_S, OPERATIONS, cells, rows


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(load_results()), "write it again: see tests/containers/degradation_page.py"


def test_each_cell_was_measured_within_its_limit() -> None:
    results = load_results()
    assert results.keys() == {row.id for row in rows()}
    assert all(times.keys() == {*OPERATIONS, "healed"} for times in results.values())
    slow = [c.id for c in cells() if results[c.row.id][c.operation] > c.within_s]
    assert not slow
    assert max(times["healed"] for times in results.values()) <= HEAL_LIMIT_S
