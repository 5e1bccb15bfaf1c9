"""docs/sharding.md shows what is committed."""

from __future__ import annotations

import json

from scripts import script


def test_the_page_shows_the_committed_predictions() -> None:
    """Made anew by `python benchmarks/groups/group_sizes.py`."""
    predict = script("benchmarks/groups/group_sizes.py")
    rows = json.loads(predict.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 8
    page = predict.PAGE.read_text(encoding="utf-8")
    assert "| 16x8xH100 | 25 GbE | 8 |" in page
    assert page == predict.filled(page, rows)
    assert page != predict.filled(page, rows[:-1])
