"""Rich's console, without the blanks that fill lines up where it writes to no terminal."""

import re
import sys
from collections.abc import Callable
from io import StringIO
from shutil import get_terminal_size
from typing import Any

from rich.console import Console


class _Unfilled(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))


def screen(*, stderr: bool = False, **options: Any) -> Console:
    """For stdout or stderr."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return (Console if terminal else _Unfilled)(stderr=stderr, **options)


def as_text(show: Callable[..., None], value: Any, otherwise: int = 100) -> str:
    """What `show` prints of a value, as plain text: as wide as COLUMNS or the terminal, or `otherwise`."""
    console = Console(file=StringIO(), width=get_terminal_size((otherwise, 24)).columns)
    with console.capture() as captured:
        show(value, console=console)
    return "\n".join(map(str.rstrip, captured.get().rstrip().splitlines()))
