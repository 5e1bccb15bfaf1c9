"""docs/sharding.md shows what is committed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_committed_predictions() -> None:
    """Made anew by `python benchmarks/groups/predict.py`."""
    spec = importlib.util.spec_from_file_location("groups", ROOT / "benchmarks" / "groups" / "predict.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads(script.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 8
    page = script.PAGE.read_text(encoding="utf-8")
    assert "| 16x8xH100 | 25 GbE | 8 |" in page
    assert page == script.filled(page, rows)
    assert page != script.filled(page, rows[:-1])
