"""docs/reliability.md shows the committed results of benchmarks/reliability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "reliability" / "results"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def kills(what: str) -> str:
    found = [row for row in rows("kills.jsonl") if row["what"] == what]
    assert all(row["same_end"] for row in found)
    cells = {(row["strategy"], row["processes"], row["background"]) for row in found}
    count, wrong = sum(row["kills"] for row in found), sum(len(row["wrong"]) for row in found)
    unit = f"{len(cells)} layouts" if what == "events" else f"{len(found)} runs"
    return f"{count:,} kills, {unit} | {wrong} |"


def power() -> str:
    found = rows("power_loss.jsonl")
    return f"{sum(row['states'] for row in found):,} states | {sum(len(row['wrong']) for row in found)} |"


def damage() -> str:
    found = json.loads((RESULTS / "damage.json").read_text())
    results = found["results"]
    parts = f"{results['found']} found, {results['harmless']} harmless"
    return f"{found['damages']:,} damages: {parts} | {len(found['not_found'])} |"


@pytest.mark.parametrize(
    ("script", "figures"),
    [
        ("kills.py --what events", lambda: kills("events")),
        ("kills.py --what random", lambda: kills("random")),
        ("power_loss.py", power),
        ("damage.py", damage),
    ],
)
def test_the_page_has_the_figures_of_the_results(script: str, figures: Any) -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"| `{script}`")]
    assert line.endswith(figures())


def peer(name: str, found: dict[str, dict[str, int]], versions: dict[str, str]) -> str:
    """A line of the table of trainers."""

    def count(whats: tuple[str, ...], *results: str) -> int:
        return sum(found[what].get(result, 0) for what in whats for result in results)

    kills, damages = ("random", "saving"), ("flip", "truncate")
    tried, hit = (sum(sum(found[what].values()) for what in whats) for whats in (kills, damages))
    cells = [
        f"{name} {versions[next(iter(versions))]}",
        *(tried, count(kills, "exact"), count(kills, "refused", "hangs")),
        count(kills, "different", "older", "started"),
        *(hit, count(damages, "older"), count(damages, "refused", "hangs")),
        *(count(damages, "different", "started"), count(damages, "harmless")),
    ]
    return f"| {' | '.join(map(str, cells))} |"


PEERS = json.loads((RESULTS / "peers.json").read_text())["trainers"]


@pytest.mark.parametrize("name", PEERS)
def test_the_page_has_the_figures_of_the_trainers(name: str) -> None:
    line = peer(name, PEERS[name]["found"], PEERS[name]["versions"])
    assert line in (ROOT / "docs" / "reliability.md").read_text().splitlines()
