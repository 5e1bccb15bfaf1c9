"""Power limits set by a run: asked for first, leased, guarded, and put back.

    found = permission(device, uuids)                     # before training; changes nothing
    if found.allowed:
        with PowerControl(device, uuids, run=folder) as control:
            applied = control.set(450.0)                  # watts by UUID, or Unavailable: measure only

One process of a node controls all cards that the run uses there.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shardwise.device import Device, NoPermission, Unavailable
from shardwise.errors import MachineError, what_of
from shardwise.power.guardian import Guardian
from shardwise.power.lease import Lease, Settled, leases, locked, same, settle, take

CAP_SYS_ADMIN = 21  # of linux/capability.h; the driver requires it of a process that sets a power limit

Status = Literal["allowed", "no permission", "no range", "divided", "busy", "unavailable"]

WAYS = (
    "run as root, in a container with --cap-add SYS_ADMIN",
    "or let a batch system set it: Slurm's --gpu-power=WATTS where the site offers it",
    "or have an administrator set it before the run: nvidia-smi -pm 1; nvidia-smi -pl WATTS",
)
"""How a run gets lower limits. zeusd, Zeus' daemon, is not among them: it would have to hold the leases."""

SEE = ("see `nvidia-smi -q -d POWER`",)


@dataclass(frozen=True, kw_only=True)
class PowerRange:
    """What a card can be set to, in watts, and what it is set to."""

    least_watts: float
    most_watts: float
    present_watts: float

    def clip(self, watts: float) -> float:
        """The nearest limit within the range that is not above the present one."""
        return min(self.present_watts, max(self.least_watts, watts))


@dataclass(frozen=True, kw_only=True)
class Permission:
    """Whether this process may set the power limits of the cards it asked for, and why not."""

    status: Status
    reason: str = ""
    fixes: Sequence[str] = ()
    ranges: Mapping[str, PowerRange] = field(default_factory=dict)  # by UUID, where they are known

    @property
    def allowed(self) -> bool:
        return self.status == "allowed"

    def block(self) -> str:
        """The block for the user of a run that was to set limits and may not."""
        lines = [f"power limits are measured, not set: {self.reason}"]
        return "\n".join(
            lines + [f"  {'fix:' if not i else '    '} {fix}" for i, fix in enumerate(self.fixes)]
        )


def permission(device: Device, uuids: Sequence[str], *, folder: Path | None = None) -> Permission:
    """Ask for permission by setting each card's present limit again, which changes nothing.

    Cards under another run's lease are not touched: the answer is `busy`.
    """
    divided = [card.uuid for card in device.cards if card.uuid in uuids and card.divided]
    if divided:
        reason = f"MIG divides {divided[0]}, and its parts have one power limit"
        return Permission(status="divided", reason=reason, fixes=["give the run undivided GPUs"])
    try:
        with locked(folder, create=False) as place:
            live = [one for one in leases(place)[0] if one.state != "stale" and set(uuids) & set(one.cards)]
            if live:
                reason = f"process {live[0].owner.pid} ({live[0].run}) controls these GPUs"
                return Permission(status="busy", reason=reason, fixes=["wait for its end"])
            return _try(device, uuids)
    except MachineError as error:
        problem = error.problems[0]
        return Permission(status="unavailable", reason=problem.what, fixes=[problem.fix])


def _try(device: Device, uuids: Sequence[str]) -> Permission:
    ranges = dict[str, PowerRange]()
    for uuid in uuids:
        found = power_range(device, uuid)
        if isinstance(found, Unavailable):
            reason = f"{uuid} does not report its limit or its range: {found.reason}"
            return Permission(status="no range", reason=reason, fixes=SEE, ranges=ranges)
        ranges[uuid] = found
    for uuid, span in ranges.items():
        refused = device.limit_power(uuid, span.present_watts)
        if isinstance(refused, NoPermission):
            reason = f"this process may not set power limits ({refused.reason})"
            return Permission(status="no permission", reason=reason, fixes=WAYS, ranges=ranges)
        if refused is not None:
            reason = f"{uuid}: {refused.reason}"
            return Permission(status="unavailable", reason=reason, fixes=SEE, ranges=ranges)
    return Permission(status="allowed", ranges=ranges)


def power_range(device: Device, uuid: str) -> PowerRange | Unavailable:
    """What a card can be set to now; Unavailable where it reports no range."""
    least, most = device.read(uuid, "power_min_watts"), device.read(uuid, "power_max_watts")
    present = device.read(uuid, "power_limit_watts")
    for value in (least, most, present):
        if isinstance(value, Unavailable):
            return value
    assert not isinstance(least, Unavailable)
    assert not isinstance(most, Unavailable)
    assert not isinstance(present, Unavailable)
    return PowerRange(least_watts=least, most_watts=most, present_watts=present)


def may_set_power(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process is root with CAP_SYS_ADMIN, as the driver requires; the driver is not asked."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(encoding="ascii"), re.MULTILINE)
    return os.geteuid() == 0 and found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


class PowerControl:
    """Control over the cards of a node, from `with` to its end. Not for several threads at once."""

    def __init__(
        self, device: Device, uuids: Sequence[str], *, run: str | Path, folder: Path | None = None
    ) -> None:
        """`run`: the run folder, for the lease and the guardian's log. `folder`: of leases."""
        self._device, self._uuids, self._folder = device, list(uuids), folder
        self._run = str(Path(run).absolute())
        self._lease: Lease | None = None
        self._guardian: Guardian | None = None
        self._pid = os.getpid()
        self._present = dict[str, float]()  # what each card should be set to now
        self._ranges = dict[str, PowerRange]()
        self.notes: list[str] = []  # about older leases and what was put back; for the user
        self.refused: Unavailable | None = None  # why nothing is set any more

    def __enter__(self) -> Self:
        """Leases the cards and starts the guardian; changes no limit.

        PowerBusyError where another run has one of them; MachineError where the lease or guardian fails.
        """
        self._pid = os.getpid()
        self._lease, self.notes = take(self._device, self._uuids, run=self._run, folder=self._folder)
        self._present = {uuid: card.previous_watts for uuid, card in self._lease.cards.items()}
        try:
            for uuid in self._uuids:
                span = power_range(self._device, uuid)
                if isinstance(span, Unavailable):
                    raise MachineError(f"the range of power limits cannot be read: {span.reason}", where=uuid)
                self._ranges[uuid] = span
            self._guard()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, watts: float) -> Mapping[str, float] | Unavailable:
        """Set all cards, each to the nearest limit up to the one it had before; returns watts by UUID.

        A card that has this limit is not set again. Where one card fails, or somebody else has changed one,
        all are put back, and this and every later call is Unavailable with the reason.
        """
        if self.refused is None:
            assert self._lease is not None, "inside `with` only"
            targets = {uuid: self._ranges[uuid].clip(watts) for uuid in self._uuids}
            todo = {uuid: goal for uuid, goal in targets.items() if not same(goal, self._present[uuid])}
            try:
                with locked(self._lease.file.parent, create=False):
                    failure = self._lost() or self._apply(todo)
            except MachineError as error:
                failure = what_of(error)
            if failure is None:
                return {uuid: self._present[uuid] for uuid in self._uuids}
            self.refused = Unavailable(reason=failure)
            self.close()
        return self.refused

    def close(self) -> None:
        """Put everything back and end the guardian; what fails stays with it. Safe to call again."""
        if self._lease is None or os.getpid() != self._pid:  # a forked child owns nothing
            return
        try:
            with locked(self._lease.file.parent, create=False):
                # gone: put back by force, and the cards may belong to another run by now
                gone = not self._lease.file.exists()
                settled = Settled(left=None, lines=()) if gone else settle(self._lease, self._device)
        except (OSError, MachineError) as error:
            settled = Settled(left=self._lease, lines=(f"power limits: not put back: {what_of(error)}",))
        self.notes += settled.lines
        self._lease = settled.left
        if settled.left is None and self._guardian is not None:
            self._guardian.end()
            self._guardian = None

    def _apply(self, todo: Mapping[str, float]) -> str | None:
        """Why it failed; None where all cards have their new limit."""
        assert self._lease is not None
        if not todo:
            return None
        self._guard()
        self._lease = self._lease.with_levels(todo)
        for uuid, goal in todo.items():
            refused = self._device.limit_power(uuid, goal)
            if refused is not None:
                return f"{uuid} cannot be set to {goal:.0f} W: {refused.reason}"
            present = self._device.read(uuid, "power_limit_watts")
            if isinstance(present, Unavailable):
                return f"{uuid} was set, but its limit cannot be read: {present.reason}"
            if not same(present, goal):
                self._lease = self._lease.with_levels({uuid: present})
                return f"{uuid} was set to {goal:.0f} W, but has {present:.0f} W"
            self._present[uuid] = present
        return None

    def _lost(self) -> str | None:
        """Why the cards are not this run's any more."""
        assert self._lease is not None
        if not self._lease.file.exists():
            return f"somebody has put the limits back by force ({self._lease.file} is gone)"
        for uuid, expected in self._present.items():
            found = self._device.read(uuid, "power_limit_watts")
            if isinstance(found, Unavailable):
                return f"the limit of {uuid} cannot be read: {found.reason}"
            if not same(found, expected):
                return f"somebody else has set {uuid} to {found:.0f} W, so this run sets nothing more"
        return None

    def _guard(self) -> None:
        """A guardian that runs, named in the lease."""
        assert self._lease is not None
        if self._guardian is None or not self._guardian.alive:
            self._guardian = Guardian(self._lease)
            self._lease = replace(self._lease, guardian=self._guardian.process)
            self._lease.save()
