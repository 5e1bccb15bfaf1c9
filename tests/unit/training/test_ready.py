"""What `strategy: auto` comes to on GPUs: the plan's choice, or an error that says what would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import DoesNotFitError
from shardwise.hardware.parse import parse_hardware
from shardwise.job import json_schema
from shardwise.job.identity import BY_CONTENT, DECISIVE, within
from shardwise.job.schema import Job
from shardwise.strategy import Strategy
from shardwise.training import ready
from shardwise.training.ready import get_ready, identity

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("A horse is not a zebra, and a zebra is not a horse.\n\n" * 200)
    return Job.model_validate(
        {
            "name": "run",
            "output": str(tmp_path),
            "model": {
                "source": str(tmp_path / "model"),
                "weights": "random",
                "tokenizer": "train",
                "tokenizer_vocab": 300,
            },
            "data": {"train": str(tmp_path / "text.txt"), "format": "text", "sequence_length": 64},
            "train": {"steps": 2, "global_batch": 8},
        }
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two RTX 4080; nothing here touches them."""
    monkeypatch.setattr(ready.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ready, "detect_hardware", lambda: parse_hardware("2xRTX4080"))
    return monkeypatch


def test_auto_is_the_plans_choice_on_gpus(job: Job, gpus: pytest.MonkeyPatch) -> None:
    found = get_ready(job, processes=2)
    assert found.plan is not None
    assert found.plan.chosen is not None
    assert found.strategy == found.plan.chosen.strategy
    assert found.strategy.world_size == 2
    assert found.strategy.global_batch == 8
    assert found.plan.job.parameters == found.built.total, "planned with the learned tokenizer's vocabulary"
    written = found.to_json()
    assert Strategy.from_json(written["chosen"]["strategy"]) == found.strategy
    assert written["chosen"]["prediction"]["memory"]["peak_reserved_bytes"] > 0


def test_a_plan_is_made_once(job: Job, gpus: pytest.MonkeyPatch) -> None:
    first = get_ready(job, processes=2)
    gpus.setattr("shardwise.planner.planning._make", None)  # would fail if it were called again
    assert get_ready(job, processes=2).plan == first.plan


def test_where_nothing_fits_nothing_starts(job: Job, gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFitError):
        get_ready(job, processes=2, memory_cap_bytes=100 * 1024**2)


@pytest.mark.parametrize("asked", ["auto", "zero3"])
def test_the_launchers_choice_holds_whatever_the_job_says(
    job: Job, gpus: pytest.MonkeyPatch, asked: str
) -> None:
    began = Strategy(engine="deepspeed", stage=1, data_parallel=2, micro_batch=1, accumulation=4)
    chosen = {"strategy": began.to_json(), "why": ["less"]}
    found = get_ready(job.model_copy(update={"strategy": asked}), processes=2, chosen=chosen)
    assert (found.strategy, found.why, found.plan) == (began, ["less"], None)
    assert found.to_json() == {"schema": 1, "chosen": chosen}


def test_on_cpus_auto_stays_a_rule(job: Job) -> None:
    found = get_ready(job, processes=2)
    assert (found.strategy.name, found.plan) == ("zero2", None)


@pytest.mark.parametrize("instructions", [True, False])
def test_a_processor_that_is_slow_in_bf16_is_told_of(
    job: Job, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "multiplies_bf16", lambda: instructions)
    says = "this processor has no instructions for bf16: train.precision: fp32 is faster on it"
    assert (says in get_ready(job, processes=1).why) is not instructions
    exact = job.model_copy(update={"train": job.train.model_copy(update={"precision": "fp32"})})
    assert says not in get_ready(exact, processes=1).why


CHANGED: dict[str, Any] = {
    "name": "other",
    "strategy": "zero2",
    "tracking": [],
    "model.config": {"num_hidden_layers": 1},
    "model.tokenizer_vocab": 290,
    "model.lora": {"rank": 4},
    "data.format": "auto",
    "data.max_samples": 150,
    "data.sequence_length": 32,
    "data.packing": False,
    "data.weights": [2.0],
    "data.loss_on": "all",
    "data.system": "be brief",
    "data.too_long": "drop",
    "data.skip_bad": True,
    "data.eval_fraction": 0.1,
    "optimizer.learning_rate": 1e-3,
    "optimizer.beta2": 0.99,
    "optimizer.clip_norm": 0.5,
    "train.steps": 3,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.precision": "fp32",
    "train.checkpointing": "full",
    "train.eval_every": 1,
    "train.patience": 3,
    "train.sample_prompts": ["Once"],
    "train.save_every": 1,
    "train.keep": 1,
    "train.worst_case_first": False,
    "train.seed": 7,
    "train.deterministic": True,
}


@pytest.mark.parametrize("section", ["", "model", "data", "optimizer", "train"])
def test_a_checkpoint_belongs_to_the_decisive_keys_of_its_job(job: Job, section: str) -> None:
    """The launcher refuses by key; the workers, by this identity: both or neither."""
    before = identity(get_ready(job, processes=1))
    for key, value in CHANGED.items():
        if key.rpartition(".")[0] != section:
            continue
        values = job.model_dump(mode="json")
        (values[section] if section else values)[key.rpartition(".")[2]] = value
        after = identity(get_ready(Job.model_validate(values), processes=1))
        assert (after != before) == within(key, DECISIVE), key


def test_every_data_and_train_key_is_tried() -> None:
    """But for names of files, which are compared by content, and for `epochs`, which excludes `steps`."""
    keys = {".".join(key) for key in json_schema.every_key()}
    tried = {*CHANGED, *BY_CONTENT, "train.epochs"}
    assert {key for key in keys if key.startswith(("data.", "train."))} <= tried
