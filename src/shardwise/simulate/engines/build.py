"""From a strategy to the model of its engine's memory."""

from __future__ import annotations

from shardwise.simulate.engines.protocol import EngineMemory
from shardwise.simulate.engines.single import Single
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy.strategy import Strategy


def engine_memory(trace: StepTrace, strategy: Strategy) -> EngineMemory:
    """The memory of the strategy's engine, before anything is built."""
    if strategy.engine == "fsdp2":
        from shardwise.simulate.engines.fsdp2 import Fsdp2

        return Fsdp2(trace, strategy)
    if strategy.engine == "deepspeed":
        from shardwise.simulate.engines.zero3 import Zero3
        from shardwise.simulate.engines.zero12 import Zero012

        return Zero3(trace, strategy) if strategy.stage == 3 else Zero012(trace, strategy)
    return Single(trace, strategy)
