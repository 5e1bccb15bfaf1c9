"""A GPU's joules, and a process's memory on it, from the driver's management library (NVML).

NVML is asked on the host: no CUDA context, no stream, no waiting for the GPU. An answer takes milliseconds
(3.3 on average and 9 at most on an H200), so a thread asks, ten times a second. Since Volta a GPU counts
the energy it has used, in millijoules; the counter moves every 20 to 100 ms. So a difference over one
second may be off by a fifth, one over ten seconds by a fiftieth. Older GPUs tell only their power, which is
integrated here. Both are the whole GPU's, whoever uses it, without the host, the network and the power
supply.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

EnergySource = Literal["counter", "power samples"]

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A number that cannot be had, and why."""

    reason: str


class Gpu:
    """One GPU as NVML sees it."""

    def __init__(self, library: Any, handle: Any) -> None:
        """`library` is the module pynvml, `handle` its handle of the GPU."""
        self._library = library
        self._handle = handle
        self._last: float | Unavailable
        self.energy_source: EnergySource | Unavailable
        read = self._find_energy_source()
        if read is not None:
            threading.Thread(target=self._sample, args=(read,), name="gpu-energy", daemon=True).start()

    def joules(self) -> float | Unavailable:
        """Energy used since some moment, as of the last sample: differences are what counts."""
        return self._last

    def process_bytes(self) -> int | None:
        """GPU memory of this process, as the driver counts it; None where it does not tell.

        It does not in a container with process ids of its own, and on Windows.
        """
        try:
            processes = self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._library.NVMLError:
            return None
        mine = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        return int(mine[0]) if mine and mine[0] is not None else None

    def _find_energy_source(self) -> Callable[[], float] | None:
        """What reads the joules; it has been tried once."""
        try:
            self._last, self.energy_source = self._counter(), "counter"
        except self._library.NVMLError as no_counter:
            try:
                power = _PowerIntegral(self._library, self._handle)
            except self._library.NVMLError as no_power:
                reason = f"NVML gives neither energy ({no_counter}) nor power ({no_power}) of this GPU"
                self._last = self.energy_source = Unavailable(reason=reason)
                return None
            self._last, self.energy_source = 0.0, "power samples"
            return power
        return self._counter

    def _counter(self) -> float:
        return float(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000.0

    def _sample(self, read: Callable[[], float]) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            try:
                self._last = read()
            except self._library.NVMLError as error:
                self._last = Unavailable(reason=f"NVML's energy: {error}")


def find_gpu(uuid: str, *, library: Any = None) -> Gpu | Unavailable:
    """The GPU with this UUID, e.g. `GPU-5d8b…`.

    The UUID is the one name that CUDA and NVML share: their numbers differ with CUDA_VISIBLE_DEVICES and
    CUDA_DEVICE_ORDER. `library` stands in for the module pynvml of the package nvidia-ml-py.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return Unavailable(reason="nvidia-ml-py is not installed: pip install nvidia-ml-py")
    try:
        library.nvmlInit()
        return Gpu(library, library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError as error:
        return Unavailable(reason=f"NVML: {error} ({uuid})")


class _PowerIntegral:
    """Joules as the integral of power (trapezoids) from call to call."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._joules = 0.0
        self._watts, self._time = self._now()

    def __call__(self) -> float:
        watts, now = self._now()
        self._joules += (now - self._time) * (self._watts + watts) / 2
        self._watts, self._time = watts, now
        return self._joules

    def _now(self) -> tuple[float, float]:
        return float(self._library.nvmlDeviceGetPowerUsage(self._handle)) / 1000.0, time.perf_counter()
