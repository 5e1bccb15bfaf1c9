"""A good job file: what it means, where each value comes from, and what `--set` changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.job.identity import identity_of
from shardwise.job.load import load_job, resolved
from shardwise.job.schema import Data, Job, StrategySpec


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    path = Path("job.yaml")
    path.write_text(
        "name: run\n"
        "model:\n"
        "  source: org/model\n"
        "data:\n"
        "  train: qa.jsonl\n"
        "optimizer:\n"
        "  learning_rate: 1e-4\n"
        "strategy: zero2\n"
    )
    return path


def test_values_defaults_and_origins(job_file: Path) -> None:
    rows = {row.key: (row.value, row.origin) for row in resolved(load_job(job_file, ["train.steps=20"]))}
    assert rows["optimizer.learning_rate"] == (1e-4, "job.yaml:7")
    assert rows["strategy"] == ("zero2", "job.yaml:8")
    assert rows["train.steps"] == (20, "--set train.steps=20")
    assert rows["train.global_batch"] == (16, "default")
    assert rows["model.config"] == ({}, "default")


def test_every_field_of_the_job_is_listed_once(job_file: Path) -> None:
    keys = [row.key for row in resolved(load_job(job_file))]
    assert len(keys) == len(set(keys))
    assert {"name", "model.lora", "data.packing", "train.seed", "tracking"} <= set(keys)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),  # YAML 1.1 reads text
        ("5E-3", 5e-3),
        (".5", 0.5),
        ("1", 1.0),
        ("+2.5", 2.5),
    ],
)
def test_numbers_people_write(job_file: Path, text: str, value: float) -> None:
    assert load_job(job_file, [f"optimizer.learning_rate={text}"]).job.optimizer.learning_rate == value


@pytest.mark.parametrize(
    "text", ["no", "on", "off", "yes", "2024-01-02", "12:30:00", "0x1F", "null-model", "1.2.3"]
)
def test_text_that_yaml_1_1_turns_into_something_else_stays_text(job_file: Path, text: str) -> None:
    assert load_job(job_file, [f"data.system={text}"]).job.data.system == text


def test_set_makes_sections_and_replaces_whole_values(job_file: Path) -> None:
    job = load_job(
        job_file,
        ["model.lora.rank=8", "strategy={engine: deepspeed, stage: 3}", "data.train=[qa.jsonl, qa.jsonl]"],
    ).job
    assert job.model.lora is not None
    assert job.model.lora.rank == 8
    assert job.strategy == StrategySpec(engine="deepspeed", stage=3)
    assert job.data.train == ["qa.jsonl", "qa.jsonl"]


def test_a_replaced_section_leaves_no_origin_behind(job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("org/model\n", "org/model\n  lora: {rank: 8}\n"))
    rows = {
        row.key: (row.value, row.origin) for row in resolved(load_job(job_file, ["model.lora={alpha: 4}"]))
    }
    assert rows["model.lora.rank"] == (16, "default")
    assert rows["model.lora.alpha"] == (4.0, "--set model.lora={alpha: 4}")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("strategy={engine: deepspeed, stage: 4}", "strategy.stage"),
        ("strategy=zero4", "strategy"),
        ("train.checkpointing=ful", "train.checkpointing"),
        ("data.train=[1, 2]", "data.train"),
    ],
)
def test_one_mistake_in_a_key_of_several_types_is_one_problem(job_file: Path, change: str, key: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(job_file, [change])
    assert [problem.what.split()[0] for problem in caught.value.problems] == [f"`{key}`"]


def test_set_null_unsets_and_the_last_set_wins(job_file: Path) -> None:
    job = load_job(job_file, ["train.epochs=2", "train.steps=5", "train.epochs=null", "train.steps=6"]).job
    assert (job.train.epochs, job.train.steps) == (None, 6)


def test_set_null_unsets_a_key_that_cannot_be_null(job_file: Path) -> None:
    """Said to be null, where a number is expected: two keys of a file that exclude each other stayed."""
    Path("job.yaml").write_text(
        job_file.read_text().replace("  train: q", "  eval_fraction: 0.1\n  train: q")
    )
    with pytest.raises(JobError, match="both say what is held out") as caught:
        load_job(job_file, ["data.eval=qa.jsonl"])
    assert "`--set data.eval_fraction=null`" in caught.value.problems[0].fix
    job = load_job(job_file, ["data.eval=qa.jsonl", "data.eval_fraction=null"]).job
    assert (job.data.eval, job.data.eval_fraction) == ("qa.jsonl", Data(train="a").eval_fraction)
    for change, what in (("data.train=null", "`data.train` is missing"), ("data.evl=null", "is not a key")):
        with pytest.raises(JobError, match=what):
            load_job(job_file, [change])


def test_set_reaches_into_the_model_config(job_file: Path) -> None:
    loaded = load_job(job_file, ["model.weights=random", "model.config.num_hidden_layers=2"])
    assert loaded.job.model.config == {"num_hidden_layers": 2}
    origin = next(row.origin for row in resolved(loaded) if row.key == "model.config")
    assert origin == "--set model.config.num_hidden_layers=2"


def test_byte_order_mark_and_windows_line_ends(job_file: Path) -> None:
    job_file.write_bytes(b"\xef\xbb\xbf" + job_file.read_bytes().replace(b"\n", b"\r\n"))
    assert load_job(job_file).job.name == "run"
    assert load_job(job_file).origins["strategy"].text == "job.yaml:8"


def test_relative_paths_count_from_the_job_file_s_folder_and_flags_from_here(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a job means the same wherever the command runs."""
    for folder in ("jobs", "jobs/base", "train"):
        Path(folder).mkdir()
    moved = job_file.rename("jobs/job.yaml")
    text = moved.read_text().replace("org/model", "base\n  weights: random\n  tokenizer: train")
    Path("jobs/base/config.json").write_text("{}")
    moved.write_text(text.replace("qa.jsonl", "[qa.jsonl, org/name]"))
    with pytest.raises(JobError, match=r"jobs/qa\.jsonl does not exist"):
        load_job(moved)
    assert load_job(moved, ["data.train=qa.jsonl"]).job.data.train == "qa.jsonl"
    Path("jobs/qa.jsonl").write_text("{}\n")
    job = load_job(moved).job
    assert job.data.train == ["jobs/qa.jsonl", "org/name"], "a name on the hub stays one"
    assert (job.model.source, job.model.tokenizer) == ("jobs/base", "train")
    monkeypatch.chdir(tmp_path / "jobs")
    again = load_job("job.yaml").job
    assert again.data.train == ["qa.jsonl", "org/name"]
    there = identity_of(again)
    monkeypatch.chdir(tmp_path)
    assert identity_of(load_job(moved).job) == there


def test_home_is_expanded(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_job(job_file, ["data.train=~/qa.jsonl"]).job.data.train == str(tmp_path / "qa.jsonl")


def test_a_commit_is_not_taken_for_a_key(job_file: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert load_job(job_file, [f"model.revision={commit}"]).job.model.revision == commit


def test_the_job_survives_json(job_file: Path) -> None:
    """Worker processes receive the job as JSON."""
    job = load_job(job_file, ["model.lora={}", "strategy={engine: fsdp2}"]).job
    assert Job.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    ("changes", "alpha", "rate"),
    [
        (["model.lora={rank: 8}"], 16.0, 2e-4),
        (["model.lora={rank: 8, alpha: 32}", "optimizer.clip_norm=0.5"], 32.0, 2e-4),
        (["model.lora={}", "optimizer.learning_rate=1e-5"], 32.0, 1e-5),
    ],
)
def test_adapters_have_their_own_defaults(
    job_file: Path, changes: list[str], alpha: float, rate: float
) -> None:
    """A rank keeps the update's scale, and a rate for all weights is not theirs."""
    job_file.write_text(re.sub("(?m)^(optimizer:| *learning_rate.*)\n", "", job_file.read_text()))
    job = load_job(job_file, changes).job
    assert job.model.lora is not None
    assert (job.model.lora.alpha, job.optimizer.learning_rate) == (alpha, rate)
    assert load_job(job_file).job.optimizer.learning_rate == 2e-5


def test_defaults_of_adapters_survive_being_written(job_file: Path) -> None:
    job = load_job(job_file, ["model.lora={rank: 8}"]).job
    assert Job.model_validate(job.model_dump(mode="json", exclude_defaults=True)) == job
