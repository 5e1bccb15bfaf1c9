"""A rank that hangs is named, with what it does; one that is only slow is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_command import forked_shardwise
from harness import steps_of
from test_out_of_memory import write_job
from torch.distributed.flight_recorder.components.loader import read_dump

pytestmark = pytest.mark.slow


def train(
    folder: Path, *arguments: str, faults: list[dict[str, Any]], seconds: float = 60.0, **variables: str
) -> tuple[int, str]:
    code, _, err = forked_shardwise(
        "train",
        *arguments,
        cwd=folder,
        worker="fault_worker",
        SHARDWISE_CACHE=str(folder.parent / "cache"),
        SHARDWISE_HANG_SECONDS=str(seconds),
        FAULTS=json.dumps(faults),
        FAULTS_IN=str(folder),
        **variables,
    )
    return code, err


@pytest.mark.parametrize(
    ("fault", "does"),
    [
        ("stop", "is stopped (SIGSTOP)"),
        ("spin", "computes in spin (fault_worker.py:"),
        ("sleep", "waits in sleep (fault_worker.py:"),
        ("deadlock", "waits in barrier (distributed_c10d.py:"),
    ],
)
def test_a_rank_that_hangs_is_named(tmp_path: Path, fault: str, does: str) -> None:
    write_job(tmp_path, "fsdp2", eval_every=0)
    faults = [{"rank": 1, "step": 5, "do": fault}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=faults, seconds=3.0)
    assert code == 4, err
    assert err.count("error: ") == 1
    logs = tmp_path / "runs" / "run" / "logs"
    assert f"  - rank 1 {does}" in err
    assert "  - rank 0 waits in " in err
    if fault != "deadlock":  # where both wait, both are named: nobody can tell who is wrong
        assert "error: rank 1 hangs in step 5, training: no progress for " in err
        assert "  - rank 0 waits in " in err
        assert " in _issue" in (logs / "rank-0.log").read_text()
    else:
        assert "error: ranks 0, 1 hang in step 5" in err
    assert (" in in_step" in (logs / "rank-1.log").read_text()) == (fault != "stop")
    recorded = {path.name for path in logs.glob("flight-*")}
    assert recorded == {f"flight-gloo-rank-{rank}" for rank in ((0,) if fault == "stop" else (0, 1))}
    assert re.search(r"- rank 0 waits in \w+ \(.*\); gloo:\w+, number \d+ of \w+, is not finished\n", err), (
        err
    )


def test_after_a_time_out_of_nccl_the_last_collectives_are_shown(tmp_path: Path) -> None:
    """The files are those that torch's own recorder makes, for gloo: there is no NCCL here."""
    write_job(tmp_path, "fsdp2", eval_every=0)
    faults = [{"rank": 0, "step": 5, "do": "time_out"}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=faults)
    assert code == 4, err
    assert err.count("error: ") == 1
    assert re.search(r"\n  - rank 0: gloo:\w+, number \d+ of \w+, is (not )?finished\n", err), err
    logs = tmp_path / "runs" / "run" / "logs"
    read: Any = read_dump("flight-nccl-rank-", str(logs / "flight-nccl-rank-0"))  # of torch's own tool
    assert read["rank"] == 0
    assert all(entry["profiling_name"].startswith("gloo:") for entry in read["entries"])


def test_slow_evaluations_and_saves_are_no_hang(tmp_path: Path) -> None:
    write_job(tmp_path, "fsdp2", steps=6, save_every=3, eval_every=6)
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=[], seconds=1.5, FAULTS_SLOW="2.0")
    assert code == 0, err
    assert len(steps_of(tmp_path / "runs" / "run")) == 6


def test_one_sigterm_saves_the_state_although_a_rank_is_stopped(tmp_path: Path) -> None:
    write_job(tmp_path, "zero2")
    faults = [{"rank": 1, "step": 5, "do": "stop_and_ask"}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=faults)
    assert code == 75, err
    assert "stopped: on request after step 5 of 8; the state is saved" in err
