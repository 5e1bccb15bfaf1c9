"""A strategy on a hardware: memory, time and energy from one trace."""

from shardwise.engines import descriptor
from shardwise.hardware.catalog import Gpu
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import predict_energy
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.step import predict_time
from shardwise.strategy import Strategy

DRIVER_BYTES = 400 * 1024**2
"""GPU memory that CUDA does not hand out: torch finds 23.61 GiB on an RTX 4090 of 24564 MiB
(pinokiofactory/flux-webui#11), 7.75 GiB on an RTX 4060 of 8188 MiB (ESRSchao/EdgeRegNet#2). Data-centre cards
may keep more; that was not measured."""


def simulate(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, *, memory_cap_bytes: int | None = None
) -> Prediction:
    """Predict one strategy; its micro-batch is `trace`. `memory_cap_bytes`: limit per GPU for the process."""
    engine, capacity = descriptor(strategy), capacity_bytes(hardware.gpu, memory_cap_bytes)
    played = engine.play(trace, strategy, hardware)
    time = predict_time(trace, strategy, hardware, played)
    return Prediction(
        memory=engine.peak_memory(trace, strategy, hardware, capacity_bytes=capacity),
        time=time,
        energy=predict_energy(hardware.gpu, time, work_joules=played.totals.joules, gpus=strategy.world_size),
    )


def capacity_bytes(gpu: Gpu, memory_cap_bytes: int | None = None) -> int:
    """What a process alone on the GPU can use, its CUDA context included."""
    usable = gpu.memory_bytes - DRIVER_BYTES
    return usable if memory_cap_bytes is None else min(usable, memory_cap_bytes)
