"""The Python API, as a notebook uses it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise
from shardwise.app.jobs import size_in_bytes
from shardwise.cli import main
from shardwise.errors import JobError, MachineError
from shardwise.record.write import locked

JOB = """\
name: tuned
model: {source: meta-llama/Llama-3.2-1B, weights: random}
data: {train: data.jsonl, sequence_length: 512}
train: {global_batch: 8}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    Path("data.jsonl").write_text("{}\n")
    Path("job.yaml").write_text(JOB)
    return Path("job.yaml")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_nothing_heavy() -> None:
    """No time is asserted: what would take it is."""
    loaded = _python("import shardwise, sys; print(*sys.modules)").split()
    assert {name.split(".")[0] for name in loaded} & {"torch", "pydantic", "rich", "yaml", "numpy"} == set()


def test_every_public_name_is_there() -> None:
    names = _python("import shardwise; print(*(getattr(shardwise, n).__name__ for n in shardwise.__all__))")
    assert names.split() == shardwise.__all__
    with pytest.raises(AttributeError, match="nothing"):
        _ = shardwise.nothing


def test_a_function_is_not_replaced_by_a_package_of_its_name() -> None:
    code = (
        "import shardwise, importlib, pkgutil\n"
        "for m in pkgutil.iter_modules(shardwise.__path__): importlib.import_module(f'shardwise.{m.name}')\n"
        "print(all(callable(getattr(shardwise, n)) for n in shardwise.__all__))"
    )
    assert _python(code).strip() == "True"


def test_a_job_value_is_checked_as_a_file_is(job: Path) -> None:
    made = shardwise.load_job(job)
    train = made.train.model_copy(update={"steps": 3, "epochs": 2.0})
    contradictory = shardwise.Job(**{**dict(made), "train": train})
    with pytest.raises(JobError, match=r"(?s)train\.steps.*train\.epochs"):
        shardwise.plan(contradictory, gpus="1xH100")


@pytest.mark.parametrize("size", [0, -1, "0 GiB", "16"])
def test_a_size_that_is_none_is_refused(size: str | int) -> None:
    with pytest.raises(JobError, match="is not a size"):
        size_in_bytes(size, "memory_cap")


def test_a_run_has_its_events(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: first\n")
    (tmp_path / "plan.json").write_text("{}")
    lines = [
        {"kind": "run", "processes": 1},
        {"kind": "step", "step": 1, "loss": 2.0, "tokens": 8, "seconds": 0.1},
        {"kind": "eval", "step": 1, "loss": 3.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = shardwise.Run(folder=tmp_path, exit_code=0)
    assert [event["loss"] for event in run.events()] == [2.0]
    assert [event["loss"] for event in run.events("eval")] == [3.0]


def test_one_file_may_be_checked_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimisation": {"stage": 3}}')
    assert shardwise.check(str(tmp_path / "ds.json")).failed


def test_a_plan_of_a_job_value_is_that_of_its_file(job: Path) -> None:
    loaded = shardwise.load_job(job, ["train.micro_batch=2"])
    assert loaded.train.micro_batch == 2
    by_value = shardwise.plan(loaded, gpus="2xRTX4080")
    by_file = shardwise.plan(job, gpus="2xRTX4080", changes=["train.micro_batch=2"])
    assert by_value == by_file
    assert by_value.chosen is not None
    assert by_value.chosen.strategy.micro_batch == 2


def test_a_plan_needs_no_data_file(job: Path) -> None:
    with_data = shardwise.plan(job, gpus="1xRTX4080")
    Path("data.jsonl").unlink()
    without = shardwise.plan(job, gpus="1xRTX4080")
    assert without.options == with_data.options
    assert [one for one in without.job.assumed if one not in with_data.job.assumed] == [
        "data.jsonl does not exist: its rows are taken as full"
    ]
    with pytest.raises(JobError, match=r"data\.jsonl does not exist"):
        shardwise.load_job(job)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody can write to")
def test_a_run_folder_that_cannot_be_made_is_said_before_anything_is_loaded(job: Path) -> None:
    with pytest.raises(MachineError, match="the run folder cannot be made") as caught:
        shardwise.train(job, changes={"output": "/proc/nope"})
    assert caught.value.problems[0].fix == "name a folder you can write to: --set output=DIR"
    assert not Path("cache").exists()


@pytest.mark.parametrize("documents", [0, -1])
def test_a_plan_of_documents_without_tokens_is_refused(job: Path, documents: int) -> None:
    """A division by zero, or a wrong speed."""
    with pytest.raises(JobError, match=f"documents have {documents} tokens"):
        shardwise.plan(job, gpus="1xRTX4080", documents=documents)


def test_a_plan_prints_as_the_table_that_the_verb_shows(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = str(shardwise.plan(job, gpus="1xRTX4080"))
    assert max(map(len, text.splitlines())) <= 80
    assert "1 × RTX 4080" in text
    assert re.search(r"tok(ens)?/s", text)


def test_changes_may_be_a_mapping_or_one_text(job: Path) -> None:
    changes = {"train.micro_batch": 2, "train.checkpointing": "none", "data.system": None}
    loaded = shardwise.load_job(job, changes)
    assert (loaded.train.micro_batch, loaded.train.checkpointing, loaded.data.system) == (2, "none", None)
    assert shardwise.load_job(job, "train.micro_batch=4").train.micro_batch == 4


def test_changes_may_be_paths_numbers_of_numpy_or_none(job: Path) -> None:
    Path("other.jsonl").write_text("{}\n")
    changes = {"data.train": Path("other.jsonl"), "train.steps": np.int64(5)}
    loaded = shardwise.load_job(job, changes)
    assert (loaded.data.train, loaded.train.steps) == ("other.jsonl", 5)
    assert shardwise.load_job(job, None) == shardwise.load_job(job)


@pytest.mark.parametrize("changes", [5, [5], {"train.steps": {1, 2}}, {"train.steps": np.arange(3)}])
def test_changes_that_are_none_are_an_error_with_its_fix(job: Path, changes: Any) -> None:
    with pytest.raises(JobError, match="changes are not keys and values") as raised:
        shardwise.load_job(job, changes)
    assert "train.steps=20" in raised.value.problems[0].fix


@pytest.mark.parametrize("changes", ["train={micro_batch: 2}", {"train": {"micro_batch": 2}}])
def test_a_section_is_not_replaced_silently(job: Path, changes: Any) -> None:
    """The other keys of the section would go back to their defaults."""
    with pytest.raises(JobError, match="would drop global_batch of `train`") as raised:
        shardwise.load_job(job, changes)
    assert raised.value.problems[0].fix == "key by key: --set train.micro_batch=2"
    assert shardwise.load_job(job, {"train": {"global_batch": 16}}).train.global_batch == 16


def test_gpus_and_strategies_of_a_wrong_type_are_errors_of_the_job(job: Path) -> None:
    with pytest.raises(JobError, match="no GPU is called '5'"):
        shardwise.plan(job, gpus=5)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="there is no strategy 'nope'"):
        shardwise.bench(job, strategies=["zero2", "nope"])
    with pytest.raises(JobError, match="there is no strategy '5'"):
        shardwise.bench(job, strategies=5)  # type: ignore[arg-type]


def test_the_memory_that_a_plan_shows_has_a_name(job: Path) -> None:
    plan = shardwise.plan(job, gpus="1xRTX4080")
    assert plan.chosen is not None
    memory = plan.chosen.prediction.memory
    assert memory.needed_bytes == memory.peak_reserved_bytes + memory.outside_allocator_bytes
    assert f"{memory.needed_bytes / 2**30:.1f} of 15.6 GiB" in str(plan)
    assert f"{memory.needed_bytes / 2**30:.1f} GiB" in repr(plan)


def test_a_report_of_check_prints_as_the_verb_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from transformers import TrainingArguments\nTrainingArguments(deepspeed='ds.json')\n"
    Path("a.py").write_text(text)
    Path("ds.json").write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')
    report = shardwise.check(["a.py", "ds.json"])
    assert main(["check", "a.py", "ds.json"]) == 2
    assert str(report) == capsys.readouterr().out.rstrip("\n")
    assert repr(report) == str(report), "a notebook shows it"
    order = [line.partition(":")[0] for line in str(report).splitlines() if line.endswith("]")]
    assert order == sorted(order, key=["error", "warning", "note"].index)


def test_changes_of_a_job_value_are_checked(job: Path) -> None:
    with pytest.raises(JobError) as error:
        shardwise.plan(shardwise.load_job(job), gpus="1xRTX4080", changes=["train.micro_batch=none"])
    assert "micro_batch" in error.value.problems[0].what + error.value.problems[0].where


def test_a_machine_without_gpus_says_so(job: Path) -> None:
    with pytest.raises(MachineError, match="no GPU"):
        shardwise.plan(job)


def test_training_into_a_folder_with_something_in_it_is_refused(job: Path) -> None:
    Path("runs/tuned").mkdir(parents=True)
    Path("runs/tuned/notes.txt").write_text("mine")
    with pytest.raises(JobError, match="exists already"):
        shardwise.train(job)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_writes_is_refused(job: Path, resume: bool) -> None:
    Path("runs/tuned").mkdir(parents=True)
    held = locked(Path("runs/tuned/.lock"))
    with pytest.raises(MachineError, match="another process is writing to the run folder runs/tuned"):
        shardwise.train(job, resume=resume)
    assert held is not None
    os.close(held)
    with pytest.raises(JobError):  # of an empty run folder, or no run
        shardwise.train(job, resume=resume)


def test_a_check_finds_what_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 5}}')
    report = shardwise.check([config])
    assert report.failed
    assert report.to_json()["errors"] >= 1


def test_what_the_readme_shows_of_python_runs(job: Path) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    section = text.split("## From Python")[1].split("\n## ")[0]
    command, notebook = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    one_line = re.fullmatch(r'python -c "(.*)"\n', command)
    assert one_line is not None
    code = one_line[1].replace("8xH100", "1xH100")
    assert "1 × H100" in _python(code)
    assert _python(notebook.replace("8xH100", "1xH100"))


def test_an_error_that_nobody_catches_shows_where_and_how_to_fix_it(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: a\nmodel: {sorce: m}\n")
    code = "import shardwise; shardwise.load_job('bad.yaml')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "at:  bad.yaml:2: model.sorce" in done.stderr
    assert "did you mean model.source?" in done.stderr


def test_what_is_no_job_is_an_error_with_a_fix() -> None:
    with pytest.raises(JobError, match="a dict is no job"):
        shardwise.plan({"name": "x"}, gpus="1xRTX4080")  # type: ignore[arg-type]
    with pytest.raises(JobError) as error:
        shardwise.plan("Qwen/Qwen3-8B", gpus="1xRTX4080")
    assert "--model" in error.value.problems[0].fix
