"""A GPU's joules and a process's memory on it, and the joules of each training step.

The driver answers on the host, without waiting for the GPU: 3.3 ms on average and 9 ms at most on an H200.
So a thread asks ten times a second. Since Volta a GPU counts its energy, in steps of 20 to 100 ms: a
difference over one second may be off by a fifth, one over ten seconds by a fiftieth. On older GPUs power is
integrated instead. Both cover the entire GPU, whoever uses it, without host, network and power supply.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from shardwise.device import Device, NoDevice, Unavailable
from shardwise.device.find import find

EnergySource = Literal["counter", "power samples"]

SAMPLE_SECONDS = 0.1
FIRST = "no reading before the first step of a launch"
INTERRUPTED = "an evaluation or a save lies between the readings"


class Gpu:
    """One GPU, its energy sampled by a thread."""

    def __init__(self, device: Device, uuid: str) -> None:
        self._device, self._uuid = device, uuid
        self.energy_source: EnergySource | Unavailable = "counter"
        read: Callable[[], float | Unavailable] = partial(device.read, uuid, "energy_joules")
        self._last = read()
        if isinstance(self._last, Unavailable):
            power = device.read(uuid, "power_watts")
            if isinstance(power, Unavailable):
                reason = f"neither energy ({self._last.reason}) nor power ({power.reason}) of this GPU"
                self._last = self.energy_source = Unavailable(reason=reason)
                return
            self._last, self.energy_source = 0.0, "power samples"
            read = _PowerIntegral(device, uuid, power)
        threading.Thread(target=self._sample, args=(read,), name="gpu-energy", daemon=True).start()

    def joules(self) -> float | Unavailable:
        """Energy used since an arbitrary moment, as of the last sample: only differences count."""
        return self._last

    def process_bytes(self) -> int | Unavailable:
        """GPU memory of this process; Unavailable in containers with their own process ids."""
        found = self._device.processes(self._uuid)
        missing = Unavailable(reason="the driver does not list this process")
        return found if isinstance(found, Unavailable) else found.get(os.getpid(), missing)

    def _sample(self, read: Callable[[], float | Unavailable]) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            self._last = read()


class _PowerIntegral:
    """Joules as the integral of power (trapezoids) from call to call."""

    def __init__(self, device: Device, uuid: str, watts: float) -> None:
        self._device, self._uuid = device, uuid
        self._joules, self._watts, self._time = 0.0, watts, time.perf_counter()

    def __call__(self) -> float | Unavailable:
        watts, now = self._device.read(self._uuid, "power_watts"), time.perf_counter()
        if isinstance(watts, Unavailable):
            return watts
        self._joules += (now - self._time) * (self._watts + watts) / 2
        self._watts, self._time = watts, now
        return self._joules


def find_gpu(uuid: str, device: Device | None = None) -> Gpu | Unavailable:
    """The GPU whose UUID ends with `uuid`, torch's: CUDA's numbers of GPUs differ from the driver's."""
    device = device or find()
    found = next((card.uuid for card in device.cards if card.uuid.endswith(uuid)), None)
    if found is not None:
        return Gpu(device, found)
    why = device.reason if isinstance(device, NoDevice) else "the driver shows no such GPU"
    return Unavailable(reason=f"{why} ({uuid})")


class StepJoules:
    """Differences between the energy counters of all GPUs at one step and at the next one."""

    def __init__(self, unavailable: str | None = None) -> None:
        """`unavailable`: why there are no readings at all, where that is known."""
        self._unavailable = unavailable
        self._before: list[int] | None = None
        self._gap = FIRST

    def of_step(self, millijoules: Sequence[int | None]) -> float | Unavailable:
        """Energy of all GPUs since the step before. `millijoules` by rank; None: that GPU has no counter."""
        if self._unavailable is not None:
            return Unavailable(reason=self._unavailable)
        now = [reading for reading in millijoules if reading is not None]
        if len(now) < len(millijoules):
            self._before, self._gap = None, "the step before has no reading"
            return Unavailable(reason=f"rank {list(millijoules).index(None)} has no reading")
        before, self._before = self._before, now
        if before is None:
            return Unavailable(reason=self._gap)
        differences = [after - start for start, after in zip(before, now, strict=True)]
        if min(differences) < 0:
            return Unavailable(reason="an energy counter went backwards")
        return sum(differences) / 1000.0

    def interrupt(self) -> None:
        """Forget the last readings: what used energy since is not the next step."""
        self._before, self._gap = None, INTERRUPTED
