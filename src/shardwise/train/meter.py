"""Measuring a run: memory of this process, seconds of a step, FLOP/s of a GPU."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

MEMORY_FIELDS = ("allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes")


def memory(device: torch.device) -> list[float]:
    """Bytes as in MEMORY_FIELDS. On the CPU: resident set now (both) and its peak (both)."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)  # once: collecting them takes longer than a kernel launch
        keys = ("allocated_bytes", "reserved_bytes")
        return [float(stats.get(f"{key}.all.{when}", 0)) for when in ("current", "peak") for key in keys]
    resident = float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return [resident, resident, peak, peak]


class Stopwatch:
    """Seconds from one lap to the next, or from the last restart."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds

    def restart(self) -> None:
        self._since = time.perf_counter()
