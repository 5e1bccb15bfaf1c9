"""The arithmetic behind docs/accuracy.md: differences, summaries, words and points."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import accuracy

GIB = 1024**3


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return accuracy.module("page")


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    return accuracy.module("predict")


def comparison(name: str, *, fits: bool = True, oom: bool = False) -> dict[str, Any]:
    quantities = ("reserved", "allocated", "outside", "needed", "fragmentation", "step", "joules", "host")
    return {
        "id": name,
        "set": "fit",
        "family": "zero2 offload",
        "gpus": 2,
        "fits": fits,
        "oom": oom,
        "predicted": dict.fromkeys(quantities, 1.5 * GIB),
        "measured": {} if oom else dict.fromkeys(quantities, 2.0 * GIB),
        "differences": dict.fromkeys(quantities, None if oom else -0.25),
    }


def test_a_row_is_compared_value_by_value(predict: ModuleType) -> None:
    """The measured side of an offloading row on two GPUs, made from the prediction itself."""
    row = predict.Row(model="smollm2-135m", gpus=2, strategy="zero2-offload", memory_cap_gib=0.5)
    said = predict.predict(row)
    own = predict.process_bytes()
    measured = {
        "error": None,
        "oom": False,
        "strategy": row.resolved().to_json(),
        "peak_reserved_bytes": said.memory.peak_reserved_bytes * 2,
        "peak_allocated_bytes": said.memory.peak_allocated_bytes,
        "outside_allocator_bytes": said.memory.outside_allocator_bytes,
        "step_seconds": said.time.step_seconds / 2,
        "joules_per_step": said.energy.joules_per_step * 2,
        "warmup_steps": 1,
        "step_seconds_all": [9.0, 0.4, 0.4],  # timed: too short for a counter of energy
        "host_memory_bytes_by_rank": [own + said.memory.host_bytes // 4] * 2,
    }
    found = predict.compare(row, measured)
    assert found["family"] == "zero2 offload"
    assert not found["fits"], "half a GiB does not hold a CUDA context"
    differences = found["differences"]
    assert differences["reserved"] == pytest.approx(-0.5)
    assert differences["allocated"] == 0
    # reserved grew by one peak, all of it fragmentation: half of what is reserved
    assert differences["fragmentation"] == pytest.approx(-0.5)
    assert differences["step"] == pytest.approx(1.0)
    assert differences["joules"] is None
    longer = predict.compare(row, {**measured, "step_seconds_all": [9.0, 0.4, 0.6]})
    assert longer["differences"]["joules"] == pytest.approx(-0.5)
    assert differences["host"] == pytest.approx(1.0, rel=1e-6)
    ended = predict.compare(row, {"error": "out of memory", "oom": True})
    assert set(ended["differences"].values()) == {None}
    assert ended["oom"]


def test_a_summary_keeps_the_sign_of_the_worst(predict: ModuleType) -> None:
    summary = predict.summary_of({"a": 0.1, "b": -0.3, "c": -0.005, "d": None})
    assert summary == predict.Summary(
        rows=3,
        mean=pytest.approx(0.405 / 3),
        median=-0.005,
        worst=-0.3,
        worst_row="b",
        too_low=1,
    )
    assert predict.summary_of({"a": None}) is None


def test_small_shares_have_more_digits(page: ModuleType) -> None:
    shown = [page.percent(share, sign=True) for share in (0.1234, -0.0123, 0.00456, -0.000004, 0.0)]
    assert shown == ["+12.3 %", "-1.2 %", "+0.46 %", "0.00 %", "0.00 %"]


def test_rows_that_ran_out_of_memory_are_counted(page: ModuleType) -> None:
    rows = [
        comparison("a"),
        comparison("b", fits=False),
        comparison("c", oom=True, fits=False),
        comparison("d", oom=True),
    ]
    said = page.out_of_memory(rows)
    assert said.startswith("Of 2 rows that ran, 1 was predicted not to fit.")
    assert said.endswith("2 rows ran out of memory: 1 of them was predicted not to fit.")
    lines = page.ledger(rows).splitlines()[2:]
    assert lines[0].startswith("| `a` | fit | 2.00 | 1.50 | -25.0 % |")
    assert lines[2].startswith("| `c` | fit | out of memory | 1.50 | does not fit |")
    assert lines[3].startswith("| `d` | fit | out of memory | 1.50 | fits |")


def test_only_what_is_between_the_marks_is_made(page: ModuleType) -> None:
    text = "Before.\n\n<!-- terms -->\nold\n<!-- end -->\n\nAfter.\n"
    made = page.filled(text, [comparison("a")])
    assert made.startswith("Before.\n\n<!-- terms -->\n\n| ")
    assert made.endswith("|\n\n<!-- end -->\n\nAfter.\n")
    assert "old" not in made
    assert page.filled(made, [comparison("a")]) == made


def test_points_lie_where_their_values_say() -> None:
    scatter = accuracy.module("scatter")
    points = [
        scatter.Point(name="right", group="a", measured=10.0, predicted=10.0),
        scatter.Point(name="low <1>", group="b", measured=1.0, predicted=0.5, hollow=True),
    ]
    svg = scatter.scatter(points, title="t", unit="GiB", band=0.1, groups=("a", "b"))
    marks = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4" fill="(\S+)".*?<title>(.*?)</title>', svg)
    assert [(fill, name) for _, _, fill, name in marks] == [
        ("#0072b2", "right"),
        ("white", "low &lt;1&gt;"),
        ("#0072b2", "right"),
        ("white", "low &lt;1&gt;"),
    ]
    (x, y), (low_x, low_y), (_, none), (_, half) = [(float(x), float(y)) for x, y, _, _ in marks]
    assert x > low_x
    assert y < low_y
    # on the diagonal from (70, 440) to (620, 40); a factor of 2 below it
    assert (x - 70) / 550 == pytest.approx((440 - y) / 400, abs=1e-3)
    assert (440 - low_y) / 400 < (low_x - 70) / 550
    assert none == pytest.approx(570)  # the middle of the lower plot, which reaches to 55 %
    assert half == pytest.approx(570 + 0.5 / 0.55 * 70, abs=0.1)


def test_rows_held_out_have_a_line_of_their_own_beside_the_tools(page: ModuleType) -> None:
    name = "llama-2-7b.4gpu.zero2.full.s2048.b2x1.ck0"
    fit = comparison("tinyllama-1.1b.1gpu.single.full.s2048.b4x1.ck0")
    lines = page.peers([fit, {**comparison(name), "set": "held-out"}]).splitlines()
    assert lines[2].startswith("| **shardwise plan** | 2 of 2 | 25.0 % | -25.0 % | -25.0 % | 2 of 2 |")
    assert lines[3].startswith("| **shardwise plan**, rows held out | 1 of 2 | 25.0 % |")
    assert lines[4].startswith("| DeepSpeed, `estimate_zero2/3_model_states_mem_needs` | 1 of 2 |")


def test_step_times_are_separated_by_who_waits(page: ModuleType) -> None:
    """A step that the host issues for half of it is among the uncertain ones."""
    shares = {"busy": 0.49, "waits": 0.5}
    lines = page.bound([comparison(name) | {"host_share": share} for name, share in shares.items()])
    assert [line.split(" | ")[:4] for line in lines.splitlines()[2::5]] == [
        ["| less than half", "fit", "1", "25.0 %"],
        ["| half or more", "fit", "1", "25.0 %"],
    ]


def test_time_that_the_hypervisor_took_is_counted_of_the_rows_own_cores(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  60 0 30 400 10 0 0 13 0 0\ncpu0 20 0 10 100 0 0 0 3 0 0\ncpu1 30 0 10 100 10 0 0 9 0 0\n"
        "cpu2 10 0 10 200 0 0 0 1 0 0\nintr 5\n",
        encoding="utf-8",
    )
    ticks = accuracy.module("measure").processor_ticks
    assert ticks([0, 2], stat) == [4, 133 + 221]
    assert ticks([0], tmp_path / "none") == [0, 0]


def test_a_gpu_waits_for_the_share_of_a_step_without_kernels() -> None:
    """A collective that waits for a host which the profiler slows is longer than the step without it."""
    idle = accuracy.module("idle")
    row = {"row": {"gpus": 1}, "step_seconds": 0.2, "profiled_busy_seconds": 0.15}
    assert idle.share(row) == pytest.approx(0.25)
    assert idle.share({**row, "profiled_busy_seconds": 0.3}) == 0
    assert idle.share({**row, "row": {"gpus": 2}, "profiled_busy_seconds": 0.3}) is None
    assert "in 296 of 331 rows" in idle.summary()
    assert "Of 34 more" in idle.summary()
