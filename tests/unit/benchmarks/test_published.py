"""benchmarks/published: its rows are jobs, its differences have reasons, its page is what is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest

from scripts import script
from shardwise.hardware.parse import parse_hardware

MEMORY = ["allocated_gib", "reserved_gib"]
FOLDER = Path(__file__).parents[3] / "benchmarks" / "published"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    return script("benchmarks/published/published.py")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return script("benchmarks/published/published_page.py")


@pytest.fixture(scope="module")
def results(published: ModuleType) -> list[dict[str, Any]]:
    return json.loads(published.RESULTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_every_row_is_a_job_with_a_source(published: ModuleType, tmp_path: Path) -> None:
    runs = published.load_runs()
    assert len(runs["table"]) >= 20
    assert all(table["source"].startswith("http") and table["date"] for table in runs["table"])
    rows = [row for table in runs["table"] for row in published.rows_of(table)]
    assert len(rows) >= 150
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        job = published.job_of(row, runs["models"], tmp_path)
        assert job.train.global_batch % (row["micro"] * row["accumulation"]) == 0
        parse_hardware(row["gpus"])


def test_all_546_rows_are_accounted_for(published: ModuleType) -> None:
    """A row of IE3 is of eight sizes, each predicted; the page of sources that was read has 546 rows."""
    runs = published.load_runs()
    predicted = {row["id"].partition("@")[0] for t in runs["table"] for row in published.rows_of(t)}
    left = sum(one["rows"] for one in runs["left_out"])
    assert len(predicted) + left == 546


def test_the_committed_results_are_those_of_the_rows(published: ModuleType, results: Any) -> None:
    rows = [row for table in published.load_runs()["table"] for row in published.rows_of(table)]
    assert [result["id"] for result in results] == [row["id"] for row in rows]
    for result, row in zip(results, rows, strict=True):
        assert result["published"]["tokens_per_second"] == (row.get("tokens_per_second") or None)


def test_every_large_difference_has_its_reason_and_every_reason_a_row(
    published: ModuleType, page: ModuleType, results: Any
) -> None:
    runs = published.load_runs()
    needing = page.needing_reason(results)
    assert [result["id"] for result, about in needing if not page.reason(result, about, runs)] == []
    for one in runs["reason"]:
        assert any(about == one["about"] and re.search(one["rows"], r["id"]) for r, about in needing), one


def test_the_page_shows_what_is_committed(published: ModuleType, page: ModuleType, results: Any) -> None:
    runs, text = published.load_runs(), page.PAGE.read_text(encoding="utf-8")
    parts = {"headline": page.headline(results), "fits": page.fits(results)}
    parts |= {"sources": page.sources(results, runs), "left-out": page.left_out(runs)}
    assert page.filled(text, parts) == text
    assert page.filled(text, {"headline": page.headline(results[5:])}) != text


def test_a_wrong_fit_contradicts_the_authors(page: ModuleType) -> None:
    """`tight` fits; rows of another program, and those without a result, prove nothing."""
    said = [("no", "yes"), ("tight", "no"), ("fits", "yes"), ("no", "no"), ("not compared", "yes")]
    said += [("fits", "no result")]
    found = [page.wrong_fit({"fits": fits, "ran": ran}) for fits, ran in said]
    assert found == [True, True, False, False, False, False]


@pytest.mark.parametrize(("quantities", "bound"), [(["tokens_per_second"], 0.08), (MEMORY, 0.05)])
def test_half_of_the_rows_are_close(results: Any, quantities: list[str], bound: float) -> None:
    found = [result["differences"][quantity] for result in results for quantity in quantities]
    assert median(abs(one) for one in found if one is not None) <= bound


def test_what_peft_prepares_for_4_bits_has_hidden_states_in_fp32(published: ModuleType) -> None:
    """Two bytes more of what each of 40 checkpointed blocks keeps, and embeddings in fp32."""
    table = next(table for table in published.load_runs()["table"] if table["id"] == "FA2")
    rows = {row["id"]: row for row in published.rows_of(table)}
    prepared, not_prepared = (
        published.predict_group([rows[name]])[0]["predicted"]["allocated_gib"]
        for name in ("FA2.17", "FA2.21")
    )
    assert prepared - not_prepared == pytest.approx((40 * 4 * 4096 + 49152) * 2304 * 2 / 2**30, rel=0.1)


def test_a_row_is_predicted_as_committed(published: ModuleType, results: Any) -> None:
    """The smallest model, from its row to its numbers; another value means that the page is out of date."""
    table = next(table for table in published.load_runs()["table"] if table["id"] == "LG3")
    row = next(row for row in published.rows_of(table) if row["id"] == "LG3.6")
    (found,) = published.predict_group([row])
    expected = next(result for result in results if result["id"] == "LG3.6")
    speed = found["predicted"]["tokens_per_second"]
    assert speed == pytest.approx(expected["predicted"]["tokens_per_second"], rel=1e-3)
    assert found["differences"]["tokens_per_second"] == pytest.approx(speed / (8192 / 0.44765) - 1, abs=1e-4)
    assert found["predicted"]["allocated_gib"] == pytest.approx(
        expected["predicted"]["allocated_gib"], rel=1e-3
    )
