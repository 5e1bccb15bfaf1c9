"""With which strategy a run goes on: what it was last run with, and what is new in the job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.launch.resume import last_choice
from shardwise.record.manifest import Manifest, Origin
from shardwise.record.write import RunFolder
from shardwise.strategy import Strategy
from shardwise.training.snapshot import check_origin

RETRIED = Strategy(engine="deepspeed", stage=2, data_parallel=2, micro_batch=2, accumulation=4)
"""After it ran out of memory with the 4 rows at a time that the job names."""


def values(strategy: str = "zero2", **train: Any) -> dict[str, Any]:
    settings = {"steps": 9, "global_batch": 16, "micro_batch": 4, **train}
    content = {"name": "run", "model": {"source": "m"}, "data": {"train": "t"}, "train": settings}
    return Job.model_validate({**content, "strategy": strategy}).model_dump(mode="json")


@pytest.fixture(params=["zero2", "auto"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "run"
    plan = {"schema": 1, "chosen": {"strategy": RETRIED.to_json(), "why": ["x"]}}
    RunFolder.create(path, job_yaml=yaml.safe_dump(values(kind)), plan=plan, environment={}).close()
    return path


def resumed(run: Path, job: dict[str, Any], processes: int = 2) -> Strategy | None:
    chosen = last_choice(run, Job.model_validate(job), processes)
    return None if chosen is None else Strategy.from_json(chosen["strategy"])


def test_a_run_that_was_retried_does_not_run_out_of_memory_again(run: Path, kind: str) -> None:
    assert resumed(run, values(kind)) == RETRIED


def test_what_is_new_in_the_job_counts(run: Path, kind: str) -> None:
    fewer = replace(RETRIED, micro_batch=1, accumulation=8)
    assert resumed(run, values(kind, micro_batch=1)) == fewer
    assert resumed(run, values(kind, checkpointing="full")) == replace(RETRIED, checkpoint_every=1)
    assert resumed(run, values(kind, checkpointing=3)) == replace(RETRIED, checkpoint_every=3)


def test_another_kind_or_number_of_processes_is_for_the_job_to_say(run: Path, kind: str) -> None:
    assert resumed(run, values("zero3")) is None
    assert resumed(run, values(kind), processes=4) is None


def test_the_run_folder_keeps_what_it_goes_on_with(run: Path, kind: str) -> None:
    other = replace(RETRIED, micro_batch=1, accumulation=8)
    folder = RunFolder.reopen(run)
    before = (run / "plan.json").read_bytes()
    folder.keep_choice({"strategy": RETRIED.to_json(), "why": ["the same"]})
    assert (run / "plan.json").read_bytes() == before
    folder.keep_choice({"strategy": other.to_json(), "why": ["less"]})
    folder.close()
    plan = json.loads((run / "plan.json").read_text())
    assert plan == {"schema": 1, "chosen": {"strategy": other.to_json(), "why": ["less"]}}
    assert resumed(run, values(kind)) == other


def test_checkpoints_that_name_their_micro_batch_are_read_with_another() -> None:
    def origin(identity: dict[str, Any]) -> Origin:
        return Origin(world_size=2, strategy=RETRIED.to_json(), identity=identity, versions={})

    saved = Manifest(step=1, origin=origin({"seed": 1, "micro_batch": 4}), files={})
    check_origin(saved, origin({"seed": 1}), where="x")


CHANGED = [
    {"engine": "other"}, {"micro_batch": 0}, {"micro_batch": "2"}, {"stage": 7}, {"reshard": 1}, {"extra": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [
        "{}",
        '{"chosen": null}',
        '{"chosen": {"strategy": {"stage": 2}}}',
        '{"chosen": {"strategy": [1, 2]}}',
        *[json.dumps({"chosen": {"strategy": {**RETRIED.to_json(), **change}}}) for change in CHANGED],
    ],
)
def test_a_plan_without_a_strategy_is_a_damaged_run(run: Path, kind: str, plan: str) -> None:
    (run / "plan.json").write_text(plan)
    with pytest.raises(CheckpointError, match="does not say the strategy"):
        resumed(run, values(kind))
