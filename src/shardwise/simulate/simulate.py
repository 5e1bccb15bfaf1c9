"""A strategy on a hardware: memory, time and energy from one trace."""

from __future__ import annotations

from shardwise.hardware.catalog import Gpu
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import predict_energy
from shardwise.simulate.memory import predict_memory
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.timeline import play, predict_time
from shardwise.strategy.strategy import Strategy

DRIVER_BYTES = 400 * 1024**2
"""Of a card's memory as nvidia-smi shows it, what CUDA does not give out: torch finds 23.61 GiB on an RTX
4090 of 24564 MiB (pinokiofactory/flux-webui#11), 7.75 GiB on an RTX 4060 of 8188 MiB (ESRSchao/EdgeRegNet#2).
Cards of data centres may keep more; that was not measured."""


def simulate(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, *, memory_cap_bytes: int | None = None
) -> Prediction:
    """The prediction for one micro-batch size; `memory_cap_bytes`: the process may use no more of its GPU."""
    played = play(trace, strategy, hardware)
    time = predict_time(trace, strategy, hardware, played)
    return Prediction(
        memory=predict_memory(
            trace, strategy, hardware, capacity_bytes=capacity_bytes(hardware.gpu, memory_cap_bytes)
        ),
        time=time,
        energy=predict_energy(strategy, hardware, time, played),
    )


def capacity_bytes(gpu: Gpu, memory_cap_bytes: int | None = None) -> int:
    """What a process alone on the GPU can use, its CUDA context included."""
    whole = gpu.memory_bytes - DRIVER_BYTES
    return whole if memory_cap_bytes is None else min(whole, memory_cap_bytes)
