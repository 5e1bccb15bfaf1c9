"""The search for a power limit on recorded sweeps, compared with Zeus' optimizer, and on modelled jobs.

    python benchmarks/power_limits/replay.py --data FOLDER --zeus PYTHON
    python benchmarks/power_limits/replay.py --page

FOLDER is `tests/profile_data` of https://github.com/ml-energy/zeus (12 CSV files; commit 75a8b93 was used).
PYTHON is the interpreter of an environment with zeus 0.16.0. Needs no GPU; takes 10 minutes on a core.
Writes results/records.json, unless `--data` is missing, and results/families.json. `--page` only fills the
tables of README.md from them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES, LEVELS
from families import record as modelled
from rehearse import Noise, Outcome, Record, rehearse

from shardwise.power.objective import Objective

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
RECORDS = HERE / "results" / "records.json"
JOBS = HERE / "results" / "families.json"

ZEUS_WINDOW_STEPS, ZEUS_STEPS_PER_LEVEL, ZEUS_WATTS = 40, 50, 25
FAST_STEP_SECONDS = 0.1  # below, windows are long in steps because they last seconds
SEEDS, JOB_SEEDS = 20, 5
NOISES = {
    "2 % noise": Noise(relative=0.02),
    "5 % noise": Noise(relative=0.05),
    "1 % noise and ticks": Noise(relative=0.01, ticks=True),
    "5 % drift": Noise(relative=0.01, drift_per_window=0.005),
}
OBJECTIVES: dict[str, Callable[[int], Objective]] = {
    "energy": lambda gpus: Objective(kind="energy", gpus=gpus),
    "time": lambda gpus: Objective(kind="time", gpus=gpus),
    "eta 0.5": lambda gpus: Objective(kind="eta", gpus=gpus, eta=0.5),
    "cost": lambda gpus: Objective(kind="cost", gpus=gpus, price_per_kwh=0.2, price_per_gpu_hour=0.5),
    "max-slowdown 5 %": lambda gpus: Objective(kind="max-slowdown", gpus=gpus, max_slowdown=0.05),
    "max-slowdown 10 %": lambda gpus: Objective(kind="max-slowdown", gpus=gpus, max_slowdown=0.10),
}
SELECTORS = {
    "energy": "energy",
    "time": "time",
    "eta 0.5": "eta:0.5",
    "max-slowdown 5 %": "slowdown:1.05",
    "max-slowdown 10 %": "slowdown:1.1",
}


def load(path: Path) -> Record:
    """A sweep as recorded by ZeusMonitor: one window of 40 steps for each limit."""
    with path.open(encoding="utf-8") as lines:
        rows = sorted(csv.DictReader(lines), key=_watts)
    energies = [[float(value) for name, value in row.items() if name.endswith("_energy")] for row in rows]
    return Record(
        name=path.stem,
        gpus=len(energies[0]),
        limits=[_watts(row) for row in rows],
        seconds=np.array([float(row["elapsed_time"]) for row in rows]) / ZEUS_WINDOW_STEPS,
        joules=np.array([sum(energy) for energy in energies]) / ZEUS_WINDOW_STEPS,
    )


def _watts(row: dict[str, str]) -> int:
    return int(row["window_name"].rpartition("_")[2])


def one(record: Record, objective: Objective, noise: Noise, seed: int) -> Outcome:
    return rehearse(record, objective, noise, np.random.default_rng(seed))


def noisy(
    records: Sequence[Record], make: Callable[[int], Objective], noise: Noise, seeds: int
) -> dict[str, float]:
    outcomes = [one(record, make(record.gpus), noise, seed) for record in records for seed in range(seeds)]
    regrets = [outcome.regret for outcome in outcomes]
    return {
        "mean_regret": round(statistics.mean(regrets), 5),
        "worst_regret": round(max(regrets), 5),
        "share_above_3_percent": round(sum(regret > 0.03 for regret in regrets) / len(regrets), 5),
        "mean_windows": round(statistics.mean(outcome.windows for outcome in outcomes), 2),
        "most_windows": max(outcome.windows for outcome in outcomes),
    }


def exact_rows(records: Sequence[Record], zeus: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for record in records:
        swept = zeus["records"][record.name]
        sweep_seconds = float(record.seconds.sum()) * ZEUS_STEPS_PER_LEVEL
        for name, make in OBJECTIVES.items():
            objective = make(record.gpus)
            regrets = record.regrets(objective)
            found = one(record, objective, Noise(), 0)
            chosen = swept["watts"].get(SELECTORS.get(name, ""))
            yield {
                "record": record.name,
                "objective": name,
                "best_watts": record.limits[int(regrets.argmin())],
                "watts": found.watts,
                "regret": round(found.regret, 5),
                "windows": found.windows,
                "levels": found.levels,
                "steps": found.steps,
                "seconds": round(found.seconds, 1),
                "step_seconds": round(float(record.seconds[-1]), 3),
                "limits": len(record.limits),
                "zeus_steps": swept["steps"],
                "zeus_seconds": round(sweep_seconds, 1),
                "zeus_watts": chosen,
                "zeus_regret": None
                if chosen is None
                else round(float(regrets[record.limits.index(chosen)]), 5),
            }


def replay(folder: Path, python: str) -> dict[str, Any]:
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise SystemExit(f"{folder} has no CSV files: see the head of this script for where to get them")
    command = [python, str(HERE / "zeus_side.py"), str(folder), *SELECTORS.values()]
    zeus = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    records = [load(path) for path in paths]
    return {
        **stamp(),
        "zeus": zeus["zeus"],
        "data_sha256": hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest(),
        "seeds": SEEDS,
        "rows": list(exact_rows(records, zeus)),
        "noisy": [
            {"objective": name, "noise": label, **noisy(records, make, noise, SEEDS)}
            for name, make in OBJECTIVES.items()
            for label, noise in NOISES.items()
        ],
    }


def model() -> dict[str, Any]:
    rows = []
    for family in FAMILIES:
        jobs = [modelled(family, levels, seed) for levels in LEVELS for seed in range(JOB_SEEDS)]
        for name, make in OBJECTIVES.items():
            found = [one(job, make(job.gpus), Noise(), 0) for job in jobs]
            shares = [outcome.steps / zeus_steps(job) for outcome, job in zip(found, jobs, strict=True)]
            rows.append(
                {
                    "family": family,
                    "objective": name,
                    "jobs": len(jobs),
                    "mean_regret": round(statistics.mean(outcome.regret for outcome in found), 5),
                    "worst_regret": round(max(outcome.regret for outcome in found), 5),
                    "mean_windows": round(statistics.mean(outcome.windows for outcome in found), 2),
                    "mean_steps_share": round(statistics.mean(shares), 4),
                    "most_steps_share": round(max(shares), 4),
                    "mean_regret_2_percent": noisy(jobs, make, NOISES["2 % noise"], 1)["mean_regret"],
                    "mean_regret_5_percent": noisy(jobs, make, NOISES["5 % noise"], 1)["mean_regret"],
                }
            )
    return {**stamp(), "rows": rows}


def zeus_steps(job: Record) -> int:
    """Steps of Zeus' optimizer with its defaults: 50 for each 25 W, and 2, as on the records."""
    return ZEUS_STEPS_PER_LEVEL * len(range(job.limits[-1], job.limits[0] - 1, -ZEUS_WATTS)) + 2


def stamp() -> dict[str, Any]:
    return {
        "schema": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def by_objective(content: dict[str, Any]) -> str:
    lines = []
    for name in OBJECTIVES:
        rows = [row for row in content["rows"] if row["objective"] == name]
        slow = [row for row in rows if row["step_seconds"] >= FAST_STEP_SECONDS]
        regrets = [row["regret"] for row in rows]
        zeus = [row["zeus_regret"] for row in rows]
        shares = [row["steps"] / row["zeus_steps"] for row in slow]
        lines.append(
            [
                name,
                percent(statistics.mean(regrets), 2),
                percent(max(regrets), 2),
                "" if None in zeus else percent(max(zeus), 1),
                f"{statistics.mean(row['windows'] for row in rows):.1f}",
                f"{percent(statistics.mean(shares))}, {percent(max(shares))}",
                percent(statistics.mean(row["steps"] / row["zeus_steps"] for row in rows)),
                percent(statistics.mean(row["seconds"] / row["zeus_seconds"] for row in rows)),
            ]
        )
    head = ["objective", "regret: mean", "worst", "Zeus: worst", "windows: mean"]
    return table([*head, "steps: mean, worst of 10", "mean of 12", "seconds: mean of 12"], lines)


def by_record(content: dict[str, Any]) -> str:
    lines = []
    for name in dict.fromkeys(row["record"] for row in content["rows"]):
        rows = {row["objective"]: row for row in content["rows"] if row["record"] == name}
        first = rows["energy"]
        lines.append(
            [name, first["limits"], f"{first['step_seconds']:.2f}", first["zeus_steps"]]
            + [f"{row['watts']} W ({percent(row['regret'])}), {row['steps']}" for row in rows.values()]
        )
    return table(["record", "limits", "s/step", "Zeus' steps", *OBJECTIVES], lines)


def by_noise(content: dict[str, Any]) -> str:
    found = {(row["objective"], row["noise"]): row for row in content["noisy"]}
    lines = [
        [name]
        + [
            f"{percent(row['mean_regret'], 2)} ({row['mean_windows']:.1f} windows)"
            for row in (found[name, noise] for noise in NOISES)
        ]
        for name in OBJECTIVES
    ]
    return table(["objective", *NOISES], lines)


def by_family(content: dict[str, Any]) -> str:
    lines = [
        [
            row["family"],
            row["objective"],
            percent(row["mean_regret"], 2),
            percent(row["worst_regret"], 2),
            f"{row['mean_windows']:.1f}",
            f"{percent(row['mean_steps_share'])}, {percent(row['most_steps_share'])}",
            percent(row["mean_regret_2_percent"]),
            percent(row["mean_regret_5_percent"]),
        ]
        for row in content["rows"]
    ]
    head = ["jobs", "objective", "regret: mean", "worst", "windows", "steps: mean, worst"]
    return table([*head, "2 % noise", "5 % noise"], lines)


def filled(text: str) -> str:
    """README.md with the tables of the committed results."""
    records, jobs = (json.loads(path.read_text(encoding="utf-8")) for path in (RECORDS, JOBS))
    tables = {
        "objectives": by_objective(records),
        "records": by_record(records),
        "noise": by_noise(records),
        "families": by_family(jobs),
    }
    for name, content in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, rf"\g<1>{content}\n\g<2>", text, flags=re.DOTALL)
    return text


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The search for a power limit, replayed")
    parser.add_argument("--data", type=Path, help="tests/profile_data of ml-energy/zeus")
    parser.add_argument("--zeus", default="python", metavar="PYTHON", help="interpreter with zeus 0.16.0")
    parser.add_argument("--page", action="store_true", help="only fill the tables of README.md")
    arguments = parser.parse_args()
    if not arguments.page:
        if arguments.data is not None:
            write(RECORDS, replay(arguments.data, arguments.zeus))
        write(JOBS, model())
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
