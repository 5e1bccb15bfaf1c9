"""`shardwise bench` on a machine with GPUs, as far as it goes without them: planned for real, not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.hardware.parse import parse_hardware
from shardwise.trials.rows import Row
from shardwise.trials.run import Settings

JOB = """
name: small
model: {source: llama-3.2-1b, weights: random, config: {num_hidden_layers: 2}}
data: {train: text.txt, format: text, sequence_length: 512, eval_fraction: 0}
train: {steps: 100, global_batch: 16, micro_batch: 2, checkpointing: none}
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Row], Settings]]:
    """What is to be run on two GPUs of 24 GB; every row then runs out of memory."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    Path("job.yaml").write_text(JOB)
    calls: list[tuple[Sequence[Row], Settings]] = []

    def run_rows(rows: Sequence[Row], settings: Settings) -> Iterator[dict[str, Any]]:
        calls.append((rows, settings))
        for row in rows:
            about = {
                "key": row.key,
                "label": row.label,
                "strategy": row.strategy.to_json(),
                **row.predicted(),
            }
            about |= {"date": "2026-01-02T03:04:05+00:00", "measured": None, "trace": None}
            yield {**about, "status": "out of memory", "error": "after 0 of 13 steps", "seconds": 1.0}

    monkeypatch.setattr("shardwise.app.bench.run_rows", run_rows)
    monkeypatch.setattr("shardwise.app.bench.gpu_count", lambda: 2)
    monkeypatch.setattr("shardwise.app.bench.detect_hardware", lambda: parse_hardware("2x24GB"))
    return calls


def test_what_fits_is_run_with_its_prediction_under_the_cap(
    asked: list[tuple[Sequence[Row], Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "job.yaml", "--memory-cap", "10GiB", "--steps", "7", "--json"]) == 0
    bench = json.loads(capsys.readouterr().out)
    ((rows, settings),) = asked
    assert (settings.memory_cap_bytes, settings.steps, settings.processes) == (10 * 2**30, 7, 2)
    assert settings.folder == Path("bench/small")
    assert [row["label"] for row in bench["rows"]] == [row.label for row in rows]
    assert len(rows) >= 4
    for row in bench["rows"]:
        memory = row["predicted"]["memory"]
        assert memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"] <= 10 * 2**30
        assert row["fit"] in ("fits", "tight")
    left_out = {one["strategy"]: one["reason"] for one in bench["left_out"]}
    assert "more than it has" in left_out["zero0"]
    assert bench["hardware"]["world_size"] == 2
    assert len(bench["environment"]["gpus"]) == 2
    first = next(row for row in bench["rows"] if row["why"] and "the fastest" in row["why"][0])
    assert first["fit"] == "fits"

    assert main(["report", "bench/small", "--html", "page.html"]) == 0
    fastest = max(bench["rows"], key=lambda row: row["predicted"]["time"]["tokens_per_second_per_gpu"])
    assert (fastest["label"], fastest["fit"]) == ("ddp-zero1", "tight"), "not the plan's choice"
    assert f"<b>{fastest['label']}</b> was predicted to be the fastest" in Path("page.html").read_text()


def test_asked_by_name_it_is_run_even_where_it_does_not_fit(
    asked: list[tuple[Sequence[Row], Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--strategies", "zero0", "--memory-cap", "4GiB", "--out", "bb"]
    assert main(["bench", "job.yaml", *flags]) == 0
    assert [row.label for row in asked[0][0]] == ["zero0"]
    out = capsys.readouterr().out
    assert "zero0: out of memory, after 0 of 13 steps" in out
    assert main(["bench", "job.yaml", *flags]) == 0
    assert len(asked) == 1, "running out of memory is a result, and is kept"
    assert main(["bench", "job.yaml", *flags, "--steps", "3"]) == 2
    assert "steps is 3, in the bench it is 10" in capsys.readouterr().err


def test_where_nothing_fits_the_nearest_change_is_said(
    asked: list[tuple[Sequence[Row], Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "job.yaml", "--memory-cap", "3GiB", "--set", "strategy=zero2"]) == 3
    assert "nothing fits" in capsys.readouterr().err
    assert asked == []
    assert not Path("bench").exists()


@pytest.mark.parametrize(("gpus", "each"), [(2, "GPU"), (0, "process")])
def test_the_rate_of_a_row_is_that_of_a_gpu_only_where_there_is_one(
    asked: list[tuple[Sequence[Row], Settings]],
    gpus: int,
    each: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"tokens_per_second_per_gpu": 2220.0, "peak_reserved_bytes": 2**30, "verdict": "valid"}

    def run_rows(rows: Sequence[Row], _: Settings) -> Iterator[dict[str, Any]]:
        yield {"key": rows[0].key, "label": "zero2", "measured": found, "status": "measured", "seconds": 1.0}

    monkeypatch.setattr("shardwise.app.bench.run_rows", run_rows)
    monkeypatch.setattr("shardwise.app.bench.gpu_count", lambda: gpus)
    main(["bench", "job.yaml", "--strategies", "zero2", "--processes", "2"])
    assert f"zero2: 2.22k tok/s/{each}, 1.0 GiB, valid; took 1 s\n" in capsys.readouterr().err


def test_strategies_on_one_process_are_said_to_shard_nothing(
    asked: list[tuple[Sequence[Row], Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench", "job.yaml", "--strategies", "zero2,fsdp2", "--processes", "1"])
    assert "one process shards nothing" in capsys.readouterr().err
    main(["bench", "job.yaml", "--strategies", "zero2,fsdp2", "--processes", "2"])
    assert "one process shards nothing" not in capsys.readouterr().err
