"""A node of a Slurm job: which nodes train together, where they meet, what they share, when the job ends.

It is read from the variables that `srun` sets for the tasks of a job step (Slurm's manual, srun(1)).
"""

import hashlib
import hmac
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from shardwise.errors import JobError, MachineError
from shardwise.launch.nodes import SECRET, Nodes

STOP_SECONDS = 300.0  # before the time limit; `emit/batch.py` asks Slurm for the same
SHORTEST_SECONDS = 60.0  # a job that ends sooner could not even begin to train
_STEP = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
_FIRST_PORT, _PORTS = 20_000, 10_000  # below the ports that Linux gives to clients
_QUIET_SECONDS = 10.0
_START = "srun --ntasks-per-node=1 shardwise train ..."
_BY_HAND = "or say it yourself: --nodes, --node-rank and --rendezvous"


def nodes_of_step() -> Nodes | None:
    """The nodes of the job step that this process is a task of; None outside of Slurm, or for one node.

    JobError where the step has several tasks a node, or several nodes were allocated and `srun` was left out.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    if "SLURM_STEP_ID" not in os.environ:
        allocated = os.environ.get("SLURM_JOB_NUM_NODES", "1")
        if allocated != "1":
            what = f"Slurm allocated {allocated} nodes, and this would train on one of them"
            raise JobError(what, where="SLURM_JOB_NUM_NODES", fix=f"{_START}; for one node: --nodes 1")
        return None
    count, tasks, rank, job, step = (_number(name) for name in _STEP)
    if tasks != count:
        if os.environ.get("SLURM_PROCID", "0") != "0":  # one of them speaks, and srun must not end it before
            time.sleep(_QUIET_SECONDS)
            raise SystemExit(JobError.exit_code)
        what = f"srun started {tasks} tasks on {count} nodes; shardwise starts a process for each GPU itself"
        raise JobError(what, where="SLURM_STEP_NUM_TASKS", fix=_START)
    if count == 1:
        return None
    if rank >= count:
        what = f"Slurm's variables do not fit together: this is node {rank} of {count}"
        raise MachineError(what, where="SLURM_NODEID", fix=f"start with {_START}, {_BY_HAND}")
    port = _FIRST_PORT + (job * 10 + step % 10) % _PORTS
    return Nodes(count=count, rank=rank, rendezvous=f"{_address_of_first()}:{port}")


def _number(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdecimal():
        found = "unset" if text is None else f"{text!r}, not a number"
        fix = f"start with {_START}, {_BY_HAND}"
        raise MachineError(f"{name} is {found}", where="Slurm's variables", fix=fix)
    return int(text)


def _address_of_first() -> str:
    """The step's first node, as Slurm itself reaches it; its name where `scontrol` is not to be had.

    Containers often lack it.
    """
    listed = os.environ.get("SLURM_STEP_NODELIST", "")
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])+", listed)  # n[01-03,7],m1: the first is n01
    if match is None:
        fix = f"start with {_START}, {_BY_HAND}"
        raise MachineError("SLURM_STEP_NODELIST is unset", where="Slurm's variables", fix=fix)
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
    return _shown("node", name, "NodeAddr") or name


def _shown(kind: str, name: str, key: str) -> str | None:
    """A value of `scontrol show`; None where it cannot be asked."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["scontrol", "--oneliner", "show", kind, name]
        usual = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
        shown = subprocess.run(command, env=usual, capture_output=True, text=True, check=False, timeout=30)
        found = re.search(rf"\b{key}=(\S+)", shown.stdout)
        return None if found is None else found[1]
    return None


def share_secret() -> None:
    """Set the secret of this job step for its nodes, unless the user has set one.

    It is made of the job's id and a random key in the user's home, which all nodes see and others do not.
    """
    if SECRET in os.environ:
        return
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    which = "/".join(os.environ.get(name, "") for name in names)
    os.environ[SECRET] = hmac.new(_key(), which.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    path = Path.home() / ".config" / "shardwise" / "slurm.key"
    fix = f"export {SECRET}=$(openssl rand -hex 32) before srun"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            own.touch(mode=0o600)
            own.write_text(secrets.token_hex(32), encoding="ascii")
            with suppress(FileExistsError):  # another node was faster: its key holds
                os.link(own, path)
            own.unlink()
        about = path.stat()
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise MachineError(
                "others may read the key of your jobs", where=str(path), fix=f"chmod 600 {path}"
            )
        return path.read_bytes()
    except OSError as error:
        what = f"the nodes' secret cannot be kept: {error.strerror}"
        raise MachineError(what, where=str(error.filename or path), fix=fix) from None


def seconds_left() -> float | None:
    """Until Slurm ends the job; None without a limit, or where it cannot be asked."""
    end = _shown("job", os.environ.get("SLURM_JOB_ID", ""), "EndTime")
    with suppress(ValueError, KeyError):
        if end is not None:
            return time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - time.time()
        return float(os.environ["SLURM_JOB_END_TIME"]) - time.time()  # newer versions set it
    return None


@contextmanager
def stopped_in_time() -> Iterator[None]:
    """Within, this process gets SIGUSR1 before Slurm's time limit, early enough to save. Main thread only.

    JobError where the limit is too near. The limit may be moved meanwhile: it is read again.
    """
    left = seconds_left() if "SLURM_JOB_ID" in os.environ else None
    if left is None:
        yield
        return
    if left < SHORTEST_SECONDS:
        what = f"Slurm ends this job in {max(0.0, left):.0f} s"
        raise JobError(what, where="the job's time limit", fix="give it more time: sbatch --time=HH:MM:SS")
    reserve = min(STOP_SECONDS, left / 4)

    def look(_number: int, _frame: FrameType | None) -> None:
        rest = seconds_left()
        if rest is None or rest <= reserve + 1:
            if os.environ.get("SLURM_NODEID", "0") == "0":
                print(f"Slurm ends this job in {reserve:.0f} s", file=sys.stderr, flush=True)
            signal.raise_signal(signal.SIGUSR1)
        else:
            signal.setitimer(signal.ITIMER_REAL, rest - reserve)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, left - reserve)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
