"""Stacked bars of memory in text, readable without colour."""

from __future__ import annotations

from rich.text import Text

from shardwise.planner.why import terms
from shardwise.simulate.prediction import Memory

PARTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("█", "blue", "weights", ("weights",)),
    ("▓", "magenta", "gradients, optimizer", ("gradients", "optimizer")),
    ("▒", "cyan", "activations, loss", ("activations", "output head and loss")),
    ("░", "yellow", "rest", ("engine buffers", "fragmentation", "CUDA and NCCL")),
)
"""Glyph, colour, name, and the terms of memory in it."""

FREE, LIMIT, BEYOND = "·", "│", "»"
ROOM = 0.75
"""Share of a bar's width up to the limit, where something is drawn beyond it."""


def room(width: int, *, all_fit: bool) -> int:
    """Cells before the limit in bars of `width` cells."""
    return width - 1 if all_fit else max(1, round(ROOM * (width - 1)))


def memory_bar(memory: Memory, width: int, before: int) -> Text:
    """`████▓▓▒▒▒▒░···│    `: the parts, what is free, the limit, what does not fit.

    Exactly `width` cells, `before` of them up to the limit. A bar crosses the limit only if the strategy does
    not fit; `»` ends a bar that is longer than the line.
    """
    cells = _cells(memory, before, width)
    if not memory.fits:
        cells += cells[-1:] * (before + 1 - len(cells))
    inside, outside = cells[:before], cells[before:]
    after = width - before - 1
    if len(outside) > after:
        outside = [*outside[: after - 1], (BEYOND, "red")]
    inside += [(FREE, "dim")] * (before - len(inside))
    outside += [(" ", "")] * (after - len(outside))
    limit = (LIMIT, "green" if memory.fits else "red")
    return Text.assemble(*inside, limit, *outside)


def plain_bar(share: float, width: int) -> Text:
    """A bar of one part; a share of 1 or more fills it."""
    filled = min(width, round(width * share))
    return Text.assemble(("█" * filled, "cyan"), (FREE * (width - filled), "dim"))


def legend() -> Text:
    """What the glyphs mean."""
    pieces: list[tuple[str, str] | str] = []
    for glyph, colour, name, _ in PARTS:
        pieces += [(glyph, colour), f" {name}  "]
    return Text.assemble(*pieces, LIMIT, " limit")


def _cells(memory: Memory, before: int, most: int) -> list[tuple[str, str]]:
    """One (glyph, colour) per cell, at most `most`; `before` cells stand for the capacity."""
    values = terms(memory)
    cells: list[tuple[str, str]] = []
    reached = 0
    for glyph, colour, _, names in PARTS:
        reached += sum(values[name] for name in names)
        end = min(most, round(before * reached / memory.capacity_bytes))
        cells += [(glyph, colour)] * (end - len(cells))
    return cells
