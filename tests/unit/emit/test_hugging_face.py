"""What the Trainer is told trains as the job would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import get_scheduler

from shardwise.emit.files import trainer_flags
from shardwise.engines import descriptor
from shardwise.job.schema import Optimizer, Train
from shardwise.strategy import Strategy
from shardwise.training.loop import learning_rate, warmup_steps

STEPS = 40


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("final_fraction", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_trainer_s_learning_rate_is_the_job_s(schedule: Any, final_fraction: float, warmup: int) -> None:
    """transformers counts steps from 0 and ours from 1, so that its curve is a step behind."""
    asked = Optimizer(
        learning_rate=0.02, schedule=schedule, final_fraction=final_fraction, warmup_steps=warmup
    )
    flags = dict(trainer_flags(Strategy(engine="deepspeed", stage=2), asked))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=float(flags["learning_rate"]))
    scheduler = get_scheduler(
        flags["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=int(flags["warmup_steps"]),
        num_training_steps=STEPS,
        scheduler_specific_kwargs=json.loads(flags.get("lr_scheduler_kwargs", "{}")),
    )
    for step in range(1, STEPS + 1):
        optimizer.step()
        scheduler.step()
        expected = learning_rate(asked, step=step, steps=STEPS)
        assert scheduler.get_last_lr()[0] == pytest.approx(expected, abs=1e-12), step


def test_a_warm_up_that_nobody_set_is_a_share() -> None:
    flags = dict(trainer_flags(Strategy(engine="deepspeed", stage=2), Optimizer()))
    assert float(flags["warmup_steps"]) == 0.03


def test_a_share_of_warm_up_is_one_for_the_trainer() -> None:
    from transformers import TrainingArguments

    asked = Optimizer(warmup_steps=0.125)
    flags = dict(trainer_flags(Strategy(engine="deepspeed", stage=2), asked))
    arguments = TrainingArguments("o", warmup_steps=float(flags["warmup_steps"]))
    assert arguments.get_warmup_steps(90) == warmup_steps(asked, 90) == 12


@pytest.mark.parametrize(
    ("asked", "name", "value"),
    [
        ({}, "num_train_epochs", "1.0"),
        ({"epochs": 2.5}, "num_train_epochs", "2.5"),
        ({"steps": 7}, "max_steps", "7"),
    ],
)
def test_the_trainer_goes_on_as_long_as_the_job(asked: dict[str, Any], name: str, value: str) -> None:
    """Its own default is three epochs."""
    train = Train(global_batch=8, **asked)
    flags = dict(trainer_flags(Strategy(engine="deepspeed", stage=2), Optimizer(), train))
    assert {key: flags[key] for key in ("num_train_epochs", "max_steps") if key in flags} == {name: value}
    assert not {"num_train_epochs", "max_steps"} & dict(trainer_flags(Strategy(engine="fsdp2"), None)).keys()


def test_accelerate_makes_the_groups_of_hsdp(tmp_path: Path) -> None:
    """Its own reader of the file; the sizes are those of its device mesh."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.parallelism_config import ParallelismConfig

    strategy = Strategy(engine="fsdp2", data_parallel=16, shard_group=8, reduce_dtype="bf16")
    values = descriptor(strategy).accelerate_settings(strategy, nodes=2, folder=".")
    file = tmp_path / "accelerate.yaml"
    common = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 16}
    file.write_text(yaml.safe_dump(common | values))
    read = ClusterConfig.from_yaml_file(str(file)).parallelism_config
    prefix = "parallelism_config_"
    mesh = ParallelismConfig(**{name.removeprefix(prefix): size for name, size in read.items()})
    assert (mesh.dp_replicate_size, mesh.dp_shard_size, mesh.total_size) == (2, 8, 16)
    plain = Strategy(engine="fsdp2", data_parallel=16)
    assert "parallelism_config" not in descriptor(plain).accelerate_settings(plain, nodes=2, folder=".")
    for_accelerate, for_torchrun = (
        descriptor(strategy).script_notes(strategy, target, own_optimizer=True)
        for target in ("accelerate", "torchrun")
    )
    assert for_accelerate == ["gradients in bf16: MixedPrecisionPolicy.reduce_dtype of the script"]
    assert "(2, 8)" in for_torchrun[0]
