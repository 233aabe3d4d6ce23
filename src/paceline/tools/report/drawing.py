"""Draws the curves of runs as SVG. Styles are attributes, so nothing applies to the page around it (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, Protocol

from paceline.tools.report.charts import Chart
from paceline.tools.report.facts import Curve

COLOURS = ("#0b62b8", "#c9690a", "#1f8a5b", "#a3328f", "#6b5fd0", "#a8891a", "#28909c", "#b3404a")
INK, MUTED, GRID = "#1c2126", "#68727d", "#e3e7eb"
WIDTH, HEIGHT = 400, 210  # of a chart, without its title and its legend
LEFT, RIGHT, BOTTOM = 58, 16, 26  # the margins of the area of the curves
LINE = 20  # the height of a title, and of a row of a legend
LETTER = 6.6  # the width of a letter in a legend, about
DOTS = 40  # curves with fewer points show them


class Drawn(Protocol):
    """What is drawn: a run, or another thing with curves."""

    @property
    def label(self) -> str:
        """The text in the legend."""

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves by name."""


class Axis(NamedTuple):
    """The horizontal axis: its name, and whether its numbers are drawn by their logarithm to base 2."""

    name: str = "step"
    is_log: bool = False

    def place(self, number: float) -> float:
        """Where a number is drawn, before it is scaled."""
        return math.log2(number) if self.is_log else number

    def text(self, place: float) -> str:
        """The number that is drawn there."""
        return f"{2**place if self.is_log else place:,g}"


@dataclass(frozen=True)
class Stroke:
    """A curve, with its label, colour and kind of line."""

    label: str
    colour: str
    is_dashed: bool
    curve: Curve


class Area(NamedTuple):
    """The part of the drawing for the curves, and the numbers at its borders."""

    left: float
    top: float
    right: float
    bottom: float
    steps: tuple[float, float]
    values: tuple[float, float]
    axis: Axis

    def x(self, step: float) -> float:
        """The horizontal position of a step."""
        low, high = self.steps
        return round(self.left + (self.axis.place(step) - low) / (high - low) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        """The vertical position of a value."""
        low, high = self.values
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 1)


def svg_of(runs: Sequence[Drawn], charts: Sequence[Chart], axis: Axis = Axis()) -> str:  # noqa: B008 - a constant
    """The charts as one SVG, two in a row; the runs differ by colour, or the curves if there is one run."""
    columns = min(2, len(charts))
    width = columns * WIDTH
    parts, top = [], 8
    if len(runs) > 1:
        entries = [(run.label, COLOURS[n % len(COLOURS)], False) for n, run in enumerate(runs)]
        drawn, top = _legend(entries, LEFT, top, width)
        parts.append(drawn)
    for first in range(0, len(charts), columns):
        row = [_chart(runs, chart, n * WIDTH, top, axis) for n, chart in enumerate(charts[first : first + columns])]
        parts += [drawn for drawn, _ in row]
        top = max(bottom for _, bottom in row)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'style="max-width: 100%; height: auto" font-family="system-ui, sans-serif" font-size="12" fill="{MUTED}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{top}" fill="#ffffff"/>', *parts, "</svg>"])


def _chart(runs: Sequence[Drawn], chart: Chart, left: int, top: int, axis: Axis) -> tuple[str, int]:
    """A chart at a position in the drawing, and the vertical position of its end."""
    strokes = list(_strokes(runs, chart))
    parts = [_text(left + LEFT, top + 14, chart.title, f'font-weight="600" fill="{INK}"')]
    top += LINE
    if len(chart.names) > 1:
        entries = [(name, COLOURS[n] if len(runs) == 1 else MUTED, len(runs) > 1 and n > 0)
                   for n, name in enumerate(chart.names)]  # fmt: skip
        drawn, top = _legend(entries, left + LEFT, top, left + WIDTH)
        parts.append(drawn)
    area = Area(
        left + LEFT, top + 6, left + WIDTH - RIGHT, top + HEIGHT - BOTTOM,
        _limits([axis.place(step) for stroke in strokes for step in stroke.curve.step], margin=0.0),
        _limits([value for stroke in strokes for value in stroke.curve.value], margin=0.05), axis,
    )  # fmt: skip
    parts += [*_axes(area), *(_curve(area, stroke) for stroke in strokes)]
    return "\n".join(parts), top + HEIGHT + 8


def _strokes(runs: Sequence[Drawn], chart: Chart) -> Iterator[Stroke]:
    for n, name in enumerate(chart.names):
        for place, run in enumerate(runs):
            if name in run.curves:
                colour = COLOURS[(place if len(runs) > 1 else n) % len(COLOURS)]
                label = f"{run.label} {name}" if len(runs) > 1 else name
                yield Stroke(label, colour, len(runs) > 1 and n > 0, run.curves[name])


def _curve(area: Area, stroke: Stroke) -> str:
    points = [(area.x(step), area.y(value)) for step, value in zip(stroke.curve.step, stroke.curve.value, strict=True)]
    dash = ' stroke-dasharray="5 4"' if stroke.is_dashed else ""
    dots = points if len(points) < DOTS else []
    last = f"{stroke.label}: {stroke.curve.value[-1]:.5g} at {area.axis.name} {stroke.curve.step[-1]:,}"
    return "".join(
        [
            f'<g stroke="{stroke.colour}" fill="none" stroke-width="1.5" stroke-linejoin="round">',
            f"<title>{escape(last)}</title>",
            f'<polyline{dash} points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>',
            *(f'<circle cx="{x:g}" cy="{y:g}" r="1.8" fill="{stroke.colour}"/>' for x, y in dots),
            "</g>",
        ]
    )


def _axes(area: Area) -> Iterator[str]:
    """The lines and numbers of both axes."""
    for tick in ticks(*area.values):
        y = area.y(tick)
        yield f'<path d="M{area.left:g} {y:g}H{area.right:g}" stroke="{GRID}"/>'
        yield _text(area.left - 6, y + 4, f"{tick:g}", 'text-anchor="end"')
    for tick in ticks(*area.steps):
        if area.axis.is_log and tick != int(tick):
            continue
        x = area.x(2**tick if area.axis.is_log else tick)
        yield f'<path d="M{x:g} {area.bottom:g}v4" stroke="{MUTED}"/>'
        yield _text(x, area.bottom + 17, area.axis.text(tick), 'text-anchor="middle"')
    yield f'<path d="M{area.left:g} {area.bottom:g}H{area.right:g}" stroke="{MUTED}"/>'
    yield _text(area.left - 6, area.bottom + 17, area.axis.name, 'text-anchor="end"')


def _legend(entries: Sequence[tuple[str, str, bool]], left: float, top: int, right: float) -> tuple[str, int]:
    """Labels with their lines, in the necessary number of rows, and the vertical position of the end."""
    parts, x = [], left
    for label, colour, is_dashed in entries:
        width = 22 + LETTER * len(label) + 14
        if x > left and x + width > right:
            x, top = left, top + LINE
        dash = ' stroke-dasharray="4 3"' if is_dashed else ""
        parts.append(f'<path d="M{x:g} {top + 10}h16" stroke="{colour}" stroke-width="2.5"{dash}/>')
        parts.append(_text(x + 22, top + 14, label, f'fill="{INK}"'))
        x += width
    return "\n".join(parts), top + LINE


def _text(x: float, y: float, text: str, more: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(text)}</text>'


def _limits(numbers: Sequence[float], margin: float) -> tuple[float, float]:
    """The lowest and highest number, with a margin; different ones, even if all numbers are equal."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between two limits: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [n * distance for n in range(math.ceil(low / distance), math.floor(high / distance) + 1)]
