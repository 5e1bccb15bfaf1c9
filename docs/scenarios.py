"""Run the commands of docs/scenarios.md and look for what the page says they print.

python docs/scenarios.py [WORD ...]

Rows of a table with the column `what it prints` are run, each in a fresh folder with the files of PLACES;
with WORDs those that have one of them. The cell has texts in backticks in the order of the output, with …
for what is left out, and `exit code N` where that is not 0. Spaces and line breaks do not count.
tests/unit/test_scenarios.py runs a few of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import environ, pathsep
from pathlib import Path
from shutil import copytree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scenarios.md"
PLACES = ("docs/scenarios", "docs/examples", "tests/unit/lint/examples")
CODE = re.compile(r"`([^`]*)`")


@dataclass(frozen=True)
class Row:
    """A row of a table whose commands are run."""

    wanted: str
    command: str
    prints: str
    state: str


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table, with its header."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not re.fullmatch(r"[|\s:-]+", line):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in found if table]


def rows(page: str) -> list[Row]:
    """All rows whose commands are run."""
    wanted = [table for table in tables(page) if table[0][2:3] == ["what it prints"]]
    return [Row(*cells) for table in wanted for cells in table[1:]]


def squeezed(text: str) -> str:
    """A text without spaces and line breaks: the width of a terminal decides them."""
    return re.sub(r"\s+", "", text)


def missing(row: Row, printed: str, code: int) -> list[str]:
    """What the row says and the command did not do."""
    named = re.search(r"exit code (\d+)", row.prints)
    expected = int(named[1]) if named else 0
    wrong = [] if code == expected else [f"exit code {code}, not {expected}"]
    rest = squeezed(printed)
    for quoted in CODE.findall(row.prints):
        for part in filter(None, map(squeezed, quoted.split("…"))):
            before, there, after = rest.partition(part)
            wrong += [] if there else [f"not printed: {part}"]
            rest = after if there else before
    return wrong


def run(row: Row) -> list[str]:
    """Run the command of a row; what of the page is not true."""
    source = pathsep.join(filter(None, [str(ROOT / "src"), environ.get("PYTHONPATH")]))
    own = {
        "PATH": f"{Path(sys.executable).parent}{pathsep}{environ['PATH']}",
        "COLUMNS": "110",
        "NO_COLOR": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        for place in PLACES:
            copytree(ROOT / place, folder, dirs_exist_ok=True)
        done = subprocess.run(
            ["bash", "-c", 'shardwise() { python -m shardwise "$@"; }; ' + CODE.findall(row.command)[0]],
            cwd=folder,
            env={**environ, **own, "PYTHONPATH": source},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    wrong = missing(row, done.stdout, done.returncode)
    return [f"{row.command}", *wrong, done.stdout] if wrong else []


def main(words: list[str]) -> None:
    """See the module."""
    asked = [
        row
        for row in rows(PAGE.read_text(encoding="utf-8"))
        if not words or any(word in f"{row.wanted} {row.command}" for word in words)
    ]
    with ThreadPoolExecutor(2) as pool:
        wrong = [one for one in pool.map(run, asked) if one]
    for one in wrong:
        print("\n".join(one), end="\n\n")
    sys.exit(f"{len(wrong)} of {len(asked)} rows of docs/scenarios.md are not true" if wrong else None)


if __name__ == "__main__":
    main(sys.argv[1:])
