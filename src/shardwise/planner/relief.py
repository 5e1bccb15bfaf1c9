"""After a strategy ran out of memory: which others need less, and which of them to retry with.

The failure corrects the plan: what a process used beyond its prediction is added to all other predictions.
That is the best guess: they share the model, the kernels and whatever else is on the GPU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.engines import settings_of, strategy_flag
from shardwise.hardware.hardware import Hardware
from shardwise.planner.plan import Option
from shardwise.planner.search import MARGIN, rank
from shardwise.strategy import Strategy


def same_state(one: Strategy, other: Strategy) -> bool:
    """Whether a checkpoint of one can be loaded by the other: they differ in how they compute only."""
    alike: dict[str, int] = {"micro_batch": 1, "accumulation": 1, "checkpoint_every": 0, "reshard": True}
    return replace(one, **alike) == replace(other, **alike)  # type: ignore[arg-type]


def corrected(option: Option, beyond_bytes: int) -> Option:
    """`option` with the fit it has when it needs `beyond_bytes` more of the GPU than predicted."""
    needed, capacity = _needed(option) + beyond_bytes, option.prediction.memory.capacity_bytes
    if needed > capacity:
        return replace(option, fit="no")
    crowded = option.fit == "fits" and needed > (1 - MARGIN) * capacity
    return replace(option, fit="tight") if crowded else option


def following(
    failed: Option, options: Iterable[Option], tried: list[Strategy], beyond_bytes: int, hardware: Hardware
) -> Option | None:
    """What to retry with: the fastest that needs less than `failed` and fits after correction, if any.

    It leaves the margin free where any can. To fit after correction means to save what was missing.
    """
    left = (corrected(option, beyond_bytes) for option in options if option.strategy not in tried)
    fitting = [option for option in left if option.fit != "no" and _needed(option) < _needed(failed)]
    return rank(fitting, "throughput", hardware)[0] if fitting else None


def reliefs(failed: Option, options: Sequence[Option], beyond_bytes: int, hardware: Hardware) -> list[Option]:
    """At most three that need less: a smaller micro-batch, more checkpointing, another kind of strategy.

    From each group the fastest that fits after correction; else the one that needs the least, as `no`.
    """
    asked = failed.strategy
    less = [corrected(option, beyond_bytes) for option in options if _needed(option) < _needed(failed)]
    own = [option for option in less if same_state(asked, option.strategy)]
    others = [option for option in less if not same_state(asked, option.strategy)]
    smaller = [one for one in own if one.strategy.checkpoint_every == asked.checkpoint_every]
    leaner = [one for one in own if one.strategy.micro_batch == asked.micro_batch and one not in smaller]
    found = []
    for group in filter(None, (smaller, leaner, others)):
        fitting = [option for option in group if option.fit != "no"]
        found.append(rank(fitting, "throughput", hardware)[0] if fitting else min(group, key=_needed))
    return found


def flags(asked: Strategy, other: Strategy) -> list[str]:
    """What to add to the command line to get from one strategy to the other."""
    changes = [] if settings_of(asked) == settings_of(other) else [strategy_flag(other)]
    if asked.micro_batch != other.micro_batch:
        changes.append(f"--set train.micro_batch={other.micro_batch}")
    if asked.checkpoint_every != other.checkpoint_every:
        word = {0: "none", 1: "full"}.get(other.checkpoint_every, str(other.checkpoint_every))
        changes.append(f"--set train.checkpointing={word}")
    return changes


def leaner_unpredicted(failed: Strategy) -> list[Strategy]:
    """What to try in turn where nothing can be simulated; each can load the state of `failed`.

    The micro-batch is halved down to one row, then every block is checkpointed, then weights are resharded.
    """
    found, rows = [failed], failed.micro_batch * failed.accumulation
    while found[-1].micro_batch > 1:
        half = found[-1].micro_batch // 2
        found.append(replace(failed, micro_batch=half, accumulation=rows // half))
    if failed.checkpoint_every != 1:
        found.append(replace(found[-1], checkpoint_every=1))
    if not failed.reshard:
        found.append(replace(found[-1], reshard=True))
    return [one for one in found[1:] if one.global_batch == failed.global_batch]


def _needed(option: Option) -> int:
    return option.prediction.memory.needed_bytes
