"""The engine that runs in one process and shards nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.engines.descriptor import EngineSpec
from shardwise.engines.facts import Rule
from shardwise.engines.single.memory import SingleMemory
from shardwise.engines.single.time import SingleSchedule
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.schedule import Schedule
from shardwise.strategy import Strategy

if TYPE_CHECKING:
    from shardwise.engines.runtime.protocol import Engine


class Single(EngineSpec):
    """One process; torch's AdamW over fp32 weights."""

    name = "single"
    rules = (
        Rule(
            name="single-is-one-process",
            broken=lambda f: f.world_size != 1,
            reason="the single engine runs in one process, and there are several",
            where="strategy.engine",
            fix="--processes 1, or a strategy that shards: zero2, zero3, fsdp2",
            source="shardwise.engines.single.runtime",
        ),
        Rule(
            name="single-does-not-offload",
            broken=lambda f: f.offloads,
            reason="the single engine cannot offload",
            where="strategy.offload_optimizer, strategy.offload_parameters",
            fix="strategy: zero2-offload or zero3-offload; both run in one process, too",
            source="shardwise.engines.single.runtime",
        ),
    )

    def memory(self, trace: StepTrace, strategy: Strategy) -> EngineMemory:
        return SingleMemory(trace, strategy)

    def schedule(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Schedule:
        return SingleSchedule(trace, strategy, hardware)

    def runtime(self) -> type[Engine]:
        from shardwise.engines.single.runtime import SingleEngine

        return SingleEngine

    def check_launcher(self, target: str, strategy: Strategy) -> None:
        if target != "torchrun":
            what = f"{strategy.name} runs in one process and needs no configuration"
            raise JobError(what, where="--to", fix="--to torchrun, or `python train.py`")
