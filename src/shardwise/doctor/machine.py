"""What can be seen of the machine without starting anything: Python, compilers, memory, disks, ports."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.doctor.check import Check
from shardwise.hardware.host import cpu_cores, host_memory_bytes
from shardwise.launch.local import free_port
from shardwise.record.environment import versions
from shardwise.units import GIB, count, gib

LEAST_PYTHON = (3, 11)
RENDEZVOUS_PORT = 29500
"""The default of torchrun, `deepspeed` and accelerate; shardwise's own launcher looks for a free one."""

LITTLE_DISK = 20 * GIB
"""A 7B model's weights in bf16 are 13 GB."""
LITTLE_SHM = GIB
"""NCCL and data loaders take tens to hundreds of MB; Docker gives 64 MiB."""
LITTLE_MEMORY = 4 * GIB

SHM = Path("/dev/shm")  # noqa: S108 - the place itself is meant

OFFLOAD_BYTES = 16
"""Of host memory for each parameter whose optimizer is offloaded: fp32 weight, gradient and two moments."""


def checks(*, gpus: int, cache: Path, runs: Path) -> Iterator[Check]:
    """`gpus`: how many will train. `cache`, `runs`: folders that will be written."""
    yield python()
    yield compiler()
    yield memory()
    yield shared_memory(gpus=gpus)
    yield disk("disk for runs", runs)
    yield disk("disk for the cache", cache)
    yield ports()


def python() -> Check:
    """The interpreter, and what is installed beside it."""
    facts = {"executable": sys.executable, "versions": versions()}
    finding = f"{platform.python_version()} in {sys.prefix}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return Check(name="Python", status="problem", finding=finding, fix="use 3.11 or newer", facts=facts)
    return Check(name="Python", status="ok", finding=finding, facts=facts)


def compiler() -> Check:
    """What Triton and DeepSpeed compile with: a C++ compiler, Python's headers, ninja."""
    name = os.environ.get("CC")
    found = {
        "C compiler": next(filter(None, map(shutil.which, [name] if name else ["gcc", "clang", "cc"])), None),
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "Python.h": _file(Path(sysconfig.get_paths()["include"]) / "Python.h"),
        "ninja": shutil.which("ninja", path=_path()),
        "nvcc": shutil.which("nvcc")
        or _file(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")),
    }
    missing = [what for what in ("C compiler", "C++ compiler", "Python.h", "ninja") if found[what] is None]
    if missing:
        return Check(
            name="compilers",
            status="warning",
            finding=f"{', '.join(missing)} missing: Triton's kernels or DeepSpeed's ops cannot be built",
            fix="apt install build-essential python3-dev (of this Python); pip install ninja",
            facts=found,
        )
    nvcc = "nvcc" if found["nvcc"] else "no nvcc, which only DeepSpeed's own GPU operators need"
    return Check(
        name="compilers", status="ok", finding=f"C, C++, Python's headers, ninja, {nvcc}", facts=found
    )


def memory() -> Check:
    """Host memory, and what fits there of an offloaded optimizer."""
    total, available = host_memory_bytes(), _available_bytes()
    if total is None or available is None:
        return Check(name="host memory", status="skipped", finding="/proc/meminfo cannot be read")
    available = min(available, total)
    facts = {"total_bytes": total, "available_bytes": available, "cpu_cores": cpu_cores()}
    cores = f"{facts['cpu_cores']} CPU core{'' if facts['cpu_cores'] == 1 else 's'}"
    finding = f"{gib(available)} of {gib(total)} available, {cores}"
    if available < LITTLE_MEMORY:
        fix = "end other processes, or give the container more memory"
        return Check(name="host memory", status="warning", finding=finding, fix=fix, facts=facts)
    finding += f"; an offloaded optimizer of up to {count(available / OFFLOAD_BYTES)} parameters"
    return Check(name="host memory", status="ok", finding=finding, facts=facts)


def shared_memory(*, gpus: int, folder: Path = SHM) -> Check:
    """The folder in memory, through which NCCL's processes and data loaders talk."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        finding = f"{folder} cannot be used: {error.strerror}"
        return Check(
            name="shared memory", status="problem" if gpus > 1 else "warning", finding=finding, fix=_SHM_FIX
        )
    facts = {"total_bytes": usage.total, "free_bytes": usage.free}
    if usage.free < LITTLE_SHM:
        finding = f"{usage.free / 2**20:.0f} MiB free in {folder}: NCCL between several GPUs may fail"
        return Check(name="shared memory", status="warning", finding=finding, fix=_SHM_FIX, facts=facts)
    return Check(
        name="shared memory", status="ok", finding=f"{gib(usage.free)} free in {folder}", facts=facts
    )


_SHM_FIX = "start the container with --ipc=host or --shm-size=16g, or delete what is left in /dev/shm"


def disk(name: str, folder: Path) -> Check:
    """Whether `folder`, or where it will be made, can be written, and how much room is there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(there)
    facts = {"folder": str(folder), "free_bytes": usage.free}
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "make room" if full else "give permission"
        return Check(
            name=name,
            status="problem",
            finding=f"{there} cannot be written: {error.strerror}",
            fix=f"{fix}, or name another place ({_OTHER_PLACE[name]})",
            facts=facts,
        )
    finding = f"{gib(usage.free)} free in {folder}"
    if usage.free < LITTLE_DISK:
        return Check(
            name=name,
            status="warning",
            finding=f"{finding}: little for checkpoints and models",
            fix=f"make room, or name another place ({_OTHER_PLACE[name]})",
            facts=facts,
        )
    return Check(name=name, status="ok", finding=finding, facts=facts)


_OTHER_PLACE = {
    "disk for runs": "`output` in the job",
    "disk for the cache": "the environment variables SHARDWISE_CACHE and HF_HOME",
}


def ports(rendezvous: int = RENDEZVOUS_PORT) -> Check:
    """Whether processes of this machine can meet on a port of the loopback device."""
    facts: dict[str, int] = {"rendezvous": rendezvous}
    try:
        with socket.create_server(("127.0.0.1", free_port())) as server:
            facts["port"] = server.getsockname()[1]
            with socket.create_connection(server.getsockname(), timeout=5.0):
                pass
    except OSError as error:
        return Check(
            name="ports",
            status="problem",
            finding=f"two processes cannot meet on 127.0.0.1: {_reason(error)}",
            fix="see `ip addr show lo`, `ulimit -n` and the firewall's rules for the loopback device",
        )
    try:
        with socket.create_server(("", rendezvous)):
            pass
    except OSError as error:
        return Check(
            name="ports",
            status="warning",
            finding=f"port {rendezvous}, torchrun's and deepspeed's default, is taken: {_reason(error)}",
            fix="`shardwise train` finds a free one; give the others --master_port, or see `ss -ltnp`",
            facts=facts,
        )
    finding = f"a free port on 127.0.0.1, and {rendezvous} for torchrun and deepspeed"
    return Check(name="ports", status="ok", finding=finding, facts=facts)


def _reason(error: OSError) -> str:
    """Without the address that newer versions of Python add."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _path() -> str:
    """With the tools of this virtual environment, as workers get it (launch/worker.py)."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _file(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
