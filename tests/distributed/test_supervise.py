"""`train --supervise`: a run whose ranks are killed comes to the same weights by itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from harness import steps_of
from test_heartbeat import train
from test_out_of_memory import STEPS, write_job

from shardwise.record.restarts import read_restarts
from shardwise.report.compare import summary

pytestmark = pytest.mark.slow


def weights(run: Path) -> str:
    file = run / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_killed_and_hung_it_comes_to_the_weights_of_the_undisturbed_run(tmp_path: Path) -> None:
    """Killed before the first checkpoint, hung, killed: three restarts by one command."""
    run = tmp_path / "runs" / "run"
    write_job(tmp_path, "zero2", eval_every=0)
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=[])
    assert code == 0, err
    undisturbed, losses = weights(run), [event["loss"] for event in steps_of(run)]
    run.rename(tmp_path / "undisturbed")

    faults = [
        {"rank": 1, "step": 1, "do": "kill"},
        {"rank": 1, "step": 5, "do": "sleep"},
        {"rank": 0, "step": 7, "do": "kill_once_saved", "with": {"step": 6}},
    ]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", "--supervise", faults=faults, seconds=3.0)
    assert code == 0, err
    assert err.count("supervise: starting again in 1 s, from the start") == 1
    assert err.count("supervise: starting again in 1 s, from the state after step 4") == 1
    assert err.count("supervise: starting again in 1 s, from the state after step 6") == 1
    assert weights(run) == undisturbed
    assert [event["loss"] for event in steps_of(run)] == losses

    lines = read_restarts(run)
    assert [line["event"] for line in lines] == ["began", "failed"] * 3 + ["began", "ended"]
    assert [line["step"] for line in lines if line["event"] == "failed"] == [1, 5, 7]
    found = summary(run)["supervised"]
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    productive = sum(event["seconds"] for event in events if event["kind"] in ("step", "eval"))
    assert found["ettr"] == pytest.approx(productive / (lines[-1]["at"] - lines[0]["at"]))
    assert lines[-1]["ettr"] == found["ettr"]
    assert f"3 failures, ETTR {found['ettr']:.1%} of " in err


def test_the_same_error_twice_in_the_same_step_ends_it(tmp_path: Path) -> None:
    write_job(tmp_path, "zero2", eval_every=0)
    faults = [{"rank": 0, "step": 5, "do": "fail", "times": 9}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", "--supervise", faults=faults)
    assert code == 1, err
    assert err.count("error: RuntimeError: a bug that comes back") == 2, err
    assert "supervise: not started again: the same error came twice in step 5; 2 failures, ETTR " in err
    last = json.loads((tmp_path / "runs/run/supervise.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["code"], last["why"]) == ("failed", 1, "the same error came twice in step 5")


@pytest.mark.parametrize(
    "strategy", ["fsdp2", {"engine": "pipeline", "pipeline": 2}], ids=["fsdp2", "pipeline"]
)
def test_a_value_that_is_not_finite_ends_it_and_is_named(tmp_path: Path, strategy: Any) -> None:
    """Another try would end in the same step. The first rank of the pipeline sees a gradient of it."""
    write_job(tmp_path, strategy, eval_every=0)
    module = "model.model.layers.1.mlp"
    faults = [{"rank": 1, "step": 3, "do": "poison", "with": {"module": module}}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", "--supervise", faults=faults)
    assert code == 2, err
    assert err.count(", the gradient norm nan; this step was not applied") == 1
    assert f"what {module.removeprefix('model.')} returns is not finite" in err
    assert "    at:  step 3, rank 1\n" in err
    assert "in micro-batch 1 of " in err
    assert "row 1, from the sample that begins '### User:" in err
    assert "rank 0\n" not in err, "what follows from it is left out"
