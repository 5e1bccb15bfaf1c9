"""A strategy on a hardware: memory, time and energy from one trace."""

from __future__ import annotations

from shardwise.hardware.catalog import Gpu
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import predict_energy
from shardwise.simulate.memory import predict_memory
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.timeline import predict_time
from shardwise.strategy.strategy import Strategy

DRIVER_SHARE = 0.018
"""Of a card's memory as nvidia-smi shows it, the most that CUDA does not give out: 16376 MiB of an RTX 4080
are 15.7 GiB in torch's out-of-memory messages. Of an H200 it is 0.4 %."""


def simulate(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, *, memory_cap_bytes: int | None = None
) -> Prediction:
    """The prediction for one micro-batch size; `memory_cap_bytes`: the process may use no more of its GPU."""
    time = predict_time(trace, strategy, hardware)
    return Prediction(
        memory=predict_memory(
            trace, strategy, hardware, capacity_bytes=capacity_bytes(hardware.gpu, memory_cap_bytes)
        ),
        time=time,
        energy=predict_energy(trace, strategy, hardware, time),
    )


def capacity_bytes(gpu: Gpu, memory_cap_bytes: int | None = None) -> int:
    """What a process alone on the GPU can use, its CUDA context included."""
    whole = int(gpu.memory_bytes * (1 - DRIVER_SHARE))
    return whole if memory_cap_bytes is None else min(whole, memory_cap_bytes)
