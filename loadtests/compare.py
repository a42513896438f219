"""Two runs of one scenario: what is slower, faster, or fails now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: Ratios of two runs of the same code on one busy machine reach this; below, nothing can be said.
NOISE: Final = 1.25
#: Milliseconds below which a difference is of the clock and the network.
LEAST_MS: Final = 5.0


class NotComparable(Exception):
    """The two runs asked different things."""


@dataclass(frozen=True, slots=True)
class Row:
    window: str
    endpoint: str
    what: str
    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a and self.b is not None else None

    @property
    def worse(self) -> bool:
        if self.what == "failed %":
            return (self.b or 0) > (self.a or 0)
        if self.a is None or self.b is None:
            return self.a is not None  # it was measured before, and no longer is
        return self.b > self.a * NOISE and self.b - self.a > LEAST_MS


def read(path: Path) -> dict[str, Any]:
    """`path` is a report's folder or its run.json."""
    file = path / "run.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        found["figures"], found["scenario"]["shape"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotComparable(f"{file} is no report of a run: {error!r}") from None
    return found


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """A row for each percentile and error rate. Raises NotComparable."""
    for name in ("shape", "mix", "memories", "tenants", "fault", "seed"):
        if a["scenario"].get(name) != b["scenario"].get(name):
            raise NotComparable(f"{name} is {a['scenario'].get(name)} in A and {b['scenario'].get(name)} in B")
    mine, theirs = ({(f["window"], f["endpoint"]): f for f in run["figures"]} for run in (a, b))
    rows = []
    for key in sorted(mine.keys() | theirs.keys()):
        left, right = mine.get(key), theirs.get(key)
        for what in ("p50_ms", "p95_ms", "p99_ms"):
            rows.append(Row(*key, what.replace("_", " "), left and left[what], right and right[what]))
        rows.append(Row(*key, "failed %", _failed(left), _failed(right)))
    return rows


def _failed(figures: dict[str, Any] | None) -> float | None:
    return None if figures is None else 100 * figures["errors"] / max(1, figures["requests"])


def table(rows: list[Row]) -> str:
    lines = [f"{'window':<8}{'endpoint':<14}{'':<10}{'A':>10}{'B':>10}{'B/A':>8}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        said = "  worse" if row.worse else ""
        lines.append(
            f"{row.window:<8}{row.endpoint:<14}{row.what:<10}{_cell(row.a):>10}{_cell(row.b):>10}{ratio:>8}{said}"
        )
    worse = sum(row.worse for row in rows)
    lines.append(f"B is worse in {worse} of {len(rows)}, by more than {NOISE:g} times and {LEAST_MS:g} ms")
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
