"""What is read from Slurm's variables: nodes, a common secret, and the time limit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from types import FrameType

import pytest

from shardwise.emit import batch
from shardwise.errors import JobError, MachineError, ShardwiseError
from shardwise.launch import slurm
from shardwise.launch.nodes import SECRET, Nodes

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_CLUSTER_NAME": "one",
}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Slurm, whatever runs the tests."""
    for name in [name for name in os.environ if name.startswith("SLURM") or name == SECRET]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")  # as some users have it
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def within(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**STEP, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def scontrol(folder: Path, answers: str) -> None:
    """A program of that name that answers so."""
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n[ $SLURM_TIME_FORMAT = standard ] && echo '{answers}'\n")
    path.chmod(0o755)


def test_outside_of_slurm_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.nodes_of_step() is None
    within(monkeypatch, SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1", SLURM_NODEID="0")
    assert slurm.nodes_of_step() is None, "one node needs no others"
    within(monkeypatch, SLURM_STEP_ID=None, SLURM_JOB_NUM_NODES="1")
    assert slurm.nodes_of_step() is None


def test_a_task_finds_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    within(monkeypatch)
    assert slurm.nodes_of_step() == Nodes(count=2, rank=1, rendezvous="gpu07:27110")
    scontrol(tmp_path, "NodeName=gpu07 Arch=x86_64 NodeAddr=10.1.0.7 NodeHostName=gpu07")
    assert slurm.nodes_of_step() == Nodes(count=2, rank=1, rendezvous="10.1.0.7:27110")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a,b", "a"), ("n[1-2,9],m3", "n1"), ("r[01-02]c[3-4]", "r01c3"), ("gpu-a100-007", "gpu-a100-007")],
)
def test_the_first_of_a_list(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, SLURM_STEP_NODELIST=nodes)
    found = slurm.nodes_of_step()
    assert found is not None
    assert found.rendezvous.partition(":")[0] == first


def test_jobs_on_one_node_have_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job, step in (("1", "0"), ("1", "1"), ("2", "0")):
        within(monkeypatch, SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        found = slurm.nodes_of_step()
        assert found is not None
        ports.add(found.address()[1])
    assert len(ports) == 3
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "0"}, JobError, "srun started 16 tasks on 2 nodes"),
        ({"SLURM_STEP_ID": None, "SLURM_JOB_NUM_NODES": "2"}, JobError, "Slurm allocated 2 nodes"),
        ({"SLURM_NODEID": "2"}, MachineError, "this is node 2 of 2"),
        ({"SLURM_NODEID": None}, MachineError, "SLURM_NODEID is unset"),
        ({"SLURM_STEP_NUM_NODES": "two"}, MachineError, "SLURM_STEP_NUM_NODES is 'two', not a number"),
        ({"SLURM_STEP_NODELIST": None}, MachineError, "SLURM_STEP_NODELIST is unset"),
    ],
)
def test_variables_that_do_not_fit_are_refused(
    changes: dict[str, str | None],
    kind: type[ShardwiseError],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within(monkeypatch, **changes)
    with pytest.raises(kind, match=re.escape(what)) as caught:
        slurm.nodes_of_step()
    assert caught.value.problems[0].fix


def test_of_many_tasks_one_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("shardwise.launch.slurm.time.sleep", waited.append)
    within(monkeypatch, SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="5")
    with pytest.raises(SystemExit) as ended:
        slurm.nodes_of_step()
    assert (ended.value.code, waited) == (2, [10.0]), "srun ends the others when one has ended"


def secret(monkeypatch: pytest.MonkeyPatch, **changes: str) -> str:
    within(monkeypatch, **changes)
    monkeypatch.delenv(SECRET, raising=False)
    slurm.share_secret()
    return os.environ.pop(SECRET)


def test_the_tasks_of_a_step_share_a_secret_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = secret(monkeypatch)
    key = tmp_path / "home" / ".config" / "shardwise" / "slurm.key"
    assert (key.stat().st_mode & 0o777, [path.name for path in key.parent.iterdir()]) == (0o600, [key.name])
    assert secret(monkeypatch, SLURM_NODEID="0", SLURM_PROCID="0") == ours, "another node"
    others = [secret(monkeypatch, SLURM_STEP_ID="1"), secret(monkeypatch, SLURM_JOB_ID="1")]
    key.write_text("another user's")
    others.append(secret(monkeypatch))
    assert len({ours, *others}) == 4
    monkeypatch.setenv(SECRET, "mine")
    slurm.share_secret()
    assert os.environ[SECRET] == "mine"


def test_a_key_that_others_read_or_that_cannot_be_kept_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret(monkeypatch)
    (tmp_path / "home" / ".config" / "shardwise" / "slurm.key").chmod(0o644)
    with pytest.raises(MachineError, match="others may read the key"):
        secret(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="the nodes' secret cannot be kept: Not a directory"):
        secret(monkeypatch)


def ends_in(seconds: float) -> str:
    return time.strftime("EndTime=%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_the_time_left_is_slurm_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    within(monkeypatch)
    assert slurm.seconds_left() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    assert slurm.seconds_left() == pytest.approx(500, abs=2)
    scontrol(tmp_path, f"JobId=4711 {ends_in(900)} Deadline=N/A")
    assert slurm.seconds_left() == pytest.approx(900, abs=2), "it may have been moved"
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    scontrol(tmp_path, "JobId=4711 EndTime=Unknown")
    assert slurm.seconds_left() is None


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When SIGUSR1 came."""
    times: list[float] = []

    def note(_number: int, _frame: FrameType | None) -> None:
        times.append(time.time())

    before = signal.signal(signal.SIGUSR1, note)
    yield times
    signal.signal(signal.SIGUSR1, before)


def test_the_run_is_asked_to_stop_before_the_limit(
    received: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    within(monkeypatch)
    monkeypatch.setattr(slurm, "SHORTEST_SECONDS", 1.0)
    scontrol(tmp_path, ends_in(4))
    begun = time.time()
    with slurm.stopped_in_time():
        scontrol(tmp_path, ends_in(6))  # somebody gave it more time
        while not received and time.time() < begun + 10:
            time.sleep(0.05)
    assert received[0] - begun == pytest.approx(6 - 1, abs=1.2), (
        "a quarter of the first limit is kept to save"
    )
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_nothing_is_sent_to_a_run_that_ends_before(
    received: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with slurm.stopped_in_time():
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no Slurm, no limit"
    within(monkeypatch)
    scontrol(tmp_path, ends_in(3600))
    with slurm.stopped_in_time():
        assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(3600 - slurm.STOP_SECONDS, abs=3)
    assert (signal.getitimer(signal.ITIMER_REAL), received) == ((0.0, 0.0), [])


def test_a_limit_that_is_too_near_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    within(monkeypatch)
    scontrol(tmp_path, ends_in(45))
    with pytest.raises(JobError, match=r"Slurm ends this job in 4\d s"), slurm.stopped_in_time():
        raise AssertionError("it began")


def test_the_emitted_script_asks_slurm_for_the_same_time() -> None:
    assert batch.STOP_SECONDS == slurm.STOP_SECONDS
