"""docs/tensor-parallel.md shows what is committed."""

from __future__ import annotations

import json

from scripts import script


def test_the_page_shows_the_committed_predictions() -> None:
    """Made anew by `python benchmarks/tensor_parallel/autotp.py`."""
    predict = script("benchmarks/tensor_parallel/autotp.py")
    rows = json.loads(predict.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 16
    page = predict.PAGE.read_text(encoding="utf-8")
    assert "| 2048 × 4 | PCIe 4.0 |" in page
    assert page == predict.filled(page, rows)
    assert page != predict.filled(page, rows[:-1])
