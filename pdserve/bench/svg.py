"""Plots as SVG text: lines, points and bars on linear axes. No fonts, scripts or images from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 26, 44
MAX_POINTS = 2000
"""Of one line; more are thinned evenly, keeping each stretch's largest value, which is what stalls look like."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one name in one colour."""

    name: str
    points: Sequence[Point]
    dots: bool = False
    """Dots instead of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of time in one row."""

    row: int
    begin: float
    end: float
    name: str
    """Bars of one name have one colour, and one entry in the legend."""


@dataclass(frozen=True, slots=True)
class _Axes:
    x0: float
    x1: float
    y0: float
    y1: float
    height: int = HEIGHT

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (self.height - TOP - BOTTOM)


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series], *, limit: float | None = None) -> str:
    """Axes begin at 0. `limit` draws a horizontal line, an SLO say. A plot without points says so."""
    points = [point for s in series for point in s.points if all(map(math.isfinite, point))]
    if not points:
        return _figure(title, HEIGHT, f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>')
    top = max(y for _, y in points)
    if limit is not None:
        top = max(top, limit)
    axes = _Axes(min(0.0, *(x for x, _ in points)), max(x for x, _ in points) or 1.0, 0.0, 1.05 * top or 1.0)
    parts = [_grid(axes, x_label, y_label)]
    if limit is not None:
        y = axes.y(limit)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>')
    for i, s in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        places = [(axes.x(x), axes.y(y)) for x, y in thinned(s.points) if math.isfinite(x) and math.isfinite(y)]
        if s.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in places]
        elif places:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    parts.append(_legend([s.name for s in series]))
    return _figure(title, HEIGHT, "".join(parts))


def gantt(title: str, x_label: str, bars: Sequence[Bar], names: Sequence[str]) -> str:
    """A row for each request, its phases one after the other. `names` gives the order of colours."""
    num_rows = max((bar.row for bar in bars), default=0) + 1
    height = TOP + BOTTOM + max(120, min(14 * num_rows, 1400))
    end = max((bar.end for bar in bars), default=1.0) or 1.0
    axes = _Axes(min([0.0, *(bar.begin for bar in bars)]), end, 0, num_rows, height)
    parts = [_grid(axes, x_label, "request", y_ticks=False)]
    thickness = (height - TOP - BOTTOM) / num_rows
    for bar in bars:
        x0, x1 = axes.x(bar.begin), axes.x(bar.end)
        if x1 - x0 < 0.05:
            continue
        # Rows go down, in the order of time.
        y = TOP + thickness * bar.row
        colour = COLOURS[names.index(bar.name) % len(COLOURS)]
        parts.append(
            f'<rect x="{x0:.1f}" y="{y:.1f}" width="{x1 - x0:.2f}" height="{max(0.85 * thickness, 0.5):.2f}" '
            f'fill="{colour}"><title>{escape(bar.name)} {1e3 * (bar.end - bar.begin):.1f} ms</title></rect>'
        )
    parts.append(_legend(names))
    return _figure(title, height, "".join(parts))


def cdf(samples: Sequence[float]) -> list[Point]:
    """Steps of an empirical distribution: (value, share of samples up to it)."""
    ordered = sorted(samples)
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points, in order, with the highest of each stretch kept."""
    if len(points) <= limit:
        return list(points)
    stretch = math.ceil(len(points) / limit)
    return [max(points[i : i + stretch], key=lambda p: p[1]) for i in range(0, len(points), stretch)]


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(axes: _Axes, x_label: str, y_label: str, *, y_ticks: bool = True) -> str:
    bottom = axes.height - BOTTOM
    parts = []
    for tick in _ticks(axes.x0, axes.x1):
        x = axes.x(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(axes.y0, axes.y1) if y_ticks else []:
        y = axes.y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{WIDTH / 2}" y="{axes.height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, x = [], LEFT
    for i, name in enumerate(names):
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{escape(name)}</text>')
        x += 24 + 7 * len(name)
    return "".join(parts)


def _figure(title: str, height: int, content: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{content}</svg></figure>'
    )
