"""A toy simulator: a 1.3B model's step by simple formulas, so that a test knows what a plan must say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.planner.plan import Plan, Workload
from shardwise.planner.search import search
from shardwise.simulate.prediction import Energy, Memory, MemoryTerms, Moment, Prediction, Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy
from shardwise.units import GIB

BLOCKS = 24
PARAMETERS = 1.3e9
SEQUENCE = 2048
PEAK = 40e12
"""FLOP/s of the toy's GPU."""


def toy_trace(rows: int, checkpoint_every: int) -> StepTrace:
    return StepTrace(
        parameters=(),
        buffers=(),
        units=(),
        events=(),
        ops=(),
        rows=rows,
        sequence_length=SEQUENCE,
        checkpoint_every=checkpoint_every,
        precision="bf16",
    )


def toy_simulate(trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Prediction:
    memory = _memory(trace, strategy, int(0.98 * hardware.gpu.memory_bytes))
    return Prediction(memory=memory, **_time(trace, strategy, memory))


def _memory(trace: StepTrace, strategy: Strategy, capacity: int) -> Memory:
    gpus, sharded = strategy.data_parallel, strategy.stage == 3 or strategy.engine == "fsdp2"
    away = strategy.offload_parameters != "none"
    weights = 0 if away else 2 * PARAMETERS / (gpus if sharded else 1)
    gradients = 4 * PARAMETERS / (gpus if sharded or strategy.stage == 2 else 1)
    optimizer = 12 * PARAMETERS / (gpus if sharded or strategy.stage else 1)
    host = 0.0
    if strategy.offload_optimizer != "none":
        host, optimizer, gradients = 16 * PARAMETERS, 0, 0
    every = strategy.checkpoint_every
    kept = 1.0 if every == 0 else 1 - 0.9 / every
    activations = trace.tokens * 2048 * 34 * BLOCKS * kept
    terms = MemoryTerms(
        weights_bytes=int(weights),
        gradients_bytes=int(gradients),
        optimizer_bytes=int(optimizer),
        activations_bytes=int(activations),
        loss_bytes=trace.tokens * 50_000,
        engine_buffers_bytes=int(0.4 * GIB) if sharded or strategy.stage else 0,
        fragmentation_bytes=int(0.03 * activations),
    )
    states = int(weights + gradients + optimizer)
    phases = [("forward", range(BLOCKS)), ("backward", range(BLOCKS - 1, -1, -1))]
    timeline = [
        Moment(where=f"block {n} {phase}", allocated_bytes=states + int(activations * (n + 1) / BLOCKS))
        for phase, blocks in phases
        for n in blocks
    ]
    timeline.insert(BLOCKS, Moment(where="output head", allocated_bytes=terms.total_bytes))
    timeline.append(Moment(where="optimizer", allocated_bytes=states + GIB // 2))
    return Memory(
        peak_reserved_bytes=terms.total_bytes,
        peak_allocated_bytes=terms.total_bytes - terms.fragmentation_bytes,
        outside_allocator_bytes=GIB // 2,
        capacity_bytes=capacity,
        terms=terms,
        host_bytes=int(host),
        timeline=tuple(timeline),
    )


def _time(trace: StepTrace, strategy: Strategy, memory: Memory) -> dict[str, Time | Energy]:
    recomputed = 1 / (3 * strategy.checkpoint_every) if strategy.checkpoint_every else 0.0
    busy = trace.rows / (trace.rows + 0.5)
    tokens = strategy.global_batch * trace.sequence_length
    compute = 6 * PARAMETERS * (1 + recomputed) * tokens / strategy.world_size / PEAK / busy
    gathers = strategy.accumulation if strategy.stage == 3 or strategy.engine == "fsdp2" else 0
    communication = 2 * PARAMETERS * (gathers * 2 + 2) / 13e9 if strategy.world_size > 1 else 0.0
    exposed = 0.3 * communication
    copies = memory.host_bytes / 26e9
    step = compute + exposed + copies + 0.02
    return {
        "time": Time(
            step_seconds=step,
            compute_seconds=compute,
            communication_seconds=communication,
            exposed_communication_seconds=exposed,
            copy_seconds=copies,
            optimizer_seconds=0.02,
            launch_seconds=0.6 * compute,
            tokens_per_step=tokens,
            world_size=strategy.world_size,
            full_clock_seconds=step,
            clocked_seconds=0.9 * compute,
            link="pcie4x16 through host memory",
            link_to_peers="pcie4x16 through host memory",
        ),
        "energy": Energy(
            joules_per_step=strategy.world_size * (60 * step + 200 * compute),
            idle_joules=strategy.world_size * 60 * step,
            tokens_per_step=tokens,
            at_power_limit=False,
        ),
    }


def toy_strategies(world_size: int, rows: int) -> list[Strategy]:
    """Eight kinds, each with every micro-batch and three ways of checkpointing."""
    kinds: list[dict[str, object]] = [
        *({"engine": "deepspeed", "stage": stage} for stage in range(4)),
        {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
        {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu"},
        {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"engine": "fsdp2"},
    ]
    each = rows // world_size
    return [
        Strategy(
            **kind,  # type: ignore[arg-type]
            data_parallel=world_size,
            micro_batch=micro,
            accumulation=each // micro,
            checkpoint_every=every,
        )
        for kind in kinds
        for micro in (2**n for n in range(each.bit_length()))
        for every in (0, 1, 2)
    ]


WORKLOAD = Workload(
    name="toy",
    model="toy-1.3b",
    parameters=int(PARAMETERS),
    trainable_parameters=int(PARAMETERS),
    lora_rank=None,
    sequence_length=SEQUENCE,
    global_batch=64,
    precision="bf16",
    total_tokens=None,
)


class Toy:
    """Plans by the toy simulator, and notes what was traced and simulated."""

    def __init__(self) -> None:
        self.traced: list[tuple[int, int]] = []
        self.simulated: list[Strategy] = []
        self.host_memory_bytes: int | None = None

    def trace_for(self, rows: int, checkpoint_every: int, _tensor_parallel: int = 1) -> StepTrace:
        self.traced.append((rows, checkpoint_every))
        return toy_trace(rows, checkpoint_every)

    def simulate(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Prediction:
        assert (trace.rows, trace.checkpoint_every) == (strategy.micro_batch, strategy.checkpoint_every)
        self.simulated.append(strategy)
        return toy_simulate(trace, strategy, hardware)

    def hardware(self, gpus: str) -> Hardware:
        return replace(parse_hardware(gpus), host_memory_bytes=self.host_memory_bytes)

    def strategies(self, gpus: str, *names: str) -> list[Strategy]:
        every = toy_strategies(parse_hardware(gpus).world_size, WORKLOAD.global_batch)
        return [strategy for strategy in every if not names or strategy.name in names]

    def plan(self, gpus: str, *names: str, **options: Any) -> Plan:
        """A plan of the named kinds of strategies, or of all."""
        return self.search(gpus, self.strategies(gpus, *names), **options)

    def search(self, gpus: str, strategies: list[Strategy], **options: Any) -> Plan:
        return search(
            strategies,
            hardware=self.hardware(gpus),
            workload=WORKLOAD,
            trace_for=self.trace_for,
            simulate=self.simulate,
            **options,
        )


@pytest.fixture
def toy() -> Toy:
    return Toy()
