"""A bench on the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

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
    assert "GiB mean tok/s/GPU exposed comm. J/token" in lines
    assert "zero2 12 > 10 10.5 > 7.5 1 > 1" in lines
    assert "micro x accum. ckpt median s/step TFLOP/s MFU loss grad norm" in lines
    assert any(line.startswith("mean tok/s: all counted tokens by all counted seconds") for line in lines)
    assert "zero2 2 x 4 none 0.5 123 40% 3.8 1" in lines
    assert "zero2 6 1.5 1.5 1.5 0 0 1.5 1 13 11" in lines
    assert any(line.startswith("zero0: out of memory, after 0 of 13 steps") for line in lines)
    assert any(line.startswith("not run: single, one process only") for line in lines)


def changed(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    change(rows)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_the_fastest_row_comes_first_and_is_recommended(bench_folder: Path) -> None:
    def faster(rows: list[dict[str, Any]]) -> None:
        rows[1]["measured"]["tokens_per_second_per_gpu"] = 1200.0

    text = shown(changed(bench_folder, faster))
    assert text.index(HOSTILE[:10]) < text.index("zero2 ")
    assert f"▶ {HOSTILE}: the fastest, with 1.20 times the tok/s of the next" in text


def test_among_equally_fast_rows_the_leanest_is_recommended(bench_folder: Path) -> None:
    def alike(rows: list[dict[str, Any]]) -> None:
        rows[1]["measured"] |= {"tokens_per_second_per_gpu": 1030.0, "verdict": "noisy"}
        rows[0]["measured"]["verdict"] = "noisy"

    text = shown(changed(bench_folder, alike), width=200)
    assert (
        "▶ zero2: it needs the least memory of the 2 within 5% of the fastest; its measurement is noisy"
        in text
    )


def test_a_profiled_step_unlike_the_others_is_told_of(bench_folder: Path) -> None:
    rows = [json.loads(line) for line in (bench_folder / "rows.jsonl").read_text().splitlines()]
    for row, seconds in zip(rows[:2], (0.54, 0.9), strict=True):  # the others take 0.5
        row["measured"]["profiled_step_seconds"] = seconds
    (bench_folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = "exposed communication is of the profiled step, which took 1.8 times as long as the others"
    lines = [line.strip() for line in shown(bench_folder, width=200).splitlines() if "profiled step" in line]
    assert lines == [f"{told} ({HOSTILE})"]


def test_a_gpu_that_waits_for_its_host_is_told_of(bench_folder: Path) -> None:
    rows = [json.loads(line) for line in (bench_folder / "rows.jsonl").read_text().splitlines()]
    for row, share in zip(rows[:2], (0.09, 0.3), strict=True):
        row["measured"]["gpu_idle_fraction"] = share
    (bench_folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = (
        "the GPU was idle for 30% of the profiled step: it waited for the host, which the profiler slows down"
    )
    lines = [line.strip() for line in shown(bench_folder, width=200).splitlines() if "was idle" in line]
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


def damage(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the second row."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    change(rows[1])
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("flags", [[], ["--json"], ["--html", "page.html"]])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("key"), "it lacks key\n"),
        (lambda row: [row.pop(name) for name in ("measured", "label")], "it lacks label, measured\n"),
    ],
)
def test_a_row_that_lacks_something_is_named_with_its_line(
    bench_folder: Path,
    change: Callable[[dict[str, Any]], Any],
    said: str,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(bench_folder.parent)
    damage(bench_folder, change)
    assert main(["report", str(bench_folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert f"at:  {bench_folder / 'rows.jsonl'}:2\n" in err
    assert "fix: remove the line; `shardwise bench` with this folder as --out then measures" in err


def test_a_head_that_lacks_something_is_named(bench_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = json.loads((bench_folder / "bench.json").read_text())
    del head["order"]
    (bench_folder / "bench.json").write_text(json.dumps(head))
    assert main(["report", str(bench_folder)]) == 2
    assert "it lacks the list `order`" in capsys.readouterr().err


def test_a_number_that_is_none_is_damage_and_no_bug(
    bench_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(bench_folder, lambda row: row["measured"].update(mfu="much"))
    assert main(["report", str(bench_folder)]) == 2
    assert "a file holds a value that no version writes there" in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_a_bench_without_rows_says_so(
    bench_folder: Path, there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench_folder / "rows.jsonl").write_text("")
    if not there:
        (bench_folder / "rows.jsonl").unlink()
    told = f"shardwise bench JOB --out {bench_folder}"
    assert main(["report", str(bench_folder)]) == 0
    assert f"no row has a result yet; `{told}` goes on" in capsys.readouterr().out
    assert main(["report", str(bench_folder), "--html", str(tmp_path / "page.html")]) == 0
    assert f"No row has a result yet; {told} goes on" in (tmp_path / "page.html").read_text()
