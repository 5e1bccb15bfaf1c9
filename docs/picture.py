"""Draw docs/demo.svg, the README's picture: `python docs/picture.py` runs the demo and keeps its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
SKIPPED = re.compile(r"^(wrote|next:|The run is in|newest checkpoint)|^\$ mkdir")
BAR = re.compile(r"^step\s+\x1b")


def demo() -> list[str]:
    """Lines of a demo as a terminal shows them, without the progress bar."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", "demo", "--out", f"{folder}/demo"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=True,
        )
    lines = [re.split(r"\r(?:\x1b\[2K)?", line)[-1] for line in done.stdout.decode().split("\n")]
    lines = [re.sub(r"\x1b\[\?25[lh]|\x1b\[1A|\x1b\[2K", "", line) for line in lines]
    return [line for line in lines if not BAR.match(line) and not SKIPPED.match(line)]


def main() -> None:
    """Run the demo and write the picture into this folder."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(demo())).strip()
        console.print(Text.from_ansi(text))
        console.save_svg(str(Path(__file__).with_name("demo.svg")), title="shardwise demo")


if __name__ == "__main__":
    main()
