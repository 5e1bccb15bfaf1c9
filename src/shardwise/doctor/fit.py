"""Latency and rate of a link from measured transfers: the planner's own model, solved for its two numbers.

In simulate/time/collectives.py an all-gather of n bytes over N GPUs takes B + (N - 1) a + n (N - 1) / N / b
seconds, and a copy a + n / b. Both are c + d n; c and d minimise the squares of the relative errors, so that
a message of 4 KiB counts as much as one of 512 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.hardware.calibration import Rate, Sample
from shardwise.simulate.time.collectives import BASE_SECONDS

GATHERS = ("all_gather", "reduce_scatter")
"""The collectives that are linear in the model; an all-reduce is a ring or a tree, the faster."""

COPIES = ("pinned_to_gpu", "gpu_to_pinned")


def between(samples: Sequence[Sample], ranks: int) -> Rate | None:
    """Of the link that joins `ranks` GPUs; None where no line goes through the samples."""
    line = _line([sample for sample in samples if sample.what in GATHERS])
    if line is None or ranks < 2:
        return None
    constant, slope = line
    steps = ranks - 1
    return Rate(
        latency_seconds=max(0.0, constant - BASE_SECONDS) / steps,
        bytes_per_second=steps / ranks / slope,
    )


def host(samples: Sequence[Sample]) -> Rate | None:
    """Of copies between pinned memory and the GPU, both directions alike."""
    line = _line([sample for sample in samples if sample.what in COPIES])
    if line is None:
        return None
    constant, slope = line
    return Rate(latency_seconds=max(0.0, constant), bytes_per_second=1.0 / slope)


def _line(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """Seconds at 0 bytes and seconds a byte; None where they do not grow with the bytes."""
    weights = [1.0 / sample.seconds**2 for sample in samples]
    total = sum(weights)
    if len({sample.bytes for sample in samples}) < 2:
        return None
    pairs = list(zip(weights, samples, strict=True))
    mean_bytes = sum(w * s.bytes for w, s in pairs) / total
    mean_seconds = sum(w * s.seconds for w, s in pairs) / total
    spread = sum(w * (s.bytes - mean_bytes) ** 2 for w, s in pairs)
    slope = sum(w * (s.bytes - mean_bytes) * (s.seconds - mean_seconds) for w, s in pairs) / spread
    return (mean_seconds - slope * mean_bytes, slope) if slope > 0 else None
