"""A strategy on a hardware: memory, time and energy from one trace."""

from shardwise.engines import descriptor
from shardwise.hardware.catalog import Gpu
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import predict_energy
from shardwise.simulate.prediction import Memory, Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.step import Played, predict_time
from shardwise.strategy import Strategy

DRIVER_BYTES = 400 * 1024**2
"""GPU memory that CUDA does not hand out: torch finds 23.61 GiB on an RTX 4090 of 24564 MiB
(pinokiofactory/flux-webui#11), 7.75 GiB on an RTX 4060 of 8188 MiB (ESRSchao/EdgeRegNet#2). Data-centre cards
may keep more; that was not measured."""


def simulate(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, *, memory_cap_bytes: int | None = None
) -> Prediction:
    """Predict one strategy; its micro-batch is `trace`. `memory_cap_bytes`: limit per GPU for the process."""
    played = play(trace, strategy, hardware)
    time = predict_time(trace, strategy, hardware, played)
    capacity = capacity_bytes(hardware.gpu, memory_cap_bytes)
    return Prediction(
        memory=predict_memory(trace, strategy, hardware, capacity_bytes=capacity),
        time=time,
        energy=predict_energy(hardware.gpu, time, work_joules=played.totals.joules, gpus=strategy.world_size),
    )


def play(trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Played:
    """Play the engine's schedule until steps are alike; `predict_time` makes a prediction of it."""
    return descriptor(strategy).play(trace, strategy, hardware)


def predict_memory(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, *, capacity_bytes: int
) -> Memory:
    """Memory of the fullest GPU. `capacity_bytes`: what the process may use of it, context included."""
    return descriptor(strategy).peak_memory(trace, strategy, hardware, capacity_bytes=capacity_bytes)


def capacity_bytes(gpu: Gpu, memory_cap_bytes: int | None = None) -> int:
    """What a process alone on the GPU can use, its CUDA context included."""
    usable = gpu.memory_bytes - DRIVER_BYTES
    return usable if memory_cap_bytes is None else min(usable, memory_cap_bytes)
