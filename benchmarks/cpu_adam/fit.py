"""Fit `[cpu]` of simulate/time/efficiency.toml to the step times of the ledger's rows `fit` that offload.

    python benchmarks/cpu_adam/fit.py

Needs no GPU, takes 20 seconds. Prints the GB/s with the least soft-L1 norm of the relative errors.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from predict import HERE, earlier_kernels, hash_alike, measured_rows, paced, parse_hardware, predict_step
from rows import Row, load_rows

from shardwise.simulate.time.roofline import table

SOFT = 0.15
"""Relative error from which a row counts by its error and no longer by its square."""
ALL, TORCH = range(96, 121), range(40, 61)
"""GB/s of all processes of a node, and of one with torch's AdamW."""


def main() -> None:
    hash_alike()
    found = measured_rows()
    fit = [row for row in load_rows(HERE / "rows.toml") if row.set == "fit" and row.id in found]
    rows = [(row, found[row.id]) for row in fit if row.resolved().offload_optimizer != "none"]
    torch = [pair for pair in rows if pair[0].resolved().engine == "fsdp2"]
    others = [pair for pair in rows if pair not in torch]
    by_rate = {rate: norm(others, rate, TORCH[0]) for rate in ALL}
    pairs = itertools.product(ALL, TORCH)
    least, rate, one = min((by_rate[rate] + norm(torch, rate, one), rate, one) for rate, one in pairs)
    print(f"{len(rows)} rows: {rate} GB/s, of one process with torch {one} GB/s, norm {least:.4f}")


def norm(rows: list[tuple[Row, dict[str, Any]]], rate: int, torch: int) -> float:
    table()["cpu"] |= {"bytes_per_second": rate * 1e9, "torch_bytes_per_second": torch * 1e9}
    return sum(2 * SOFT**2 * (math.hypot(1, error(*pair) / SOFT) - 1) for pair in rows)


def error(row: Row, measured: dict[str, Any]) -> float:
    hardware = paced(parse_hardware(f"{row.gpus}xH200"), measured)
    time = predict_step(row, earlier=earlier_kernels(measured), hardware=hardware, in_part=False)
    return float(time.step_seconds / measured["step_seconds"] - 1)


if __name__ == "__main__":
    main()
