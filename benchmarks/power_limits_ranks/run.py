"""Zeus' power limit optimizer and shardwise's, each in four processes on the same fake GPUs.

    python benchmarks/power_limits_ranks/run.py --zeus-python PYTHON

PYTHON has zeus==0.16.0 and torch. Writes results/ranks.json and the table in README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.device.fake import FakeNvml, create
from shardwise.launch.nodes import free_port

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ranks.json"
RANKS, PRESENT_WATTS, TIMEOUT_SECONDS = 4, 650.0, 240
FORMS = ("documented", "seed", "shardwise")
BEGIN, END = "<!-- table -->", "<!-- end -->"


def run(form: str, python: str) -> dict[str, Any]:
    """What one form did, with the factors that follow from it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fake = FakeNvml(create(folder / "gpus.json", RANKS, power_limit_watts=PRESENT_WATTS))
        shared = {
            **os.environ,
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_PORT": str(free_port()),
            "SHARDWISE_LEASES": str(folder / "leases"),
            "SHARDWISE_DEVICE": f"fake:{fake.file}",
            "OMP_NUM_THREADS": "1",
        }
        command = [python, str(HERE / "worker.py"), form, str(folder)]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(RANKS)
        ]
        codes = [rank.wait(timeout=TIMEOUT_SECONDS) for rank in ranks]
        if any(codes):
            raise SystemExit(f"{form}: exit codes {codes}")
        found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
        return {**found, **_factors(found, fake)}


def _factors(found: dict[str, Any], fake: FakeNvml) -> dict[str, Any]:
    windows = found["windows"]
    calls = [one for one in fake.state()["calls"] if one["function"] == "nvmlDeviceSetPowerManagementLimit"]
    changes = [(one["uuid"], one["value"]) for one in calls if one["before"] != one["value"]]
    energy = sum(one["joules"] for one in windows) / sum(one["cards_joules"] for one in windows)
    # eta*energy_factor*E + (1-eta)*(cost_world_size/RANKS)*P_max*RANKS*T, as one eta of the true cost
    of_energy, of_time = found["eta"] * energy, (1 - found["eta"]) * found["cost_world_size"] / RANKS
    best = min({one["watts"] for one in windows}, key=lambda watts: _cost(windows, watts))
    return {
        "set_calls": len(calls),
        "set_calls_for_each_change_of_a_card": round(len(calls) / len(changes), 2),
        "processes_that_set": len({one["pid"] for one in calls}),
        "changes_by_card": dict(Counter(uuid for uuid, _ in changes)),
        "energy_factor": round(energy, 3),
        "eta_of_the_true_cost": round(of_energy / (of_energy + of_time), 3),
        "best_measured_watts_by_the_true_cost": best,
        "limits_before_watts": PRESENT_WATTS,
        "limits_after_watts": sorted({gpu["power_limit_watts"] for gpu in fake.state()["gpus"]}),
    }


def _cost(windows: list[dict[str, Any]], watts: int) -> float:
    """0.5*E + 0.5*P_max*N*T of a step: joules as the cards counted them, over all windows at this limit."""
    here, highest = [one for one in windows if one["watts"] == watts], max(one["watts"] for one in windows)
    joules, seconds = (sum(one[key] for one in here) for key in ("cards_joules", "seconds"))
    return float(0.5 * joules + 0.5 * highest * RANKS * seconds) / sum(one["steps"] for one in here)


ROWS = {
    "energy, times what the cards counted": "energy_factor",
    "GPUs in the time term of the cost": "cost_world_size",
    "eta asked": "eta",
    "eta that this is, by the true cost": "eta_of_the_true_cost",
    "set calls for each change of a card": "set_calls_for_each_change_of_a_card",
    "processes that set": "processes_that_set",
    "steps until the choice": "steps",
    "limit chosen, W": "chosen_watts",
    "best of the limits it measured, by the true cost, W": "best_measured_watts_by_the_true_cost",
    "limit before, W": "limits_before_watts",
    "limit after the end, W": "limits_after_watts",
}


def table(results: dict[str, Any]) -> str:
    """The README's table."""
    lines = [
        "| | Zeus, documented form | Zeus, one monitor of all GPUs on each rank | shardwise |",
        "|---|---|---|---|",
    ]
    for label, key in ROWS.items():
        cells = [results["forms"][form][key] for form in FORMS]
        lines.append(f"| {label} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return ", ".join(f"{one:g}" for one in value) if isinstance(value, list) else f"{value:g}"


def filled(text: str, results: dict[str, Any]) -> str:
    """The README with the table of these results."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zeus-python", required=True)
    python = parser.parse_args().zeus_python
    version = [python, "-c", "from importlib.metadata import version as v; print(v('zeus'), v('torch'))"]
    zeus, torch = subprocess.run(version, capture_output=True, text=True, check=True).stdout.split()
    forms = {form: run(form, sys.executable if form == "shardwise" else python) for form in FORMS}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    results = {
        "schema": 1,
        "date": date,
        "zeus": zeus,
        "torch": torch,
        "ranks": RANKS,
        "simulated": True,
        "forms": forms,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    readme = HERE / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
