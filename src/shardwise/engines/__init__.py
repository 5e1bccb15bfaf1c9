"""The registry of engines: each has a folder with a descriptor (`spec.py`), free of torch."""

import json
import shlex

from shardwise.engines.ddp.spec import Ddp
from shardwise.engines.ddp_zero1.spec import DdpZero1
from shardwise.engines.deepspeed.spec import DeepSpeed
from shardwise.engines.descriptor import EngineSpec
from shardwise.engines.fsdp2.spec import Fsdp2
from shardwise.engines.pipeline.spec import Pipeline
from shardwise.engines.single.spec import Single
from shardwise.errors import Problem
from shardwise.job.schema import StrategySpec
from shardwise.job.strategies import NAMED, Parts
from shardwise.strategy import Strategy

ENGINES: dict[str, EngineSpec] = {
    spec.name: spec for spec in (Single(), DeepSpeed(), Fsdp2(), Ddp(), DdpZero1(), Pipeline())
}


def descriptor(strategy: Strategy) -> EngineSpec:
    """Everything that depends on the strategy's engine."""
    return ENGINES[strategy.engine]


def parts_of(spec: str | StrategySpec) -> Parts:
    """Fields of the `Strategy` for a name other than `auto`, or for a job's own parts."""
    return dict(NAMED[spec]) if isinstance(spec, str) else ENGINES[spec.engine].parts(spec)


def spec_problems(spec: str | StrategySpec) -> list[Problem]:
    """What is wrong with a job's own parts and would not show in the strategy."""
    return [] if isinstance(spec, str) else ENGINES[spec.engine].problems(spec)


def settings_of(strategy: Strategy) -> StrategySpec:
    """A strategy as the `strategy` section of a job: the one conversion back from a strategy."""
    return descriptor(strategy).settings(strategy)


def strategy_flag(strategy: Strategy) -> str:
    """`--set strategy=...` for a shell: its name where that says all, else the parts that are no defaults."""
    parts = settings_of(strategy)
    named = (name for name in NAMED if settings_of(Strategy(**parts_of(name))) == parts)
    return f"--set strategy={next(named, shlex.quote(json.dumps(parts.model_dump(exclude_defaults=True))))}"
