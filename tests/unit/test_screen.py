"""What is printed into a file or a pipe has no blanks at the ends of its lines; a terminal gets them."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table

from shardwise.screen import screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table() -> Table:
    made = Table(box=None, show_header=False)
    made.add_row("a", "long")
    made.add_row("b", "c")
    return made


@pytest.mark.parametrize("stderr", [False, True])
def test_no_line_ends_with_blanks_outside_a_terminal(
    capsys: pytest.CaptureFixture[str], stderr: bool
) -> None:
    screen(stderr=stderr).print(table())
    screen(stderr=stderr).print("one line  \n", end="")
    text = capsys.readouterr()[stderr]
    assert text == " a  long\n b  c\none line\n"


def test_a_terminal_gets_what_rich_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    screen(color_system=None, force_terminal=True).print(table())
    assert " b  c    \n" in stream.getvalue()
