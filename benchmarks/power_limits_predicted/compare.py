"""Predicted time and energy under power limits against recorded and published sweeps.

    git clone https://github.com/ml-energy/zeus
    python benchmarks/power_limits_predicted/compare.py --records zeus/tests/profile_data [--out FILE]

Needs no GPU. The records are Zeus' own and stay there; FILE gets ratios only. A record gives time and energy
of the same steps at each power limit, the highest first. The model gets the average watts at the highest
limit, as a plan gets them from the simulator, and the share of the step that follows the clock. For BERT-base
it is what the simulator says of GPT-2, which has the same blocks. Vision models cannot be simulated: their
share is fitted. The two coefficients are fitted to one card's records on one GPU; all others are held out.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.app.jobs import hardware_of
from shardwise.hardware.catalog import Gpu
from shardwise.planner.planning import predict_strategy
from shardwise.planner.sketch import sketch
from shardwise.simulate.energy import Draw
from shardwise.simulate.power import under_limit
from shardwise.simulate.prediction import Energy, Memory, MemoryTerms, Prediction, Time
from shardwise.simulate.time.roofline import table
from shardwise.strategy import Strategy

GPUS = {"A40": "A40", "V100": "V100 PCIe 16GB", "RTX 3090": "RTX 3090", "RTX 4090": "RTX 4090"}
LANGUAGE = "bert-base-uncased"
SHIPPED = "V100"
"""Whose records the coefficients of `efficiency.toml` come from."""
FLOORS = [percent / 100 for percent in range(56, 92, 2)]
CLOCKS = [percent / 100 for percent in range(40, 92, 4)]
SHARES = [tenths / 10 for tenths in range(11)]
NEAR = 1.2
"""The band of a plan is from levels that slow the step by less: a plan chooses among these."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One limit, against the highest one of its sweep."""

    limit_watts: float
    time_ratio: float
    energy_ratio: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep; `watts`: on average at the highest limit, of one GPU."""

    name: str
    gpu: str
    highest_watts: float
    watts: float
    levels: tuple[Level, ...]
    source: str

    @property
    def calibrated(self) -> Sweep:
        """Without the levels below the least one that a plan uses."""
        least = table()["voltage"]["least_limit"] * self.highest_watts
        return replace(self, levels=tuple(one for one in self.levels if one.limit_watts >= least))


def _drawn(watts: float) -> float:
    return 0.985 * watts


def published() -> list[Sweep]:
    """Sweeps of which only a few figures were published. The watts at the highest limit are assumed."""
    prefill = {300: 9326, 250: 8436, 200: 5941}  # tokens/s; 9893 at 350 W
    return [
        Sweep(
            name="LLM fine-tuning, RTX 4090",
            gpu="RTX 4090",
            highest_watts=450,
            watts=_drawn(450),
            levels=(Level(limit_watts=300, time_ratio=1 / 0.9445, energy_ratio=0.67 / 0.9445),),
            source="doi 10.1109/OJCS.2025.3580498: -5.55 % throughput, -33 % power; before: at the limit",
        ),
        Sweep(
            name="MiniMax M2.5 prefill, 6 x RTX 3090",
            gpu="RTX 3090",
            highest_watts=350,
            watts=_drawn(350),
            levels=tuple(
                Level(limit_watts=watts, time_ratio=9893 / rate, energy_ratio=watts / 350 * 9893 / rate)
                for watts, rate in prefill.items()
            ),
            source="llmgarage.ai/power-limit-tokens-per-second-benchmark: inference; at each limit",
        ),
        Sweep(
            name="language models, V100",
            gpu="V100",
            highest_watts=250,
            watts=_drawn(150) / (0.863 / 1.068),
            levels=(Level(limit_watts=150, time_ratio=1.068, energy_ratio=0.863),),
            source="arXiv 2205.09646 (by the press): watts before from the ratios, as 150 W bind",
        ),
    ]


def read(path: Path) -> Sweep:
    """A record of Zeus: `A40+bert-base-uncased+gpu0.csv`."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in rows[0] if name.endswith("_energy")]
    seconds = [float(row["elapsed_time"]) for row in rows]
    joules = [sum(float(row[name]) for name in columns) for row in rows]
    limits = [float(row["window_name"].rsplit("_", 1)[1]) for row in rows]
    return Sweep(
        name=path.stem,
        gpu=path.stem.split("+")[0],
        highest_watts=limits[0],
        watts=joules[0] / seconds[0] / len(columns),
        levels=tuple(
            Level(limit_watts=limit, time_ratio=time / seconds[0], energy_ratio=used / joules[0])
            for limit, time, used in zip(limits[1:], seconds[1:], joules[1:], strict=True)
        ),
        source="ml-energy/zeus tests/profile_data",
    )


def predict(sweep: Sweep, share: float) -> tuple[Level, ...]:
    """The model's levels; `share`: of the step at the highest limit, what follows the clock."""
    gpu = hardware_of(f"1x{GPUS[sweep.gpu].replace(' ', '-')}").gpu
    before = _step(sweep.watts, share, gpu)
    after = [under_limit(before, gpu, level.limit_watts) for level in sweep.levels]
    return tuple(
        Level(
            limit_watts=level.limit_watts,
            time_ratio=one.time.step_seconds,
            energy_ratio=one.energy.joules_per_step / sweep.watts,
        )
        for level, one in zip(sweep.levels, after, strict=True)
    )


def _step(watts: float, share: float, gpu: Gpu) -> Prediction:
    """A step of one second that draws `watts` at the card's own limit."""
    nothing = dict.fromkeys(Time.__dataclass_fields__, 0)
    busy = {"step_seconds": 1.0, "full_clock_seconds": 1.0, "compute_seconds": 1.0, "clocked_seconds": share}
    time = Time(**{**nothing, **busy, "tokens_per_step": 1, "world_size": 1})
    energy = Energy(joules_per_step=watts, idle_joules=Draw(gpu).constant_watts, tokens_per_step=1)
    terms = MemoryTerms(**dict.fromkeys(MemoryTerms.__dataclass_fields__, 0))
    sizes = dict.fromkeys(("peak_reserved_bytes", "peak_allocated_bytes", "outside_allocator_bytes"), 0)
    memory = Memory(**sizes, capacity_bytes=1, terms=terms, host_bytes=0)
    return Prediction(memory=memory, time=time, energy=energy)


def simulated_share(gpus: str) -> float:
    """What follows the clock in a step of GPT-2 in fp32, 32 rows of 128 tokens."""
    changes = ["model.lora=null", "data.sequence_length=128", "train.global_batch=32", "train.precision=fp32"]
    strategy = Strategy(engine="single", micro_batch=32, accumulation=1, checkpoint_every=0)
    option = predict_strategy(sketch("gpt2", changes, world_size=1).job, hardware_of(gpus), strategy)
    return option.prediction.time.clocked_seconds / option.prediction.time.full_clock_seconds


def errors(sweep: Sweep, share: float) -> dict[str, list[float]]:
    """(predicted - measured) / measured by quantity, for each level."""
    pairs = list(zip(predict(sweep, share), sweep.levels, strict=True))
    return {
        name: [getattr(one, f"{name}_ratio") / getattr(level, f"{name}_ratio") - 1 for one, level in pairs]
        for name in ("time", "energy")
    }


def fit(sweeps: Sequence[Sweep], shares: Mapping[str, float]) -> tuple[float, float]:
    """Floor and clock of least squared errors over sweeps, on a grid; shares that are not known, too."""

    def loss() -> float:
        return sum(
            _squares(errors(one.calibrated, shares.get(one.name) or fitted_share(one))) for one in sweeps
        )

    return min(itertools.product(FLOORS, CLOCKS), key=lambda pair: with_voltage(*pair, loss))


def fitted_share(sweep: Sweep) -> float:
    return min(SHARES, key=lambda share: _squares(errors(sweep.calibrated, share)))


def with_voltage(floor: float, clock: float, run: Callable[[], Any]) -> Any:
    """What `run` gives with other coefficients."""
    rules = table()["voltage"]
    shipped = dict(rules)
    rules.update(floor=floor, clock=clock)
    try:
        return run()
    finally:
        rules.update(shipped)


def _squares(of: dict[str, list[float]]) -> float:
    return sum(error**2 for values in of.values() for error in values)


def summary(of: dict[str, list[float]]) -> dict[str, float]:
    """Mean and worst, percent."""
    return {
        f"{name}_{what}_percent": round(100 * figure, 1)
        for name, values in of.items()
        for what, figure in (
            ("mean", statistics.fmean(map(abs, values))),
            ("worst", max(values, key=abs)),
        )
    }


def measured_over_predicted(sweep: Sweep, share: float) -> list[float]:
    """Of the energy ratio at levels that slow the step by less than NEAR."""
    pairs = zip(predict(sweep, share), sweep.calibrated.levels, strict=False)
    return [real.energy_ratio / one.energy_ratio - 1 for one, real in pairs if real.time_ratio < NEAR]


def compare(sweep: Sweep, share: float, how: str) -> dict[str, Any]:
    """A row of the result."""
    rows = zip(sweep.levels, predict(sweep, share), strict=True)
    return {
        "name": sweep.name,
        "source": sweep.source,
        "how": how,
        "highest_watts": sweep.highest_watts,
        "drawn_watts": round(sweep.watts, 1),
        "share": round(share, 3),
        **summary(errors(sweep.calibrated, share)),
        "levels": [
            {
                "limit_watts": real.limit_watts,
                "time": [round(real.time_ratio, 4), round(one.time_ratio, 4)],
                "energy": [round(real.energy_ratio, 4), round(one.energy_ratio, 4)],
            }
            for real, one in rows
        ],
    }


def run(folder: Path) -> dict[str, Any]:
    """All comparisons."""
    sweeps = {one.name: one for one in map(read, sorted(folder.glob("*.csv")))}
    simulated = {"A40": simulated_share("1xA40"), "V100": simulated_share("1xV100-PCIe-16GB")}
    shares = {f"{card}+{LANGUAGE}+gpu0": share for card, share in simulated.items()}
    fitted = {
        card: fit([one for one in sweeps.values() if one.gpu == card and "," not in one.name], shares)
        for card in simulated
    }
    rows, near = [], list[float]()
    for card, pair in fitted.items():  # which the coefficients come from
        how = f"coefficients from {card}"
        for one in sweeps.values():
            if card == SHIPPED or one.name in shares:
                share = shares.get(one.name)
                share = with_voltage(*pair, partial(fitted_share, one)) if share is None else share
                held_out = how + (", held out" if one.gpu != card or "," in one.name else "")
                rows.append(with_voltage(*pair, partial(compare, one, share, held_out)))
                if one.name in shares and one.gpu != card:
                    near += with_voltage(*pair, partial(measured_over_predicted, one, share))
    mean = statistics.fmean(simulated.values())
    how, far = f"coefficients from {SHIPPED}, mean share of the two cards", list(near)
    for one in published():
        rows.append(with_voltage(*fitted[SHIPPED], partial(compare, one, mean, how)))
        far += with_voltage(*fitted[SHIPPED], partial(measured_over_predicted, one, mean))
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/power_limits_predicted/compare.py --records zeus/tests/profile_data",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "records": "ml-energy/zeus, commit 75a8b9398034eb9baf74ca0a830c2c31bcce52cd",
        "fitted": {card: dict(zip(("floor", "clock"), pair, strict=True)) for card, pair in fitted.items()},
        "measured_over_predicted_energy": {"swept": _ends(near), "elsewhere": _ends(far)},
        "rows": rows,
    }


def _ends(values: Iterable[float]) -> list[float]:
    values = list(values)
    return [round(min(values), 3), round(max(values), 3)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Power limits: predicted against recorded and published sweeps"
    )
    parser.add_argument("--records", type=Path, required=True, help="tests/profile_data of ml-energy/zeus")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result = run(asked.records)
    for row in result["rows"]:
        figures = {name: value for name, value in row.items() if name.endswith("_percent")}
        print(f"{row['name']:40} {row['how']}\n    share {row['share']}: {figures}")
    print({name: result[name] for name in ("fitted", "measured_over_predicted_energy")})
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
