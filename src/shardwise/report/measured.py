"""Measurements of a run's steps, with the units and names of the accuracy ledger."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

MOST_SPREAD = 0.05
"""A measurement is noisy where its steps spread, drift or are skewed by more than this share."""
FEWEST_STEPS = 5
LEAST_ENERGY_SECONDS = 1.0
"""Over less time, a counter that moves every 20 to 100 ms can be wrong by more than a fifth."""

BY_RANK = {
    "peak_allocated_bytes": "peak_memory_allocated_bytes",
    "peak_reserved_bytes": "peak_memory_reserved_bytes",
    "outside_allocator_bytes": "outside_allocator_bytes",
    "host_memory_bytes": "host_memory_bytes",
}
"""Key of a measurement: key of the step events."""


def measured(
    steps: Sequence[Mapping[str, Any]], *, warmup: int, count: int | None = None, processes: int
) -> dict[str, Any]:
    """Memory, time, energy and curves of a run's step events; at least one must be left after `warmup`.

    Time and energy are measured over the `count` steps after the first `warmup`; later steps are ignored.
    Memory is the worst rank's and includes the warm-up, because the warm-up has to fit as well. Without a
    GPU, `peak_allocated_bytes` and `peak_reserved_bytes` are the process's resident set. A null number has
    its reason in `NAME_unavailable`.
    """
    steps = steps[: None if count is None else warmup + count]
    steady = steps[warmup:]
    seconds = [float(step["seconds"]) for step in steady]
    per_gpu = sum(step["tokens"] for step in steady) / sum(seconds) / processes
    verdict, why = judge(seconds)
    return {
        **_memory(steps),
        "steps": len(steps),
        "warmup_steps": warmup,
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": [step["seconds"] for step in steps],
        "tokens_all": [step["tokens"] for step in steps],
        "tokens_per_second_per_gpu": per_gpu,
        **_rates(steady[-1], per_gpu),
        **_energy(steady),
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "verdict": verdict,
        "verdict_why": why,
    }


def judge(seconds: Sequence[float]) -> tuple[str, list[str]]:
    """Judge the seconds of steady steps: (`valid` or `noisy`, why noisy); docs/bench.md has the rule."""
    why = []
    middle = statistics.median(seconds)
    if len(seconds) < FEWEST_STEPS:
        why.append(f"{len(seconds)} steady steps say little: at least {FEWEST_STEPS}")
    if len(seconds) >= 2:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        if (spread := (high - low) / middle) > MOST_SPREAD:
            why.append(f"the middle half of the steps spreads by {spread:.0%} of the median")
    if abs(skew := statistics.fmean(seconds) / middle - 1) > MOST_SPREAD:
        why.append(f"the mean is {skew:+.0%} off the median: single steps stand out")
    half = len(seconds) // 2
    if half >= 2:
        drift = statistics.median(seconds[-half:]) / statistics.median(seconds[:half]) - 1
        if abs(drift) > MOST_SPREAD:
            why.append(f"the second half of the steps takes {drift:+.0%}: more --warmup")
    return ("noisy" if why else "valid"), why


def _memory(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in BY_RANK.items():
        by_step = [step[key] for step in steps if step.get(key)]
        by_rank = [max(values) for values in zip(*by_step, strict=True)] or None
        found |= {name: by_rank and max(by_rank), f"{name}_by_rank": by_rank}
    on_gpu = found["outside_allocator_bytes"] is not None
    return {
        **found,
        "memory_of": "gpu" if on_gpu else "process",
        "outside_allocator_unavailable": None if on_gpu else "no GPU",
        "reserved_by_step_bytes": _by_step(steps, "memory_reserved_bytes"),
        "allocated_by_step_bytes": _by_step(steps, "memory_allocated_bytes"),
    }


def _by_step(steps: Sequence[Mapping[str, Any]], key: str) -> list[int | None]:
    """The worst rank's value after each step."""
    return [max(step[key]) if step.get(key) else None for step in steps]


def _rates(step: Mapping[str, Any], per_gpu: float) -> dict[str, Any]:
    """TFLOP/s and MFU at `per_gpu` tokens a second: both are proportional to it."""
    share = per_gpu / step["tokens_per_second_per_gpu"]
    flops, mfu = step.get("tflops_per_gpu"), step.get("mfu")
    return {
        "tflops_per_gpu": None if flops is None else flops * share,
        "mfu": None if mfu is None else mfu * share,
        "mfu_unavailable": step.get("mfu_unavailable"),
    }


def _energy(steady: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joules a token over the steady steps with a reading, of all GPUs without the host."""
    known = [step for step in steady if step.get("joules") is not None]
    seconds = sum(step["seconds"] for step in known)
    reason = None
    if not known:
        reason = next((step.get("joules_unavailable") for step in steady), None) or "no reading"
    elif seconds < LEAST_ENERGY_SECONDS:
        reason = f"the steps took {seconds:.1f} s together, too short for the counter: more --steps"
    tokens = sum(step["tokens"] for step in known)
    joules = None if reason else sum(step["joules"] for step in known) / tokens
    return {"joules_per_token": joules, "joules_unavailable": reason}
