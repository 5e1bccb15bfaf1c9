"""Fit `[cpu]` of simulate/time/efficiency.toml to the step times of the ledger's rows `fit` that offload.

    python benchmarks/cpu_adam/fit.py

Needs no GPU, takes 15 seconds. Prints the GB/s with the least soft-L1 norm of the relative errors: of a
process by rows of one, of a node by the others.
"""

from __future__ import annotations

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
RATES = range(40, 201)
"""GB/s of a process, and of all of a node."""


def main() -> None:
    hash_alike()
    found = measured_rows()
    fit = [row for row in load_rows(HERE / "rows.toml") if row.set == "fit" and row.id in found]
    rows = [(row, found[row.id]) for row in fit if row.resolved().offload_optimizer != "none"]
    for by in ("deepspeed", "torch"):
        own = [pair for pair in rows if (pair[0].resolved().engine == "fsdp2") == (by == "torch")]
        for kind in ("process", "node"):
            alike = [pair for pair in own if (pair[0].gpus == 1) == (kind == "process")]
            least, rate = min((norm(alike, by, kind, rate), rate) for rate in RATES)
            print(f"{by}, {kind}: {rate} GB/s, norm {least:.4f}")
            for pair in alike:
                alone = min(RATES, key=lambda one: norm([pair], by, kind, one))
                print(f"    {alone} GB/s  {pair[0].id}")


def norm(rows: list[tuple[Row, dict[str, Any]]], by: str, kind: str, rate: int) -> float:
    rates = {"process": 1e12, "node": 1e12, kind: rate * 1e9}
    table()["cpu"][by] = rates
    return sum(2 * SOFT**2 * (math.hypot(1, error(*pair) / SOFT) - 1) for pair in rows)


def error(row: Row, measured: dict[str, Any]) -> float:
    hardware = paced(parse_hardware(f"{row.gpus}xH200"), measured)
    time = predict_step(row, earlier=earlier_kernels(measured), hardware=hardware, in_part=False)
    return float(time.step_seconds / measured["step_seconds"] - 1)


if __name__ == "__main__":
    main()
