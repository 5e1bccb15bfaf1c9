"""After a strategy ran out of memory: which others need less, and which of them to go on with.

The failure itself corrects the plan: where a process used more than was predicted for it, the others are
taken to need as much more than their predictions. That they err alike is the best guess there is: they
share the model, the kernels and whatever else is on the GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from shardwise.engines import settings_of
from shardwise.hardware.hardware import Hardware
from shardwise.job.strategies import NAMED
from shardwise.planner.plan import Fit, Option
from shardwise.planner.search import MARGIN, family, rank
from shardwise.strategy import Strategy


def same_state(one: Strategy, other: Strategy) -> bool:
    """Whether a checkpoint of one can be loaded by the other: they differ in how they compute only."""
    return _kind(one) == _kind(other)


def corrected(option: Option, beyond_bytes: int, *, margin: float = MARGIN) -> Option:
    """`option` with its fit as it is when it needs `beyond_bytes` more of the GPU than predicted."""
    memory = option.prediction.memory
    needed = memory.needed_bytes + beyond_bytes
    if option.fit == "no" or needed > memory.capacity_bytes:
        fit: Fit = "no"
    else:
        fit = "fits" if option.fit == "fits" and needed <= (1 - margin) * memory.capacity_bytes else "tight"
    return replace(option, fit=fit)


def following(
    failed: Option,
    options: Iterable[Option],
    *,
    tried: Sequence[Strategy],
    beyond_bytes: int,
    hardware: Hardware,
) -> Option | None:
    """What to go on with: the fastest that needs less than `failed` and fits after correction, if any.

    It leaves the margin free where anything does. To fit after correction is to save what was seen missing.
    """
    left = (corrected(option, beyond_bytes) for option in options if option.strategy not in tried)
    fitting = [option for option in left if option.fit != "no" and _saves(failed, option)]
    return rank(fitting, "throughput", hardware)[0] if fitting else None


def reliefs(
    failed: Option, options: Sequence[Option], *, beyond_bytes: int, hardware: Hardware
) -> list[Option]:
    """At most three that need less: fewer rows at a time, more checkpointing, another kind of strategy.

    Of each the fastest that fits after correction; where none does, the one that needs the least, as `no`.
    """
    asked = failed.strategy
    smaller, leaner, others = [], [], []
    for option in (corrected(option, beyond_bytes) for option in options):
        if not _saves(failed, option):
            continue
        if not same_state(asked, option.strategy):
            others.append(option)
        elif option.strategy.checkpoint_every == asked.checkpoint_every:
            smaller.append(option)
        elif option.strategy.micro_batch == asked.micro_batch:
            leaner.append(option)
    return [_best(group, hardware) for group in (smaller, leaner, others) if group]


def flags(asked: Strategy, other: Strategy) -> list[str]:
    """What to add to the command line to get from one to the other."""
    said = []
    if asked.name != other.name:
        said.append(f"--set strategy={_spec(other)}")
    if asked.micro_batch != other.micro_batch:
        said.append(f"--set train.micro_batch={other.micro_batch}")
    if asked.checkpoint_every != other.checkpoint_every:
        word = {0: "none", 1: "full"}.get(other.checkpoint_every, str(other.checkpoint_every))
        said.append(f"--set train.checkpointing={word}")
    return said


def leaner_unpredicted(
    strategies: Sequence[Strategy], failed: Strategy, *, keep_state: bool
) -> Iterator[Strategy]:
    """Where nothing can be simulated: what needs less than `failed`, in the order in which to try it.

    Fewer rows at a time, then checkpointing every block, then the kinds that come later in `strategies`,
    which go from the fastest to the most frugal; of each the leanest. `keep_state`: only what can load its
    checkpoint.
    """
    own = [s for s in strategies if family(s) == family(failed) and s.micro_batch <= failed.micro_batch]
    rows = [s for s in own if s.checkpoint_every == failed.checkpoint_every and s != failed]
    yield from sorted(rows, key=lambda s: -s.micro_batch)
    if failed.checkpoint_every != 1:
        yield from _leanest(own)
    kinds = list(dict.fromkeys(family(s) for s in strategies))
    resharding = replace(family(failed), reshard=True)
    later = kinds[kinds.index(family(failed)) + 1 :] if family(failed) in kinds else kinds
    for kind in [resharding, *later]:
        if kind != family(failed) and kind.reshard and (same_state(kind, failed) or not keep_state):
            yield from _leanest([s for s in strategies if family(s) == kind])


def _leanest(strategies: Sequence[Strategy]) -> Iterator[Strategy]:
    """The one with the fewest rows at a time, and with every block checkpointed where that is allowed."""
    if strategies:
        yield min(strategies, key=lambda s: (s.micro_batch, s.checkpoint_every or inf))


def _kind(strategy: Strategy) -> Strategy:
    """What decides how its state lies in files; `reshard` only says how long weights stay gathered."""
    return replace(strategy, micro_batch=1, accumulation=1, checkpoint_every=0, reshard=True)


def _saves(failed: Option, option: Option) -> bool:
    return option.prediction.memory.needed_bytes < failed.prediction.memory.needed_bytes


def _best(options: Sequence[Option], hardware: Hardware) -> Option:
    fitting = [option for option in options if option.fit != "no"]
    if fitting:
        return rank(fitting, "throughput", hardware)[0]
    return min(options, key=lambda option: option.prediction.memory.needed_bytes)


def _spec(strategy: Strategy) -> str:
    """A strategy's kind as the value of `strategy` in a job: its name, or its parts."""
    if strategy.name in NAMED:
        return strategy.name
    parts = settings_of(strategy).model_dump(exclude={"bucket"}, exclude_none=True)
    return f"'{json.dumps(parts)}'"
