"""Predicted against measured as SVG: a scatter plot on logarithmic axes, and the differences below it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rows import GIB

# Okabe and Ito's palette, which colour-blind readers can distinguish
COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#000000", "#8c564b")
INK, PALE = "#333333", "#dddddd"
WIDTH, LEFT, RIGHT = 760, 70, 620
TOP, BOTTOM = 40, 440  # of the scatter plot
UPPER, LOWER = 500, 640  # of the differences
HEIGHT = 690
FAMILIES = ("single", "zero0", "zero1", "zero2", "zero3", "fsdp2", "ddp", "ddp-zero1")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row. Measured and predicted have the plot's unit and are more than 0."""

    name: str
    group: str
    """Decides the colour."""
    measured: float
    predicted: float
    hollow: bool = False


@dataclass(frozen=True)
class _Log:
    """A logarithmic axis from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        return [step for step in steps if self.low <= step <= self.high]


def scatter(points: Sequence[Point], *, title: str, unit: str, band: float, groups: Sequence[str]) -> str:
    """The file's text. `band`: a share, drawn to both sides of the diagonal. `groups`: as in the legend."""
    values = [value for point in points for value in (point.measured, point.predicted)]
    low, high = min(values) / 1.15, max(values) * 1.15
    x = _Log(low, high, LEFT, RIGHT)
    y = _Log(low, high, BOTTOM, TOP)
    colours = dict(zip(groups, COLOURS, strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, size=15),
        *_upper(x, y, unit, band),
        *(_mark(point, x(point.measured), y(point.predicted), colours) for point in points),
        *_differences(points, x, unit, band, colours),
        *_legend(points, groups, colours, band),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _upper(x: _Log, y: _Log, unit: str, band: float) -> Iterable[str]:
    for tick in x.ticks():
        yield _line(x(tick), TOP, x(tick), BOTTOM)
        yield _line(LEFT, y(tick), RIGHT, y(tick))
        yield _text(LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end")
    edge = 1 + band
    corners = [(x.low, x.low), (x.low, x.low * edge), (x.high / edge, x.high), (x.high, x.high)]
    corners += [(x.high, x.high / edge), (x.low * edge, x.low)]
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
    yield f'<polygon points="{path}" fill="{PALE}" fill-opacity="0.5"/>'
    yield _line(LEFT, BOTTOM, RIGHT, TOP, colour="#888888")
    yield _frame(TOP, BOTTOM)
    yield _turned(20, (TOP + BOTTOM) / 2, f"predicted, {unit}")


def _differences(
    points: Sequence[Point], x: _Log, unit: str, band: float, colours: dict[str, str]
) -> Iterable[str]:
    shares = [point.predicted / point.measured - 1 for point in points]
    reach = math.ceil(20 * 1.1 * max(band, *map(abs, shares))) / 20  # to the next 5 %

    def y(share: float) -> float:
        return (UPPER + LOWER) / 2 - share / reach * (LOWER - UPPER) / 2

    for tick in x.ticks():
        yield _line(x(tick), UPPER, x(tick), LOWER)
        yield _text(x(tick), LOWER + 18, f"{tick:g}", anchor="middle")
    yield f'<rect x="{LEFT}" y="{y(band):.1f}" width="{RIGHT - LEFT}" height="{y(-band) - y(band):.1f}" ' + (
        f'fill="{PALE}" fill-opacity="0.5"/>'
    )
    for share in dict.fromkeys((-reach, -band, 0.0, band, reach)):
        yield _line(LEFT, y(share), RIGHT, y(share), colour=PALE if share else "#888888")
        yield _text(LEFT - 8, y(share) + 4, f"{100 * share:+.0f} %" if share else "0", anchor="end")
    yield _frame(UPPER, LOWER)
    yield _text((LEFT + RIGHT) / 2, LOWER + 38, f"measured, {unit}", anchor="middle")
    yield _text(LEFT, UPPER - 10, "difference: (predicted - measured) / measured")
    for point, share in zip(points, shares, strict=True):
        yield _mark(point, x(point.measured), y(share), colours)


def _legend(
    points: Sequence[Point], groups: Sequence[str], colours: dict[str, str], band: float
) -> Iterable[str]:
    left, top = RIGHT + 18, TOP + 12
    for group in groups:
        yield f'<circle cx="{left}" cy="{top - 4}" r="4.5" fill="{colours[group]}"/>'
        yield _text(left + 12, top, group)
        top += 20
    if any(point.hollow for point in points):
        yield f'<circle cx="{left}" cy="{top - 4}" r="4" fill="white" stroke="{INK}" stroke-width="1.8"/>'
        yield _text(left + 12, top, "held out")
        top += 20
    yield f'<rect x="{left - 5}" y="{top - 10}" width="10" height="12" fill="{PALE}"/>'
    yield _text(left + 12, top, f"within {100 * band:.0f} %")


def _mark(point: Point, x: float, y: float, colours: dict[str, str]) -> str:
    colour = colours[point.group]
    fill = "white" if point.hollow else colour
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.7" stroke="{colour}" '
        f'stroke-width="{1.8 if point.hollow else 0.8}"><title>{escape(point.name)}</title></circle>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, *, colour: str = "#eeeeee") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _frame(top: float, bottom: float) -> str:
    size = f'width="{RIGHT - LEFT}" height="{bottom - top}"'
    return f'<rect x="{LEFT}" y="{top}" {size} fill="none" stroke="#888888"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _turned(x: float, y: float, text: str) -> str:
    place = f'x="{x}" y="{y}" transform="rotate(-90 {x} {y})"'
    return f'<text {place} text-anchor="middle">{escape(text)}</text>'


def pictures(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name and text of each SVG of docs/accuracy.md."""
    memory = scatter(
        _points(comparisons, "reserved", GIB),
        title="Peak reserved memory of a GPU",
        unit="GiB",
        band=0.05,
        groups=FAMILIES,
    )
    time = scatter(_points(comparisons, "step", 1), title="Step time", unit="s", band=0.20, groups=FAMILIES)
    return {"accuracy-memory.svg": memory, "accuracy-time.svg": time}


def _points(comparisons: Sequence[Mapping[str, Any]], quantity: str, unit: float) -> list[Point]:
    return [
        Point(
            name=c["id"],
            group=c["family"].split(maxsplit=1)[0],
            measured=c["measured"][quantity] / unit,
            predicted=c["predicted"][quantity] / unit,
            hollow=c["set"] != "fit",
        )
        for c in comparisons
        if c["measured"].get(quantity) is not None
    ]
