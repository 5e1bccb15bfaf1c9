"""Several nodes from one command: node 0 here, the others over ssh. Each runs `shardwise train --nodes`.

The nodes watch each other themselves (decision 0043). This starts them, passes signals on to node 0, collects
what the others print, and sees that nothing is left of them.
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import MachineError, Problem
from shardwise.launch import die_with, handled
from shardwise.launch.hostfile import Host
from shardwise.launch.nodes import SECRET
from shardwise.launch.remote import HELLO, greeting
from shardwise.record.read import is_run_folder

SENT = ("GLOO_", "HF_", "NCCL_", "SHARDWISE_")
"""Variables that begin with these are set on the other hosts, too."""

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=4")
_SSH_FAILED = 255
_GREETING_SECONDS = 60.0
_ALONE_SECONDS = 30.0  # a node that failed before it met the others may still tell them
_FOLLOW_SECONDS = 60.0  # for the others to end after node 0
_CLOSE_SECONDS = 15.0
_LOOK_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class Remote:
    """A node on another host, and the file with what it prints."""

    rank: int
    host: Host
    process: Any  # subprocess.Popen of ssh
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def order(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the node."""
        with suppress(BrokenPipeError):  # ssh has ended: its exit code says why
            self.process.stdin.write(json.dumps({"command": command, "environment": environment}).encode())
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()


def launch_on(
    hosts: Sequence[Host], arguments: Sequence[str], *, rendezvous: str, workdir: Path, run_dir: Path
) -> int:
    """Train on `hosts`, of which the first is this one; returns the exit code.

    Args:
        hosts: the nodes, by rank.
        arguments: of `shardwise`, on each of them, but for what tells a node which one it is.
        rendezvous: HOST:PORT of node 0.
        workdir: the folder that the others start in.
        run_dir: the run folder; what the others print is kept there, in `logs/node-R.log`.

    Raises MachineError with every host that cannot be used, and where a node ends before it meets the others.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))  # mode 0700
    environment = {name: value for name, value in os.environ.items() if name.startswith(SENT)}
    environment.setdefault(SECRET, secrets.token_hex(32))
    shared = [sys.executable, "-P", "-m", "shardwise", *arguments, "--nodes", str(len(hosts))]
    commands = [[*shared, "--rendezvous", rendezvous, "--node-rank", str(rank)] for rank in range(len(hosts))]
    remotes: list[Remote] = []
    try:
        for rank, host in enumerate(hosts[1:], 1):
            log = folder / f"node-{rank}.log"
            remotes.append(Remote(rank, host, _connect(host, workdir, log), log))
        _wait_for_greetings(remotes)
        for remote in remotes:
            remote.order(commands[remote.rank], environment)
        first = _start(commands[0], env={**os.environ, **environment}, stdin=subprocess.DEVNULL)
        with handled(_SIGNALS, lambda number, _: first.send_signal(number)):  # it tells the others
            _watch(first, remotes)
        _wait(remotes, _FOLLOW_SECONDS)
        codes = [first.returncode, *(remote.process.returncode for remote in remotes)]
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code
    finally:
        _end(remotes)
        _keep(remotes, run_dir)
        shutil.rmtree(folder, ignore_errors=True)


def _start(command: Sequence[str], **options: Any) -> Any:
    """A process that dies with this one, in a group of its own: Ctrl-C reaches it only through this one."""
    parent = os.getpid()
    options["preexec_fn"] = lambda: die_with(parent)
    return subprocess.Popen(command, process_group=0, **options)


def _connect(host: Host, workdir: Path, log: Path) -> Any:
    agent = shlex.join([sys.executable, "-P", "-m", "shardwise.launch.remote"])
    there = f"cd {shlex.quote(str(workdir))} && exec {agent}"
    command = ["ssh", "-T", *(f"-o{option}" for option in _OPTIONS), "--", host.name, there]
    with log.open("wb") as file:
        return _start(command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)


def _wait_for_greetings(remotes: Sequence[Remote]) -> None:
    """Until all hosts have answered; MachineError with each that cannot be used."""
    until = time.monotonic() + _GREETING_SECONDS
    problems = []
    for remote in remotes:
        while not any(line.startswith(HELLO) for line in remote.lines()):
            if remote.process.poll() is not None or time.monotonic() > until:
                break
            time.sleep(_LOOK_SECONDS)
        if greeting() not in remote.lines():
            problems.append(_useless(remote))
    if problems:
        raise MachineError("hosts of the hostfile cannot be used", problems=problems)


def _useless(remote: Remote) -> Problem:
    """Why a host did not answer, or not as it should."""
    name, code, lines = remote.host.name, remote.process.poll(), remote.lines()
    other = next((line for line in lines if line.startswith(HELLO)), None)
    what = f"{name}: {lines[-1] if lines else 'it printed nothing'}"
    fix = f"install shardwise on every host alike, so that {sys.executable} finds it"
    if other is not None:
        ours = greeting().removeprefix(HELLO)
        what = f"{name} has shardwise{other.removeprefix(HELLO)}, this machine{ours}"
        fix = "install the same version on every host"
    elif code is None:
        what, fix = f"{name} did not answer in {_GREETING_SECONDS:.0f} s", f"see `ssh {name}`"
    elif code == _SSH_FAILED:
        fix = f"`ssh {name} true` has to work without a question; see ~/.ssh/config"
    elif "cd: " in lines[-1]:
        fix = "use the same folder on every host, or name theirs: --workdir DIR"
    return Problem(what=what, where=remote.host.where, fix=fix)


def _watch(first: Any, remotes: Sequence[Remote]) -> None:
    """Wait for node 0. Where it waits for a node that has failed, end it; MachineError for that node."""
    failed: tuple[float, Remote] | None = None
    while first.poll() is None:
        now = time.monotonic()
        failed = failed or next(((now, remote) for remote in remotes if remote.process.poll()), None)
        if failed is not None and now - failed[0] > _ALONE_SECONDS:
            first.terminate()
            with suppress(subprocess.TimeoutExpired):
                first.wait(_CLOSE_SECONDS)
            first.kill()
            first.wait()
            raise _failed_alone(failed[1])
        time.sleep(_LOOK_SECONDS)


def _wait(remotes: Sequence[Remote], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(remote.process.poll() is None for remote in remotes):
        time.sleep(_LOOK_SECONDS)


def _end(remotes: Sequence[Remote]) -> None:
    """Nothing is left: a host whose stdin is closed ends its node."""
    for remote in remotes:
        with suppress(BrokenPipeError):
            remote.process.stdin.close()
    _wait(remotes, _CLOSE_SECONDS)
    for remote in remotes:
        remote.process.kill()
        remote.process.wait()


def _keep(remotes: Sequence[Remote], run_dir: Path) -> None:
    """Copy what the nodes printed to the run folder, if there is one."""
    with suppress(OSError):  # the disk is full, say
        if is_run_folder(run_dir):
            (run_dir / "logs").mkdir(exist_ok=True)
            for remote in remotes:
                shutil.copy(remote.log, run_dir / "logs")


def _failed_alone(remote: Remote) -> MachineError:
    name = f"node {remote.rank} ({remote.host.name})"
    tail = "\n".join(remote.lines()[-40:])
    print(f"--- the last lines of {name} ---\n{tail}\n---", file=sys.stderr)
    what = f"{name} ended before it had met the others"
    error = MachineError(what, where=remote.host.where, fix="see what it printed last, above")
    if 0 < remote.process.returncode < _SSH_FAILED:
        error.exit_code = remote.process.returncode
    return error
