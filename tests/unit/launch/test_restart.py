"""What `--supervise` starts again, how often, and with how many processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_launcher import FakeLauncher
from shardwise.app import train as app
from shardwise.errors import JobError, MachineError
from shardwise.launch import restart
from shardwise.launch.restart import Restarts
from shardwise.launch.spec import LaunchSpec, write_report
from shardwise.launch.supervise import WORKER_MODULE, supervise
from shardwise.record.restarts import read_restarts
from shardwise.record.write import RunFolder


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(restart, "FIRST_WAIT", 0.01)
    RunFolder.create(tmp_path / "run", job_yaml="{}", plan={}, environment={}).close()
    return tmp_path / "run"


def supervised(run_dir: Path, failure: Callable[[int], tuple[int, str]]) -> tuple[int, int]:
    """The exit code, and how often ranks were started; `failure`: code and error of each start."""
    starts = 0

    def work(rank: int, _: Path, folder: Path) -> int:
        nonlocal starts
        starts += 1
        code, what = failure(starts)
        if code:
            write_report(
                folder,
                rank,
                {"exit_code": code, "headline": "", "problems": [{"what": what}], "traceback": ""},
            )
        return code

    spec = LaunchSpec(job={}, run_dir=str(run_dir), processes=1)
    launcher = FakeLauncher({WORKER_MODULE: work})
    code = supervise(spec, launcher=launcher, grace_seconds=0.0, restarts=Restarts(run_dir, lambda: spec))
    return code, starts


@pytest.mark.parametrize("code", [2, 3, 5])
def test_an_error_in_job_data_or_checkpoint_is_not_tried_again(run_dir: Path, code: int) -> None:
    assert supervised(run_dir, lambda _: (code, "wrong")) == (code, 1)


def test_the_same_error_in_the_same_step_is_tried_once(run_dir: Path) -> None:
    """Numbers in it may differ: how much memory was held, which rank it was."""
    assert supervised(run_dir, lambda start: (4, f"it held {start}.5 GiB")) == (4, 2)
    assert [line["event"] for line in read_restarts(run_dir)] == ["began", "failed"] * 2


def test_a_rank_that_ends_without_a_word_is_a_crash_whatever_its_exit_code(run_dir: Path) -> None:
    """A library's own code 2 does not say that the job is wrong."""
    codes = iter([2, 0])
    spec = LaunchSpec(job={}, run_dir=str(run_dir), processes=1)
    launcher = FakeLauncher({WORKER_MODULE: lambda *_: next(codes)})
    assert supervise(spec, launcher=launcher, restarts=Restarts(run_dir, lambda: spec)) == 0
    assert [line.get("code") for line in read_restarts(run_dir) if line["event"] == "failed"] == [1]


def test_failures_without_a_new_checkpoint_come_to_an_end_and_with_one_go_on(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = "abcdefghijklmnop"
    assert supervised(run_dir, lambda start: (4, errors[start])) == (4, restart.MOST_IN_A_ROW + 1)
    assert "6 failures in a row, and nothing new was saved between them" in capsys.readouterr().err

    def saving(start: int) -> tuple[int, str]:
        (run_dir / "checkpoints" / f"step-{start:06d}").mkdir(parents=True)
        return (0, "") if start == 9 else (1, errors[start])

    assert supervised(run_dir, saving) == (0, 9)
    assert len(read_restarts(run_dir)) == 2 * (restart.MOST_IN_A_ROW + 1) + 2 * 9


def test_a_signal_while_no_rank_runs_ends_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "FIRST_WAIT", 60.0)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert supervised(run_dir, lambda _: (4, "lost")) == (143, 1)


def test_a_lost_gpu_leaves_the_most_processes_that_the_job_allows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 GPUs 7 are left; a global batch of 8 can be shared among 4."""

    def build(processes: int) -> LaunchSpec:
        if 8 % processes:
            raise JobError(f"not divisible by {processes}")
        return LaunchSpec(job={}, run_dir="", processes=processes)

    monkeypatch.setattr(app, "gpu_count", lambda: 7)
    assert app._on_what_is_left(build, 8, 8).processes == 4
    assert "7 of 8 GPUs are left: going on with 4 processes" in capsys.readouterr().err
    assert app._on_what_is_left(build, 2, 8).processes == 2
    assert app._on_what_is_left(build, 8, 0).processes == 8, "processes of a CPU are not counted"
    monkeypatch.setattr(app, "gpu_count", lambda: 0)
    with pytest.raises(MachineError, match="no GPU is left"):
        app._on_what_is_left(build, 8, 8)
