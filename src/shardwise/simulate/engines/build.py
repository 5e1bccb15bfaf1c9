"""From a strategy to the model of its engine's memory."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.simulate.engines.fsdp2 import Fsdp2
from shardwise.simulate.engines.protocol import EngineMemory
from shardwise.simulate.engines.single import Single
from shardwise.simulate.engines.whole import Beside, whole_parameters, without
from shardwise.simulate.engines.zero3 import Zero3
from shardwise.simulate.engines.zero12 import Partitioned
from shardwise.simulate.engines.zero_replicated import Replicated
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy.strategy import Strategy

_ZERO: dict[int, Callable[[StepTrace, Strategy], EngineMemory]] = {
    0: Replicated,
    1: Partitioned,
    2: Partitioned,
    3: Zero3,
}


def engine_memory(trace: StepTrace, strategy: Strategy) -> EngineMemory:
    """The memory of the strategy's engine, before anything is built."""
    if strategy.engine == "single":
        return Single(trace, strategy)
    whole = whole_parameters(trace, strategy.precision)
    seen = without(trace, whole) if whole else trace
    make = Fsdp2 if strategy.engine == "fsdp2" else _ZERO[strategy.stage]
    engine = make(seen, strategy)
    return Beside(engine, trace, whole) if whole else engine
