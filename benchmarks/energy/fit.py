"""Fit the prices of work in `[energy]` of simulate/time/efficiency.toml to the ledger's joules and seconds.

    python benchmarks/energy/fit.py

Needs no GPU, takes a minute. A step's energy is the constant draw for its seconds, and for each kind of
work a price times its amount. The amount is what the prediction loses when the price is 0. A step that would
draw more than the power limit lasts as long as its joules need, so its seconds depend on the prices, too.
Prices minimise the soft-L1 norm of the relative errors of joules and seconds over the rows `fit` and Mamba on
one GPU. The constant draw, the limit and the other prices stay as they are (decision 0097).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from predict import (
    HERE,
    earlier_kernels,
    found_in,
    hash_alike,
    measured_rows,
    paced,
    parse_hardware,
    predict,
)
from rows import Row, load_rows

from shardwise.simulate.energy import Draw
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.roofline import table

PRICES = ("matmul", "attention", "joules_per_byte")
SOFT = 0.03
"""Relative error from which a row counts by its error and no longer by its square."""
ROUNDS = 50


class Step:
    """What a row says of the prices, for one GPU: its errors, linear in them while the same bound holds."""

    def __init__(self, row: Row, measured: dict[str, Any]) -> None:
        with patch.object(StepTrace, "derived", lambda _, __, make: make()):  # it would keep the first prices
            today = _predict(row, measured)
            total, prices = _work(today), table()["energy"]
            parts = []
            for name in PRICES:
                price, prices[name] = prices[name], 0.0
                parts.append(total - _work(_predict(row, measured)))
                prices[name] = price
        self._amounts, self._rest = np.array(parts) / row.gpus, (total - sum(parts)) / row.gpus
        self._clocked = today.time.full_clock_seconds
        self._exposed = today.time.exposed_communication_seconds - today.time.exposed_to_peers_seconds
        self._seconds = measured["step_seconds"]
        joules = found_in(measured)["joules"]
        self._joules = joules / row.gpus if joules else None

    def errors(self, factors: np.ndarray, draw: Draw) -> list[tuple[np.ndarray, float]]:
        """Relative errors of seconds and joules at `factors` on the prices: each its slope and its value."""
        work, slope = self._amounts @ factors + self._rest, self._amounts
        powered = draw.powered_seconds(1.0)
        limited = self._exposed + work * powered > self._clocked
        seconds = self._exposed + work * powered if limited else self._clocked
        by_factor = slope * powered if limited else np.zeros(len(factors))
        found = [(by_factor / self._seconds, seconds / self._seconds - 1)]
        if self._joules is not None:
            joules = work + draw.constant_watts * seconds
            steep = slope + draw.constant_watts * by_factor
            found.append((steep / self._joules, joules / self._joules - 1))
        return found


def _predict(row: Row, measured: dict[str, Any]) -> Prediction:
    hardware = paced(parse_hardware(f"{row.gpus}xH200"), measured)
    return predict(row, earlier=earlier_kernels(measured), hardware=hardware)


def _work(prediction: Prediction) -> float:
    """Joules of a step on all GPUs without the constant draw."""
    return prediction.energy.joules_per_step - prediction.energy.idle_joules


def fitted_steps() -> list[Step]:
    found = measured_rows()
    rows = [(row, found[row.id]) for row in load_rows(HERE / "rows.toml") if row.id in found]
    return [
        Step(row, one)
        for row, one in rows
        if not one["error"]
        and one["joules_per_step"]
        and (row.set == "fit" or (row.gpus == 1 and row.model.endswith("_mamba")))
    ]


def soft_l1(steps: list[Step], draw: Draw) -> np.ndarray:
    """Factors on the prices: Gauss-Newton, each error weighted by 1 / sqrt(1 + (error / SOFT)^2)."""
    factors = np.ones(len(PRICES))
    for _ in range(ROUNDS):
        errors = [one for step in steps for one in step.errors(factors, draw)]
        slopes, values = (np.array(part) for part in zip(*errors, strict=True))
        weights = (1 + (values / SOFT) ** 2) ** -0.25  # the root of each weight
        change, *_ = np.linalg.lstsq(slopes * weights[:, None], -values * weights, rcond=None)
        factors = factors + change / 2  # Half of it: rows cross their power limit
    return factors


def mean_error(steps: list[Step], factors: np.ndarray, draw: Draw) -> float:
    return 100 * float(np.mean([abs(value) for step in steps for _, value in step.errors(factors, draw)]))


def main() -> None:
    hash_alike()
    rules, draw = table()["energy"], Draw(parse_hardware("1xH200").gpu)
    steps = fitted_steps()
    factors = soft_l1(steps, draw)
    today, fitted = (mean_error(steps, one, draw) for one in (np.ones(len(PRICES)), factors))
    print(f"{len(steps)} rows, mean error of joules and seconds: ", end="")
    print(f"{today:.2f} % with the prices of today, {fitted:.2f} % with these")
    for name, factor in zip(PRICES, factors, strict=True):
        print(f"{name:20} {rules[name]:.4g} -> {rules[name] * factor:.4g}")


if __name__ == "__main__":
    main()
