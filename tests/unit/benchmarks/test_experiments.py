"""benchmarks/experiments: its rows can be run where they are meant to, and start from the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardwise
from scripts import script
from shardwise.space.auto import resolve

FOLDER = Path(__file__).parents[3] / "benchmarks" / "experiments"


@pytest.fixture(scope="module")
def experiments() -> ModuleType:
    return script("benchmarks/experiments/experiments.py")


@pytest.fixture
def folder(tmp_path: Path, experiments: ModuleType) -> Path:
    for shape in {setting.shape for setting in (*experiments.ON_CPU, *experiments.ON_GPU)}:
        made = tmp_path / "models" / shape
        made.mkdir(parents=True)
        inputs = script("benchmarks/experiments/inputs.py")
        (made / "config.json").write_text(json.dumps(inputs.config_of(shape)))
    return tmp_path


def job_of(setting: Any, program: Any, folder: Path) -> shardwise.Job:
    job: shardwise.Job = setting.job(folder)
    strategy = program.strategy or {"engine": "single"}
    return shardwise.Job.model_validate({**job.model_dump(mode="json"), "strategy": strategy})


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["plain", "sweep", "memory"])
def test_every_row_is_allowed(name: str, gpu: bool, experiments: ModuleType, folder: Path) -> None:
    rows = list(experiments.EXPERIMENTS[name](gpu))
    assert len({(setting.name, program.name) for setting, program in rows}) == len(rows)
    for setting, program in rows:
        strategy, _ = resolve(
            job_of(setting, program, folder), world_size=1, devices="cuda" if gpu else "cpu"
        )
        assert (strategy.micro_batch, strategy.accumulation) == (setting.micro_batch, setting.accumulation)


def test_the_full_sweep_has_every_combination(experiments: ModuleType) -> None:
    points = [tuple(program.about["point"].values()) for _, program in experiments.sweep(True, full=True)]
    assert len(points) == len(set(points)) == 3 * 3 * 2 * 2


def test_the_largest_rows_fit_one_h200(experiments: ModuleType, folder: Path) -> None:
    for setting, program in experiments.against_plain(True):
        if program.name == "single":
            plan = shardwise.plan(job_of(setting, program, folder), gpus="1xH200+128GiB")
            assert plan.chosen is not None, setting.name
