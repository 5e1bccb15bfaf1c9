"""`shardwise train --hostfile` over real ssh, between machines with addresses and host names of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import SOURCE, Fleet, Machine, alive, losses, trained, wait_for, write_job

SSH = shutil.which("ssh")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(SSHD is None, reason="needs sshd: apt-get install openssh-server"),
]

SECRET = "a-secret-that-no-list-of-processes-shows"
AGENT = f"{sys.executable} -P -m shardwise.launch.remote"
OLD = """
import sys
print("shardwise-node 0.0.1", flush=True)
sys.stdin.read()
"""


@dataclass
class Hosts:
    """The first machine, from which ssh reaches the second under several names."""

    here: Machine
    there: Machine
    tools: Path

    def train(self, folder: Path, hosts: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        (folder / "hosts").write_text(hosts)
        words = [sys.executable, "-m", "shardwise", "train", "job.yaml", "--hostfile", "hosts", *arguments]
        environment = {**os.environ, "PYTHONPATH": SOURCE, "SHARDWISE_CACHE": str(folder / "cache")}
        environment |= {"PATH": f"{self.tools}:{os.environ['PATH']}", "TMPDIR": str(folder), **variables}
        return subprocess.Popen(
            self.here.command(*words),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def both(self) -> str:
        return f"good slots=1\n{self.here.address} slots=1  # this machine\n"


@pytest.fixture(scope="module")
def hosts(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """sshd on the second machine: one as it should be, one without our package, one with an old version."""
    here, there, *_ = fleet.machines
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    old = folder / "old" / "shardwise" / "launch"
    old.mkdir(parents=True)
    for package in (old.parent, old):
        (package / "__init__.py").touch()
    (old / "remote.py").write_text(OLD)
    none = folder / "none" / "shardwise"
    none.mkdir(parents=True)
    (none / "__init__.py").touch()  # hides an installed one
    Path("/run/sshd").mkdir(exist_ok=True)
    for port, path in ((2222, SOURCE), (2223, str(none.parent)), (2224, str(folder / "old"))):
        options = {
            "ListenAddress": there.address,
            "StrictModes": "no",
            "UsePAM": "no",
            "AuthorizedKeysFile": folder / "user.pub",
            "PidFile": folder / f"pid-{port}",
            "SetEnv": f"PYTHONPATH={path} HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1",
        }
        words = [f"-o{name}={value}" for name, value in options.items()]
        command = [str(SSHD), "-f", "/dev/null", "-p", str(port), "-h", str(folder / "host"), *words]
        subprocess.run(there.command(*command, "-E", str(folder / f"log-{port}")), check=True)
    (folder / "config").write_text(
        textwrap.dedent(f"""
        Host nowhere
          HostName 10.77.0.99
        Host good absent old refused denied unknown
          HostName {there.address}
        Host absent
          Port 2223
        Host old
          Port 2224
        Host refused
          Port 9
        Host denied
          PubkeyAuthentication no
        Host unknown
          StrictHostKeyChecking yes
          UserKnownHostsFile /dev/null
        Host *
          Port 2222
          IdentityFile {folder}/user
          IdentitiesOnly yes
          StrictHostKeyChecking accept-new
          UserKnownHostsFile {folder}/known
          LogLevel ERROR
        """)
    )
    tools = folder / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/config "$@"\n')
    (tools / "ssh").chmod(0o755)
    yield Hosts(here, there, tools)
    for file in folder.glob("pid-*"):
        os.kill(int(file.read_text()), signal.SIGTERM)


def of_run(folder: Path) -> list[int]:
    """Process ids of everything that works in a folder: launchers, workers, ssh and what it started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder and alive(int(process.name)):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def nothing_left(folder: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while left := of_run(folder):
        shown = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if alive(pid)]
        assert time.monotonic() < until, shown
        time.sleep(0.1)


def command_lines() -> str:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def test_machines_of_a_hostfile_train_as_one_does(hosts: Hosts, tmp_path: Path) -> None:
    write_job(tmp_path, "fsdp2")
    process = hosts.train(tmp_path, hosts.both(), SHARDWISE_SECRET=SECRET, NCCL_DEBUG="WARN", OTHER="x")
    run_dir = tmp_path / "runs" / "job"
    agents = wait_for(lambda: [pid for pid in of_run(tmp_path) if line_of(pid).startswith(AGENT)], "the node")
    node = wait_for(
        lambda: Path(f"/proc/{agents[0]}/task/{agents[0]}/children").read_text().split(), "a child"
    )
    environment = Path(f"/proc/{node[0]}/environ").read_text().split("\0")
    assert {"NCCL_DEBUG=WARN", f"SHARDWISE_SECRET={SECRET}"} <= set(environment)
    assert "OTHER=x" not in environment
    assert SECRET not in command_lines()
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    assert "node 1" in (run_dir / "logs" / "node-1.log").read_text()
    nothing_left(tmp_path, 1)
    assert not list(tmp_path.glob("shardwise-*"))
    same = hosts.train(tmp_path, f"{hosts.here.address} slots=2\n", "--set", "name=same")
    out, err = same.communicate(timeout=180)
    assert same.returncode == 0, out + err
    assert losses(run_dir) == losses(tmp_path / "runs" / "same")


def line_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def ssh_client(folder: Path) -> int:
    return next(pid for pid in of_run(folder) if line_of(pid).startswith(f"{SSH} -F"))


def test_ctrl_c_saves_everywhere_and_the_run_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    write_job(tmp_path, "fsdp2", steps=4000)
    process = hosts.train(tmp_path, hosts.both())
    run_dir = tmp_path / "runs" / "job"
    wait_for(lambda: trained(run_dir, 2), "a step", 120)
    os.kill(launcher(tmp_path), signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert err.count("stopped: ") == 1, err
    nothing_left(tmp_path, 1)
    saved = len(losses(run_dir))
    process = hosts.train(tmp_path, hosts.both(), "--resume", "--max-steps", str(saved + 3))
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    same = [f"{hosts.here.address} slots=2\n", "--set", "name=same", "--max-steps", str(saved + 3)]
    process = hosts.train(tmp_path, *same)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    assert losses(run_dir) == losses(tmp_path / "runs" / "same")


def launcher(folder: Path) -> int:
    """What the user started, the only process with a hostfile."""
    return next(
        pid for pid in of_run(folder) if line_of(pid).startswith(sys.executable) and "hosts" in line_of(pid)
    )


def far_worker(folder: Path) -> int:
    """The training process on the other machine."""
    [agent] = [pid for pid in of_run(folder) if line_of(pid).startswith(AGENT)]
    for _ in range(2):
        agent = int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])
    return agent


@pytest.mark.parametrize(
    ("victim", "code", "error"),
    [
        (ssh_client, 75, "stopped: "),
        (launcher, -9, ""),
        (far_worker, 4, "error: rank 1 was killed; the kernel counts no kill for memory since the run began"),
    ],
    ids=["ssh", "launcher", "worker"],
)
def test_nothing_is_left_when_one_is_killed(
    victim: Callable[[Path], int], code: int, error: str, hosts: Hosts, tmp_path: Path
) -> None:
    """On any machine, although sshd tells nobody that its client has died."""
    write_job(tmp_path, "fsdp2", steps=100_000)
    process = hosts.train(tmp_path, hosts.both())
    wait_for(lambda: trained(tmp_path / "runs" / "job", 2), "a step", 120)
    os.kill(victim(tmp_path), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, error in err) == (code, True), out + err
    assert err.count("error: ") + err.count("stopped: ") <= 1, err
    if victim is far_worker:
        assert "at:  node 1 (desk-b)" in err
    nothing_left(tmp_path, 60)


@pytest.mark.parametrize(
    ("line", "arguments", "code", "message"),
    [
        ("nowhere", [], 4, "nowhere: ssh: connect to host 10.77.0.99 port 2222: "),
        ("refused", [], 4, "port 9: Connection refused"),
        ("denied", [], 4, "Permission denied"),
        ("unknown", [], 4, "Host key verification failed."),
        ("absent", [], 4, "No module named 'shardwise.launch'"),
        ("old", [], 4, "old has shardwise 0.0.1, this machine"),
        (
            "good",
            ["--workdir", "/no/such/folder"],
            4,
            "fix: use the same folder on every host, or name theirs",
        ),
        ("good", ["--workdir", "/tmp"], 2, "node 1 (desk-b): there is no job file job.yaml"),
        ("good", ["--nodes", "2"], 2, "the hostfile says which nodes there are"),
        ("good", ["--rendezvous", "10.77.0.1"], 2, "'10.77.0.1' is not HOST:PORT"),
        ("good slots=3", [], 2, "has 1 slots, good 3 slots"),
        (None, [], 2, "this machine is not in the hostfile"),
        ("no.such.host.invalid", [], 4, "no.such.host.invalid cannot be found from here"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_built(
    line: str | None, arguments: list[str], code: int, message: str, hosts: Hosts, tmp_path: Path
) -> None:
    write_job(tmp_path, "fsdp2")
    own = f"{hosts.here.address}{' slots=1' if line and 'slots' in line else ''}\n"
    text = "good\n" if line is None else f"{own}{line}\n"
    process = hosts.train(tmp_path, text, *arguments)
    _, err = process.communicate(timeout=90)
    assert (process.returncode, message in err) == (code, True), err
    assert err.count("error: ") == 1, err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
    nothing_left(tmp_path, 1)
    assert not list(tmp_path.glob("shardwise-*"))
