"""A bench on the terminal and as JSON."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from conftest import GIB, HOSTILE
from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.record.bench import read_bench
from shardwise.report.bench import show_bench


def shown(folder: Path, width: int = 120) -> str:
    console = Console(file=StringIO(), width=width)
    show_bench(read_bench(folder), console=console)
    output: StringIO = console.file  # type: ignore[assignment]
    return output.getvalue()


def test_predicted_beside_measured(bench_folder: Path) -> None:
    lines = [" ".join(line.split()) for line in shown(bench_folder).splitlines()]
    assert "zero2 13 > 11 1.1k > 1k 20% > 25% 0.5 > 0.4 valid" in lines
    assert "zero2 12 > 10 10.5 > 7.5 1 > 1" in lines
    assert "zero2 2 x 4 none 0.5 123 40% 3.8 1" in lines
    assert "zero2 6 1.5 1.5 1.5 0 0 1.5 1 13 11" in lines
    assert any(line.startswith("zero0: out of memory, after 0 of 13 steps") for line in lines)
    assert any(line.startswith("not run: single, one process only") for line in lines)


def test_a_profiled_step_unlike_the_others_is_told_of(bench_folder: Path) -> None:
    rows = [json.loads(line) for line in (bench_folder / "rows.jsonl").read_text().splitlines()]
    for row, seconds in zip(rows[:2], (0.54, 0.9), strict=True):  # the others take 0.5
        row["measured"]["profiled_step_seconds"] = seconds
    (bench_folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = "exposed communication is that of the profiled step, 1.8 times as long as the others"
    lines = [line.strip() for line in shown(bench_folder, width=200).splitlines() if "profiled step" in line]
    assert lines == [f"{told} ({HOSTILE})"]


def test_a_gpu_that_waits_for_its_host_is_told_of(bench_folder: Path) -> None:
    rows = [json.loads(line) for line in (bench_folder / "rows.jsonl").read_text().splitlines()]
    for row, share in zip(rows[:2], (0.09, 0.3), strict=True):
        row["measured"]["gpu_idle_fraction"] = share
    (bench_folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = (
        "the GPU ran nothing for 30% of the profiled step: it waited for the host, which the profiler slows"
    )
    lines = [line.strip() for line in shown(bench_folder, width=200).splitlines() if "ran nothing" in line]
    assert lines == [f"{told} ({HOSTILE})"]


def test_80_columns_are_enough(bench_folder: Path) -> None:
    text = shown(bench_folder, width=80)
    tables = [line for line in text.splitlines() if line.startswith(("zero2", "   "))]
    assert all("…" not in line for line in tables)
    assert HOSTILE[:10] in text, "a name is never taken for markup"


def test_json_is_the_whole_bench(bench_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(bench_folder), "--json"]) == 0
    bench = json.loads(capsys.readouterr().out)
    assert bench["schema"] == 1
    assert [row["status"] for row in bench["rows"]] == ["measured", "measured", "out of memory"]
    assert bench["rows"][0]["measured"]["peak_reserved_bytes"] == 10 * GIB


def test_a_bench_is_reported_by_itself(bench_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(bench_folder), str(bench_folder)]) == 2
    assert "a bench is reported by itself" in capsys.readouterr().err


def test_a_bench_of_another_schema_is_refused(bench_folder: Path) -> None:
    head = json.loads((bench_folder / "bench.json").read_text())
    (bench_folder / "bench.json").write_text(json.dumps({**head, "schema": 2}))
    with pytest.raises(JobError, match="not of schema 1"):
        read_bench(bench_folder)
    (bench_folder / "bench.json").write_text("{")
    with pytest.raises(JobError, match="cannot be read"):
        read_bench(bench_folder)
