"""The machine now: its GPUs by the device seam, which makes no CUDA context, and its host."""

import time
from collections.abc import Mapping
from typing import Any, get_args

import psutil

from shardwise.device import Card, Device, NoDevice, Reading, Unavailable
from shardwise.hardware.detect import host_memory_bytes

CONSTANT: tuple[Reading, ...] = (
    "power_default_watts",
    "power_min_watts",
    "power_max_watts",
    "sm_clock_max_mhz",
)
"""Readings that a sampler asks for once; `clock_reasons` become words."""

SAMPLED: tuple[Reading, ...] = tuple(
    what for what in get_args(Reading) if what not in CONSTANT and what != "clock_reasons"
)

NAMELESS = Unavailable(reason="no such process is visible here, as in a container")


class Machine:
    """Samples GPUs and host. A value that cannot be read is None, with its reason in `unavailable`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._constant: dict[str, dict[str, Any]] = {
            card.uuid: {what: device.read(card.uuid, what) for what in CONSTANT} for card in device.cards
        }
        driver = device.driver_version()
        self._driver = None if isinstance(driver, Unavailable) else driver
        self._names: dict[int, str] = {}  # of processes, by their ids
        psutil.cpu_percent()  # a difference: the first call only begins it
        self._asked = time.monotonic()
        self._allowed_bytes = host_memory_bytes()

    def sample(self) -> dict[str, Any]:
        """`gpus`, `gpus_unavailable`, `driver` and `host`; units are in the names."""
        gpus = [self._gpu(card) for card in self._device.cards]
        shown = {process["pid"] for gpu in gpus for process in gpu["processes"] or ()}
        self._names = {pid: name for pid, name in self._names.items() if pid in shown}
        missing = self._device.reason if isinstance(self._device, NoDevice) else "the driver shows no GPU"
        return {
            "gpus": gpus,
            "gpus_unavailable": None if gpus else missing,
            "driver": self._driver,
            "host": self._host(),
        }

    def _gpu(self, card: Card) -> dict[str, Any]:
        read: dict[str, Any] = {what: self._device.read(card.uuid, what) for what in SAMPLED}
        read |= self._constant[card.uuid]
        read |= self._clocks(card.uuid)
        read |= {"memory_bytes": card.memory_bytes, "processes": self._processes(card.uuid)}
        return {"index": card.index, "uuid": card.uuid, "name": card.name, **_known(read)}

    def _clocks(self, uuid: str) -> dict[str, Any]:
        """All words for what limits the clocks, and of these the ones that mean trouble."""
        bits = self._device.read(uuid, "clock_reasons")
        if isinstance(bits, Unavailable):
            return {"clocks_held_by": bits, "clock_trouble": bits}
        trouble = _words(int(bits), self._device.clock_reasons)
        ordinary = _words(int(bits), self._device.ordinary_clock_reasons)
        rest = int(bits) & ~sum({*self._device.clock_reasons, *self._device.ordinary_clock_reasons})
        unknown = [f"reason {rest:#x}, not known here"] if rest else []
        return {"clocks_held_by": [*trouble, *ordinary, *unknown], "clock_trouble": trouble}

    def _processes(self, uuid: str) -> list[dict[str, Any]] | Unavailable:
        found = self._device.processes(uuid)
        if isinstance(found, Unavailable):
            return found
        return [_known({"pid": pid, "name": self._name(pid), "memory_bytes": found[pid]}) for pid in found]

    def _name(self, pid: int) -> str | Unavailable:
        if pid not in self._names:
            try:
                self._names[pid] = psutil.Process(pid).name()
            except (psutil.Error, OSError):
                return NAMELESS
        return self._names[pid]

    def _host(self) -> dict[str, Any]:
        """`cpu_fraction` is of all cores of the machine since the last sample."""
        short = FIRST_SECONDS - (time.monotonic() - self._asked)
        if short > 0:
            time.sleep(short)
        memory = psutil.virtual_memory()
        return {
            "cpu_fraction": psutil.cpu_percent() / 100,
            "cpu_cores": psutil.cpu_count(),
            "memory_used_bytes": int(memory.total - memory.available),
            "memory_bytes": int(memory.total),
            "allowed_memory_bytes": self._allowed_bytes,  # less in a container with a limit
        }


FIRST_SECONDS = 0.1
"""CPU use over less than this would be noise."""


def _words(bits: int, words: Mapping[int, str]) -> list[str]:
    return [text for bit, text in words.items() if bits & bit]


def _known(read: Mapping[str, Any]) -> dict[str, Any]:
    missing = {key: value.reason for key, value in read.items() if isinstance(value, Unavailable)}
    return {**read, **dict.fromkeys(missing), "unavailable": missing}
