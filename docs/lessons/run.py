"""Run the commands of the lessons: fill in what they print, or compare.

python docs/lessons/run.py [--check] [NAME ...]

A fenced block `console` holds one command after `$ ` and what it prints. The Chinese page of the same name
gets the same blocks. tests/unit/test_lessons.py compares the rest of it, with `outline` and `stamp`.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "docs" / "lessons", ROOT / "docs" / "zh" / "lessons"
BLOCK = re.compile(r"^```console\n\$ ((?:.*\\\n)*.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![A-Za-z\d.])\d(?:[\d,]*\d)?(?:\.\d+)?")
STAMP = re.compile(r"\n<!-- English: ([0-9a-f]{12}) -->\n\Z")


def lessons() -> list[Path]:
    """All English pages."""
    return sorted(ENGLISH.glob("*.md"))


def commands(text: str) -> list[str]:
    """The commands of a page, in order."""
    return [match[1] for match in BLOCK.finditer(text)]


def filled(text: str, printed: dict[str, str]) -> str:
    """The page with what its commands have printed."""
    return BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{printed[match[1]]}```", text)


def run(command: str) -> str:
    """What a command prints; at 100 columns, without colours. Fails with the command's own message."""
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"$ {command}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def prose(text: str) -> str:
    """A page without fenced blocks, inline code and targets of links."""
    plain = re.sub(r"`[^`\n]*`", "", STAMP.sub("", FENCE.sub("", text)))
    return re.sub(r"\]\([^)]*\)", "]", plain)


def unproven(text: str) -> list[str]:
    """Numbers of the prose, from 33 on or with a fraction, that no command of the page has or prints."""
    code = "\n".join(FENCE.findall(text)).replace(",", "")
    shown = set(re.findall(r"\d+(?:\.\d+)?", code))
    found = [number.replace(",", "") for number in NUMBER.findall(prose(text))]
    return [number for number in found if number not in shown and ("." in number or int(number) > 32)]


def stamp(english: str) -> str:
    """What a translation says it was made from: a hash of the page without what commands print."""
    text = BLOCK.sub(lambda match: match[1], english)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def outline(text: str) -> dict[str, object]:
    """What a translation shares with its original."""
    bare = FENCE.sub("", STAMP.sub("", text))
    return {
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", bare, re.MULTILINE)],
        "cells of each table row": [line.count("|") for line in bare.splitlines() if line.startswith("|")],
        "items": len(re.findall(r"^(?:[-*]|\d+\.) ", bare, re.MULTILINE)),
        "fenced blocks": FENCE.findall(text),
        "inline code": sorted(re.findall(r"`[^`\n]*`", bare)),
        "numbers": sorted(NUMBER.findall(prose(text))),
    }


def differences(page: Path, new: str) -> str:
    """What a page shows, against what is printed now; a unified diff."""
    name = page.relative_to(ROOT).as_posix()
    old = page.read_text(encoding="utf-8")
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), name, "printed now", lineterm="", n=1)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="lessons, as 02-zero; all by default")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    asked = parser.parse_args(arguments)
    pages = [page for page in lessons() if not asked.names or page.stem in asked.names]
    both = [other for page in pages for other in (page, CHINESE / page.name) if other.exists()]
    texts = {page: page.read_text(encoding="utf-8") for page in both}
    wanted = dict.fromkeys(command for text in texts.values() for command in commands(text))
    with ThreadPoolExecutor(2) as pool:
        printed = dict(zip(wanted, pool.map(run, wanted), strict=True))
    stale = {page: new for page, text in texts.items() if (new := filled(text, printed)) != text}
    if asked.check:
        if stale:
            shown = "\n".join(differences(page, new) for page, new in stale.items())
            sys.exit(f"{shown}\nlessons show what is no longer printed; `make lessons` writes them again")
    else:
        for page, new in stale.items():
            page.write_text(new, encoding="utf-8")
    print(f"{len(wanted)} commands of {len(pages)} lessons, {len(stale)} pages changed")


if __name__ == "__main__":
    main()
