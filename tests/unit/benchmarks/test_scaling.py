"""docs/scaling.md shows what is committed, and what is committed is what the simulator says."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from scripts import script


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return script("benchmarks/scaling/scaling.py")


def test_the_page_shows_the_committed_numbers(scaling: ModuleType) -> None:
    results = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.filled(page, scaling.parts(results)) == page
    results["cards"][0]["relative_speed"]["4 GPUs, ZeRO-2"] *= 1.1
    assert scaling.filled(page, scaling.parts(results)) != page


def test_the_committed_numbers_are_predicted_again(scaling: ModuleType) -> None:
    """Two GPUs of the small model under ZeRO-2, from 1 and 1,024 GPUs in the file."""
    results = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))
    network = next(iter(scaling.NETWORKS))
    one = scaling.tokens_per_second("tinyllama-1.1b", "single", "H200")
    for gpus in (2, 1024):
        row = next(r for r in results["predicted"] if (r["network"], r["gpus"]) == (network, gpus))
        now = scaling.tokens_per_second("tinyllama-1.1b", "zero2", scaling.NODES[gpus]) / one
        assert row["efficiency"]["zero2"] == pytest.approx(now, rel=1e-6)


def test_a_measured_row_is_compared_with_one_gpu(scaling: ModuleType) -> None:
    """Four GPUs of 60 tokens/s each against one of 50."""
    speeds = {"1gpu.single.full.s2048.b4x1.ck0": 50.0, "4gpu.zero2.full.s2048.b8x1.ck0": 60.0}
    measured = [
        {
            "id": f"tinyllama-1.1b.{name}",
            "gpus": int(name[0]),
            "tokens_per_second_per_gpu": {"measured": speed, "predicted": 1.1 * speed},
        }
        for name, speed in speeds.items()
    ]
    shown = scaling.parts({"cards": [], "predicted": [], "one_machine": [], "measured": measured})["measured"]
    assert shown.splitlines()[-1].endswith("| 60 | 66 | +10.0% | 4.80x | 4.80x |")
    assert shown.splitlines()[-2].endswith("|  |  |")
