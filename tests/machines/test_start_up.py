"""Wrong set-ups of two machines: found before a worker starts, said once, with an exit code of their kind."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet import PORT, SAMPLES, SOURCE, Fleet, shardwise, write_job

from shardwise.record.write import RunFolder
from shardwise.strategy import Strategy

pytestmark = pytest.mark.machines

MACHINES = Path(__file__).parents[1] / "shared" / "machines"
SOON = "import shardwise.launch.control as control\ncontrol.JOIN_SECONDS = 4.0\n"
OTHER = "import shardwise.launch.startup as startup\n"
OTHER_TORCH = OTHER + "known = startup.versions()\nstartup.versions = lambda: {**known, 'torch': '2.12.0'}"
NO_DEEPSPEED = (
    OTHER + "known = startup.versions()\nknown.pop('deepspeed', None)\nstartup.versions = lambda: known"
)
FROM_SOURCE = (
    OTHER + "known = startup.versions()\nknown.pop('shardwise', None)\nstartup.versions = lambda: known"
)
LATE = "import time, types, shardwise.launch.control as control\n"
LATE += "control.time = types.SimpleNamespace(**{**vars(time), 'time': lambda: time.time() - 90})"


@dataclass(frozen=True)
class Wrong:
    """What is different on node 1 (on node 0), the exit code, and what node 0 then says."""

    code: int
    says: str
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    prelude: str = ""
    first: dict[str, Any] = field(default_factory=dict)  # The same for node 0
    alone: str = ""  # What node 1 says, where it cannot tell node 0, which then waits
    change: str = ""  # A function below that changes the folders


B = r"node 1 \(desk-b\)"
A = r"node 0 \(desk-a\)"
WRONG = {
    "another version of torch": Wrong(4, f"{B} has torch 2.12.0, {A} 2.", prelude=OTHER_TORCH),
    "no deepspeed": Wrong(4, f"{B} has deepspeed not at all, {A} 0.", prelude=NO_DEEPSPEED),
    "other code": Wrong(4, f"{B} has other code of the same version of shardwise than {A}", change="code"),
    "other code that is not installed": Wrong(
        4,
        f"{B} has other code of the same version of shardwise than {A}",
        prelude=FROM_SOURCE,
        first={"prelude": FROM_SOURCE},
        change="code",
    ),
    "another job": Wrong(2, f"train.seed is 7 on {B}, 42 on {A}", ["--set", "train.seed=7"]),
    "another command": Wrong(2, f"--max-steps is 3 on {B}, None on {A}", ["--max-steps", "3"]),
    "other data": Wrong(2, f"data.jsonl is another file on {B} than on {A}", change="data"),
    "no data": Wrong(2, f"{B}: `data.train`: data.jsonl does not exist", change="no_data"),
    "no job file": Wrong(2, f"{B}: .*job.yaml", change="no_job"),
    "other processes": Wrong(2, f"{B} runs 2 processes, {A} 1 process", ["--processes", "2"]),
    "another GPU": Wrong(
        4,
        f"{B} has NVIDIA GeForce RTX 4090, {A} NVIDIA GeForce RTX 3090",
        variables={"SHARDWISE_DEVICE": str(MACHINES / "rtx4090x4.json")},
        first={"variables": {"SHARDWISE_DEVICE": str(MACHINES / "rtx3090x4.json")}},
    ),
    "a clock that is late": Wrong(4, f"the clock of {B} is 90 s behind that of {A}", prelude=LATE),
    "a full disk": Wrong(4, f"{B} has .* free for the run folder", change="disk"),
    "an interface that does not exist": Wrong(
        4,
        f"{B} has no network interface eth9, or it has no address",
        variables={"GLOO_SOCKET_IFNAME": "eth9"},
    ),
    "an interface that others do not reach": Wrong(
        4, f"{A} cannot reach {B} at 127.0.0.1", variables={"GLOO_SOCKET_IFNAME": "lo"}
    ),
    "a firewall": Wrong(4, f"{A} cannot reach {B} at 10.77.0.2 .eth0.: timed out", change="firewall"),
    "another number of nodes": Wrong(
        2, r"desk-b was started with --nodes 3, node 0 with --nodes 2", ["--nodes", "3"]
    ),
    "a rank twice": Wrong(
        2,
        "desk-c and desk-b were both started as node 1|desk-b and desk-c were both started as node 1",
        ["--nodes", "3"],
        first={"arguments": ["--nodes", "3"]},
        change="third_as_second",
    ),
    "another secret": Wrong(
        4,
        "node 1 did not come to 10.77.0.1:29500 in 4 s; a connection from 10.77.0.2 was refused",
        variables={"SHARDWISE_SECRET": "guess"},
        first={"variables": {"SHARDWISE_SECRET": "right"}, "prelude": SOON},
        alone="10.77.0.1:29500 is not node 0 of this run: the other end has another secret",
    ),
    "no secret": Wrong(
        4,
        "node 1 did not come",
        first={"variables": {"SHARDWISE_SECRET": "right"}, "prelude": SOON},
        alone="set the same SHARDWISE_SECRET on every node, or on none",
    ),
    "an address that is nowhere": Wrong(
        4,
        "node 1 did not come",
        ["--rendezvous", f"10.77.0.200:{PORT}"],
        prelude=SOON,
        first={"prelude": SOON},
        alone=f"node 0 cannot be reached at 10.77.0.200:{PORT}: (No route to host|timed out)",
    ),
    "the address of another machine": Wrong(
        4,
        f"node 0 cannot listen on 10.77.0.2:{PORT}: Cannot assign requested address",
        prelude=SOON,
        arguments=["--rendezvous", f"10.77.0.2:{PORT}"],
        first={"arguments": ["--rendezvous", f"10.77.0.2:{PORT}"]},
        alone="node 0 cannot be reached",
    ),
    "a port in use": Wrong(
        4,
        f"node 0 cannot listen on 10.77.0.1:{PORT}: Address already in use",
        prelude=SOON,
        change="port",
        alone=f"10.77.0.1:{PORT} does not answer as node 0|is not node 0 of this run",
    ),
    "half a shared disk": Wrong(
        4,
        rf"{B} see the run folder of {A}, and node 2 \(desk-c\) do not",
        ["--nodes", "3"],
        first={"arguments": ["--nodes", "3"]},
        change="half",
    ),
    "no run to resume": Wrong(2, f"{B}: there is no run to resume", change="resume"),
    "on-oom retry": Wrong(
        2,
        "--on-oom retry works on one machine, and this run has 2",
        ["--on-oom", "retry"],
        first={"arguments": ["--on-oom", "retry"]},
        prelude="import shardwise.launch.control as control\ncontrol.EXCUSE_SECONDS = 1.0\n",
        alone="--on-oom retry works on one machine",
    ),
}

EXPLAINED_THERE = ("no data", "no job file", "no run to resume", "another number of nodes")
"""What a node finds by itself is explained on both."""


@dataclass
class SetUp:
    """Two or three folders with a job, and what is changed about them."""

    fleet: Fleet
    folders: list[Path]
    commands: list[subprocess.Popen[str]] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)
    third: list[str] | None = None
    arguments: list[str] = field(default_factory=list)

    def code(self) -> None:
        copy = self.folders[1] / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        with (copy / "shardwise" / "units.py").open("a") as file:
            file.write("\n# changed\n")
        self.paths[1] = str(copy)

    def data(self) -> None:
        file = self.folders[1] / "data.jsonl"
        file.write_text(file.read_text().replace("token", "Token"))

    def no_data(self) -> None:
        (self.folders[1] / "data.jsonl").unlink()

    def no_job(self) -> None:
        (self.folders[1] / "job.yaml").unlink()

    def disk(self) -> None:
        place = self.folders[1] / "runs"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)

    def firewall(self) -> None:
        """Node 1 answers on no port; its own connection to the rendezvous passes."""
        for words in (
            f"priority 10 ipproto tcp dport {PORT} lookup main",
            "priority 20 ipproto tcp sport 30000-65534 blackhole",
        ):
            subprocess.run(self.fleet.machines[1].command("ip", "rule", "add", *words.split()), check=True)

    def port(self) -> None:
        code = f"import socket, time; s = socket.create_server(('10.77.0.1', {PORT})); time.sleep(60)"
        words = self.fleet.machines[0].command("python3", "-c", code)
        self.commands.append(subprocess.Popen(words))

    def third_as_second(self) -> None:
        self.third = ["--node-rank", "1"]

    def half(self) -> None:
        """Node 1 sees the folders of node 0, node 2 does not."""
        shutil.rmtree(self.folders[1])
        self.folders[1].symlink_to(self.folders[0])
        self.third = ["--node-rank", "2"]

    def resume(self) -> None:
        """Node 0 has a run, node 1 has lost everything of it."""
        run = self.folders[0] / "runs/job"
        plan = {
            "schema": 1,
            "chosen": {
                "strategy": Strategy(engine="deepspeed", stage=2, data_parallel=2).to_json(),
                "why": [],
            },
        }
        job_yaml = (self.folders[0] / "job.yaml").read_text()
        RunFolder.create(run, job_yaml=job_yaml, plan=plan, environment={}).close()


@pytest.fixture
def set_up(fleet: Fleet, tmp_path: Path) -> Iterator[SetUp]:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        write_job(folder, "zero2", data="data.jsonl", global_batch=12, micro_batch=1)
        shutil.copy(SAMPLES / "qa.jsonl", folder / "data.jsonl")
    made = SetUp(fleet, folders)
    yield made
    for command in made.commands:
        command.kill()
        command.communicate()
    for folder in folders:
        subprocess.run(["umount", folder / "runs"], check=False, capture_output=True)
    for machine in fleet.machines:
        for priority in ("10", "20"):
            subprocess.run(
                machine.command("ip", "rule", "delete", "priority", priority),
                check=False,
                capture_output=True,
            )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_set_up_is_found_before_a_worker_starts(set_up: SetUp, name: str) -> None:
    wrong, fleet = WRONG[name], set_up.fleet
    if wrong.change:
        getattr(set_up, wrong.change)()

    def command(
        rank: int, prelude: str = "", arguments: Sequence[str] = (), variables: Mapping[str, str] = {}
    ) -> subprocess.Popen[str]:
        words = [
            "train",
            "job.yaml",
            "--processes",
            "1",
            "--nodes",
            "2",
            "--node-rank",
            str(rank),
            "--rendezvous",
            fleet.rendezvous,
            *arguments,
        ]
        if wrong.change == "resume":
            words += ["--resume"]
        own = {"PYTHONPATH": set_up.paths[rank]} if rank in set_up.paths else {}
        made = shardwise(
            fleet.machines[rank], *words, cwd=set_up.folders[rank], prelude=prelude, **variables, **own
        )
        set_up.commands.append(made)
        return made

    began = time.monotonic()
    first = command(0, **wrong.first)
    others = [command(1, wrong.prelude, wrong.arguments, wrong.variables)]
    if set_up.third is not None:
        others.append(command(2, arguments=["--nodes", "3", *set_up.third]))
    _, said = first.communicate(timeout=50)
    theirs = [other.communicate(timeout=50)[1] for other in others]
    assert first.returncode == wrong.code, said
    assert re.search(wrong.says, said), said
    assert sum(line.startswith("error: ") for line in said.splitlines()) == 1
    for other, their in zip(others, theirs, strict=True):
        assert other.returncode == wrong.code, their
        assert "Traceback" not in said + their
        if wrong.alone:
            assert re.search(wrong.alone, their), their
        elif name not in EXPLAINED_THERE:
            assert their.splitlines()[-1].startswith("ended: "), their
            assert "shows the full error" in their
    assert time.monotonic() - began < 45
    assert not list(set_up.folders[0].rglob("events.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "2", "--node-rank", "2", "--rendezvous", "10.0.0.1:1"], "node 2 is not one of 2 nodes"),
        (["--nodes", "2"], "several nodes need three options"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1"], "'10.0.0.1' is not HOST:PORT"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1:x"], "'10.0.0.1:x' is not HOST:PORT"),
    ],
)
def test_a_wrong_command_is_found_by_itself(tmp_path: Path, arguments: list[str], says: str) -> None:
    write_job(tmp_path, "zero2")
    alone = shardwise(None, "train", "job.yaml", *arguments, cwd=tmp_path)
    _, said = alone.communicate(timeout=30)
    assert alone.returncode == 2
    assert says in said


def test_a_name_that_leads_to_this_machine_itself_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    """As Debian writes the host's own name into /etc/hosts: the others would wait for ever."""
    write_job(tmp_path, "zero2")
    prelude = "import socket; real = socket.getaddrinfo\n"
    prelude += (
        "socket.getaddrinfo = lambda host, *a, **k: real('127.0.1.1' if host == 'desk-a' else host, *a, **k)"
    )
    words = ["train", "job.yaml", "--nodes", "2", "--node-rank", "0", "--rendezvous", f"desk-a:{PORT}"]
    first = shardwise(fleet.machines[0], *words, cwd=tmp_path, prelude=prelude)
    _, said = first.communicate(timeout=30)
    assert first.returncode == 4
    assert "desk-a is 127.0.1.1 on this machine, which no other machine reaches" in said
