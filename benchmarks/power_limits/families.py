"""Curves of jobs that were not recorded: time and energy over the limit, from a simple power model.

A GPU at relative clock f draws `static + dynamic * f**exponent` watts while it works, and the limit lowers f
until that fits, down to a least clock. A step computes for `compute / f` seconds, waits for memory for
`memory` seconds, and lasts at least `feed` seconds, which the data loader needs.
"""

from __future__ import annotations

import numpy as np
from rehearse import Record

FAMILIES = ("compute-bound", "memory-bound", "input-bound", "plateaus", "limit acts late")
LEVELS = (20, 33, 60)
RANGES = ((200, 700), (100, 400), (150, 600), (200, 1000))


def record(family: str, levels: int, seed: int) -> Record:
    """One job of a family; equal arguments give equal jobs."""
    generator = np.random.default_rng([FAMILIES.index(family), levels, seed])
    low, high = RANGES[generator.integers(len(RANGES))]
    limits = np.unique(np.linspace(low, high, levels).round().astype(int))
    full = high * generator.uniform(0.9, 1.25)  # draw at full clock
    compute, memory, feed = 1.0, generator.uniform(0.0, 0.2), 0.0
    if family == "memory-bound":
        memory, full = generator.uniform(1.0, 3.0), high * generator.uniform(0.6, 0.95)
    elif family == "input-bound":
        feed = (compute + memory) * generator.uniform(1.05, 1.6)
    elif family == "limit acts late":
        full = generator.uniform(1.1 * low, 0.8 * high)
    static = high * generator.uniform(0.12, 0.25)
    static = min(static, 0.8 * low)
    exponent = generator.uniform(1.8, 3.0)
    clock = np.clip(((limits - static) / (full - static)) ** (1 / exponent), 0.25, 1.0)
    if family == "plateaus":
        clock = np.maximum(np.floor(clock * 24), 6) / 24
    busy = compute / clock + memory
    seconds = np.maximum(busy, feed) * generator.uniform(0.3, 3.0) / (compute + memory)
    share = busy / np.maximum(busy, feed)
    watts = share * (static + (full - static) * clock**exponent) + (1 - share) * 0.5 * static
    gpus = int(generator.integers(1, 9))
    return Record(
        name=f"{family}, {levels} limits, {seed}",
        gpus=gpus,
        limits=[int(limit) for limit in limits],
        seconds=seconds,
        joules=watts * seconds * gpus,
        held=[bool(value < 1.0) for value in clock] if seed % 2 else None,
    )
