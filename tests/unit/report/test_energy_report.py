"""A run's energy in the report: numbers with their errors, or why there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import HEAD, make, shown, step

from shardwise.record.energy import Used, read_used, write_used
from shardwise.record.schema import PowerEvent, ResumeEvent, StopEvent
from shardwise.report.compare import row_of, summary

PRICES = "energy: {price_per_kwh: 0.5, price_per_gpu_hour: 3.6, carbon_g_per_kwh: 400}\n"


def run(folder: Path, *, source: str = "counter", job: str = "") -> Path:
    """30 steps of 0.5 s and 200 J on two GPUs; the 16th follows an evaluation. 7200 J in 36 s in all."""
    steps = [
        (float(n), replace(step(n), joules=None if n in (1, 16) else 200.0, joules_unavailable="why"))
        for n in range(1, 31)
    ]
    choice = PowerEvent(
        step=20, what="choice", reasons=["It is best."], watts=500, simulated=source != "counter"
    )
    end = PowerEvent(step=30, what="end", reasons=[], watts=500, saved_joules=1500.0, saved_seconds=-2.0)
    path = make(
        folder / "a",
        (0.0, replace(HEAD, energy_source=source)),
        *steps,
        (35.0, choice),
        (35.5, end),
        (36.0, StopEvent(step=30, status="finished", seconds=36.0, kwh=0.002)),
    )
    (path / "job.yaml").write_text(f"name: a\n{job}")
    phases = {"start": 0.0, "training": 6000.0, "evaluation": 1200.0, "saving": 0.0}
    write_used(path, Used(joules=7200.0, error_joules=40.0, seconds=36.0, phases=phases))
    return path


def test_energy_has_errors_of_a_fifth_of_a_second_at_each_stretch(tmp_path: Path) -> None:
    found: dict[str, Any] = summary(run(tmp_path, job=PRICES))["energy"]
    seconds = 24 * 0.5  # steps 6 to 30 without step 16: two stretches
    share = 2 * 0.2 / seconds
    assert found["joules_per_step"] == pytest.approx(200.0)
    assert found["joules_per_token"] == pytest.approx(2.0)
    assert found["watts"] == pytest.approx(400.0)
    for name in ("joules_per_step", "joules_per_token", "watts"):
        assert found[f"{name}_error"] == pytest.approx(share * found[name])
        assert found[f"{name}_unavailable"] is None
    assert found["kwh"] == pytest.approx(0.002)
    assert found["kwh_error"] == pytest.approx(40 / 3.6e6)
    assert found["cost"] == pytest.approx(0.002 * 0.5 + 3.6 * 2 * 36 / 3600)
    assert found["cost_of"] == "energy and GPU-hours"
    assert found["cost_error"] == pytest.approx(0.5 * 40 / 3.6e6)
    assert found["carbon_grams"] == pytest.approx(0.8)
    assert found["phases_kwh"] == pytest.approx({"training": 6000 / 3.6e6, "evaluation": 1200 / 3.6e6})
    assert (found["limit_watts"], found["saved_joules"], found["simulated"]) == (500, 1500.0, False)


def test_gpu_hours_are_each_launchs_own(tmp_path: Path) -> None:
    """A run that goes on with other processes costs what each launch had."""
    path = make(
        tmp_path / "a",
        (0.0, replace(HEAD, processes=1)),
        (10.0, StopEvent(step=10, status="paused", seconds=10.0)),
        (50.0, replace(HEAD, processes=4)),
        (50.0, ResumeEvent(step=10)),
        (70.0, StopEvent(step=30, status="finished", seconds=20.0)),
    )
    (path / "job.yaml").write_text("name: a\nenergy: {price_per_gpu_hour: 3600}\n")
    write_used(path, Used(joules=7200.0, error_joules=40.0, seconds=30.0))
    found = summary(path)
    assert found["wall_seconds"] == pytest.approx(30.0)
    assert found["energy"]["cost"] == pytest.approx(1 * 10 + 4 * 20)


def test_without_prices_there_is_no_cost_and_that_is_said(tmp_path: Path) -> None:
    found = summary(run(tmp_path))["energy"]
    assert found["cost"] is None
    assert "energy.price_per_kwh" in found["cost_unavailable"]
    assert "energy.carbon_g_per_kwh" in found["carbon_grams_unavailable"]


def test_without_energy_the_reason_is_shown(tmp_path: Path) -> None:
    plain = replace(step(1), joules_unavailable="no GPU")
    path = make(
        tmp_path / "a",
        (0.0, HEAD),
        (1.0, plain),
        (2.0, StopEvent(step=1, status="finished", seconds=2.0, kwh_unavailable="no GPU")),
    )
    found = summary(path)["energy"]
    assert found["joules_per_token"] is found["kwh"] is None
    assert found["joules_per_token_unavailable"] == found["kwh_unavailable"] == "no GPU"
    assert "energy          - (no GPU)" in shown(path)


def test_few_steps_are_too_short_for_the_counter(tmp_path: Path) -> None:
    path = make(tmp_path / "a", (0.0, HEAD), (1.0, replace(step(1, seconds=0.4), joules=10.0)))
    assert "0.4 s of readings are too short" in summary(path)["energy"]["watts_unavailable"]


def test_the_terminal_shows_energy_and_the_limit(tmp_path: Path) -> None:
    text = shown(run(tmp_path, job=PRICES))
    for expected in (
        "2 J/token ± 3.3 %",
        "200 J/step",
        "400 W",
        "0.002 kWh",
        "0.8 gCO2e",
        "500 W chosen; +1.5 kJ",
    ):
        assert expected in text, expected
    assert "SIMULATED" not in text


@pytest.mark.parametrize(
    ("host", "missing", "text"),
    [
        ({"cpu": 7.2e6}, {"dram": "a reason"}, "CPU 2 kWh; no DRAM: a reason"),
        ({}, {"cpu": "a reason", "dram": "a reason"}, "no CPU and DRAM: a reason"),
    ],
)
def test_cpu_and_dram_are_apart(
    tmp_path: Path, host: dict[str, float], missing: dict[str, str], text: str
) -> None:
    path = run(tmp_path)
    used = read_used(path)
    assert used is not None
    write_used(path, replace(used, host=host, host_unavailable=missing))
    assert text in shown(path)
    found = summary(path)["energy"]
    assert found["kwh"] == pytest.approx(0.002), "of GPUs alone"
    assert found["host_kwh"] == {part: joules / 3.6e6 for part, joules in host.items()}


def test_simulated_energy_never_looks_measured(tmp_path: Path) -> None:
    path = run(tmp_path, source="simulated")
    rows = [line for line in shown(path).splitlines() if line.startswith(("energy", "power limit"))]
    assert len(rows) == 3
    assert all("SIMULATED: " in row for row in rows)
    row, _ = row_of(path)
    assert row["measured"]["joules_per_token"] is None
    assert row["measured"]["joules_unavailable"] == "simulated, not measured"


def test_a_damaged_meter_is_an_error(tmp_path: Path) -> None:
    path = run(tmp_path)
    (path / "energy" / "meter.json").write_text("{")
    with pytest.raises(Exception, match="meter cannot be read"):
        read_used(path)
