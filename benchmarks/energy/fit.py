"""Fit the prices of work in `[energy]` of simulate/time/efficiency.toml to the ledger's joules.

    python benchmarks/energy/fit.py

Needs no GPU, takes a minute. A step's energy is the constant draw for its seconds, and for each kind of
work a price times its amount. The amount is what the prediction loses when the price is 0. Prices minimise
the soft-L1 norm of the relative errors of joules, at the measured seconds, over the rows `fit` and Mamba on
one GPU. The constant draw and the price of a link's byte stay as they are; the file says why. The prices in
the file were fitted to the seconds as well, which the power limit makes longer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from predict import HERE, earlier_kernels, hash_alike, measured_rows, predict
from rows import Row, load_rows

from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.roofline import table

PRICES = ("matmul", "attention", "fp32", "scan", "joules_per_byte")
SOFT = 0.05
"""Relative error from which a row counts by its error and no longer by its square."""
ROUNDS = 50


def fitted_rows() -> list[tuple[Row, dict[str, Any]]]:
    found = measured_rows()
    rows = [(row, found[row.id]) for row in load_rows(HERE / "rows.toml") if row.id in found]
    rows = [(row, one) for row, one in rows if not one["error"] and one["joules_per_step"]]
    return [
        (row, one)
        for row, one in rows
        if row.set == "fit" or (row.gpus == 1 and row.model.endswith("_mamba"))
    ]


def work(row: Row, measured: dict[str, Any]) -> float:
    """Predicted joules of a step without the constant draw."""
    with patch.object(StepTrace, "derived", lambda _, __, make: make()):  # it would keep the first prices
        energy = predict(row, earlier=earlier_kernels(measured)).energy
    return energy.joules_per_step - energy.idle_joules


def amounts(row: Row, measured: dict[str, Any]) -> tuple[list[float], float]:
    """Of each kind of work, joules at its price of today; joules of the rest."""
    prices, total = table()["energy"], work(row, measured)
    parts = []
    for name in PRICES:
        price, prices[name] = prices[name], 0.0
        parts.append(total - work(row, measured))
        prices[name] = price
    return parts, total - sum(parts)


def soft_l1(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Factors on the prices: least squares, weighted again and again by 1 / sqrt(1 + (error / SOFT)^2)."""
    weights = np.ones(len(y))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        factors, *_ = np.linalg.lstsq(x * root[:, None], y * root, rcond=None)
        weights = 1 / np.sqrt(1 + ((x @ factors - y) / SOFT) ** 2)
    return factors


def main() -> None:
    hash_alike()
    rules = table()["energy"]
    x, y = [], []
    for row, measured in fitted_rows():
        parts, rest = amounts(row, measured)
        watts = rules["constant"] * float(measured["power_limit"].split()[0])
        left = measured["joules_per_step"] / row.gpus - watts * measured["step_seconds"] - rest / row.gpus
        x.append(np.array(parts) / measured["joules_per_step"])
        y.append(left * row.gpus / measured["joules_per_step"])
    parts, wanted = np.array(x), np.array(y)
    factors = soft_l1(parts, wanted)
    print(f"{len(wanted)} rows, mean error of joules at the measured seconds: ", end="")
    errors = [100 * np.abs(parts @ f - wanted).mean() for f in (np.ones(len(PRICES)), factors)]
    print(f"{errors[0]:.2f} % with the prices of today, {errors[1]:.2f} % with these")
    for name, factor in zip(PRICES, factors, strict=True):
        print(f"{name:16} {rules[name]:.4g} -> {rules[name] * factor:.4g}")


if __name__ == "__main__":
    main()
