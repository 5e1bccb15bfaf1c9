"""The values of a page: its large figures, limits of its charts, and which row it calls the best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import GIB, measurement, prediction, row
from shardwise.record.bench import read_bench
from shardwise.report.html import views
from shardwise.report.html.numbers import THIN
from shardwise.report.html.pages import bench_page

Change = Callable[[list[dict[str, Any]]], None]


def page_of(folder: Path, change: Change) -> str:
    """The bench's page after a change of its rows, with ordinary spaces."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows[1]["label"] = "zero3"
    change(rows)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return bench_page(read_bench(folder)).replace(THIN, " ")


def test_the_large_figures_are_the_best_rows_and_the_mean_errors(bench_folder: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[1]["predicted"] = prediction(15.0)  # 16 GiB with what is outside; 21 are measured
        rows[1]["measured"]["joules_per_token"] = 0.3

    text = page_of(bench_folder, change)
    assert "<dd>1,000 tok/s<small>per GPU, zero2, 1.25 times zero3</small>" in text
    assert "<dt>Least memory</dt><dd>11.0 GiB<small>zero2</small>" in text
    assert "<dt>Least energy</dt><dd>0.3 J/token<small>zero3</small>" in text
    assert "<dd>21 %<small>in memory, 24 % in speed, on average</small>" in text  # of 2/11, 5/21; 0.1, 0.375


def test_a_row_that_was_predicted_to_flush_the_cache_is_not_the_predicted_best(bench_folder: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["predicted"]["memory"]["cache_flushes"] = 1
        rows[0]["predicted"]["time"]["tokens_per_second_per_gpu"] = 2000.0

    text = page_of(bench_folder, change)
    assert "<b>zero3</b> was predicted to be the fastest that fits, 1,100 tok/s" in text
    assert "<b>zero2</b> is recommended, 1,000 tok/s" in text


def test_last_losses_are_compared(bench_folder: Path) -> None:
    text = page_of(bench_folder, lambda rows: rows[1]["measured"]["loss"].__setitem__(-1, 4.0))
    assert "they are 5.3 % apart" in text  # 4 and 3.8


@pytest.mark.parametrize(("capacity", "drawn"), [(14, True), (15, True), (17, False)])
def test_a_limit_is_drawn_where_it_is_not_far_beyond_the_bars(capacity: int, drawn: bool) -> None:
    guess = prediction(9.0)  # and 1 outside: 10 GiB
    guess["memory"]["capacity_bytes"] = capacity * GIB
    chart = views.memory([row("a", predicted=guess, measured=measurement(9.6))])  # 10.6 GiB
    assert (chart["limit"] is not None) == drawn
    assert any(name.startswith("what a process may use") for name in chart["legend"]) == drawn


def test_a_slow_first_step_is_cut_so_that_the_others_can_be_seen() -> None:
    (panel,) = views.each_step([row("a", measured=measurement(9.0))])  # 60 s, then 0.5 s each
    assert panel.chart["marks"][0] == f"1.5{THIN}s"
    assert panel.chart["shade"] == "23.077%"  # 3 of 13 steps


def test_reserved_memory_lies_above_allocated_memory_within_a_step() -> None:
    (panel,) = views.within_step([row("a", measured=measurement(9.0))])
    levels = {curve.name: max(y for _, y in curve.points) for curve, _ in panel.chart["lines"]}
    assert levels == {"reserved": 9.0, "allocated": pytest.approx(4.9)}
