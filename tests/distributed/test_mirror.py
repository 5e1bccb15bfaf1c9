"""A run whose machine is lost goes on from its mirror by the same command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness import steps_of
from test_heartbeat import train
from test_out_of_memory import write_job

pytestmark = pytest.mark.slow


def test_the_same_command_goes_on_where_the_run_folder_is_gone(tmp_path: Path) -> None:
    write_job(tmp_path, "zero2", eval_every=0, save_every=2)
    run, mirror = tmp_path / "runs" / "run", tmp_path / "far"
    common = ["job.yaml", "--processes", "2", "--resume-or-start", "--set"]
    command = [*common, f"train.keep={{last: 2, mirror: 'file://{mirror}'}}"]
    code, err = train(tmp_path, *command, faults=[])
    assert code == 0, err
    losses = [event["loss"] for event in steps_of(run)]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["mirror"] == {"step": len(losses), "failed": None}
    assert [event["mirror"] is not None for event in events if event["kind"] == "save"] == [True] * 5
    for folder in (run, mirror):
        shutil.rmtree(folder)

    assert train(tmp_path, *command, "--max-steps", "4", faults=[])[0] == 0
    shutil.rmtree(run)
    code, err = train(tmp_path, *command, faults=[])
    assert code == 0, err
    assert f"step 4 was taken from file://{mirror}/run" in err
    assert "going on after step 4 of 8" in err
    assert [event["loss"] for event in steps_of(run)] == losses

    shutil.rmtree(run)
    code, err = train(tmp_path, *[word for word in command if word != "--resume-or-start"], faults=[])
    assert code == 2, err
    assert "the mirror has a run of this name already" in err
