"""docs/energy.md shows the committed results, and the bounds that were asked for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from scripts import script

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("benchmarks/power_limits_predicted/page.py")


@pytest.mark.parametrize("table", ["accuracy", "levels", "jobs", "swept"])
def test_the_page_has_the_tables_of_the_results(page: ModuleType, table: str) -> None:
    text = (ROOT / "docs" / "energy.md").read_text(encoding="utf-8")
    shown = "\n".join(getattr(page, table)())
    assert shown[shown.index("|") :] in text, "python benchmarks/power_limits_predicted/page.py"


def test_language_models_are_within_the_bounds_with_the_shipped_coefficients(page: ModuleType) -> None:
    rows = [row for row in page.read("zeus.json")["rows"] if "bert" in row["name"] and "V100" in row["how"]]
    assert [row["how"].endswith("held out") for row in rows] == [True, False]
    for row in rows:
        for name in ("time", "energy"):
            assert row[f"{name}_mean_percent"] <= 6
            assert abs(row[f"{name}_worst_percent"]) <= 15
