"""docs/resuming.md shows the committed results of benchmarks/resume/pairs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "resume" / "results"


@pytest.mark.parametrize("kind", ["full", "tied", "lora", "nf4", "mamba", "fp16"])
def test_the_page_has_the_figures_of_the_table(kind: str) -> None:
    found = json.loads((RESULTS / f"{kind}.json").read_text())
    assert (found["kind"], found["steps"]) == (kind, 20)
    rows, names = found["rows"], {row["saved"] for row in found["rows"]}
    assert {(row["saved"], row["resumed"]) for row in rows} == {(one, two) for one in names for two in names}
    worst = max(row["loss_error"] for row in rows)
    assert worst < 1e-6 or kind in ("mamba", "fp16")
    same = [row["same_bits"] for row in rows if row["saved"] == row["resumed"]]
    equal = sum(not row["differs"] for row in rows)
    figures = f"| {len(names)} | {len(rows)} | {equal} | {worst:.1e} | {sum(same)} of {len(same)} |"
    (line,) = [
        line
        for line in (ROOT / "docs" / "resuming.md").read_text().splitlines()
        if line.startswith(f"| {kind}:")
    ]
    assert line.endswith(figures)
