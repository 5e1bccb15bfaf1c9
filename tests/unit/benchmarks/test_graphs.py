"""The page shows what was measured with recorded passes."""

from __future__ import annotations

from pathlib import Path

from scripts import script

ROOT = Path(__file__).parents[3]


def test_the_pages_table_is_made_of_the_results() -> None:
    table = script("benchmarks/graphs/table.py").table()
    assert table.count("\n") == 6
    assert table in (ROOT / "docs" / "throughput.md").read_text(encoding="utf-8")
