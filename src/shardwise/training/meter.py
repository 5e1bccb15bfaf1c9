"""Measure a run without waiting for the GPU: this process's memory, its GPU's energy, a step's seconds."""

import resource
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.device import Unavailable
from shardwise.device.find import fake_file, find
from shardwise.device.rapl import PARTS
from shardwise.energy import Gpu, Host, find_gpu
from shardwise.engines.runtime.protocol import Engine, StepResult
from shardwise.errors import MachineError
from shardwise.training.process import place

MEMORY_FIELDS = (
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "outside_allocator_bytes",
    "host_memory_bytes",
    "pinned_memory_bytes",
    "energy_millijoules",
    "cpu_millijoules",  # of the node since the launch began; 0 but for the node's first process
    "dram_millijoules",
)
"""What the ranks exchange about themselves with each step."""

CPU = torch.device("cpu")
UNKNOWN = -1.0  # Stands for what cannot be measured here: ranks exchange plain numbers

_EVERY_READING = 3
_THEN_EVERY = 50
"""Memory outside the allocator is read at the first steps, in which libraries load kernels and connect, and
rarely later: a question to the driver takes longer than a kernel launch."""


def memory(device: torch.device) -> list[float]:
    """This process's values of MEMORY_FIELDS; UNKNOWN where there is none.

    On the CPU the first four are the resident set now (twice) and its peak (twice).
    """
    resident = float(psutil.Process().memory_info().rss)
    if device.type != "cuda":
        # the kernel's peak lags a little behind what is resident now
        peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0)
        found = [resident, resident, peak, peak, UNKNOWN, resident, UNKNOWN]
        return [*found, millijoules(device), *host_millijoules()]
    stats = torch.cuda.memory_stats(device)  # once: collecting them takes longer than a kernel launch
    keys = ("allocated_bytes", "reserved_bytes")
    allocator = [float(stats.get(f"{key}.all.{when}", 0)) for when in ("current", "peak") for key in keys]
    outside = _outside(device).read(reserved_bytes=allocator[1])
    found = [*allocator, outside.device_bytes, resident, outside.pinned_bytes]
    return [*found, millijoules(device), *host_millijoules()]


def sources() -> tuple[str | None, str | None]:
    """What this process's GPU is measured with: (its energy, its memory outside the allocator).

    See `RunEvent.energy_source` and `RunEvent.outside_allocator_source`; None where nothing measures it.
    """
    gpu, outside = gpu_of(_device()), "device" if torch.cuda.is_available() else None
    if isinstance(gpu, Unavailable):
        return None, outside
    energy = None if isinstance(gpu.energy_source, Unavailable) else gpu.energy_source
    return energy, outside if isinstance(gpu.process_bytes(), Unavailable) else "process"


def why_no_energy() -> str | None:
    """The reason why this process's GPU has no joules; None if it has."""
    gpu = gpu_of(_device())
    found = gpu if isinstance(gpu, Unavailable) else gpu.energy_source
    return found.reason if isinstance(found, Unavailable) else None


def lag() -> int:
    """Readings that do not stand one step apart after an interruption.

    The host issues the second step before the first has ended, so its reading is early; with the third it
    waits for the GPU again.
    """
    return 2 if torch.cuda.is_available() else 0


def card_of(device: torch.device) -> str | None:
    """The UUID of this process's GPU, as the driver has it; None where there is none."""
    gpu = gpu_of(device)
    return None if isinstance(gpu, Unavailable) else gpu.uuid


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


class _Reading(NamedTuple):
    device_bytes: float = UNKNOWN
    pinned_bytes: float = UNKNOWN


class _Outside:
    """Memory outside torch's allocator of GPU memory, as last read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._calls, self._last = device, 0, _Reading()

    def read(self, *, reserved_bytes: float) -> _Reading:
        self._calls += 1
        if self._calls <= _EVERY_READING or self._calls % _THEN_EVERY == 0:
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", UNKNOWN)
            self._last = _Reading(max(0.0, _used_bytes(self._device) - reserved_bytes), float(pinned))
        return self._last


_outside = cache(_Outside)


def _used_bytes(device: torch.device) -> float:
    """GPU memory in use: by this process where the driver reports it, else by all processes on the GPU."""
    gpu = gpu_of(device)
    used = gpu if isinstance(gpu, Unavailable) else gpu.process_bytes()
    if not isinstance(used, Unavailable):
        return float(used)
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)


def millijoules(device: torch.device) -> float:
    """The energy counter of this process's GPU; UNKNOWN where there is none."""
    gpu = gpu_of(device)
    joules = gpu if isinstance(gpu, Unavailable) else gpu.joules()
    return UNKNOWN if isinstance(joules, Unavailable) else joules * 1000.0


_host = cache(Host)


def host_millijoules() -> list[float]:
    """Energy by PARTS that this node has used since the first call; UNKNOWN where it cannot be read.

    The first process of a node has it, the others 0: a sum over ranks counts each node once.
    """
    if place()[2] > 0:
        return [0.0] * len(PARTS)
    found = _host().joules()
    return [UNKNOWN if isinstance(one, Unavailable) else one * 1000.0 for one in found.values()]


def why_no_host() -> dict[str, str]:
    """What cannot be read of this node's CPU and DRAM, and why."""
    found = _host().joules().items()
    return {part: one.reason for part, one in found if isinstance(one, Unavailable)}


@cache
def gpu_of(device: torch.device) -> Gpu | Unavailable:
    """This process's GPU; in a rehearsal, where ranks compute on the CPU, the fake card of its number."""
    if device.type == "cuda":
        return find_gpu(str(torch.cuda.get_device_properties(device).uuid))
    if fake_file() is None:
        return Unavailable(reason="no GPU")
    driver, (rank, size, _) = find(), place()
    if rank >= len(driver.cards):
        what = f"{size} processes rehearse on {len(driver.cards)} fake cards"
        raise MachineError(what, where="SHARDWISE_DEVICE", fix="make a fake with a card for each process")
    return find_gpu(driver.cards[rank].uuid, driver)


Mark = float | torch.cuda.Event  # A moment, by a stopwatch


class Stopwatch:
    """Seconds from one mark to the next; on a GPU by its own clock, without waiting for it.

    Only that clock knows when a step ended: the host learns it while it issues the next step, early or late.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._since = self.mark()

    def mark(self) -> Mark:
        """When all that has been issued is done."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, until: Mark | None = None) -> float:
        """Seconds since the last lap or restart; `until` is a mark made after it, or now."""
        since, self._since = self._since, self.mark() if until is None else until
        if isinstance(since, float):
            assert isinstance(self._since, float)
            return self._since - since
        assert isinstance(self._since, torch.cuda.Event)
        self._since.synchronize()
        return float(since.elapsed_time(self._since)) / 1000.0

    def restart(self) -> None:
        self._since = self.mark()


PROFILED_STEPS = 2  # The first prepares the profiler, which takes seconds; the second is recorded


def profile_steps(engine: Engine, *, after: int, trace: Path) -> None:
    """Run the engine's steps behind the first `after` under the profiler; rank 0 writes the Chrome trace.

    All ranks do, so that none is slower than the others. A recorded step begins and ends with an idle GPU.
    """
    world, step, done = engine.world, engine.step, 0

    def wait() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    cuda = [ProfilerActivity.CUDA] if world.device.type == "cuda" else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *cuda],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(trace)) if world.rank == 0 else None,
    )

    def profiled(*arguments: Any, **named: Any) -> StepResult:
        nonlocal done
        done += 1
        if done <= after:
            return step(*arguments, **named)
        wait()
        if done == after + 1:
            profiler.start()
        result = step(*arguments, **named)
        wait()
        profiler.step()
        if done == after + PROFILED_STEPS:
            profiler.stop()
        return result

    engine.step = profiled  # type: ignore[method-assign]
