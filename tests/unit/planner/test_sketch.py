"""A job from a model's name and flags."""

from __future__ import annotations

import pytest

from shardwise.errors import JobError
from shardwise.planner.sketch import default_global_batch, sketch


def test_a_name_is_enough_and_what_is_assumed_is_said() -> None:
    drawn = sketch("EleutherAI/gpt-neo-2.7B", [], world_size=4)
    job = drawn.job
    assert (job.model.source, job.model.lora, job.strategy) == ("EleutherAI/gpt-neo-2.7B", None, "auto")
    assert (job.data.sequence_length, job.train.global_batch) == (2048, 64)
    assert drawn.assumed == ("--sequence 2048", "--global-batch 64", "--full")


def test_what_is_given_is_not_assumed() -> None:
    changes = ["data.sequence_length=512", "train.global_batch=12", "model.lora.rank=8"]
    drawn = sketch("org/model", changes, world_size=4)
    assert drawn.assumed == ()
    assert (drawn.job.data.sequence_length, drawn.job.train.global_batch) == (512, 12)
    assert drawn.job.model.lora is not None
    assert drawn.job.model.lora.rank == 8


def test_everything_wrong_is_said_at_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError) as caught:
        sketch("./nothing", ["train.step=3"], world_size=4)
    assert [problem.what for problem in caught.value.problems] == [
        "the folder ./nothing does not exist",
        "`train.step` is not a key of a job file",
    ]


def test_contradictions_are_found() -> None:
    with pytest.raises(JobError, match="describes no job") as caught:
        sketch("org/model", ["model.weights=random", "model.lora.rank=8"], world_size=1)
    assert "model.lora would freeze weights that are random" in caught.value.problems[0].what


def test_rows_are_no_longer_than_the_model_has_positions() -> None:
    drawn = sketch("gpt2", [], world_size=1)
    assert drawn.job.data.sequence_length == 1024
    assert "--sequence 1024" in drawn.assumed


@pytest.mark.parametrize(
    ("gpus", "rows"), [(1, 64), (3, 48), (4, 64), (8, 128), (6, 96), (128, 2048), (512, 2048), (4096, 4096)]
)
def test_the_default_batch_gives_every_gpu_the_same(gpus: int, rows: int) -> None:
    assert default_global_batch(gpus) == rows
    assert rows % gpus == 0
