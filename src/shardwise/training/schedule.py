"""The learning rate as a function of the step; pure, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from shardwise.errors import JobError
from shardwise.job.schema import WARMUP_SHARE, Optimizer


def warmup_steps(optimizer: Optimizer, steps: int) -> int:
    """Steps of linear warm-up: as asked, or 3 % of all steps."""
    if optimizer.warmup_steps is not None:
        return optimizer.warmup_steps
    return round(WARMUP_SHARE * steps)


def check_warmup(optimizer: Optimizer, steps: int) -> None:
    """JobError where the peak is never reached. A job that names its steps is checked as it is read."""
    warmup = warmup_steps(optimizer, steps)
    if warmup >= steps and warmup > 0:
        raise JobError(
            f"a warm-up of {warmup} steps does not end within the {steps} steps of train.epochs",
            where="optimizer.warmup_steps",
            fix="lower it, or leave it out for 3 % of the steps",
        )


def learning_rate(optimizer: Optimizer, *, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1 to `steps`.

    Rises linearly to the peak over the warm-up (step 1 is already above zero), then follows the
    schedule down to `final_fraction` of the peak, which the last step reaches exactly.
    """
    warmup = warmup_steps(optimizer, steps)
    peak = optimizer.learning_rate
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    remaining = 1 - progress if optimizer.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (optimizer.final_fraction + (1 - optimizer.final_fraction) * remaining)
