"""Fill docs/tables.md with what its commands print: `python docs/fill_tables.py`."""

import contextlib
import io
import re
import shlex
from pathlib import Path

from shardwise.cli import main

PAGE = Path(__file__).with_name("tables.md")
BLOCK = re.compile(r"(```\n(shardwise tables [^\n]+)\n```\n\n<!-- made -->\n).*?(<!-- end -->)", re.DOTALL)


def made(command: str) -> str:
    """The Markdown that a command of the page makes."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = main([*shlex.split(command)[1:], "--format", "md"])
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return shown.getvalue()


def filled(page: str) -> str:
    """The page with all its tables made again."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{made(block[2])}\n{block[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
