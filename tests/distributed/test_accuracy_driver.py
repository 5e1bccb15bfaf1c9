"""The ledger's driver: tiny rows through it on CPUs, and rows that fail, hang or run out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forks import handed_over

from scripts import script

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "accuracy"


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """The driver's modules, which import each other by their plain names."""
    return {name: script(f"benchmarks/accuracy/{name}.py") for name in ("rows", "measure", "run")}


def drive(out: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        **handed_over(),
        "SHARDWISE_CACHE": str(out.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(FOLDER / "run.py"), "--smoke", "--cpu", "2", "--out", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_tiny_rows_are_measured_on_one_and_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "measured.jsonl"
    lines = drive(out, "--steady-seconds", "0.2", "--row-seconds", "150", "--timeout", "200")
    assert [line["error"] for line in lines] == [None] * 3
    assert Counter(line["strategy"]["name"] for line in lines) == {"single": 2, "zero2": 1}
    for line in lines:
        row = line["row"]
        rows = row["micro_batch"] * row["accumulation"] * row["gpus"]
        assert line["tokens_all"] == [rows * row["sequence_length"]] * line["steps"], "full rows only"
        assert line["steps"] >= line["warmup_steps"] + 3
        assert len(line["peak_reserved_bytes_by_rank"]) == row["gpus"]
        assert line["peak_reserved_bytes"] == max(line["peak_reserved_bytes_by_rank"]) > 50e6
        assert 0 < line["step_seconds"] < 30
        assert (line["joules_per_step"], line["joules_unavailable"]) == (None, "no GPU")
        assert line["loss"][-1] < 7
        assert min(line["grad_norm"]) > 0
    by_model = {line["row"]["model"]: line for line in lines}
    assert by_model["tiny-gpt2"]["trainable_parameters"] < by_model["tiny-gpt2"]["parameters"] / 4
    assert by_model["tiny-gpt2"]["row"]["config"] == {"n_layer": 4}
    before = out.read_bytes()
    drive(out)
    assert out.read_bytes() == before, "what is measured is not measured again"


class Stub:
    """Assets that no process reads."""

    def source(self, row: Any) -> str:
        return row.model

    def text(self, _: Any) -> str:
        return "text.txt"


def measure(modules: dict[str, ModuleType], code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The result of a row whose launcher is `code`."""
    monkeypatch.setattr(modules["measure"], "LAUNCH", code)
    limits = modules["measure"].Limits(
        warmup_steps=1, steady_steps=1, steady_seconds=0.0, row_seconds=60.0, timeout_seconds=2.0
    )
    row = modules["rows"].Row(model="tiny-llama", strategy_name="single", sequence_length=64)
    cores = sorted(os.sched_getaffinity(0))[:1]
    one = modules["measure"].Running(row, assets=Stub(), gpus=[""], cores=cores, limits=limits, keep=None)
    while (result := one.look()) is None:
        time.sleep(0.05)
    return result


def test_a_row_without_memory_is_an_answer(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure(
        modules, "import sys; print('error: out of GPU memory: 9 GiB'); sys.exit(3)", monkeypatch
    )
    assert result["oom"] is True
    assert "exit code 3" in result["error"]
    assert "out of GPU memory: 9 GiB" in result["error"]
    assert result["strategy"]["name"] == "single"
    assert result["steps"] == 0


def test_a_row_that_crashes_leaves_the_end_of_its_log(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measure(modules, "print('x' * 9000); raise ValueError('boom')", monkeypatch)
    assert result["oom"] is False
    assert "exit code 1" in result["error"]
    assert result["error"].endswith("ValueError: boom")
    assert len(result["error"]) < 5000


def test_a_row_that_hangs_is_ended_with_all_it_has_started(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher's workers have process groups of their own: so has this one's child."""
    code = (
        "import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    result = measure(modules, code, monkeypatch)
    assert result["error"].startswith("not done after 2 s")
    child = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or " Z " in state.read_text()


def step(number: int, *, joules: float | None, seconds: float = 1.0) -> dict[str, Any]:
    lists = ("memory_allocated_bytes", "memory_reserved_bytes", "host_memory_bytes")
    peaks = {"peak_memory_allocated_bytes": [5, 6], "peak_memory_reserved_bytes": [7 + number, 8]}
    absent = {"outside_allocator_bytes": None, "pinned_memory_bytes": None}
    why = None if joules is not None else "why"
    numbers = {"loss": 1.0, "grad_norm": 1.0, "tokens": 64, "seconds": seconds}
    return {
        **numbers,
        **{name: [1, 2] for name in lists},
        **peaks,
        **absent,
        "joules": joules,
        "joules_unavailable": why,
    }


def test_warm_up_does_not_count_and_unknown_energy_stays_unknown(modules: dict[str, ModuleType]) -> None:
    steps = [
        step(0, joules=None, seconds=9.0),
        *(step(1, joules=j, seconds=j / 100) for j in (100, 300, 200)),
    ]
    result = modules["measure"].measured(steps, 1)
    assert result["step_seconds"] == 2.0
    assert result["joules_per_step"] == 200.0
    assert result["joules_unavailable"] is None
    assert result["peak_reserved_by_step_bytes"] == [8, 8, 8, 8]
    assert (result["peak_allocated_bytes"], result["peak_allocated_bytes_by_rank"]) == (6, [5, 6])
    unknown = modules["measure"].measured([*steps, step(1, joules=None)], 1)
    assert (unknown["joules_per_step"], unknown["joules_unavailable"]) == (None, "why")


def test_the_matrix_is_as_wide_as_it_is_meant_to_be(modules: dict[str, ModuleType]) -> None:
    """At least 80 rows of six architectures, at least a fifth of them held out; the rules allow every one."""
    every = modules["rows"].load_rows(FOLDER / "rows.toml")
    rows = [row for row in every if row.set in ("fit", "held-out")]
    assert len(rows) >= 80
    held_out = sum(row.set == "held-out" for row in rows)
    assert held_out / len(rows) >= 0.2
    types = {row.shape.model_type for row in rows}
    assert types >= {"gpt2", "gpt_neo", "llama", "qwen2", "gemma3_text", "gpt_neox", "phi3"}
    assert {row.gpus for row in rows} == {1, 2, 4}
    names = {row.resolved().name for row in rows}
    assert names >= {"single", "zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"}
    assert names >= {"fsdp2", "fsdp2-noreshard", "fsdp2-offload"}
    assert {row.sequence_length for row in rows} == {512, 1024, 2048, 4096, 8192}
    assert max(row.accumulation for row in rows) == 8
    assert sum(row.memory_cap_bytes is not None for row in rows) >= 5
    assert all(row.resolved().accumulation == row.accumulation for row in every)


def test_every_place_has_its_cores(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    shares = [modules["run"].share_of_cores(place, 4) for place in range(4)]
    assert sorted(core for share in shares for core in share) == list(range(10))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert [modules["run"].share_of_cores(place, 2) for place in range(2)] == [[3], [3]]
