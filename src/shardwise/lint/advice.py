"""What to change first if a configuration does not fit: settings that do not change the training."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.engines import descriptor
from shardwise.planner.plan import Option
from shardwise.strategy import Strategy
from shardwise.units import gib

LEFT_OPEN = ("strategy", "train.micro_batch", "train.checkpointing")
"""Keys of a job that change how a step is computed, not its rows."""


def cheapest(asked: Strategy, options: Iterable[Option]) -> Option | None:
    """The option of the same engine that fits with the cheapest change; None if nothing fits.

    More checkpointing is cheaper than a smaller micro-batch, then come another stage and offloading. The
    fastest of equals wins. Options without a margin come last.
    """

    def price(option: Option) -> tuple[int, ...]:
        other = option.strategy
        return (
            option.fit == "tight",
            sum(one != wanted for one, wanted in zip(_offloads(other), _offloads(asked), strict=True)),
            (other.stage, other.reshard) != (asked.stage, asked.reshard),
            other.micro_batch != asked.micro_batch,
            other.checkpoint_every != asked.checkpoint_every,
        )

    def order(option: Option) -> tuple[tuple[int, ...], float]:
        return price(option), -option.prediction.time.tokens_per_second_per_gpu

    kept = (asked.engine, asked.tensor_parallel)
    fitting = [
        o for o in options if o.fit != "no" and (o.strategy.engine, o.strategy.tensor_parallel) == kept
    ]
    return min(fitting, key=order, default=None)


def as_settings(asked: Strategy, option: Option) -> str:
    """The changes from the request to the option, in the terms of the checked files."""
    other, changes = option.strategy, []
    if other.checkpoint_every != asked.checkpoint_every:
        every = other.checkpoint_every
        how = {0: "none", 1: "all blocks"}.get(every, f"one block in {every}")
        changes.append(f"activation checkpointing (gradient_checkpointing) of {how}")
    if other.micro_batch != asked.micro_batch:
        changes.append(f"a micro-batch of {other.micro_batch} and accumulation over {other.accumulation}")
    changes += descriptor(asked).changed_settings(asked, other)
    memory = option.prediction.memory
    barely = " (barely)" if option.fit == "tight" else ""
    host = f" and {gib(memory.host_bytes)} of each host's memory" if memory.host_bytes else ""
    return f"{', '.join(changes)}: fits{barely}, in {gib(memory.needed_bytes)}{host} (predicted)"


def _offloads(strategy: Strategy) -> tuple[str, str]:
    return strategy.offload_optimizer, strategy.offload_parameters
