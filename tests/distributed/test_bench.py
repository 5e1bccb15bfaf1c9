"""`shardwise bench` as a user runs it, on two CPU processes: real engines, real profiler, real failures."""

from __future__ import annotations

import gzip
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forked_command import Command, forked_shardwise
from test_command_line import finish, shardwise, write_job

pytestmark = pytest.mark.slow

FLAGS = ("--processes", "2", "--steps", "5", "--warmup", "1", "--out", "bb")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "bb" / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_strategies_side_by_side(tmp_path: Path) -> None:
    """ZeRO-2 and FSDP2 give the same losses; what diverges or is forbidden says so, and nothing is lost."""
    write_job(tmp_path, train__steps=3, optimizer__warmup_steps=0)  # fewer steps than are measured
    flags = ("--sweep", "optimizer.learning_rate=1e-3,1e30", "--strategies", "zero2,fsdp2,single")
    code, out, err = forked_shardwise("bench", "job.yaml", *FLAGS, *flags, "--json", cwd=tmp_path)
    assert code == 0, err
    bench = json.loads(out)
    rows = {row["label"]: row for row in bench["rows"]}
    assert list(rows) == [
        f"{name} learning_rate={rate}" for rate in ("1e-3", "1e30") for name in ("zero2", "fsdp2", "single")
    ]
    for name in ("zero2", "fsdp2"):
        row = rows[f"{name} learning_rate=1e-3"]
        assert (row["status"], row["predicted"]) == ("measured", None), row["error"]
        assert row["predicted_unavailable"] == "the simulator predicts GPUs, and there is none here"
        found = row["measured"]
        assert found["steps"] == 6
        assert found["tokens_per_second_per_gpu"] > 10
        assert found["peak_reserved_bytes"] > 50e6
        assert 0 < found["exposed_communication_fraction"] < 1
        assert (found["mfu"], found["mfu_unavailable"], found["joules_unavailable"]) == (
            None,
            "no GPU",
            "no GPU",
        )
        assert found["tflops_per_gpu"] > 0
        assert found["verdict"] in ("valid", "noisy")
        trace = json.loads(gzip.decompress((tmp_path / "bb" / row["trace"]).read_bytes()))
        assert any(event["name"] == "gloo:all_reduce" for event in trace["traceEvents"])
        run = tmp_path / "bb" / row["run"]
        assert not (run / "checkpoints").exists(), "nothing is saved"
        kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
        assert kinds == ["run", *["step"] * 8, "stop"], "two more than counted, under the profiler"
        diverged = rows[f"{name} learning_rate=1e30"]
        assert diverged["status"] == "failed"
        assert "learning_rate" in diverged["error"]
    losses = [rows[f"{name} learning_rate=1e-3"]["measured"]["loss"] for name in ("zero2", "fsdp2")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert rows["single learning_rate=1e-3"]["status"] == "refused"
    assert "one process" in rows["single learning_rate=1e-3"]["error"]

    code, out, err = finish(shardwise("report", "bb", cwd=tmp_path))
    assert code == 0, err
    assert "zero2 learning_rate=1e30: failed" in out
    code, out, err = finish(shardwise("report", "bb", "--html", "bench.html", cwd=tmp_path))
    assert code == 0, err
    page = (tmp_path / "bench.html").read_text()
    assert "Waiting for communication" in page
    assert "no prediction: the simulator predicts GPUs, and there is none here (all)" in page


def test_what_is_done_is_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Ended by SIGTERM while the second row runs, then started again: only that row runs."""
    write_job(tmp_path)
    command = ("bench", "job.yaml", *FLAGS, "--strategies", "zero1,fsdp2", "--no-profile")
    bench = Command(*command, cwd=tmp_path)
    until = time.monotonic() + 120
    while not (tmp_path / "bb" / "logs" / "fsdp2.log").exists() and time.monotonic() < until:
        time.sleep(0.05)
    bench.send_signal(signal.SIGTERM)
    code, _, err = bench.finish()
    assert code == 143, err
    (first,) = rows_of(tmp_path)
    assert first["label"] == "zero1"
    code, _, err = forked_shardwise(*command, cwd=tmp_path)
    assert code == 0, err
    assert "1 of 2 are done already" in err
    assert [row["label"] for row in rows_of(tmp_path)] == ["zero1", "fsdp2"]
    assert rows_of(tmp_path)[0] == first
    assert rows_of(tmp_path)[1]["measured"]["exposed_unavailable"] == "not profiled: --no-profile"


def test_a_strategy_that_takes_too_long_is_ended_and_the_bench_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path)
    flags = ("--strategies", "zero2,fsdp2", "--timeout", "1.5")
    code, out, err = finish(shardwise("bench", "job.yaml", *FLAGS, *flags, cwd=tmp_path), 400)
    assert code == 0, err
    assert [row["status"] for row in rows_of(tmp_path)] == ["timed out", "timed out"]
    assert "zero2: timed out, after" in out
