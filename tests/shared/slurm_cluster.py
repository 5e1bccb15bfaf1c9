"""A real Slurm on this machine: two nodes, two daemons, all on the loopback device."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
MISSING = "needs Slurm and root: apt-get install slurm-wlm munge"

CONFIG = """ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=20
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs=1 RealMemory=1000 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs=1 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=120 State=UP
"""


def available() -> bool:
    found = [shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in PROGRAMS]
    return os.geteuid() == 0 and all(found)


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Within, the variables that clients need: n1 and n2 are idle. Everything is ended and removed after."""
    folder = Path(tempfile.mkdtemp(prefix="sw-slurm-", dir="/tmp"))  # the socket's path has to be short
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = _free_ports(3)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(
        CONFIG.format(host=host, folder=folder, port=ports[0], port_1=ports[1], port_2=ports[2])
    )
    (folder / "gres.conf").write_text(
        "NodeName=n1 Name=gpu File=/dev/null\nNodeName=n2 Name=gpu File=/dev/null\n"
    )
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir()
    environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    try:
        for command in (
            ["munged", "--force", *options],
            ["slurmctld", "-f", str(config)],
            ["slurmd", "-f", str(config), "-N", "n1"],
            ["slurmd", "-f", str(config), "-N", "n2"],
        ):
            subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)
        _wait_until_idle(environment)
        yield environment
    finally:
        for pid_file in folder.glob("*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
        time.sleep(1)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_idle(environment: dict[str, str]) -> None:
    command = ["sinfo", "--noheader", "--Node", "--format", "%t"]
    until = time.monotonic() + 30
    while time.monotonic() < until:
        shown = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if shown.stdout.split() == ["idle", "idle"]:
            return
        time.sleep(0.5)
    raise AssertionError(f"Slurm did not start: {shown.stdout}{shown.stderr}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
