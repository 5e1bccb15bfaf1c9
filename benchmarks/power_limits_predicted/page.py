"""The tables of docs/energy.md on prediction, from the committed results.

    python benchmarks/power_limits_predicted/page.py

Prints them; a test compares the page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def accuracy() -> Iterator[str]:
    """Errors of each sweep."""
    yield "| sweep | coefficients | time: mean | worst | energy: mean | worst |"
    yield "|---|---|---|---|---|---|"
    for row in read("zeus.json")["rows"]:
        how = row["how"].removeprefix("coefficients from ").removesuffix(", mean share of the two cards")
        figures = " | ".join(
            f"{row[f'{name}_mean_percent']:.1f} % | {row[f'{name}_worst_percent']:+.1f} %"
            for name in ("time", "energy")
        )
        yield f"| {row['name'].replace('+', ', ')} | {how} | {figures} |"


def levels() -> Iterator[str]:
    """BERT-base on the A40, level by level: the card that was held out."""
    rows = read("zeus.json")["rows"]
    row = next(one for one in rows if "A40+bert" in one["name"] and "V100, held out" in one["how"])
    yield "| limit, W | time: measured | predicted | energy: measured | predicted |"
    yield "|---|---|---|---|---|"
    for one in row["levels"]:
        pairs = " | ".join(f"{value:.3f}" for name in ("time", "energy") for value in one[name])
        below = "" if one["limit_watts"] >= row["highest_watts"] / 2 else " (not planned)"
        yield f"| {one['limit_watts']:.0f}{below} | {pairs} |"


def jobs() -> Iterator[str]:
    """What a plan chooses for four jobs."""
    yield "| job | default choice | choice | limit, W | time | energy | band of the energy |"
    yield "|---|---|---|---|---|---|---|"
    for row in read("jobs.json")["jobs"]:
        gpus = (
            row["gpus"]
            if f"{row['chosen_gpus']}x" in row["gpus"]
            else f"{row['chosen_gpus']} of {row['gpus']}"
        )
        full = "all weights" if "model.lora=null" in row["changes"] else "LoRA 16"
        limit = row["power_limit_watts"] or f"its own {row['own_limit_watts']}"
        saved, error = row["energy_saved_fraction"], row["energy_error_fraction"]
        band = f"{-saved - error:+.1%} to {-saved + error:+.1%}" if error else "no limit changed"
        yield (
            f"| {row['model']}, {full}, {gpus} | {row['default']} | {row['chosen']} | {limit} | "
            f"{row['slowdown_fraction']:+.1%} | {-saved:+.1%} | {band} |"
        )


def swept() -> Iterator[str]:
    """One job at limits that somebody names."""
    found = read("jobs.json")["swept"]
    yield f"{found['model']} on {found['gpus']}, {found['strategy']}"
    yield ""
    yield "| limit, W | time | energy |"
    yield "|---|---|---|"
    for one in found["levels"]:
        yield f"| {one['limit_watts']} | {one['time'] - 1:+.1%} | {one['energy'] - 1:+.1%} |"


if __name__ == "__main__":
    for table in (accuracy, levels, jobs, swept):
        print("\n".join(table()), end="\n\n")
