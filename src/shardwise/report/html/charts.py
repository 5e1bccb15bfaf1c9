"""Charts as inline SVG: bars in per cent, curves that stretch; so text keeps its size at any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.report.html.markup import Child, Html, h

HEIGHT = 210
SMALL = 120
WIDTH = 1000
"""Of a curve's own coordinates, which are stretched to the page's."""
COLOURS = 8

Text = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar."""

    name: str
    value: float
    colour: str
    """A class `f-COLOUR` of the style sheet."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: pieces after each other, and what it comes to in words."""

    parts: Sequence[Part]
    text: str
    guess: bool = False
    """Predicted: its text is drawn softer."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line over (x, y); where y is None it is interrupted."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: str
    """Classes of the style sheet, `l-COLOUR` first."""
    stairs: bool = False
    width: float = 1.75


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


def bars(rows: Sequence[tuple[str, str, Sequence[Bar]]], *, limit: float | None, text: Text) -> Html:
    """Rows of (label, note, one or two bars) on a common scale; `limit` is drawn across all."""
    longest = max((sum(part.value for part in bar.parts) for _, _, bars_ in rows for bar in bars_), default=0)
    scale = max(longest, limit or 0.0) * 1.01 or 1.0
    lines = []
    for label, note, drawn in rows:
        cells: list[Child] = [h("h3", None, label, h("small", None, note) if note else None)]
        for bar in drawn:
            cells += [
                _bar(bar, scale, limit, f"{label}: {bar.text}", text),
                h("div", {"class": "value guess" if bar.guess else "value"}, bar.text),
            ]
        lines.append(h("div", {"class": "row one" if len(drawn) == 1 else "row"}, cells))
    return h("div", {"class": "bars"}, lines)


def _bar(bar: Bar, scale: float, limit: float | None, label: str, text: Text) -> Html:
    shapes, reached = [], 0.0
    for part in bar.parts:
        if part.value > 0:
            at = {"x": _percent(reached / scale), "width": _percent(part.value / scale)}
            title = h("title", None, f"{part.name}: {text(part.value)}")
            shapes.append(h("rect", {**at, "y": 1, "height": 14, "class": f"f-{part.colour}"}, title))
            reached += part.value
    if limit is not None:
        x = _percent(limit / scale)
        shapes.append(h("line", {"x1": x, "x2": x, "y1": -3, "y2": 19, "class": "limit"}))
    return h("svg", {"role": "img", "aria-label": label, "height": 16}, shapes)


def legend(entries: Mapping[str, str], *, alone: bool = False) -> Html:
    """Name to classes of the swatch: `f-COLOUR` fills it, `l-COLOUR` draws a line through it."""
    items = []
    for name, style in entries.items():
        if style.startswith("f-"):
            swatch = h("rect", {"width": 12, "height": 12, "rx": 3, "class": style})
        else:
            at = {"x1": 0, "x2": 12, "y1": 6, "y2": 6, "stroke-width": 2}
            swatch = h("line", {**at, "class": f"line {style}"})
        items.append(h("li", None, h("svg", {"aria-hidden": "true"}, swatch), name))
    return h("ul", {"class": "legend alone" if alone else "legend"}, items)


def plot(
    curves: Sequence[Curve],
    *,
    label: str,
    text: Text,
    x_labels: Sequence[str],
    height: int = HEIGHT,
    zero: bool = True,
    limit: float | None = None,
    shade_to: float | None = None,
) -> Html:
    """Curves on common axes. `zero`: the axis begins at 0. `shade_to`: x up to which it is shaded.

    `label` is for who cannot see it, `text` writes a y value, `x_labels` stand evenly below.
    """
    points = [(x, y) for curve in curves for x, y in curve.points if y is not None]
    if not points:
        return h("p", None, "nothing was measured")
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    right = right if right > left else left + 1
    values = [y for _, y in points] + ([limit] if limit is not None else [])
    marks = ticks(max(values), 0.0 if zero else min(values), 4 if height >= HEIGHT else 3)
    low, high = marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - left) / (right - left), height * (1 - (y - low) / (high - low))

    shapes: list[Child] = []
    if shade_to is not None and shade_to > left:
        width = _percent(min(1.0, (shade_to - left) / (right - left)))
        shapes.append(h("rect", {"x": 0, "y": 0, "width": width, "height": height, "class": "shade"}))
    for mark in marks:
        y = place(left, mark)[1]
        shapes.append(h("line", {"x1": 0, "x2": "100%", "y1": y, "y2": y, "class": "grid"}))
    stretched = {"viewBox": f"0 0 {WIDTH} {height}", "preserveAspectRatio": "none"}
    shapes.append(
        h("svg", {**stretched, "width": "100%", "height": height}, [_line(c, place) for c in curves])
    )
    if limit is not None:
        y = place(left, limit)[1]
        shapes.append(h("line", {"x1": 0, "x2": "100%", "y1": y, "y2": y, "class": "limit"}))
    axis = h(
        "div", {"class": "y", "aria-hidden": "true"}, [h("span", None, text(m)) for m in reversed(marks)]
    )
    drawing = h("svg", {"class": "area", "height": height, "role": "img", "aria-label": label}, shapes)
    below = h("div", {"class": "x", "aria-hidden": "true"}, [h("span", None, one) for one in x_labels])
    return h("div", {"class": "plot"}, axis, drawing, below)


def _line(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> Html:
    """One path; a piece for each stretch without a gap, and a point where a stretch is one value."""
    steps: list[str] = []
    begun = False
    before = 0.0
    for x, y in curve.points:
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
    return h(
        "path",
        {"d": "".join(steps), "class": f"line {curve.style}", "stroke-width": curve.width},
        h("title", None, curve.name),
    )


def layered(place: int, count: int) -> float:
    """Width of a line among others: the first is widest, so that it is seen below those that cover it."""
    return 1.75 + (3.5 * (count - 1 - place) / (count - 1) if count > 1 else 0.0)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
