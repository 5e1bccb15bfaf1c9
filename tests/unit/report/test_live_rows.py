"""Samples in files: rows, headers, what a crash left."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.device import NoDevice, Replay
from shardwise.errors import JobError
from shardwise.report.live.machine import Machine
from shardwise.report.live.rows import COLUMNS, RowFile, rows

TWO_GPUS = json.loads((Path(__file__).parents[3] / "docs/examples/two-h200.json").read_text())
T0 = 1_795_000_000.0


def machine(**changes: Any) -> Machine:
    """The two GPUs; `changes` are readings of GPU 0."""
    values = copy.deepcopy(TWO_GPUS)
    values["gpus"][0]["readings"] |= changes
    return Machine(Replay(values))


def sample_of(two: Machine, run: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"time": T0, **two.sample(), "run": run, "run_unavailable": "none is running"}


def test_csv_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    path, sample = tmp_path / "a.csv", sample_of(machine())
    for _ in range(2):
        file = RowFile(path, as_csv=True)
        file.write(sample)
        written = len(path.read_text().splitlines())
        file.close()
        assert written == len(path.read_text().splitlines()), "a row is in the file before it is closed"
    found = list(csv.DictReader(io.StringIO(path.read_text())))
    assert len(found) == 4
    assert tuple(found[0]) == COLUMNS
    assert [row["gpu_index"] for row in found] == ["0", "1", "0", "1"]
    row = found[1]
    assert (float(row["gpu_power_watts"]), row["gpu_clocks_held_by"]) == (598.7, "power limit")
    assert (row["run_step"], float(row["time"])) == ("", T0)


def test_a_row_that_a_crash_cut_off_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"time": 1')
    file = RowFile(path, as_csv=False)
    file.write(sample_of(machine(power_watts=None)))
    file.close()
    torn, first, _ = path.read_text().splitlines()
    assert torn == '{"time": 1'
    row = json.loads(first)
    assert (row["gpu_power_watts"], row["gpu_clocks_held_by"]) == (None, [])
    assert row["unavailable"] == {"gpu_power_watts": "not recorded", "run_name": "none is running"}


def test_a_csv_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("mine\n")
    with pytest.raises(JobError, match="columns"):
        RowFile(path, as_csv=True)
    assert path.read_text() == "mine\n"


def test_a_machine_without_gpus_still_has_a_row() -> None:
    run = {"step": 9, "joules_per_token": 0.8, "unavailable": {}}
    (row,) = rows(sample_of(Machine(NoDevice("there is no driver")), run))
    assert (row["gpu_index"], row["unavailable"]["gpu_index"]) == (None, "there is no driver")
    assert (row["run_step"], row["run_joules_per_token"]) == (9, 0.8)
