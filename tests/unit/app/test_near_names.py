"""A model that is not found is answered with the folder of nearly its name, whatever the verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.app.jobs import read, trainable
from shardwise.app.models import export
from shardwise.app.plan import plan
from shardwise.errors import JobError, MachineError
from shardwise.inference.load import load_model
from shardwise.models.catalog import did_you_mean

JOB = "name: a\nmodel: {source: tiny-chatt}\ndata: {train: d.jsonl}\n"
RUN = "name: a\nmodel: {source: gpt2}\ndata: {train: d.jsonl}\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `jobs` with a job and models, seen from its parent; and a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for folder in ("jobs/tiny-chat", "jobs/models/mini-base", "apart"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text(json.dumps({"model_type": "llama"}))
    Path("jobs/tiny-chat/tokenizer.json").write_text("{}")
    Path("jobs/notes-chat").mkdir()  # no model's
    Path("jobs/job.yaml").write_text(JOB)
    Path("jobs/d.jsonl").write_text("{}\n")
    Path("runs/kill").mkdir(parents=True)
    Path("runs/kill/job.yaml").write_text(RUN)
    return tmp_path


def fix_of(call: Callable[[], object]) -> str:
    with pytest.raises((JobError, MachineError)) as caught:
        call()
    return caught.value.problems[0].fix


@pytest.mark.parametrize(
    "use",
    [
        lambda job: trainable(read(job)),
        lambda job: plan(job, gpus="2xRTX4090"),
        lambda job: plan(job, gpus="2xRTX4090", changes=["model.weights=random"]),
    ],
)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_job_names_the_folder_next_to_it(
    place: Path, use: Callable[[Path], object], absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Path("jobs/job.yaml")
    if absolute:
        job = job.resolve()
        monkeypatch.chdir(place / "apart")
    with pytest.raises(JobError) as caught:
        use(job)
    (problem,) = caught.value.problems
    assert problem.what == "there is no folder and no known shape 'tiny-chatt'"
    assert problem.where == f"{job}:2: model.source"
    assert problem.fix.startswith("did you mean the folder tiny-chat? ")


def test_a_flag_counts_from_the_working_directory(place: Path) -> None:
    job = "jobs/job.yaml"
    said = fix_of(lambda: trainable(read(job, ["model.source=jobs-chat"])))
    assert "the folder" not in said
    said = fix_of(lambda: plan(model="tiny-cat", gpus="2xRTX4090"))
    assert said.startswith("did you mean the folder jobs/tiny-chat? ")
    said = fix_of(lambda: plan(model="jobs/tiny-cat", gpus="2xRTX4090"))
    assert said.startswith("did you mean the folder jobs/tiny-chat? Else download"), "a hub's name, maybe"


def test_a_tokenizer_and_a_nested_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "jobs")
    changes = ["model.source=tiny-chat", "model.tokenizer=tiny-cha"]
    said = fix_of(lambda: trainable(read("job.yaml", changes)))
    assert said.startswith("did you mean the folder tiny-chat? set model.tokenizer")
    assert did_you_mean("mini-base").startswith("did you mean the folder models/mini-base? ")


def test_a_known_shape_that_is_as_near_is_named_as_well(place: Path) -> None:
    Path("tiny-gpt3").mkdir()
    Path("tiny-gpt3/config.json").write_text("{}")
    assert did_you_mean("tiny-gpt").startswith("did you mean the folder tiny-gpt3 or tiny-gpt2? ")
    assert did_you_mean("tiny-gpt5", Path("apart")).startswith("did you mean tiny-gpt2 or ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tiny-chatt", "did you mean the folder jobs/tiny-chat? "),
        ("./jobs/tiny-chatt", "did you mean jobs/tiny-chat?"),
        ("jobs/models/mini-bas", "did you mean jobs/models/mini-base?"),
        ("kil", "did you mean the folder runs/kill? "),
        ("runs/kil", "did you mean runs/kill?"),
    ],
)
def test_what_answers_may_be_a_model_or_a_run(place: Path, name: str, meant: str) -> None:
    assert fix_of(lambda: load_model(name)).startswith(meant)


@pytest.mark.parametrize("name", ["runs/kil", "kil"])
def test_export_takes_runs(place: Path, name: str) -> None:
    assert fix_of(lambda: export(name)) == "did you mean runs/kill?"
