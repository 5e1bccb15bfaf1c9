"""`doctor --calibrate`: all ranks measure, the slowest counts, and the planner finds it in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from shardwise.doctor import fit
from shardwise.doctor.check import Check
from shardwise.doctor.child import Answer
from shardwise.doctor.gpus import Gpus
from shardwise.hardware.calibration import Calibration, Product, Sample, load, of_hardware, save
from shardwise.record.environment import versions
from shardwise.units import count

CPU = "CPU"
KEPT_VERSIONS = ("shardwise", "torch")
NAME = "calibration"


def kept(gpus: Gpus, ranks: int) -> tuple[Calibration | None, Check]:
    """What was measured earlier, without measuring."""
    found = load(CPU, ranks, None) if gpus.hardware is None else of_hardware(gpus.hardware)
    if found is not None:
        return found, Check(name=NAME, status="ok", finding=f"of {found.date}: {summary(found)}")
    finding = "none of these GPUs with this driver: the planner goes by the catalog"
    if gpus.hardware is None:
        finding = "none of this machine"
    fix = "shardwise doctor --calibrate"
    return None, Check(name=NAME, status="skipped", finding=finding, fix=fix)


def measured(gpus: Gpus, answers: Sequence[Answer]) -> tuple[Calibration | None, Check]:
    """What the ranks have measured, saved."""
    failed = {rank: answer for rank, answer in enumerate(answers) if answer.facts is None}
    if failed:
        told = "; ".join(f"rank {rank} {answer.why}" for rank, answer in failed.items())
        fix = "run again on an idle machine; `shardwise doctor` alone shows what is wrong with it"
        return None, Check(name=NAME, status="warning", finding=f"not measured: {told}"[:600], fix=fix)
    made = calibration(gpus, answers)
    if made.count > 1 and made.between is None and made.link is not None:
        finding = "collectives take no longer for more bytes, so no rate follows; nothing is kept"
        return None, Check(name=NAME, status="warning", finding=finding, fix="run again on an idle machine")
    try:
        path = save(made)
    except OSError as error:
        finding = f"it cannot be kept in {error.filename}: {error.strerror}"
        return made, Check(
            name=NAME, status="warning", finding=finding, fix="set SHARDWISE_CACHE to another folder"
        )
    return made, Check(name=NAME, status="ok", finding=summary(made), facts={"file": str(path)})


def calibration(gpus: Gpus, answers: Sequence[Answer]) -> Calibration:
    """One value of what every rank measured: the slowest rank's times, which the others wait for."""
    every = [answer.facts for answer in answers if answer.facts is not None]
    ranks = len(every)
    samples = tuple(
        Sample(what=one["what"], bytes=one["bytes"], seconds=max(one["seconds"] for one in same))
        for same in zip(*(facts["samples"] for facts in every), strict=True)
        for one in same[:1]
    )
    products = tuple(
        Product(side=same[0]["side"], flops_per_second=min(one["flops_per_second"] for one in same))
        for same in zip(
            *(facts["products"] for facts in every), strict=False
        )  # of those that all had room for
    )
    hardware = gpus.hardware
    known = versions()
    return Calibration(
        device=CPU if hardware is None else hardware.gpu.name,
        count=ranks,
        driver=gpus.driver,
        date=datetime.now(UTC).date().isoformat(),
        versions={name: known[name] for name in KEPT_VERSIONS if name in known},
        link=None if hardware is None or ranks == 1 else hardware.intra.name,
        between=None if hardware is None else fit.between(samples, ranks),
        host=fit.host(samples),
        memory_bytes_per_second=min(facts["memory_bytes_per_second"] for facts in every),
        host_call_seconds=max(facts["host_call_seconds"] for facts in every),
        products=products,
        samples=samples,
        skipped=tuple(every[0]["skipped"]),
    )


def summary(found: Calibration) -> str:
    """A line of what was measured."""
    best = max((product.flops_per_second for product in found.products), default=0.0)
    parts = [
        f"bf16 products {count(best)}FLOP/s",
        f"memory {found.memory_bytes_per_second / 1e9:.0f} GB/s",
    ]
    if found.between is not None:
        rate = found.between.bytes_per_second / 1e9
        parts.append(f"{found.link} {rate:.1f} GB/s and {_short(found.between.latency_seconds)} a message")
    smallest = min((s for s in found.samples if s.what == "all_reduce"), key=lambda s: s.bytes, default=None)
    if found.between is None and smallest is not None:
        parts.append(f"all-reduce of {smallest.bytes} bytes {_short(smallest.seconds)}")
    if found.host is not None:
        parts.append(f"pinned copies {found.host.bytes_per_second / 1e9:.1f} GB/s")
    parts.append(f"a call of torch {_short(found.host_call_seconds)}")
    return ", ".join(parts) + "".join(f"; without {one}" for one in found.skipped)


def _short(seconds: float) -> str:
    """`14.5 µs`, `1.2 ms`."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
