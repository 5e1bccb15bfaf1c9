"""The energy section of a run's page: what its charts show, and that it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import HEAD, make, step

import browser
from browser import Browser
from shardwise.record.energy import Used, write_used
from shardwise.record.schema import Event, PowerEvent, StepEvent
from shardwise.report.compare import row_of
from shardwise.report.html.energy import energies, phases
from shardwise.report.html.pages import run_page


def at(number: int, joules: float | None = 200.0) -> StepEvent:
    """A step of half a second."""
    return replace(step(number), joules=joules, joules_unavailable=None if joules else "why")


def power(number: int, what: str, watts: int, **fields: Any) -> PowerEvent:
    return PowerEvent(step=number, what=what, reasons=[], watts=watts, **fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two GPUs at 700 W and from step 8 on at 500 W; a reading is missing at step 6."""
    windows = [(700, 4, 2.0, 1600.0), (300, 4, 5.0, 1000.0), (500, 4, 2.2, 1200.0), (500, 2, 1.1, 608.0)]
    limits = {watts: {"GPU-0": float(watts), "GPU-1": float(min(watts, 600))} for watts in (700, 500)}
    events: list[tuple[float, Event]] = [
        (0.0, replace(HEAD, energy_source="counter")),
        (0.1, power(0, "level", 700, limits_watts=limits[700])),
        *((n / 2, at(n, None if n == 6 else 200.0 if n <= 10 else 150.0)) for n in range(1, 19)),
        *(
            (9.0, power(8, "window", watts, steps=count, seconds=seconds, joules=joules))
            for watts, count, seconds, joules in windows
        ),
        (9.1, power(8, "level", 500, limits_watts=limits[500])),
        (9.2, power(8, "choice", 500)),
    ]
    path = make(tmp_path / "a", *events)
    used = {"start": 360.0, "training": 3240.0, "evaluation": 0.0, "saving": 0.0, "end": 0.0}
    write_used(path, Used(joules=3600.0, error_joules=10.0, seconds=9.0, phases=used))
    return path


def test_points_are_means_of_two_seconds_without_gaps(run: Path) -> None:
    (found,) = energies([row_of(run)])
    watts, each, _ = found.panels
    (power_of, _), (limit, _) = watts.chart["lines"]
    assert power_of.points == [(4, 400.0), (10, 400.0), (14, 300.0), (18, 300.0)], "step 6 begins anew"
    assert limit.points == [(0, 1300.0), (8, 1000.0), (18, 1000.0)], "of both cards, each with its own"
    ((joules, _),) = each.chart["lines"]
    assert joules.points == [(4, 200.0), (10, 200.0), (14, 150.0), (18, 150.0)]


def test_the_search_is_shown_against_the_highest_limit_with_its_choice(run: Path) -> None:
    (found,) = energies([row_of(run)])
    panel = found.panels[2]
    (energy, _), (time, _) = panel.chart["lines"]
    assert energy.points == [(300, 62.5), (500, pytest.approx(100 * 1808 / 6 / 400)), (700, 100.0)]
    assert time.points == [(300, 250.0), (500, pytest.approx(110.0)), (700, 100.0)]
    assert panel.chart["mark"] == "50.000%"
    assert panel.caption == "4 windows at 3 limits, against 700 W; 500 W is chosen."
    assert panel.verdict == ""


def test_phases_are_bars_and_simulated_ones_say_so(run: Path) -> None:
    row, record = row_of(run)
    chart = phases([row])
    assert chart is not None
    ((label, note, ((pieces, text, _),)),) = chart["rows"]
    assert (label, note, text) == ("a", "", "0.001\u202fkWh")
    assert [title for *_, title in pieces] == ["start: 0.0001\u202fkWh", "training: 0.0009\u202fkWh"]
    row["summary"]["energy"]["simulated"] = True
    assert phases([row])["rows"][0][1] == "simulated"  # type: ignore[index]
    (found,) = energies([(row, record)])
    assert {panel.verdict for panel in found.panels} == {"simulated"}


def test_a_run_without_energy_has_no_section(tmp_path: Path) -> None:
    path = make(tmp_path / "a", (0.0, HEAD), (1.0, step(1)))
    assert "<h2>Energy</h2>" not in run_page([path])


@pytest.mark.skipif(browser.found() is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_section_fits_and_the_choice_is_where_it_belongs(run: Path, width: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(run_page([run]), encoding="utf-8")
    with Browser(tmp_path / "profile") as chromium:
        chromium.show(page, width=width)
        assert chromium.value("document.documentElement.scrollWidth") == width
        share = chromium.value(
            "(() => { const mark = document.querySelector('.plot line.limit'), plot = mark.closest('svg');"
            "const a = mark.getBoundingClientRect(), b = plot.getBoundingClientRect();"
            "return ((a.left + a.right) / 2 - b.left) / b.width })()"
        )
    assert share == pytest.approx(0.5, abs=0.01)
