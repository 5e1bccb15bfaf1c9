"""What to change first where a configuration does not fit: what keeps the training as it is."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.engines import descriptor
from shardwise.planner.plan import Option
from shardwise.strategy import Strategy
from shardwise.units import gib

LEFT_OPEN = ("strategy", "train.micro_batch", "train.checkpointing")
"""Keys of a job that change how it is computed, and not what: the rows of a step stay."""


def cheapest(asked: Strategy, options: Iterable[Option]) -> Option | None:
    """Of what fits with the same engine the one with the cheapest change; None where nothing fits.

    More checkpointing is cheaper than fewer rows at a time, that than another stage, that than offloading;
    of equals the fastest counts. What leaves no margin comes after all that does.
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
    """How to get there from what was asked, in the words of the files that are checked."""
    other, said = option.strategy, []
    if other.checkpoint_every != asked.checkpoint_every:
        every = other.checkpoint_every
        how = {0: "none", 1: "all blocks"}.get(every, f"one block in {every}")
        said.append(f"activation checkpointing (gradient_checkpointing) of {how}")
    if other.micro_batch != asked.micro_batch:
        said.append(f"a micro-batch of {other.micro_batch} and accumulation over {other.accumulation}")
    said += descriptor(asked).changed_settings(asked, other)
    memory = option.prediction.memory
    barely = " (barely)" if option.fit == "tight" else ""
    host = f" and {gib(memory.host_bytes)} of each host's memory" if memory.host_bytes else ""
    return f"{', '.join(said)}: fits{barely}, in {gib(memory.needed_bytes)}{host} (predicted)"


def _offloads(strategy: Strategy) -> tuple[str, str]:
    return strategy.offload_optimizer, strategy.offload_parameters
