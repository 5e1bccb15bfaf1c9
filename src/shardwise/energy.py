"""A GPU's joules and a process's memory on it, and the joules of each training step.

The driver answers on the host, without waiting for the GPU: 3.3 ms on average and 9 ms at most on an H200.
So a thread asks ten times a second. Since Volta a GPU counts its energy, in steps of 20 to 100 ms: a
difference over one second may be off by a fifth, one over ten seconds by a fiftieth. On older GPUs power is
integrated instead. Both cover the entire GPU, whoever uses it, without host, network and power supply.
CPU and DRAM are counted by themselves where RAPL can be read, for the entire node.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardwise.device import Device, NoDevice, Unavailable
from shardwise.device.find import fake_file, find
from shardwise.device.rapl import PARTS, Part, Rapl

EnergySource = Literal["counter", "power samples", "simulated"]

SAMPLE_SECONDS = 0.1
END_SECONDS = 0.2
"""A window's joules are off by at most so many seconds of its power: at each end, a reading is up to one
sample and one step of the counter old."""

PHASES = ("start", "training", "evaluation", "saving", "end")
"""`start`: before the first step of a launch; `end`: after the last one, neither evaluation nor saving."""
FIRST = "no reading before the first step of a launch"
INTERRUPTED = "an evaluation or a save lies between the readings"


class Gpu:
    """One GPU, its energy sampled by a thread."""

    def __init__(self, device: Device, uuid: str) -> None:
        self._device, self.uuid = device, uuid
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
        if fake_file() is not None:
            self.energy_source = "simulated"
        threading.Thread(target=self._sample, args=(read,), name="gpu-energy", daemon=True).start()

    def joules(self) -> float | Unavailable:
        """Energy used since an arbitrary moment, as of the last sample: only differences count."""
        return self._last

    def process_bytes(self) -> int | Unavailable:
        """GPU memory of this process; Unavailable in containers with their own process ids."""
        found = self._device.processes(self.uuid)
        missing = Unavailable(reason="the driver does not list this process")
        return found if isinstance(found, Unavailable) else found.get(os.getpid(), missing)

    def _sample(self, read: Callable[[], float | Unavailable]) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            self._last = read()


class Host:
    """CPU and DRAM of this node, their energy sampled by a thread: the counters go round in minutes."""

    def __init__(self, rapl: Rapl | None = None) -> None:
        self._rapl = rapl or Rapl()
        self._last = self._read()
        if any(not isinstance(one, Unavailable) for one in self._last.values()):
            threading.Thread(target=self._sample, name="host-energy", daemon=True).start()

    def joules(self) -> dict[Part, float | Unavailable]:
        """Energy used since this was made, as of the last sample."""
        return self._last

    def _read(self) -> dict[Part, float | Unavailable]:
        return {part: self._rapl.joules(part) for part in PARTS}

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_SECONDS)
            self._last = self._read()


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
    """Energy of steps and phases of a run, from the energy counters of all GPUs at each step."""

    def __init__(
        self,
        unavailable: str | None = None,
        *,
        cards: Sequence[str | None] = (),
        first: Sequence[int | None] = (),
        lag: int = 0,
        waited: float = 0.0,
    ) -> None:
        """`unavailable`: why there are no readings at all, where that is known.

        `cards`: UUIDs by rank, so that a GPU of several ranks is counted once. `first`: readings of the
        launch, in millijoules by rank. `lag`: readings after an interruption that do not stand one step
        apart, because the host is ahead of the GPU there. `waited`: seconds from `first` until now.
        """
        self._unavailable, self._lag, self._left = unavailable, lag, lag
        # The first rank of each card; a rank without a card stands for itself.
        self._ranks = [i for i, card in enumerate(cards) if card is None or cards.index(card) == i] or None
        self._before = {rank: reading for rank, reading in enumerate(first) if reading is not None}
        self._gap: str | None = FIRST
        self.phases = dict.fromkeys(PHASES, 0.0)  # joules of all GPUs
        self._steps, self._pure = 0, 0.0  # steps with a reading at both ends, and their joules
        self._stretch = _Stretch({"start": waited})

    def of_step(self, millijoules: Sequence[int | None]) -> float | Unavailable:
        """Energy of all GPUs since the step before. `millijoules` by rank; None: that GPU has no counter."""
        if self._unavailable is not None:
            return Unavailable(reason=self._unavailable)
        used, wrong = self._since(millijoules)
        gap = wrong or self._gap
        if self._left:
            self._left -= 1
        else:
            self._gap = None
        if gap is None:
            self.phases["training"] += used
            self._steps, self._pure = self._steps + 1, self._pure + used
            self._settle()
            return used
        self._stretch.joules += used
        self._stretch.steps += 1
        return Unavailable(reason=gap)

    def interrupt(self, phase: str = "evaluation", seconds: float = 1.0) -> None:
        """What used energy since is not the next step, but a phase that took `seconds`."""
        self._gap, self._left = INTERRUPTED, self._lag
        self._stretch.phases[phase] = self._stretch.phases.get(phase, 0.0) + seconds

    def finish(self, millijoules: Sequence[int | None], seconds: float = 0.0) -> None:
        """The last readings, `seconds` after the last step, evaluation or save. `phases` is complete then."""
        if self._unavailable is None:
            self._stretch.phases["end"] = seconds
            self._stretch.joules += self._since(millijoules)[0]
            self._stretch.steps += self._lag
            self._settle()

    @property
    def joules(self) -> float:
        """Of all GPUs, since the readings of the launch."""
        return sum(self.phases.values()) + self._stretch.joules

    def _since(self, millijoules: Sequence[int | None]) -> tuple[float, str | None]:
        """Joules of all cards since their last readings, and what is wrong with these."""
        used, wrong = 0.0, None
        for rank in range(len(millijoules)) if self._ranks is None else self._ranks:
            now, before = millijoules[rank], self._before.get(rank)
            if now is None:
                wrong, self._gap = f"rank {rank} has no reading", "the step before has no reading"
                self._left = max(1, self._left)
                continue
            self._before[rank] = now
            if before is not None and now < before:
                wrong = wrong or "an energy counter went backwards"
            elif before is not None:
                used += (now - before) / 1000.0
        return used, wrong

    def _settle(self) -> None:
        """Charge a stretch: its steps as others, the rest to what lay between, by their seconds."""
        stretch, self._stretch = self._stretch, _Stretch({})
        each = self._pure / self._steps if self._steps else 0.0
        steps = min(stretch.joules, stretch.steps * each) if stretch.phases else stretch.joules
        self.phases["training"] += steps
        total, count = sum(stretch.phases.values()), len(stretch.phases)
        for phase, seconds in stretch.phases.items():
            self.phases[phase] += (stretch.joules - steps) * (seconds / total if total else 1 / count)


@dataclass
class _Stretch:
    """Readings that do not stand one step apart."""

    phases: dict[str, float]  # seconds of what lay between
    joules: float = 0.0
    steps: int = 0
