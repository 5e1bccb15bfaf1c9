"""A file after reading: its values, and the place of each in the text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.job.source import Key, nearest

Span = tuple[int, int]  # offsets in the text: the first character, and the one after the last

Kind = Literal["deepspeed", "accelerate", "training", "job", "pins", "rows"]
Syntax = Literal["json", "yaml", "python", "shell", "text"]

LONGEST_NUMBER = 100  # digits: the product of three such numbers is still a float

AUTO = "auto"  # the value that Hugging Face's Trainer and Accelerate fill in; DeepSpeed has no such value


class UnreadableError(Exception):
    """The text cannot be read as what it seems to be."""

    def __init__(self, what: str, *, line: int, fix: str, ours: bool = False) -> None:
        """`ours`: the reader cannot, the file may be right."""
        super().__init__(what)
        self.what, self.line, self.fix = what, line, fix
        self.ours, self.cell = ours, 0  # of a notebook, in which the line then counts


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The place of a key and its value."""

    line: int  # counted from 1
    key: Span | None = None  # the key as written, with its quotes; None for items of a list, and in scripts
    value: Span = (0, 0)  # in JSON and YAML, the texts that can be edited


def every(values: Mapping[Any, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """All keys of a file with their values, each section before what is in it."""
    for name, value in values.items():
        yield (*above, str(name)), value
        if isinstance(value, Mapping):
            yield from every(value, (*above, str(name)))


@dataclass(frozen=True, kw_only=True)
class Document:
    """Values with their places. An item of a list has its index as key."""

    name: str
    text: str
    syntax: Syntax
    values: Mapping[str, Any]
    marks: Mapping[Key, Mark]
    kind: Kind = "deepspeed"
    comments: tuple[Span, ...] = ()  # comments in a JSON text
    trailing_commas: tuple[int, ...] = ()  # positions of commas that JSON does not allow
    duplicates: tuple[tuple[Key, int], ...] = ()
    """Keys given twice in a section, and the line of the first; any reader uses the last, as `values` do."""
    marked: bool = False  # whether the file begins with a byte order mark, which `text` does not include
    bare: bool = False  # whether the braces around the keys of a JSON are missing
    uses: frozenset[str] = frozenset()  # names that a Python script calls
    inner: tuple["Document", ...] = ()  # DeepSpeed configurations that the script writes as dicts
    first: int = 1  # their first line
    flags: frozenset[str] = frozenset()  # of a command's keys, those that its script gets
    environment: Mapping[str, str] = field(default_factory=dict)  # the variables of a shell's script
    cells: tuple[int, ...] = ()  # of a notebook, the line where the code of each cell begins; 0: no code
    unknown: frozenset[Key] = frozenset()  # keys of those whose value, AUTO here, only a run knows
    set_at: Mapping[Key, tuple[str, int]] = field(default_factory=dict)
    """Keys that a script sets after it loads the file: the script, and its line."""
    lines: tuple[tuple[str, int], ...] = ()  # of a text as it runs: file and line of each of its lines

    def get(self, *key: str) -> Any:
        """The value, or None if the key, or a section above it, is absent."""
        value: Any = self.values
        for part in key:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def section(self, *key: str) -> Mapping[str, Any]:
        """The values of a section; empty if it is absent."""
        value = self.get(*key)
        return value if isinstance(value, Mapping) else {}

    def has(self, *key: str) -> bool:
        return key in self.marks

    def on(self, *key: str) -> bool:
        """Whether the value is true."""
        return self.get(*key) is True

    def number(self, *key: str) -> float | None:
        """The value if it is a finite number; None for `auto` and everything else."""
        value = self.get(*key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and math.isfinite(value) else None

    def place(self, line: int) -> tuple[str, int]:
        """The file, and its line, for a line of the text."""
        return self.lines[line] if self.lines else (self.name, line)

    def at(self, line: int) -> str:
        """The same in words, with the cell of a notebook; without the file's name where it is this file."""
        file, at = self.place(line)
        cell, row = place_in_cells(self.cells, at)
        return f"{at} of {file}" if file != self.name else f"{row} of cell {cell}" if cell else f"{at}"

    def line(self, key: Key) -> int:
        """The line of the key, or of the nearest section above it in the text; else the first."""
        near = nearest(key, self.marks)
        return self.marks[near].line if near else self.first


def place_in_cells(starts: Sequence[int], line: int) -> tuple[int, int]:
    """The cell that has a line of a notebook's code, and its line there; 0 and the line without cells."""
    begun = [(cell, start) for cell, start in enumerate(starts, 1) if 0 < start <= line]
    cell, start = begun[-1] if begun else (0, 1)
    return cell, line - start + 1


def line_at(text: str, position: int) -> int:
    """The line of a character, counted from 1."""
    return text.count("\n", 0, position) + 1
