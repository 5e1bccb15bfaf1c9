"""docs/tables.md: its tables are what the commands print, and its audit quotes them."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tables.md").read_text(encoding="utf-8")


@pytest.fixture
def filler() -> types.ModuleType:
    return script("docs/fill_tables.py")


@pytest.mark.parametrize(
    "start", ["memory --models llama-2-7b", "speed --models 7b_mamba,3b_mamba --gpus 6x"]
)
def test_a_table_of_the_page_is_what_its_command_prints(
    start: str, filler: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them, in seconds; after a change `python docs/fill_tables.py` makes them all."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    block = next(one for one in filler.BLOCK.finditer(PAGE) if one[2].startswith(f"shardwise tables {start}"))
    assert filler.filled(block[0]) == block[0]


def test_the_audit_quotes_numbers_of_the_page_s_tables(filler: types.ModuleType) -> None:
    shown = {number for block in filler.BLOCK.finditer(PAGE) for number in numbers(block[0])}
    rest = filler.BLOCK.sub("", PAGE)
    quoted, column = [], None
    for line in rest.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "`tables`" in cells or "`tables`, four H100" in cells:
            column = next(index for index, cell in enumerate(cells) if cell.startswith("`tables`"))
        elif column is not None and line.startswith("|") and "---" not in line:
            quoted += numbers(cells[column])
        else:
            column = column if "---" in line else None
    assert len(quoted) > 40
    assert [number for number in quoted if number not in shown] == []


def numbers(text: str) -> list[str]:
    """Numbers with a point or a comma, or of two digits; not those of names such as ZeRO-3."""
    return re.findall(r"(?<![\w.,-])\d+(?:[.,]\d+)+(?![\w.])", text)
