"""The seam to real GPUs: what a vendor's driver answers; and no driver: recorded values, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args

Reading = Literal[
    "memory_used_bytes",  # by all processes
    "energy_joules",  # since the driver was loaded: only differences count
    "power_watts",
    "power_limit_watts",
    "power_default_watts",
    "power_min_watts",
    "power_max_watts",
    "temperature_celsius",
    "sm_clock_mhz",
    "sm_clock_max_mhz",  # of this model of GPU
    "memory_clock_mhz",
    "utilization_fraction",  # share of the driver's last sample period (up to 1 s) in which a kernel ran
    "clock_reasons",  # what limits the clocks now, as bits; see Device.clock_reasons
]

Paths = Mapping[tuple[int, int], str]
"""What joins GPU i to GPU j, for both orders: `NV12` (12 NVLinks), or over PCIe, nearest first, `PIX`, `PXB`
(switches), `PHB`, `NODE` (host bridges), `SYS` (CPU sockets). Empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A number that cannot be read, and the reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class NoPermission(Unavailable):
    """The driver refuses this process what it may do for another user."""


POWER_LIMIT = "power limit"  # in words, the clock reason that a power limit holds clocks down

NOT_REPORTED = Unavailable(reason="the driver does not report it")


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU and what never changes about it."""

    index: int  # position in the driver's order, which the vendor's visibility variable counts in
    uuid: str
    name: str
    memory_bytes: int | Unavailable = NOT_REPORTED
    pcie_generation: int | Unavailable = NOT_REPORTED
    pcie_lanes: int | Unavailable = NOT_REPORTED
    compute_capability: str | Unavailable = NOT_REPORTED  # CUDA's, as `9.0`
    divided: bool = False  # MIG is on: CUDA shows parts of this GPU


class Device(Protocol):
    """One vendor's driver. `uuid` is a card's; a reading that fails is Unavailable, never 0."""

    visible_variable: str  # the environment variable that selects GPUs, as CUDA_VISIBLE_DEVICES does
    clock_reasons: Mapping[int, str]  # the bits of the reading `clock_reasons` that mean trouble, in words
    ordinary_clock_reasons: Mapping[int, str]  # its other bits: idle, the power limit
    cards: Sequence[Card]

    def driver_version(self) -> str | Unavailable: ...

    def paths(self) -> Paths: ...

    def read(self, uuid: str, what: Reading) -> float | Unavailable: ...

    def processes(self, uuid: str) -> Mapping[int, int | Unavailable] | Unavailable:
        """GPU memory in bytes by process id; a container with its own process ids sees none."""

    def limit_power(self, uuid: str, watts: float) -> Unavailable | None:
        """Set a card's power limit; None once it is set. Only `power/`, which puts it back, calls this."""


FACTS = [field.name for field in fields(Card) if field.name != "index"]


class Replay:
    """Answers as the recorded machine did; null, and what was not recorded, is Unavailable.

    {"driver": "580.95.05", "clock_reasons": {"2": "words"}, "ordinary_clock_reasons": {"1": "idle"},
     "paths": ["X NV18", "NV18 X"],
     "gpus": [{"uuid": ..., "name": ..., and other fields of `Card`,
               "readings": {READING: number, or a list to give one by one, the last one again and again},
               "processes": {PID: bytes}}]}
    """

    visible_variable = "CUDA_VISIBLE_DEVICES"

    def __init__(self, values: Mapping[str, Any], missing: str = "not recorded") -> None:
        """`values` may be changed between readings. KeyError or TypeError where a card lacks its name."""
        self._values, self._missing = values, Unavailable(reason=missing)
        self._gpus = {gpu["uuid"]: gpu for gpu in values["gpus"]}
        self.clock_reasons = _words(values.get("clock_reasons", {}))
        self.ordinary_clock_reasons = _words(values.get("ordinary_clock_reasons", {}))
        self.cards: Sequence[Card] = [
            Card(index=index, **{fact: gpu[fact] for fact in FACTS if gpu.get(fact) is not None})
            for index, gpu in enumerate(self._gpus.values())
        ]

    def driver_version(self) -> str | Unavailable:
        return self._values.get("driver") or self._missing

    def paths(self) -> Paths:
        rows = [row.split() for row in self._values.get("paths", ())]
        return {(i, j): path for i, row in enumerate(rows) for j, path in enumerate(row) if path != "X"}

    def read(self, uuid: str, what: Reading) -> float | Unavailable:
        found = self._gpus.get(uuid, {}).get("readings", {}).get(what)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return self._missing if found is None else found

    def processes(self, uuid: str) -> Mapping[int, int | Unavailable] | Unavailable:
        found = self._gpus.get(uuid, {}).get("processes")
        if found is None:
            return self._missing
        return {int(pid): self._missing if size is None else size for pid, size in found.items()}

    def limit_power(self, uuid: str, watts: float) -> Unavailable | None:  # noqa: ARG002
        recorded = Unavailable(reason="it is recorded, so nothing can be set")
        return recorded if uuid in self._gpus else self._missing


class NoDevice(Replay):
    """No GPUs, because there is no driver or because it fails; every answer gives the reason."""

    def __init__(self, reason: str, *, broken: bool = False) -> None:
        """`broken`: a driver or package fails, which the user has to fix."""
        super().__init__({"gpus": []}, missing=reason)
        self.reason, self.broken = reason, broken


def record(device: Device) -> dict[str, Any]:
    """What `device` answers now, as Replay and json.dump take it; processes are left out."""
    paths, numbers = device.paths(), range(len(device.cards))
    gpus: list[dict[str, Any]] = [{fact: getattr(card, fact) for fact in FACTS} for card in device.cards]
    for gpu in gpus:
        readings = {what: device.read(gpu["uuid"], what) for what in get_args(Reading)}
        gpu["readings"] = {what: value for what, value in readings.items() if _known(value)}
    return {
        "driver": device.driver_version() if _known(device.driver_version()) else None,
        "clock_reasons": {str(bit): words for bit, words in device.clock_reasons.items()},
        "ordinary_clock_reasons": {str(bit): words for bit, words in device.ordinary_clock_reasons.items()},
        "paths": [" ".join(paths.get((i, j), "X") for j in numbers) for i in numbers],
        "gpus": [{fact: value for fact, value in gpu.items() if _known(value)} for gpu in gpus],
    }


def _words(recorded: Mapping[str, str]) -> Mapping[int, str]:
    return {int(bit): words for bit, words in recorded.items()}


def _known(value: Any) -> bool:
    return not isinstance(value, Unavailable)
