"""A file as a reader left it: its values, and where in the text each of them stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Key = tuple[str, ...]
Span = tuple[int, int]
"""Characters of the text from the first to the one after the last."""

Kind = Literal["deepspeed", "accelerate", "training", "job"]
Syntax = Literal["json", "yaml", "python", "shell"]

LONGEST_NUMBER = 100
"""Digits: three numbers of so many multiplied are still a float."""

AUTO = "auto"
"""What Hugging Face's Trainer and Accelerate fill in; DeepSpeed knows no such value."""


class UnreadableError(Exception):
    """A text that is not what it seems to be."""

    def __init__(self, what: str, *, line: int, fix: str) -> None:
        super().__init__(what)
        self.what, self.line, self.fix = what, line, fix


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a key and its value stand."""

    line: int
    """Counted from 1."""
    key: Span | None
    """Of the key as written, with its quotes; None for items of a list."""
    value: Span


@dataclass(frozen=True, kw_only=True)
class Document:
    """Values with their places. A list's items have their index as key."""

    name: str
    text: str
    syntax: Syntax
    values: Mapping[str, Any]
    marks: Mapping[Key, Mark]
    kind: Kind = "deepspeed"
    comments: tuple[Span, ...] = ()
    """Of a JSON text."""
    trailing_commas: tuple[int, ...] = ()
    """Where JSON allows none."""
    duplicates: tuple[tuple[Key, int], ...] = ()
    """Keys that the same section gives again further down, and the lines where they are given before.

    `values` and `marks` are those of the last: the only one that any reader takes.
    """
    marked: bool = False
    """Whether the file begins with a byte order mark, which `text` does not hold."""
    uses: frozenset[str] = field(default=frozenset())
    """Of a Python script: names that it calls."""

    def get(self, *key: str) -> Any:
        """The value, or None where the key, or a section above it, is not there."""
        value: Any = self.values
        for part in key:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def section(self, *key: str) -> Mapping[str, Any]:
        """A section's values; empty where there is no such section."""
        value = self.get(*key)
        return value if isinstance(value, Mapping) else {}

    def has(self, *key: str) -> bool:
        return key in self.marks

    def on(self, *key: str) -> bool:
        """Whether a switch is on for certain."""
        return self.get(*key) is True

    def number(self, *key: str) -> float | None:
        """The value where it is a finite number; None for `auto` and everything else."""
        value = self.get(*key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and math.isfinite(value) else None

    def line(self, key: Key) -> int:
        """The line of the key, or of the nearest section above that stands in the text; else the first."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.marks:
                return self.marks[key[:length]].line
        return 1


def line_at(text: str, position: int) -> int:
    """The line of a character, counted from 1."""
    return text.count("\n", 0, position) + 1
