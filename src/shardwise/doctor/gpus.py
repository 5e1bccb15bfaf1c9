"""What the driver tells of the GPUs: which there are, how they are joined, and what holds them back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.doctor.check import Check
from shardwise.errors import MachineError
from shardwise.hardware.detect import FIELDS, MIB, Card, chosen, detect_hardware, read_cards, visible
from shardwise.hardware.driver import ask
from shardwise.hardware.hardware import Hardware
from shardwise.units import GIB, gib

STATE = "index,driver_version,memory.used,power.limit,power.default_limit,power.min_limit,power.max_limit"
THROTTLE = "clocks_throttle_reasons.active"
IN_USE_BYTES = GIB
"""What others may hold of a GPU before it is worth a warning; a desktop takes less."""

REASONS = {
    0x02: "clocks set by an administrator",
    0x08: "hardware slowdown (heat, or too little power from the supply)",
    0x20: "heat (software slowdown)",
    0x40: "heat (hardware slowdown)",
    0x80: "power brake of the chassis",
}
"""NVML's clocksEventReasons that are not the ordinary ones: idle, power cap, sync boost, display."""

CAP_SYS_ADMIN = 21
"""Of linux/capability.h; the driver wants it of whoever sets a power limit."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How a GPU is now; None where the driver does not tell."""

    index: int
    used_bytes: int | None
    power_watts: float | None
    """Its limit."""
    default_watts: float | None
    least_watts: float | None
    most_watts: float | None
    throttle: int | None
    """NVML's bits."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that a process started here would use."""

    cards: Sequence[Card] = ()
    states: Sequence[State] = ()
    hardware: Hardware | None = None
    """What the planner takes them for; None without GPUs, or where `error` says why."""
    error: MachineError | None = None
    driver: str | None = None
    failure: str = ""
    """Why the driver did not answer; empty where it did."""
    count: int = 0
    """How many processes the launcher would start: all of `cards`, or parts of GPUs that MIG divides."""
    hidden: int = 0
    """GPUs that CUDA_VISIBLE_DEVICES leaves out."""


def look() -> Gpus:
    """Asks nvidia-smi. Before anything of ours runs on the GPUs: their memory in use is others'."""
    reply = ask(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    if reply.text is None:
        return Gpus(failure=reply.failure)
    states, driver = _states()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(bool(line.strip()) for line in reply.text.splitlines())
    count = visible(present, setting)
    found = Gpus(driver=driver, count=count, hidden=max(0, present - count))
    try:
        cards = chosen(read_cards(reply.text), setting)
        mine = {card.index for card in cards}
        found = replace(found, cards=cards, states=[state for state in states if state.index in mine])
        return replace(found, hardware=detect_hardware())
    except MachineError as error:
        return replace(found, error=error)


def checks(gpus: Gpus) -> Iterator[Check]:
    """All that needs nobody but the driver."""
    yield present(gpus)
    if not gpus.cards:
        return
    if len(gpus.cards) > 1:
        yield links(gpus)
    yield from (check(gpus.states) for check in (memory, clocks, power) if gpus.states)


def present(gpus: Gpus) -> Check:
    """Which GPUs there are."""
    facts = {"driver": gpus.driver, "gpus": [card.name for card in gpus.cards], "hidden": gpus.hidden}
    name = "GPUs"
    if "no nvidia-smi" in gpus.failure:
        return Check(
            name=name,
            status="warning",
            finding="no NVIDIA GPU: training runs on the CPU, which only small models are for",
            fix="`shardwise plan --gpus` plans for a machine that has them; a container wants --gpus all and "
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            facts=facts,
        )
    if gpus.failure:
        fix = "look for NVRM and Xid in `dmesg`; load or reinstall the driver, then reboot"
        return Check(name=name, status="problem", finding=gpus.failure, fix=fix, facts=facts)
    if gpus.error is not None:
        problem = gpus.error.problems[0]
        return Check(name=name, status="warning", finding=problem.what, fix=problem.fix, facts=facts)
    if not gpus.cards and gpus.count:
        return Check(
            name=name,
            status="warning",
            finding=f"{gpus.count} parts of GPUs by CUDA_VISIBLE_DEVICES, which the planner does not know",
            fix="plan for their memory, as --gpus 1x20GiB",
            facts=facts,
        )
    if not gpus.cards:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        finding = f"CUDA_VISIBLE_DEVICES={setting} hides all {gpus.hidden} GPUs: training runs on the CPU"
        return Check(name=name, status="warning", finding=finding, fix="unset it, or name GPUs", facts=facts)
    first = gpus.cards[0]
    finding = f"{len(gpus.cards)} × {first.name.removeprefix('NVIDIA ')}, {gib(first.memory_bytes)} each"
    if gpus.hidden:
        finding += f"; CUDA_VISIBLE_DEVICES hides {gpus.hidden} more"
    return Check(name=name, status="ok", finding=finding, facts=facts)


def links(gpus: Gpus) -> Check:
    """What joins the GPUs, as the planner counts with it."""
    if gpus.hardware is None:
        return Check(name="links", status="skipped", finding="not known of GPUs that differ or are divided")
    link = gpus.hardware.intra
    origin = "measured" if link.measured else "by the catalog"
    return Check(
        name="links",
        status="ok",
        finding=f"{link.name}: {link.bytes_per_second / 1e9:.1f} GB/s from each GPU, {origin}",
        facts={
            "name": link.name,
            "bytes_per_second": link.bytes_per_second,
            "latency_seconds": link.latency_seconds,
            "measured": link.measured,
        },
    )


def memory(states: Sequence[State]) -> Check:
    """What other processes hold of the GPUs' memory."""
    taken = {
        s.index: s.used_bytes for s in states if s.used_bytes is not None and s.used_bytes > IN_USE_BYTES
    }
    facts = {"used_bytes": {str(state.index): state.used_bytes for state in states}}
    if not taken:
        return Check(name="GPU memory", status="ok", finding="free of other processes", facts=facts)
    held = ", ".join(f"{gib(size)} of GPU {index}" for index, size in taken.items())
    return Check(
        name="GPU memory",
        status="warning",
        finding=f"other processes hold {held}",
        fix="see `nvidia-smi`; end them, leave those GPUs out with CUDA_VISIBLE_DEVICES, or use --memory-cap",
        facts=facts,
    )


def clocks(states: Sequence[State]) -> Check:
    """Whether something other than load and the power limit holds the clocks down now."""
    known = [state for state in states if state.throttle is not None]
    if not known:
        return Check(name="clocks", status="skipped", finding="the driver does not tell what limits them")
    facts = {"reasons": {str(state.index): state.throttle for state in known}}
    slowed = {
        state.index: [text for bit, text in REASONS.items() if (state.throttle or 0) & bit] for state in known
    }
    told = "; ".join(f"GPU {index}: {', '.join(texts)}" for index, texts in slowed.items() if texts)
    if not told:
        return Check(name="clocks", status="ok", finding="nothing holds them down", facts=facts)
    return Check(
        name="clocks",
        status="warning",
        finding=f"held down now: {told}",
        fix="look at `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK`; mend cooling or supply, or ask the "
        "administrator to reset the clocks (nvidia-smi -rac, -rgc)",
        facts=facts,
    )


def power(states: Sequence[State]) -> Check:
    """The power limits, and whether this process might set them; nothing sets them here."""
    limits = [state for state in states if state.power_watts is not None]
    if not limits:
        return Check(name="power limit", status="skipped", finding="the driver does not tell it")
    allowed = may_set_power()
    facts = {
        "may_set": allowed,
        "limits_watts": {str(state.index): state.power_watts for state in limits},
        "default_watts": limits[0].default_watts,
        "least_watts": limits[0].least_watts,
        "most_watts": limits[0].most_watts,
    }
    found = " or ".join(f"{watts:.0f} W" for watts in sorted({state.power_watts or 0.0 for state in limits}))
    may = "may set" if allowed else "may not set (that takes root, in a container also --cap-add SYS_ADMIN)"
    first = limits[0]
    span = ""
    if first.least_watts is not None and first.most_watts is not None:
        span = f", {first.least_watts:.0f} to {first.most_watts:.0f} W possible"
    lower = [
        s for s in limits if s.default_watts is not None and (s.power_watts or 0.0) < s.default_watts - 1
    ]
    finding = f"{found}{span}; this process {may} it"
    if lower:
        return Check(
            name="power limit",
            status="warning",
            finding=f"{finding}; {lower[0].default_watts:.0f} W is the default: slower than planned",
            fix=f"if nobody wants it so: sudo nvidia-smi -pl {lower[0].default_watts:.0f}",
            facts=facts,
        )
    return Check(name="power limit", status="ok", finding=finding, facts=facts)


def may_set_power(status: Path = Path("/proc/self/status")) -> bool:
    """Whether the driver would let this process set a power limit: root with CAP_SYS_ADMIN."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    bits = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return os.geteuid() == 0 and bool(bits >> CAP_SYS_ADMIN & 1)


def _states() -> tuple[list[State], str | None]:
    """Of every GPU, and the driver's version; a driver that does not know the clocks is asked without."""
    for fields in (f"{STATE},{THROTTLE}", STATE):
        reply = ask(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
        if reply.text is not None:
            rows = [[part.strip() for part in line.split(",")] for line in reply.text.splitlines() if line]
            rows = [row for row in rows if len(row) == len(fields.split(",")) and row[0].isdigit()]
            return [_state(row) for row in rows], rows[0][1] if rows else None
    return [], None


def _state(row: Sequence[str]) -> State:
    index, _, used, limit, default, least, most, *throttle = row
    return State(
        index=int(index),
        used_bytes=int(used) * MIB if used.isdigit() else None,
        power_watts=_number(limit),
        default_watts=_number(default),
        least_watts=_number(least),
        most_watts=_number(most),
        throttle=int(throttle[0], 16) if throttle and throttle[0].startswith("0x") else None,
    )


def _number(text: str) -> float | None:
    return float(text) if text[:1].isdigit() else None
