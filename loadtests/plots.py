"""Lines over time as SVG, with the fault as a band: small, without scripts, readable on light and dark paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 860
HEIGHT: Final = 230
LEFT: Final = 58
RIGHT: Final = 110
TOP: Final = 14
BOTTOM: Final = 30
#: Classes of the page's style sheet, in this order.
COLOURS: Final = ("a", "b", "c", "d")
#: Labels at the ends of lines keep so far apart.
LABEL_GAP: Final = 14

#: (second, value); None: nothing is known there, and the line breaks off.
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    label: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A limit, as a horizontal line."""

    label: str
    value: float


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from below `low` to above `high`."""
    span = max(high - low, 1e-9)
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= count)
    first = math.floor(low / step)
    return [round((first + i) * step, 10) for i in range(math.ceil(high / step) - first + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(begin, max(end, begin + 1) + 1)]


class _Scale:
    def __init__(self, seconds: float, values: Sequence[float], log: bool) -> None:
        self._log = log
        self._seconds = max(seconds, 1e-9)
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        self.ticks = log_ticks(max(min(known), 0.1), max(known)) if log else ticks(0.0, max(*known, 1.0))
        self._low, self._high = self._place(self.ticks[0]), self._place(self.ticks[-1])

    def _place(self, value: float) -> float:
        return math.log10(max(value, 0.01)) if self._log else value

    def x(self, second: float) -> float:
        return LEFT + min(max(second / self._seconds, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (self._place(value) - self._low) / (self._high - self._low)
        return TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)


def chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    seconds: float,
    *,
    band: Band | None = None,
    marks: Sequence[Mark] = (),
    log: bool = False,
) -> str:
    """A figure of HTML."""
    values = [v for line in lines for _, v in line.points if v is not None] + [mark.value for mark in marks]
    scale = _Scale(seconds, values, log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        *(_band(band, scale) if band else ()),
        *_grid(scale, seconds),
        *(part for mark in marks for part in _mark(mark, scale)),
        *(_drawn(line, colour, scale) for line, colour in zip(lines, COLOURS, strict=False)),
        *_labels(lines, scale),
        "</svg>",
    ]
    return f"<figure><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>{''.join(parts)}</figure>"


def _band(band: Band, scale: _Scale) -> list[str]:
    left, right = scale.x(band.begin), scale.x(band.end)
    return [
        f'<rect class="fault" x="{left:.1f}" y="{TOP}" width="{max(right - left, 1):.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/>',
        f'<text class="fault" x="{left + 4:.1f}" y="{TOP + 11}">{escape(band.label)}</text>',
    ]


def _grid(scale: _Scale, seconds: float) -> list[str]:
    parts = []
    for value in scale.ticks:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>')
    for second in (t for t in ticks(0, seconds, 8) if t <= seconds):
        parts.append(
            f'<text class="tick" x="{scale.x(second):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{second:,g} s</text>'
        )
    return parts


def _mark(mark: Mark, scale: _Scale) -> list[str]:
    y = scale.y(mark.value)
    return [
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="limit" x="{WIDTH - RIGHT - 4}" y="{y - 4:.1f}" text-anchor="end">{escape(mark.label)}</text>',
    ]


def _drawn(line: Line, colour: str, scale: _Scale) -> str:
    if line.dots:
        return "".join(
            f'<circle class="{colour}" cx="{scale.x(s):.1f}" cy="{scale.y(v):.1f}" r="1.8"/>'
            for s, v in line.points
            if v is not None
        )
    path, pen = [], "M"
    for second, value in line.points:
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{scale.x(second):.1f} {scale.y(value):.1f}")
        pen = "L"
    return f'<path class="{colour}" d="{"".join(path)}"/>'


def _labels(lines: Sequence[Line], scale: _Scale) -> list[str]:
    """At the end of each line, pushed apart where they would overlap."""
    wanted: list[tuple[float, str, str]] = []
    for line, colour in zip(lines, COLOURS, strict=False):
        known = [v for _, v in line.points if v is not None]
        if known:
            wanted.append((scale.y(known[-1]) + 4, line.label, colour))
    parts, free = [], 0.0
    for at, label, colour in sorted(wanted):
        y = max(at, free)
        free = y + LABEL_GAP
        parts.append(f'<text class="{colour}" x="{WIDTH - RIGHT + 8}" y="{y:.1f}">{escape(label)}</text>')
    return parts
