"""What the driver reports about the GPUs: which there are, how they are joined, and what limits them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from shardwise.device import Card, NoDevice, Reading, Unavailable
from shardwise.device.find import find, unseen_vendor
from shardwise.diagnosis import Check
from shardwise.errors import MachineError
from shardwise.hardware.detect import detect_hardware, visible
from shardwise.hardware.hardware import Hardware
from shardwise.power.control import may_set_power
from shardwise.power.lease import RESTORE, leases
from shardwise.units import GIB, gib

IN_USE_BYTES = GIB  # which others may hold of a GPU without a warning; a desktop takes less


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that a process started here would use."""

    cards: Sequence[Card] = ()
    readings: Mapping[int, Mapping[Reading, float | Unavailable]] = field(default_factory=dict)  # by index
    clock_reasons: Mapping[int, str] = field(default_factory=dict)  # the device's words for the bits
    hardware: Hardware | None = None  # to the planner; None without GPUs, or where `error` says why
    error: MachineError | None = None
    driver: str | None = None
    failure: str = ""  # why there is no device
    broken: bool = False  # `failure` is one that the user has to fix
    count: int = 0  # of processes that the launcher would start: `cards`, or parts of GPUs that MIG divides
    hidden: int = 0  # GPUs that CUDA_VISIBLE_DEVICES leaves out

    def known(self, what: Reading) -> dict[int, float]:
        """The reading of every card that has it."""
        found = {index: readings[what] for index, readings in self.readings.items()}
        return {index: value for index, value in found.items() if not isinstance(value, Unavailable)}


def look() -> Gpus:
    """Ask the driver, before anything of ours runs on the GPUs: memory in use is then held by others."""
    device = find()
    if isinstance(device, NoDevice):
        return Gpus(failure=device.reason, broken=device.broken)
    used = visible(device)
    cards = [card for card in used if isinstance(card, Card)]
    driver = device.driver_version()
    found = Gpus(
        cards=cards,
        readings={one.index: {key: device.read(one.uuid, key) for key in get_args(Reading)} for one in cards},
        clock_reasons=device.clock_reasons,
        driver=driver if isinstance(driver, str) else None,
        count=len(used),
        hidden=max(0, len(device.cards) - len(used)),
    )
    try:
        return replace(found, hardware=detect_hardware())
    except MachineError as error:
        return replace(found, error=error)


def checks(gpus: Gpus) -> Iterator[Check]:
    """All that the driver alone can answer."""
    yield present(gpus)
    if len(gpus.cards) > 1:
        yield links(gpus)
    if gpus.cards:
        yield from (check(gpus) for check in (memory, clocks, power, energy))
        yield power_leases()


def present(gpus: Gpus) -> Check:
    """Which GPUs there are."""
    facts = {"driver": gpus.driver, "gpus": [card.name for card in gpus.cards], "hidden": gpus.hidden}
    name = "GPUs"
    if gpus.broken:
        fix = "look for NVRM and Xid in `dmesg`; load or reinstall the driver, then reboot"
        return Check(name, "problem", gpus.failure, fix, facts)
    if gpus.failure:
        finding = f"no NVIDIA GPU: training runs on the CPU, which only small models are for; {gpus.failure}"
        fix = "`shardwise plan --gpus` plans for a machine that has them; a container needs --gpus all and "
        fix += "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check(name, "warning", unseen_vendor() or finding, fix, facts)
    if gpus.error is not None:
        problem = gpus.error.problems[0]
        return Check(name, "warning", problem.what, problem.fix, facts)
    if not gpus.cards and gpus.count:
        finding = f"CUDA_VISIBLE_DEVICES names {gpus.count} parts of GPUs, which the planner does not know"
        return Check(name, "warning", finding, "plan for their memory, as --gpus 1x20GiB", facts)
    if not gpus.cards:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        finding = f"CUDA_VISIBLE_DEVICES={setting} hides all {gpus.hidden} GPUs: training runs on the CPU"
        return Check(name, "warning", finding, "unset it, or name GPUs", facts)
    first = gpus.cards[0]
    finding = f"{len(gpus.cards)} × {first.name.removeprefix('NVIDIA ')}{size_of(first)}"
    finding += f"; CUDA_VISIBLE_DEVICES hides {gpus.hidden} more" if gpus.hidden else ""
    return Check(name, "ok", finding, facts=facts)


def size_of(card: Card) -> str:
    """`, 140.4 GiB each`; empty where the driver does not report it."""
    return "" if isinstance(card.memory_bytes, Unavailable) else f", {gib(card.memory_bytes)} each"


def links(gpus: Gpus) -> Check:
    """What joins the GPUs, as the planner counts with it."""
    if gpus.hardware is None:
        return Check("links", "skipped", "not known of GPUs that differ or are divided")
    link = gpus.hardware.intra
    origin = "measured" if link.measured else "by the catalog"
    finding = f"{link.name}: {link.bytes_per_second / 1e9:.1f} GB/s from each GPU, {origin}"
    facts = {key: getattr(link, key) for key in ("name", "bytes_per_second", "latency_seconds", "measured")}
    return Check("links", "ok", finding, facts=facts)


def memory(gpus: Gpus) -> Check:
    """What other processes hold of the GPUs' memory."""
    used = gpus.known("memory_used_bytes")
    facts = {"used_bytes": {str(index): used.get(index) for index in gpus.readings}}
    held = ", ".join(f"{gib(size)} of GPU {index}" for index, size in used.items() if size > IN_USE_BYTES)
    if not held:
        return Check("GPU memory", "ok", "free of other processes", facts=facts)
    fix = "see `nvidia-smi`; end them, leave those GPUs out with CUDA_VISIBLE_DEVICES, or use --memory-cap"
    return Check("GPU memory", "warning", f"other processes hold {held}", fix, facts)


def clocks(gpus: Gpus) -> Check:
    """Whether something other than load and the power limit holds the clocks down now."""
    known = {index: int(bits) for index, bits in gpus.known("clock_reasons").items()}
    if not known:
        return Check("clocks", "skipped", "the driver does not report what limits them")
    facts = {"reasons": {str(index): bits for index, bits in known.items()}}
    words = gpus.clock_reasons.items()
    slowed = {index: ", ".join(text for bit, text in words if bits & bit) for index, bits in known.items()}
    found = "; ".join(f"GPU {index}: {texts}" for index, texts in slowed.items() if texts)
    if not found:
        return Check("clocks", "ok", "nothing holds them down", facts=facts)
    fix = "look at `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK`; fix cooling or supply, or ask the "
    fix += "administrator to reset the clocks (nvidia-smi -rac, -rgc)"
    return Check("clocks", "warning", f"held down now: {found}", fix, facts)


def power(gpus: Gpus) -> Check:
    """The power limits, and whether this process might set them; nothing sets them here."""
    limits = gpus.known("power_limit_watts")
    if not limits:
        return Check("power limit", "skipped", "the driver does not report it")
    first, allowed = next(iter(limits)), may_set_power()
    defaults = gpus.known("power_default_watts")
    least, most = (gpus.known(what).get(first) for what in ("power_min_watts", "power_max_watts"))
    facts = {"may_set": allowed, "limits_watts": {str(index): watts for index, watts in limits.items()}}
    facts |= {"default_watts": defaults.get(first), "least_watts": least, "most_watts": most}
    found = " or ".join(f"{watts:.0f} W" for watts in sorted(set(limits.values())))
    span = "" if least is None or most is None else f", {least:.0f} to {most:.0f} W possible"
    may = "may set" if allowed else "may not set (that takes root, in a container also --cap-add SYS_ADMIN)"
    finding = f"{found}{span}; this process {may} it"
    lowered = [defaults[index] for index in limits if limits[index] < defaults.get(index, 0.0) - 1]
    if not lowered:
        return Check("power limit", "ok", finding, facts=facts)
    finding += f"; {lowered[0]:.0f} W is the default: slower than planned"
    fix = f"if nobody chose this limit: sudo nvidia-smi -pl {lowered[0]:.0f}"
    return Check("power limit", "warning", finding, fix, facts)


def power_leases() -> Check:
    """Whether a run that ended has left GPUs at a power limit that was not there before."""
    name = "power leases"
    try:
        found, damaged = leases()
    except MachineError as error:
        problem = error.problems[0]
        return Check(name, "warning", problem.what, problem.fix)
    stale = [lease for lease in found if lease.state == "stale"]
    facts = {"stale": [str(lease.file) for lease in stale], "live": len(found) - len(stale)}
    if stale:
        cards = sum(len(lease.cards) for lease in stale)
        finding = f"{cards} GPU{'' if cards == 1 else 's'} may have a power limit of a run that has ended"
        return Check(name, "warning", f"{finding} ({stale[0].run})", RESTORE, facts)
    if damaged:
        return Check(name, "warning", damaged[0].reason, "see `shardwise power`", facts)
    finding = f"{len(found)} in use: see `shardwise power`" if found else "none is left over"
    return Check(name, "ok", finding, facts=facts)


def energy(gpus: Gpus) -> Check:
    """Whether joules will be recorded."""
    first = next(iter(gpus.readings.values()))
    sources = {"energy": first["energy_joules"], "power": first["power_watts"]}
    missing = {name: value.reason for name, value in sources.items() if isinstance(value, Unavailable)}
    if len(missing) == len(sources):
        finding = f"runs will have no joules: {'; '.join(missing.values())}"
        return Check("energy", "warning", finding, "see `nvidia-smi -q -d POWER`")
    watts = "the driver reports watts, which are summed up"
    finding = watts if "energy" in missing else "the driver counts joules"
    return Check("energy", "ok", finding, facts={"tells": [name for name in sources if name not in missing]})
