from __future__ import annotations

import pytest

from warmstart.store.migrations import MAX_REASON, Migration, shipped


def incompatible(sql: str) -> str:
    return Migration(7, "seventh", sql).incompatible


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("ALTER TABLE jobs ADD COLUMN note text;", ""),
        ("-- Notes of jobs.\n\nALTER TABLE jobs ADD COLUMN note text;", ""),
        ("-- compatible: yes\nALTER TABLE jobs ADD COLUMN note text;", ""),
        ("-- Notes go.\n-- compatible: no, drops jobs.note\nALTER TABLE jobs DROP COLUMN note;", "drops jobs.note"),
        ("CREATE TABLE a (n int);\n-- compatible: no, of a comment further down\n", ""),
    ],
)
def test_the_head_of_a_file_says_whether_earlier_releases_can_go_on(sql: str, reason: str) -> None:
    assert incompatible(sql) == reason


@pytest.mark.parametrize(
    "line",
    ["compatible: no", "compatible: no,", "compatible: No, drops it", "compatible:yes", "compatible: maybe",
     "compatible: yes, nearly", f"compatible: no, {'x' * (MAX_REASON + 1)}"],
)  # fmt: skip
def test_a_head_that_says_it_wrongly_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"migration 0007 \(seventh\): .* must be `-- compatible: yes`"):
        incompatible(f"-- {line}\nSELECT 1;")


def test_the_shipped_ones_are_in_order_and_say_it_rightly() -> None:
    assert [m.version for m in shipped()] == list(range(1, len(shipped()) + 1))
    assert all(isinstance(m.incompatible, str) for m in shipped())
