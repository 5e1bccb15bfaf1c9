"""Leases: which power limits GPUs had before a run changed them, so that anyone can put them back.

A lease is a file in a folder of the machine, `lease_folder`. It is on the disk before the first change, and
each limit is added to it before it is set. It names its owner and the owner's guardian by process id, start
time and boot: a process id alone is given to another process later. What changes leases holds a lock on the
folder.

The folder is per machine because the cards are. Containers that share cards have to share it: mount it.
"""

import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.device import Device, Unavailable
from shardwise.errors import MachineError, PowerBusyError
from shardwise.folders import replace_json, sync

FOLDER = "SHARDWISE_LEASES"
RUN_LOCK = Path("/run/lock")  # in memory: after a reboot, which resets the cards, leases are gone, too
FALLBACK = Path("/var/tmp/shardwise-leases")  # noqa: S108 - checked for its owner before it is used
SAME_WATTS = 1.0  # two limits closer than this are one: drivers round
LOCK_SECONDS = 60.0  # a driver that answers slowly is waited for, a hanging one not

RESTORE = "shardwise power restore"


def lease_folder() -> Path:
    """`$SHARDWISE_LEASES`, else `/run/lock/shardwise`, else `/var/tmp/shardwise-leases`."""
    default = RUN_LOCK / "shardwise" if RUN_LOCK.is_dir() else FALLBACK
    return Path(os.environ.get(FOLDER) or default).absolute()


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, as no later one can be mistaken for it."""

    pid: int
    start_ticks: int  # clock ticks from boot to its start
    boot: str
    namespace: str  # of process ids; a container has its own

    def alive(self) -> bool | None:
        """None where it cannot be known: the process belongs to another container."""
        if self.boot != _boot():
            return False
        return None if self.namespace != _namespace() else _start_ticks(self.pid) == self.start_ticks


def process(pid: int) -> Process | None:
    """The process that has this id now."""
    start = _start_ticks(pid)
    if start is None:
        return None
    return Process(pid=pid, start_ticks=start, boot=_boot(), namespace=_namespace())


def _start_ticks(pid: int) -> int | None:
    """None for a process that is gone, or that has ended and is not yet waited for."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc_pid_stat(5): fields 3 and 22


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


@dataclass(frozen=True, kw_only=True)
class CardLease:
    """One card's part of a lease, in watts."""

    previous_watts: float
    levels_watts: tuple[float, ...] = ()  # all that were set, or were about to be set


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What one run may have changed."""

    file: Path
    run: str  # its folder
    since: float  # seconds since 1970
    owner: Process
    guardian: Process | None = None
    cards: Mapping[str, CardLease] = field(default_factory=dict)  # by UUID

    @property
    def state(self) -> Literal["alive", "unknown", "stale"]:
        """`unknown`: its owner belongs to another container, so it counts as alive."""
        return {True: "alive", None: "unknown", False: "stale"}[self.owner.alive()]  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "file"}

    def save(self) -> None:
        """Write it and wait until it is on the disk. MachineError where it cannot be."""
        try:
            replace_json(self.file, self.to_json())
            sync(self.file.parent)
        except OSError as error:
            raise _unusable(self.file.parent, error.strerror or str(error)) from None

    def with_levels(self, levels_watts: Mapping[str, float]) -> "Lease":
        """With one more level of each named card, on the disk: call it before the levels are set."""
        cards = dict(self.cards)
        for uuid, watts in levels_watts.items():
            card = cards[uuid]
            if not any(same(watts, level) for level in card.levels_watts):
                cards[uuid] = replace(card, levels_watts=(*card.levels_watts, watts))
        changed = replace(self, cards=cards)
        if changed != self:
            changed.save()
        return changed


def same(one_watts: float, other_watts: float) -> bool:
    """Whether two limits are the same one, as the driver rounds it."""
    return abs(one_watts - other_watts) <= SAME_WATTS


def read_lease(file: Path) -> Lease | Unavailable:
    """One lease; Unavailable with the reason for a file that is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        guardian = values["guardian"]
        return Lease(
            file=file,
            run=str(values["run"]),
            since=float(values["since"]),
            owner=Process(**values["owner"]),
            guardian=None if guardian is None else Process(**guardian),
            cards={
                uuid: CardLease(
                    previous_watts=float(card["previous_watts"]),
                    levels_watts=tuple(map(float, card["levels_watts"])),
                )
                for uuid, card in values["cards"].items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Unavailable(reason=f"{file} is no lease ({type(error).__name__}): look at it and delete it")


def leases(folder: Path | None = None) -> tuple[list[Lease], list[Unavailable]]:
    """All leases of the machine, oldest first, and the files that are none. MachineError for a bad folder."""
    place = folder or lease_folder()
    if not _trusted(place):
        return [], []
    found = [read_lease(file) for file in sorted(place.glob("*.json"))]
    good = [lease for lease in found if isinstance(lease, Lease)]
    gone = [bad for bad in found if isinstance(bad, Unavailable) and "FileNotFoundError" not in bad.reason]
    return sorted(good, key=lambda lease: lease.since), gone


@contextmanager
def locked(folder: Path | None = None, *, create: bool = True) -> Iterator[Path]:
    """Within, nobody else reads limits for a lease, sets or restores them.

    Without `create`, a folder that is missing is not locked. MachineError where it cannot be used, or another
    process keeps it for a minute.
    """
    place = folder or lease_folder()
    try:
        if create:
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _trusted(place):
            yield place
            return
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(place, error.strerror or str(error)) from None
    try:
        _wait_for(lock, place)
        yield place
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing it is not enough where a process was forked within
        os.close(lock)


def take(
    device: Device, uuids: Sequence[str], *, run: str, folder: Path | None = None
) -> tuple[Lease, list[str]]:
    """A new lease of this process on these cards, and what the reader should know about older ones.

    Stale leases on them are settled first. PowerBusyError where a live run has one of the cards; MachineError
    where a stale lease cannot be settled, a limit cannot be read, or the lease not be written.
    """
    owner = process(os.getpid())
    assert owner is not None
    with locked(folder) as place:
        found, damaged = leases(place)
        notes = [bad.reason for bad in damaged]
        for lease in found:
            if not set(uuids) & set(lease.cards):
                continue
            if lease.state != "stale":
                raise PowerBusyError(
                    f"the power limits of these GPUs belong to another run (process {lease.owner.pid})",
                    where=lease.run,
                    fix=f"wait for its end; if it runs no more: {RESTORE} --force",
                )
            settled = settle(lease, device)
            notes += settled.lines
            if settled.left is not None and set(uuids) & set(settled.left.cards):
                what = f"limits of an earlier run ({lease.run}) cannot be put back: {settled.lines[-1]}"
                raise MachineError(what, where=str(lease.file), fix=f"see `nvidia-smi`, then {RESTORE}")
        cards = {uuid: CardLease(previous_watts=_limit(device, uuid)) for uuid in uuids}
        file = place / f"{owner.pid}-{secrets.token_hex(4)}.json"
        lease = Lease(file=file, run=run, since=time.time(), owner=owner, cards=cards)
        lease.save()
    return lease, notes


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What became of a lease."""

    left: Lease | None  # with the cards that could not be put back; None: the lease is gone
    lines: tuple[str, ...]  # for each card that was changed, or could not be: what was done


def settle(lease: Lease, device: Device) -> Settled:
    """Put every card of a lease back, within `locked`. A limit that somebody else has set since stays.

    The file is deleted when every card is settled; cards that fail stay in it.
    """
    lines, left = list[str](), dict[str, CardLease]()
    for uuid, card in lease.cards.items():
        failed, line = _settle_card(device, uuid, card)
        if failed:
            left[uuid] = card
        lines += [line] if line else []
    lines.sort(key=lambda line: "not put back" in line)
    remaining = replace(lease, cards=left) if left else None
    if remaining is None:
        lease.file.unlink(missing_ok=True)
        sync(lease.file.parent)
    elif remaining != lease:
        remaining.save()
    return Settled(left=remaining, lines=tuple(lines))


def _settle_card(device: Device, uuid: str, card: CardLease) -> tuple[bool, str]:
    """Whether it failed, and what there is to say."""
    if not card.levels_watts:
        return False, ""
    present = device.read(uuid, "power_limit_watts")
    if isinstance(present, Unavailable):
        return True, f"{uuid}: not put back: {present.reason}"
    if same(present, card.previous_watts):
        return False, ""
    if not any(same(present, level) for level in card.levels_watts):
        return False, f"{uuid}: {present:.0f} W was set by somebody else since: left as it is"
    refused = device.limit_power(uuid, card.previous_watts)
    if refused is not None:
        return (
            True,
            f"{uuid}: not put back from {present:.0f} to {card.previous_watts:.0f} W: {refused.reason}",
        )
    return False, f"{uuid}: put back from {present:.0f} to {card.previous_watts:.0f} W"


def _limit(device: Device, uuid: str) -> float:
    found = device.read(uuid, "power_limit_watts")
    if isinstance(found, Unavailable):
        raise MachineError(f"the power limit cannot be read: {found.reason}", where=uuid)
    return found


def _wait_for(lock: int, place: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise _unusable(place, "another process has locked it for a minute") from None
            time.sleep(0.01)
        else:
            return


def _trusted(place: Path) -> bool:
    """Whether it exists; MachineError where it is not a folder of root or of this user."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise _unusable(place, f"it is no folder of root or of this user, but of user {status.st_uid}")
    return True


def _unusable(place: Path, why: str) -> MachineError:
    what = f"power leases cannot be kept in {place}: {why}"
    return MachineError(what, where=FOLDER, fix=f"set {FOLDER} to a local folder of your own on this machine")
