"""DeepSpeed's configuration for a user's own script: what the Trainer or Accelerate fill in is `auto`.

Written for transformers 5 and accelerate 1. Neither file names an optimizer: the script builds its own, and
Accelerate refuses a second one.
"""

from __future__ import annotations

from typing import Any

from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.job import schema
from shardwise.strategy import Strategy

AUTO = "auto"

# Elements: 32 MiB in bf16. DeepSpeed's own files (config.py) make a bucket no larger than the trained
# parameters; these files may be used with more of them.
LEAST_BUCKET = 1 << 24


def trainer_config(strategy: Strategy, *, trainable_parameters: int) -> dict[str, Any]:
    """For the Trainer: it fills in what its arguments say, and refuses values that differ from them."""
    config = own_config(strategy, None, trainable_parameters=trainable_parameters)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        config[key] = AUTO
    for precision in ("bf16", "fp16"):
        config[precision]["enabled"] = AUTO
    return config


def accelerate_config(strategy: Strategy, *, trainable_parameters: int) -> dict[str, Any]:
    """For a script that calls Accelerator: the rows at a time are its data loader's.

    The precision is spelled out: with a DeepSpeed file the launch may not name one.
    """
    config = own_config(strategy, None, trainable_parameters=trainable_parameters)
    return {**config, "train_micro_batch_size_per_gpu": AUTO}


def own_config(
    strategy: Strategy, optimizer: schema.Optimizer | None, *, trainable_parameters: int
) -> dict[str, Any]:
    """For a script that calls deepspeed.initialize; without an optimizer where the script brings one."""
    config = deepspeed_config(
        strategy,
        optimizer or schema.Optimizer(),
        trainable_parameters=max(LEAST_BUCKET, trainable_parameters),
    )
    if optimizer is None:
        del config["optimizer"]
    if strategy.stage == 3:
        # Otherwise nothing that loads as a model can be saved.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config
