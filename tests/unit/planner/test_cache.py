"""Plans on disk: found again by the same question only, and never the cause of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.kernels import flash4
from shardwise.planner.cache import cached_plan, plan_key, plan_once
from shardwise.planner.planning import make_plan
from shardwise.planner.search import MARGIN

JOB = Job.model_validate(
    {
        "name": "run",
        "model": {
            "source": "llama-3.2-1b",
            "weights": "random",
            "config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "vocab_size": 512,
            },
        },
        "data": {"train": "text.txt", "sequence_length": 64},
        "train": {"steps": 2, "global_batch": 4},
        "strategy": "zero2",
    }
)
HARDWARE = parse_hardware("2xRTX4080")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return tmp_path


def test_a_cached_plan_is_the_plan(cache: Path) -> None:
    made = make_plan(JOB, HARDWARE)
    asked: dict[str, object] = {"objective": "throughput", "memory_cap_bytes": None, "margin": MARGIN}
    assert cached_plan(plan_key(JOB, HARDWARE, **asked, nearest=True)) == made


def test_another_question_has_another_key() -> None:
    keys = {
        plan_key(JOB, HARDWARE, objective="throughput"),
        plan_key(JOB, HARDWARE, objective="memory"),
        plan_key(JOB, parse_hardware("4xRTX4080"), objective="throughput"),
        plan_key(JOB.model_copy(update={"strategy": "zero3"}), HARDWARE, objective="throughput"),
    }
    assert len(keys) == 4
    assert plan_key(JOB.model_copy(update={"name": "other"}), HARDWARE, objective="memory") in keys


def test_installing_another_attention_is_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_key(JOB, HARDWARE)
    package = tmp_path / "flash_attn_4-4.0.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plan_key(JOB, HARDWARE) != before
    flash4.installed.cache_clear()
    assert flash4.installed()
    monkeypatch.undo()
    flash4.installed.cache_clear()


def test_a_tokenizer_that_has_changed_in_its_folder_is_another_question(tmp_path: Path) -> None:
    model = JOB.model.model_copy(update={"tokenizer": str(tmp_path)})
    job = JOB.model_copy(update={"model": model})
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    before = plan_key(job, HARDWARE)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    assert plan_key(job, HARDWARE) != before


def test_a_damaged_plan_is_made_again(cache: Path) -> None:
    made = make_plan(JOB, HARDWARE)
    (path,) = (cache / "plans").glob("*.json")
    path.write_text('{"hardware": 1')
    assert cached_plan(path.stem) is None
    assert make_plan(JOB, HARDWARE) == made
    assert cached_plan(path.stem) == made


def test_a_folder_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    (cache / "plans").write_text("a file where the folder should be")
    made = make_plan(JOB, HARDWARE)
    assert plan_once("key", lambda: made) is made
