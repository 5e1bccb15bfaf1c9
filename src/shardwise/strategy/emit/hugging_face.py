"""DeepSpeed's configuration for scripts of Hugging Face: what the Trainer or Accelerate fill in is `auto`.

Written for transformers 5 and accelerate 1. Neither file names an optimizer: the script builds its own, and
Accelerate refuses a second one.
"""

from __future__ import annotations

import json
from typing import Any

from shardwise.job import schema
from shardwise.strategy.emit.deepspeed import deepspeed_config
from shardwise.strategy.strategy import Strategy

AUTO = "auto"

# Elements: 32 MiB in bf16. DeepSpeed's own files (emit/deepspeed.py) make a bucket no larger than the trained
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

    The precision is spelled out: beside a DeepSpeed file the launch may not name one.
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


def trainer_flags(
    strategy: Strategy, optimizer: schema.Optimizer | None, train: schema.Train | None = None
) -> list[tuple[str, str]]:
    """TrainingArguments, as flags and their values; of a job's settings those that are known."""
    flags = [
        ("per_device_train_batch_size", str(strategy.micro_batch)),
        ("gradient_accumulation_steps", str(strategy.accumulation)),
        ("max_grad_norm", str(strategy.clip_norm)),
    ]
    if strategy.precision != "fp32":
        flags.append((strategy.precision, "true"))
    every = strategy.checkpoint_every
    if strategy.engine != "fsdp2" and every == 1:
        flags.append(("gradient_checkpointing", "true"))
    elif strategy.engine != "fsdp2" and every > 1:
        flags += [
            ("activation_checkpointing", "true"),
            ("activation_checkpointing_kwargs", f'{{"every_n_layers": {every}}}'),
        ]
    if optimizer is not None:
        flags += [
            ("learning_rate", str(optimizer.learning_rate)),
            ("weight_decay", str(optimizer.weight_decay)),
            ("adam_beta1", str(optimizer.beta1)),
            ("adam_beta2", str(optimizer.beta2)),
            ("adam_epsilon", str(optimizer.epsilon)),
            *_schedule(optimizer),
        ]
    if train is not None:  # transformers would go through the data three times
        epochs = ("num_train_epochs", str(train.epochs or 1.0))
        flags.append(epochs if train.steps is None else ("max_steps", str(train.steps)))
    return flags


def _schedule(optimizer: schema.Optimizer) -> list[tuple[str, str]]:
    """The same curve in transformers' names, which go down to nothing unless a further one is taken.

    A `warmup_steps` below 1 is a share of all steps. How many those are is the script's to say.
    """
    unset = optimizer.warmup_steps is None
    warmup = ("warmup_steps", str(schema.WARMUP_SHARE if unset else optimizer.warmup_steps))
    last = optimizer.final_fraction
    names: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": last}) if last else ("cosine", {}),
        "linear": ("polynomial", {"lr_end": last * optimizer.learning_rate}) if last else ("linear", {}),
    }
    name, options = names[optimizer.schedule]
    flags = [("lr_scheduler_type", name), warmup]
    return [*flags, ("lr_scheduler_kwargs", json.dumps(options))] if options else flags


def fsdp_settings(strategy: Strategy) -> dict[str, Any]:
    """FSDP2 as the Trainer's `fsdp_config` names it; Accelerate's YAML puts `fsdp_` before each."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": strategy.reshard,
        "activation_checkpointing": strategy.checkpoint_every > 0,
        # one file that loads as a model, instead of shards
        "state_dict_type": "FULL_STATE_DICT",
    }
