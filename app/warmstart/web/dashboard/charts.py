"""Pictures from figures: the geometry of bars and lines, which a template writes as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

#: Units of the picture, not pixels: it takes the width there is.
WIDTH: Final = 720
HEIGHT: Final = 200
LEFT: Final = 44
BOTTOM: Final = 22
TOP: Final = 10
GRIDLINES: Final = 4


@dataclass(frozen=True, slots=True)
class Bar:
    x: float
    y: float
    width: float
    height: float
    series: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    summary: str
    bars: list[Bar]
    #: Name of a series → the points of its line, in parts where hours are without a value.
    lines: list[tuple[str, str]]
    dots: list[tuple[float, float, str, str]]
    ticks_x: list[Tick]
    ticks_y: list[Tick]
    series: list[str]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    floor: int = HEIGHT - BOTTOM


def stacked(
    name: str, summary: str, starts: Sequence[int], columns: Sequence[dict[str, int]], series: Sequence[str]
) -> Chart:
    """One bar an hour; `columns` are counts by series."""
    top = _ceiling(max((sum(c.values()) for c in columns), default=0))
    step = (WIDTH - LEFT) / max(1, len(columns))
    bars = []
    for i, (start, counts) in enumerate(zip(starts, columns, strict=True)):
        base = float(HEIGHT - BOTTOM)
        for one in series:
            if count := counts.get(one, 0):
                height = count / top * (HEIGHT - BOTTOM - TOP)
                base -= height
                gap = min(2.0, step * 0.2)
                bars.append(Bar(
                    round(LEFT + i * step + gap / 2, 2), round(base, 2), round(step - gap, 2), round(height, 2),
                    one, f"{_hour(start)}: {count:,} {one}",
                ))  # fmt: skip
    return Chart(name, summary, bars, [], [], _hours(starts, step), _grid(top, str), list(series))


def lines(
    name: str,
    summary: str,
    starts: Sequence[int],
    series: dict[str, Sequence[float | None]],
    unit: str,
) -> Chart:
    """A line for each series; None is a gap."""
    top = _ceiling(max((v for values in series.values() for v in values if v is not None), default=0))
    step = (WIDTH - LEFT) / max(1, len(starts))
    drawn, dots = [], []
    for one, values in series.items():
        part: list[str] = []
        for i, value in enumerate([*values, None]):
            if value is None:
                if len(part) > 1:
                    drawn.append((one, " ".join(part)))
                part = []
                continue
            x = round(LEFT + (i + 0.5) * step, 2)
            y = round(HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP), 2)
            part.append(f"{x},{y}")
            dots.append((x, y, one, f"{_hour(starts[i])}: {value:,.0f}{unit} ({one})"))
    return Chart(name, summary, [], drawn, dots, _hours(starts, step), _grid(top, lambda v: f"{v}{unit}"), list(series))


def _ceiling(value: float) -> int:
    """The next round number above, which four gridlines divide."""
    if value <= GRIDLINES:
        return GRIDLINES
    magnitude = 10 ** math.floor(math.log10(value))
    for factor in (1, 2, 4, 6, 8, 10):
        if value <= factor * magnitude and (factor * magnitude) % GRIDLINES == 0:
            return int(factor * magnitude)
    return int(20 * magnitude)


def _grid(top: int, text: object) -> list[Tick]:
    label = text if callable(text) else str
    span = HEIGHT - BOTTOM - TOP
    return [
        Tick(round(HEIGHT - BOTTOM - span * i / GRIDLINES, 2), label(top * i // GRIDLINES))
        for i in range(GRIDLINES + 1)
    ]


def _hours(starts: Sequence[int], step: float) -> list[Tick]:
    """Hours of a day under a day's bars, dates under a week's."""
    found = []
    for i, start in enumerate(starts):
        at = datetime.fromtimestamp(start, UTC)
        if len(starts) <= 24 and at.hour % 6 == 0:
            found.append(Tick(round(LEFT + i * step, 2), f"{at:%H:%M}"))
        elif len(starts) > 24 and at.hour == 0:
            found.append(Tick(round(LEFT + i * step, 2), f"{at:%-d %b}"))
    return found


def _hour(start: int) -> str:
    return f"{datetime.fromtimestamp(start, UTC):%-d %b %H:%M} UTC"
