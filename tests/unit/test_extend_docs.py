"""The extension guides name files that exist.

A path is a word in backticks with a slash, or a file at the root. `<vendor>` in a path stands for a name to
choose: such a file is new, and its folder has to exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "extend").glob("*.md"))
_PATH = re.compile(r"`((?:[\w.<>-]+/)+[\w.<>-]*|[\w-]+\.(?:md|toml))`")


def missing(text: str) -> list[str]:
    """The paths in `text` that do not exist."""
    paths = _PATH.findall(text)
    return [path for path in paths if not (ROOT / path.partition("<")[0].rpartition("/")[0]).is_dir()] + [
        path for path in paths if "<" not in path and not (ROOT / path).exists()
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_every_path_in_a_guide_exists(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    assert _PATH.search(text), "a guide names the files to change"
    assert missing(text) == []


def test_a_path_that_does_not_exist_is_found() -> None:
    assert missing("see `src/shardwise/device/nvml.py`, `pyproject.toml` and `tests/shared/machines/`") == []
    assert missing("`src/shardwise/device/<vendor>.py`, `a/b` in prose is a path") == ["a/b", "a/b"]
    assert missing("`src/shardwise/none/<vendor>.py` and `nothing.md`") == [
        "src/shardwise/none/<vendor>.py",
        "nothing.md",
    ]


def test_a_gpu_vendor_is_added_with_at_most_six_edits_and_two_new_files() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs/extend/gpu.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    files = [row[2].strip(" `") for row in rows[1:]]
    assert sum("<" in file for file in files) <= 2
    assert sum("<" not in file for file in files) <= 6
