"""docs/extend/engine.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_file_that_the_page_names_exists() -> None:
    page = ROOT / "docs" / "extend" / "engine.md"
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|docs|tests)/[^`]+)`", text)
    links = [page.parent / link for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(named) > 15
    paths = [ROOT / name for name in named if "NAME" not in name]
    assert [str(path) for path in (*paths, *links) if not path.exists()] == []
