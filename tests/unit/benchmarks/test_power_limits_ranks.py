"""The page of the comparison with Zeus under several processes shows the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import script

FOLDER = Path(__file__).parents[3] / "benchmarks" / "power_limits_ranks"


def test_the_page_shows_the_committed_results() -> None:
    run = script("benchmarks/power_limits_ranks/run.py")
    results = json.loads((FOLDER / "results" / "ranks.json").read_text(encoding="utf-8"))
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert text == run.filled(text, results)
    documented, seed, ours = (results["forms"][form] for form in run.FORMS)
    assert (documented["energy_factor"], documented["cost_world_size"]) == (1.0, 1)
    assert (seed["energy_factor"], seed["cost_world_size"]) == (4.0, 4)
    assert abs(ours["energy_factor"] - 1) < 0.02
    assert ours["processes_that_set"] == 1
    assert ours["limits_after_watts"] == [ours["limits_before_watts"]]
