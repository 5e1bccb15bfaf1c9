"""Geometry of the charts. Templates draw them as inline SVG: lengths in per cent, curves that stretch.

So the page's text keeps its size at any width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.report.curves import extremes

HEIGHT = 210
SMALL = 120
SCATTER = 300
WIDTH = 1000  # of a curve's own coordinates, which are stretched to the page's
COLOURS = 8

Text = Callable[[float], str]
Chart = dict[str, Any]  # what the template's macro `bars` or `plot` takes


class Part(NamedTuple):
    """A piece of a bar; its colour is the class `f-COLOUR` of the style sheet."""

    name: str
    value: float
    colour: str


class Bar(NamedTuple):
    """One bar: its pieces in order, and its total as text."""

    parts: Sequence[Part]
    text: str
    guess: bool = False  # Predicted: its text is drawn softer


class Curve(NamedTuple):
    """A line over (x, y); where y is None it is interrupted."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: str  # classes of the style sheet, `l-COLOUR` first
    stairs: bool = False
    width: float = 1.75


class Dot(NamedTuple):
    """A point of a scatter; `title` is shown where one points at it, `text` always."""

    x: float
    y: float
    style: str  # `f-COLOUR` of the style sheet
    title: str
    text: str = ""
    radius: int = 4


def ticks(high: float, low: float = 0.0, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps apart; at least two."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        span = abs(high) or 1.0
        low, high = low - span / 2, high + span / 2
    raw = span / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * n for n in range(first, last + 1)]


def bars(
    rows: Sequence[tuple[str, str, Sequence[Bar]]],
    *,
    text: Text,
    limit: float | None = None,
    legend: Mapping[str, str] | None = None,
) -> Chart:
    """Rows of (label, note, one or two bars) on a common scale; `limit` is drawn across all.

    `legend`: name to classes of its swatch; `f-COLOUR` fills it, `l-COLOUR` draws a line through it.
    """
    longest = max((sum(part.value for part in bar.parts) for *_, drawn in rows for bar in drawn), default=0)
    scale = max(longest, limit or 0.0) * 1.01 or 1.0

    def pieces(bar: Bar) -> list[tuple[str, str, str, str]]:
        shown, reached = [], 0.0
        for name, value, colour in bar.parts:
            if value > 0:
                title = f"{name}: {text(value)}"
                shown.append((_percent(reached / scale), _percent(value / scale), colour, title))
                reached += value
        return shown

    shown = [(*head, [(pieces(bar), bar.text, bar.guess) for bar in drawn]) for *head, drawn in rows]
    mark = None if limit is None else _percent(limit / scale)
    return {"rows": shown, "limit": mark, "legend": legend or {}}


def plot(
    curves: Sequence[Curve],
    *,
    label: str,
    text: Text,
    x_labels: Sequence[str],
    height: int = HEIGHT,
    zero: bool = True,
    shade_to: float | None = None,
    mark: float | None = None,
    legend: Mapping[str, str] | None = None,
) -> Chart:
    """Curves on common axes. `zero`: the axis begins at 0. `shade_to`: x up to which it is shaded.

    `mark`: x of a line across all. `label` describes the chart to screen readers, `text` writes a y value,
    `x_labels` are spaced evenly.
    """
    points = [(x, y) for curve in curves for x, y in curve.points if y is not None]
    if not points:
        return {"lines": [], "legend": legend or {}}
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    right = right if right > left else left + 1
    values = [y for _, y in points]
    marks = ticks(max(values), 0.0 if zero else min(values), 4 if height >= HEIGHT else 3)
    low, high = marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - left) / (right - left), height * (1 - (y - low) / (high - low))

    shaded = shade_to is not None and shade_to > left
    return {
        "legend": legend or {},
        "label": label,
        "box": f"0 0 {WIDTH} {height}",
        "height": height,
        "shade": _percent(min(1.0, ((shade_to or 0) - left) / (right - left))) if shaded else None,
        "mark": None if mark is None else _percent((mark - left) / (right - left)),
        "grid": [place(left, mark)[1] for mark in marks],
        "lines": [(curve, _path(curve, place)) for curve in curves],
        "marks": [text(mark) for mark in reversed(marks)],
        "x_labels": x_labels,
    }


def scatter(
    dots: Sequence[Dot],
    *,
    label: str,
    x: Text,
    y: Text,
    ticks: tuple[Sequence[float], Sequence[float]],
    legend: Mapping[str, str],
) -> Chart:
    """Dots on axes from the first to the last of their `ticks`; `x` and `y` write values.

    A text stands above its dot, and in the right half below it: away from a falling front.
    """
    (left, *_, right), (low, *_, high) = ticks
    placed = [((one.x - left) / (right - left), 1 - (one.y - low) / (high - low)) for one in dots]
    return {
        "legend": legend,
        "label": label,
        "height": SCATTER,
        "grid": [_percent(1 - (mark - low) / (high - low)) for mark in ticks[1]],
        "dots": [
            (dot, _percent(across), _percent(down), across > 0.5)
            for dot, (across, down) in zip(dots, placed, strict=True)
        ],
        "marks": [y(mark) for mark in reversed(ticks[1])],
        "x_labels": [x(left), x((left + right) / 2), x(right)],
    }


def _path(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> str:
    """An SVG path with a piece for each stretch without a gap, and a point where a stretch is one value."""
    steps: list[str] = []
    begun, before = False, 0.0
    for x, y in map(curve.points.__getitem__, extremes([y for _, y in curve.points])):
        if y is None:
            begun = False
            continue
        px, py = place(x, y)
        if not begun:
            steps.append(f"M{px:.1f} {py:.1f}h0.01")
        elif curve.stairs:
            steps.append(f"L{px:.1f} {before:.1f}V{py:.1f}")
        else:
            steps.append(f"L{px:.1f} {py:.1f}")
        begun, before = True, py
    return "".join(steps)


def layered(place: int, count: int) -> float:
    """Width of a line among others: the first is widest, so that it is seen below those that cover it."""
    return 1.75 + (3.5 * (count - 1 - place) / (count - 1) if count > 1 else 0.0)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
