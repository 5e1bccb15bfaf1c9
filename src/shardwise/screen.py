"""Rich's console, without the blanks that fill lines up where it writes to no terminal."""

import re
import sys
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
