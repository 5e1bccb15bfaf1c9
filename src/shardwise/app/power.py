"""The power limits of this machine's GPUs, who controls them, and limits of runs that ended put back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.device import Card, Device, NoDevice, Reading, Unavailable
from shardwise.device.find import find
from shardwise.errors import MachineError
from shardwise.hardware.detect import visible
from shardwise.power.control import Permission, may_set_power, permission
from shardwise.power.lease import Lease, Settled, leases, locked, settle

READINGS: tuple[Reading, ...] = (
    "power_limit_watts",
    "power_default_watts",
    "power_min_watts",
    "power_max_watts",
    "power_watts",
)


@dataclass(frozen=True, kw_only=True)
class Power:
    """What the driver and the leases say; nothing is changed to find it out."""

    cards: Sequence[Card]
    readings: dict[str, dict[Reading, float | Unavailable]]  # in watts, by UUID
    leases: Sequence[Lease]
    damaged: Sequence[str]  # files that are no leases, and why
    failure: str  # why there is no device; empty where there is one
    may_set: bool  # this process is root with CAP_SYS_ADMIN; only an attempt shows what the driver allows

    def to_json(self) -> dict[str, Any]:
        def known(value: Any) -> Any:
            return None if isinstance(value, Unavailable) else value

        return {
            "schema": 1,
            "gpus": [
                {"index": card.index, "uuid": card.uuid, "name": card.name, "divided": card.divided}
                | {what: known(value) for what, value in self.readings[card.uuid].items()}
                for card in self.cards
            ],
            "failure": self.failure or None,
            "may_set": self.may_set,
            "leases": [one.to_json() | {"file": str(one.file), "state": one.state} for one in self.leases],
            "damaged": list(self.damaged),
        }


def power() -> Power:
    """The limits, ranges and draws of all GPUs, and the leases. MachineError for a bad lease folder."""
    device = find()
    found, damaged = leases()
    return Power(
        cards=device.cards,
        readings={
            card.uuid: {what: device.read(card.uuid, what) for what in READINGS} for card in device.cards
        },
        leases=found,
        damaged=[bad.reason for bad in damaged],
        failure=device.reason if isinstance(device, NoDevice) else "",
        may_set=may_set_power(),
    )


def try_permission() -> Permission:
    """What a run on the visible GPUs would be allowed: sets each present limit again."""
    device = _device()
    return permission(device, [card.uuid for card in visible(device) if isinstance(card, Card)])


Restored = tuple[list[tuple[Lease, Settled | None]], list[str]]
"""Each lease and what became of it, None if it was left alone; and the files that are no leases, and why."""


def restore(*, force: bool = False) -> Restored:
    """Settle every stale lease, and with `force` live ones, too.

    MachineError where there is no driver, or the folder cannot be used.
    """
    with locked(create=False):
        found, bad = leases()
        device = _device() if found else NoDevice("there is nothing to put back")
        rows = [(one, settle(one, device) if force or one.state == "stale" else None) for one in found]
        return rows, [one.reason for one in bad]


def _device() -> Device:
    device = find()
    if isinstance(device, NoDevice):
        raise MachineError(f"no GPU: {device.reason}", fix="see `shardwise doctor`")
    return device
