"""Machines for tests: network namespaces with a bridge between them, each with its own address and host name.

They share files, process ids and the clock. A machine's link can be taken down, which is a partition.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forks import Call, run, warm_up

from shardwise.job.schema import Job
from shardwise.job.source import job_text

SAMPLES = Path(__file__).parents[2] / "src" / "shardwise" / "job" / "samples"
SOURCE = str(Path(__file__).parents[2] / "src")
PORT = 29500
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why there can be no machines here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip`: apt-get install iproute2"
    name = f"probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Machine:
    """One machine: its host name, its address, and the folder that commands run in."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str

    def link(self, state: str) -> None:
        """`up` or `down`."""
        _ip("netns", "exec", self.switch, "ip", "link", "set", self.port, state)

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` on this machine."""
        become = f'hostname {self.name}; exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", become, "sh", *words]


class Fleet:
    def __init__(self, count: int = 3) -> None:
        mark = f"sw{os.getpid()}"
        self._names = [f"{mark}-{number}" for number in range(count)]
        self._switch = f"{mark}-switch"
        _ip("netns", "add", self._switch)
        self._in(self._switch, "link", "add", "br0", "type", "bridge")
        self._in(self._switch, "link", "set", "br0", "up")
        self.machines = []
        for number, namespace in enumerate(self._names):
            port, address = f"port{number}", f"10.77.0.{number + 1}"
            _ip("netns", "add", namespace)
            self._in(
                self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace
            )
            self._in(self._switch, "link", "set", port, "master", "br0")
            self._in(self._switch, "link", "set", port, "up")
            self._in(namespace, "address", "add", f"{address}/24", "dev", "eth0")
            self._in(namespace, "link", "set", "eth0", "up")
            self._in(namespace, "link", "set", "lo", "up")
            self.machines.append(
                Machine(f"desk-{'abcdefgh'[number]}", address, namespace, self._switch, port)
            )

    @property
    def rendezvous(self) -> str:
        return f"{self.machines[0].address}:{PORT}"

    def up(self) -> None:
        for machine in self.machines:
            machine.link("up")

    def close(self) -> None:
        for namespace in (*self._names, self._switch):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)

    def _in(self, namespace: str, *words: str) -> None:
        _ip("-n", namespace, *words)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Fleet()
    yield made
    made.close()


def write_job(
    folder: Path,
    strategy: object,
    *,
    name: str = "job",
    output: str = "runs",
    data: str | None = None,
    **train: object,
) -> Path:
    """A small Llama in fp32 on the packaged questions; `output` is relative, so each folder has its own."""
    settings = {"steps": 6, "global_batch": 8, "micro_batch": 2, "precision": "fp32", "save_every": 0}
    job = Job.model_validate(
        {
            "name": name,
            "output": output,
            "model": {
                "source": "HuggingFaceTB/SmolLM2-135M",
                "weights": "random",
                "config": CONFIG,
                "tokenizer": "train",
                "tokenizer_vocab": 512,
            },
            "data": {"train": data or str(SAMPLES / "qa.jsonl"), "sequence_length": 96, "packing": False},
            "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 2},
            "train": {**settings, "eval_every": 0, **train},
            "strategy": strategy,
            "tracking": [],
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.yaml"
    path.write_text(job_text(job.model_dump(mode="json", exclude_defaults=True)))
    return path


@dataclass
class Node:
    """A launcher on a machine, which a fork of a template runs, and what it left."""

    machine: Machine | None
    folder: Path
    code: int | None = None

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def launcher(self) -> int:
        """Its process id, as soon as it has one."""
        return int(wait_for((self.folder / "pid").read_text, "a launcher"))

    def workers(self) -> list[int]:
        """Process ids of what the launcher has started and still runs."""
        path = Path(f"/proc/{self.launcher}/task/{self.launcher}/children")
        return [int(word) for word in path.read_text().split()] if path.exists() else []


@dataclass
class Cluster:
    """`shardwise train` on some machines, side by side."""

    nodes: list[Node]
    thread: threading.Thread = field(default_factory=threading.Thread)

    def wait(self, seconds: float = 250.0) -> list[Node]:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "it has not ended"
        return self.nodes


def start(
    fleet: Fleet | None, folders: list[Path], *arguments: str, processes: int = 2, **variables: str
) -> Cluster:
    """Start the launchers, one in each folder, in forks that have imported everything.

    Without a fleet there is one node, on this machine.
    """
    nodes, calls = [], []
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("out", "err", "pid"):
            (folder / name).unlink(missing_ok=True)
        machine = None if fleet is None else fleet.machines[rank]
        own = [*arguments, "--processes", str(processes)]
        if fleet is not None:
            own += ["--nodes", str(len(folders)), "--node-rank", str(rank), "--rendezvous", fleet.rendezvous]
        place = [machine.namespace, machine.name] if machine else ["", ""]
        environment = {**os.environ, "SHARDWISE_CACHE": str(folder / "cache"), **variables}
        calls.append(
            Call(
                target="fleet:main",
                arguments=[*place, str(folder), *own],
                environment=environment,
                output=folder / "out",
                errors=folder / "err",
            )
        )
        (folder / "out").touch()
        (folder / "err").touch()
        nodes.append(Node(machine, folder))
    cluster = Cluster(nodes)
    warm_up()

    def work() -> None:
        for node, code in zip(nodes, run(calls, timeout=280.0), strict=True):
            node.code = code

    cluster.thread = threading.Thread(target=work, daemon=True)
    cluster.thread.start()
    return cluster


def main(namespace: str, name: str, folder: str, *arguments: str) -> None:
    """In a fork: become a process of that machine, then the command."""
    import forked_command

    libc = ctypes.CDLL(None, use_errno=True)
    if namespace:
        with Path(f"/run/netns/{namespace}").open() as file:
            assert libc.setns(file.fileno(), _CLONE_NEWNET) == 0
        assert libc.unshare(_CLONE_NEWUTS) == 0
        assert libc.sethostname(name.encode(), len(name)) == 0
    partial = Path(folder) / "pid.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder) / "pid")
    forked_command.main(folder, "shardwise.training.worker", "train", *arguments)


def losses(run_dir: Path) -> list[float]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


def wait_for(find, what: str, seconds: float = 120.0):  # type: ignore[no-untyped-def]
    """The first true value of `find`; files that are not there yet count as false."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            found = find()
            if found:
                return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not appear within {seconds:.0f} s")


def trained(run_dir: Path, step: int = 1) -> bool:
    """Whether a run has taken that many steps."""
    return len(losses(run_dir)) >= step


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


def shardwise(
    machine: Machine | None, *arguments: str, cwd: Path, prelude: str = "", **variables: str
) -> subprocess.Popen[str]:
    """The real command on a machine; `prelude` is Python that runs before it."""
    code = f"import sys\n{prelude}\nfrom shardwise.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "SHARDWISE_CACHE": str(cwd / "cache"), **variables}
    return subprocess.Popen(
        words if machine is None else machine.command(*words),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
