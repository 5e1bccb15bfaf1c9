"""What a vendor's driver answers about the GPUs of this machine. Pure Python: no torch, no CUDA context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reading = Literal[
    "memory_used_bytes",  # by all processes
    "energy_joules",  # since the driver was loaded: only differences count
    "power_watts",
    "power_limit_watts",
    "power_default_watts",
    "power_min_watts",
    "power_max_watts",
    "clock_reasons",  # what limits the clocks now, as bits; see Device.clock_reasons
]

Paths = Mapping[tuple[int, int], str]
"""What joins GPU i to GPU j, for both orders: `NV12` (12 NVLinks), or over PCIe, nearest first, `PIX`, `PXB`
(switches), `PHB`, `NODE` (host bridges), `SYS` (CPU sockets). Empty where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A number that cannot be read, and the reason."""

    reason: str


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
    cards: Sequence[Card]

    def driver_version(self) -> str | Unavailable: ...

    def paths(self) -> Paths: ...

    def read(self, uuid: str, what: Reading) -> float | Unavailable: ...

    def processes(self, uuid: str) -> Mapping[int, int | Unavailable] | Unavailable:
        """GPU memory in bytes by process id; a container with its own process ids sees none."""
