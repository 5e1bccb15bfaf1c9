"""`doctor --calibrate`: all ranks measure, the slowest counts, and the planner finds the result in the cache.

A link's latency a and rate b follow from measured transfers by the planner's own model. There (see
simulate/time/collectives.py) an all-gather of n bytes over N GPUs takes B + (N - 1) a + n (N - 1) / N / b
seconds and a copy a + n / b. Both are c + d n; c and d minimise the squares of the relative errors, so a
message of 4 KiB counts as much as one of 512 MiB.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from shardwise.diagnosis import Check
from shardwise.diagnosis.child import Answer
from shardwise.diagnosis.gpus import Gpus
from shardwise.hardware.calibration import Calibration, Product, Rate, Sample, load, of_hardware, save
from shardwise.record.environment import versions
from shardwise.simulate.time.collectives import BASE_SECONDS
from shardwise.units import count

CPU, NAME = "CPU", "calibration"
GATHERS = ("all_gather", "reduce_scatter")  # linear in the model; an all-reduce is a ring or a tree
COPIES = ("pinned_to_gpu", "gpu_to_pinned")


def kept(gpus: Gpus, ranks: int) -> tuple[Calibration | None, Check]:
    """What was measured earlier, without measuring."""
    found = load(CPU, ranks, None) if gpus.hardware is None else of_hardware(gpus.hardware)
    if found is not None:
        return found, Check(NAME, "ok", f"of {found.date}: {summary(found)}")
    of_gpus = "none of these GPUs with this driver: the planner uses the catalog"
    finding = "none of this machine" if gpus.hardware is None else of_gpus
    return None, Check(NAME, "skipped", finding, "shardwise doctor --calibrate")


def measured(gpus: Gpus, answers: Sequence[Answer]) -> tuple[Calibration | None, Check]:
    """What the ranks have measured, saved."""
    failed = "; ".join(f"rank {rank} {one.why}" for rank, one in enumerate(answers) if one.facts is None)
    if failed:
        fix = "run again on an idle machine; `shardwise doctor` alone shows what is wrong with it"
        return None, Check(NAME, "warning", f"not measured: {failed}"[:600], fix)
    made = calibration(gpus, answers)
    if made.count > 1 and made.between is None and made.link is not None:
        finding = "collectives take no longer for more bytes, so no rate follows; nothing is kept"
        return None, Check(NAME, "warning", finding, "run again on an idle machine")
    try:
        path = save(made)
    except OSError as error:
        finding = f"it cannot be kept in {error.filename}: {error.strerror}"
        return made, Check(NAME, "warning", finding, "set SHARDWISE_CACHE to another folder")
    return made, Check(NAME, "ok", summary(made), facts={"file": str(path)})


def calibration(gpus: Gpus, answers: Sequence[Answer]) -> Calibration:
    """One value of what every rank measured: the slowest rank's times, which the others wait for."""
    every = [answer.facts for answer in answers if answer.facts is not None]
    ranks, hardware, known = len(every), gpus.hardware, versions()
    samples = tuple(
        Sample(what=same[0]["what"], bytes=same[0]["bytes"], seconds=max(one["seconds"] for one in same))
        for same in zip(*(facts["samples"] for facts in every), strict=True)
    )
    products = tuple(
        Product(side=same[0]["side"], flops_per_second=min(one["flops_per_second"] for one in same))
        for same in zip(*(facts["products"] for facts in every), strict=False)  # those that all had room for
    )
    return Calibration(
        device=CPU if hardware is None else hardware.gpu.name,
        count=ranks,
        driver=gpus.driver,
        date=datetime.now(UTC).date().isoformat(),
        versions={name: known[name] for name in ("shardwise", "torch") if name in known},
        link=None if hardware is None or ranks == 1 else hardware.intra.name,
        between=None if hardware is None else link_between(samples, ranks),
        host=link_to_host(samples),
        memory_bytes_per_second=min(facts["memory_bytes_per_second"] for facts in every),
        host_call_seconds=max(facts["host_call_seconds"] for facts in every),
        products=products,
        samples=samples,
        skipped=tuple(every[0]["skipped"]),
    )


def summary(found: Calibration) -> str:
    """One line of what was measured."""
    best = max((product.flops_per_second for product in found.products), default=0.0)
    parts = [f"bf16 products {count(best)}FLOP/s", f"memory {found.memory_bytes_per_second / 1e9:.0f} GB/s"]
    smallest = min((s for s in found.samples if s.what == "all_reduce"), key=lambda s: s.bytes, default=None)
    if found.between is not None:
        rate = found.between.bytes_per_second / 1e9
        parts.append(f"{found.link} {rate:.1f} GB/s and {_short(found.between.latency_seconds)} a message")
    elif smallest is not None:
        parts.append(f"all-reduce of {smallest.bytes} bytes {_short(smallest.seconds)}")
    if found.host is not None:
        parts.append(f"pinned copies {found.host.bytes_per_second / 1e9:.1f} GB/s")
    parts.append(
        f"a call of torch {_short(found.host_call_seconds)}: calls on the host x {found.host_pace:.2g}"
    )
    return ", ".join(parts) + "".join(f"; without {one}" for one in found.skipped)


def link_between(samples: Sequence[Sample], ranks: int) -> Rate | None:
    """The link that joins `ranks` GPUs; None where no line fits the samples."""
    line = _line([sample for sample in samples if sample.what in GATHERS])
    if line is None or ranks < 2:
        return None
    latency = max(0.0, line[0] - BASE_SECONDS) / (ranks - 1)
    return Rate(latency_seconds=latency, bytes_per_second=(ranks - 1) / ranks / line[1])


def link_to_host(samples: Sequence[Sample]) -> Rate | None:
    """Copies between pinned memory and the GPU, both directions alike."""
    line = _line([sample for sample in samples if sample.what in COPIES])
    return None if line is None else Rate(latency_seconds=max(0.0, line[0]), bytes_per_second=1.0 / line[1])


def _line(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """Seconds at 0 bytes and seconds per byte; None where they do not grow with the bytes."""
    if len({sample.bytes for sample in samples}) < 2:
        return None
    seconds = np.array([sample.seconds for sample in samples])
    slope, start = map(float, np.polyfit([sample.bytes for sample in samples], seconds, 1, w=1.0 / seconds))
    return (start, slope) if slope > 0 else None


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
