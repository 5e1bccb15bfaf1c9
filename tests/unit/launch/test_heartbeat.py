"""Who is named when a run hangs, and how long a rank may be silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import JobError
from shardwise.launch import heartbeat
from shardwise.launch.heartbeat import Pulse, Seen, innermost, least_seconds, suspects
from shardwise.launch.spec import Worker

GATHER = ("/x/torch/distributed/distributed_c10d.py:9", "all_gather")
BACKWARD = ("/x/torch/autograd/graph.py:9", "_engine_run_backward")
OWN = ("/home/a/job.py:3", "wait_for_disk")


def seen(
    rank: int,
    frame: tuple[str, str] | None = GATHER,
    *,
    step: int = 7,
    marks: int = 9,
    halted: bool = False,
    busy: bool = False,
) -> Seen:
    return Seen(rank, step, "training", marks, halted=halted, busy=busy, frame=frame)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([seen(0), seen(1, None, halted=True)], [1]),
        ([seen(0), seen(1, OWN)], [1]),
        ([seen(0, BACKWARD), seen(1, OWN, busy=True)], [1]),  # DDP waits in its backward pass
        ([seen(0, BACKWARD), seen(1, BACKWARD, busy=True)], [1]),
        ([seen(0, ("numpy.py:1", "f")), seen(1, OWN, busy=True)], [1]),  # both look active; one computes
        ([seen(0, marks=10), seen(1, marks=9)], [1]),  # both wait; one is behind
        ([seen(0, step=8), seen(1, step=7, marks=99)], [1]),
        ([seen(0), seen(1)], [0, 1]),
        ([seen(0, OWN)], [0]),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(ranks: list[Seen], named: list[int]) -> None:
    assert [one.rank for one in suspects(ranks)] == named


def test_the_main_threads_innermost_frame_is_read_from_the_stacks() -> None:
    program = "import faulthandler, sys, threading, time\n"
    program += "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    program += "def deep(): faulthandler.dump_traceback(sys.stdout)\ndeep()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert innermost(done.stdout) == ("<string>:3", "deep")
    assert innermost("") is None


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(heartbeat.SECONDS, text)
    with pytest.raises(JobError, match=f"{heartbeat.SECONDS}={text}"):
        least_seconds()


RANK = """
import sys, time
from pathlib import Path
from shardwise.launch import heartbeat
heartbeat.begin(Path(sys.argv[1]), 0)
for step in range(1, int(sys.argv[3])):
    heartbeat.mark(sys.argv[2], step)
    time.sleep(0.1)
time.sleep(60)
"""


def watched(folder: Path, phase: str, *, steps: int, least: float, seconds: float, step: int = 1) -> Worker:
    """A process that makes marks, then none, as a launcher sees it for so many seconds."""
    process = subprocess.Popen([sys.executable, "-c", RANK, str(folder), phase, str(steps)])
    try:
        worker = Worker(0, process, folder)
        until = time.monotonic() + 20
        while not (folder / "rank-0.beat").exists() and time.monotonic() < until:
            time.sleep(0.01)
        pulse, until = Pulse([worker], least=least), time.monotonic() + seconds
        while time.monotonic() < until and not pulse.hung:
            pulse.look()
            time.sleep(0.01)
        assert pulse.last_step() == steps - 1
        return worker
    finally:
        process.kill()
        process.wait()


def test_silence_is_a_hang_in_training_and_not_while_kernels_are_compiled(tmp_path: Path) -> None:
    for name, phase, hangs in (("a", "training", True), ("b", "the first steps", False)):
        (tmp_path / name).mkdir()
        worker = watched(tmp_path / name, phase, steps=3, least=0.5, seconds=4.0)
        assert (worker.report is not None) == hangs
        if worker.report is not None:
            assert worker.report["exit_code"] == 4
            assert worker.report["headline"].startswith("rank 0 hangs in step 2, training: no progress for ")
            assert "rank 0 waits in <module> (<string>:" in worker.report["problems"][0]["what"]
            assert "in <module>" in worker.log.read_text()


def test_a_launcher_that_did_not_run_itself_accuses_nobody(tmp_path: Path) -> None:
    """A suspended machine or container: all clocks went on, no process did."""
    worker = Worker(0, subprocess.Popen(["sleep", "60"]), tmp_path)
    try:
        os.kill(worker.process.pid, signal.SIGSTOP)
        pulse = Pulse([worker], least=60.0)
        time.sleep(0.6)
        pulse.look()
        pulse._looked -= 100.0
        pulse.look()
        assert not pulse.hung
    finally:
        worker.process.kill()  # type: ignore[attr-defined]
        worker.process.wait()


def test_a_rank_that_is_stopped_for_moments_and_makes_progress_is_not_accused(tmp_path: Path) -> None:
    """As under cpulimit. Each look may come while it is stopped."""
    worker = Worker(0, subprocess.Popen(["sleep", "60"]), tmp_path)
    beat = tmp_path / "rank-0.beat"
    try:
        os.kill(worker.process.pid, signal.SIGSTOP)
        pulse = Pulse([worker], least=0.6)
        for marks in range(1, 8):
            beat.write_bytes(heartbeat._LAYOUT.pack(marks, marks, heartbeat._PHASES.index("training")))
            time.sleep(0.1)
            pulse.look()
        assert not pulse.hung
        time.sleep(0.3)
        pulse.look()
        assert pulse.hung, "without progress it is"
    finally:
        worker.process.kill()  # type: ignore[attr-defined]
        worker.process.wait()


def test_a_rank_that_uses_the_processor_between_stops_is_not_accused(tmp_path: Path) -> None:
    """Without a mark for longer than a stopped rank may take: its step is long."""
    worker = Worker(0, subprocess.Popen([sys.executable, "-c", "while True: pass"]), tmp_path)
    pulse = Pulse([worker], least=3.0)
    try:
        for _ in range(15):
            os.kill(worker.process.pid, signal.SIGCONT)
            time.sleep(0.1)
            os.kill(worker.process.pid, signal.SIGSTOP)
            time.sleep(0.05)
            pulse._looked -= 0.3
            pulse.look()
        assert not pulse.hung
        for _ in range(2):
            time.sleep(1.2)
            pulse.look()
        assert pulse.hung, "now it does nothing for longer than a third of the limit"
    finally:
        worker.process.kill()  # type: ignore[attr-defined]
        worker.process.wait()


def test_a_first_step_that_compiles_is_not_the_usual_one(tmp_path: Path) -> None:
    worker = Worker(0, subprocess.Popen(["sleep", "60"]), tmp_path)
    pulse = Pulse([worker], least=0.5)
    try:
        for step, phase, seconds in (
            (1, "the first steps", 1.5),
            (2, "the first steps", 0.1),
            (3, "training", 3.0),
        ):
            number = heartbeat._PHASES.index(phase)
            (tmp_path / "rank-0.beat").write_bytes(heartbeat._LAYOUT.pack(step, step, number))
            until = time.monotonic() + seconds
            while time.monotonic() < until and not pulse.hung:
                pulse.look()
                time.sleep(0.01)
        assert pulse.hung, "ten times the mean of the two would be 8 s"
    finally:
        worker.process.kill()  # type: ignore[attr-defined]
        worker.process.wait()
