"""A strategy as arguments of Hugging Face's Trainer. Written for transformers 5."""

from __future__ import annotations

import json

from shardwise.engines import descriptor
from shardwise.job import schema
from shardwise.strategy import Strategy


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
    every = 0 if descriptor(strategy).sets_checkpointing else strategy.checkpoint_every
    if every == 1:
        flags.append(("gradient_checkpointing", "true"))
    elif every > 1:
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
