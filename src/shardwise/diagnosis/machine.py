"""What can be checked without starting a process: Python, compilers, memory, disks, ports."""

import errno
import os
import platform
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from shardwise.diagnosis import Check
from shardwise.hardware.detect import cpu_cores, host_memory_bytes
from shardwise.record.environment import versions
from shardwise.units import GIB, count, gib, size

LEAST_PYTHON = (3, 11)
RENDEZVOUS_PORT = 29500  # of torchrun, `deepspeed` and accelerate; shardwise looks for a free port
LITTLE_DISK = 20 * GIB  # a 7B model's weights in bf16 are 13 GB
LITTLE_SHM = GIB  # NCCL and data loaders take tens to hundreds of MB; Docker gives 64 MiB
LITTLE_MEMORY = 4 * GIB
SHM = Path("/dev/shm")  # noqa: S108 - the place itself is meant
OFFLOAD_BYTES = 16  # per parameter whose optimizer is offloaded: fp32 weight, gradient and two moments
OTHER_PLACE = {
    "disk for runs": "`output` in the job",
    "disk for the cache": "the environment variables SHARDWISE_CACHE and HF_HOME",
}


def checks(*, gpus: int, cache: Path, runs: Path) -> Iterator[Check]:
    """`gpus`: how many will train. `cache`, `runs`: folders that will be written."""
    yield from (python(), compiler(), memory(), shared_memory(gpus=gpus))
    yield from (disk("disk for runs", runs), disk("disk for the cache", cache), ports())


def python() -> Check:
    """The interpreter and its installed packages."""
    facts = {"executable": sys.executable, "versions": versions()}
    old = sys.version_info[:2] < LEAST_PYTHON
    finding, fix = f"{platform.python_version()} in {sys.prefix}", "use 3.11 or newer" if old else ""
    if not old and sys.dont_write_bytecode and (slow := _not_compiled()):
        finding = f"PYTHONDONTWRITEBYTECODE is set: each start compiles {' and '.join(slow)} again"
        fix = "unset it: PEFT is then imported in half the time"
        return Check("Python", "warning", finding, fix, facts)
    return Check("Python", "problem" if old else "ok", finding, fix, facts)


def _not_compiled() -> list[str]:
    """Packages without a file of bytecode: images of containers leave them out to be small."""
    found = {name: find_spec(name) for name in ("torch", "transformers", "peft")}
    return [name for name, spec in found.items() if spec and spec.cached and not Path(spec.cached).exists()]


def compiler() -> Check:
    """What Triton and DeepSpeed compile with: a C++ compiler, Python's headers, ninja."""
    name, cuda = os.environ.get("CC"), Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    # with the tools of this virtual environment, as workers have them (launch/local.py)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = {
        "C compiler": next(filter(None, map(shutil.which, [name] if name else ["gcc", "clang", "cc"])), None),
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "Python.h": _file(Path(sysconfig.get_paths()["include"]) / "Python.h"),
        "ninja": shutil.which("ninja", path=path),
        "nvcc": shutil.which("nvcc") or _file(cuda / "bin" / "nvcc"),
    }
    missing = [what for what in ("C compiler", "C++ compiler", "Python.h", "ninja") if found[what] is None]
    if missing:
        finding = f"{', '.join(missing)} missing: Triton's kernels or DeepSpeed's ops cannot be built"
        fix = "apt install build-essential python3-dev (of this Python); pip install ninja"
        return Check("compilers", "warning", finding, fix, found)
    nvcc = "nvcc" if found["nvcc"] else "no nvcc, which only DeepSpeed's own GPU operators need"
    return Check("compilers", "ok", f"C, C++, Python's headers, ninja, {nvcc}", facts=found)


def memory() -> Check:
    """Host memory, and how large an offloaded optimizer fits there."""
    total, cores = host_memory_bytes(), cpu_cores()
    available = min(psutil.virtual_memory().available, total)
    facts = {"total_bytes": total, "available_bytes": available, "cpu_cores": cores}
    finding = f"{gib(available)} of {gib(total)} available, {cores} CPU core{'' if cores == 1 else 's'}"
    if available < LITTLE_MEMORY:
        fix = "end other processes, or give the container more memory"
        return Check("host memory", "warning", finding, fix, facts)
    finding += f"; an offloaded optimizer of up to {count(available / OFFLOAD_BYTES)} parameters"
    return Check("host memory", "ok", finding, facts=facts)


def shared_memory(*, gpus: int, folder: Path = SHM) -> Check:
    """The folder in memory through which NCCL's processes and data loaders communicate."""
    name = "shared memory"
    fix = "start the container with --ipc=host or --shm-size=16g, or delete what is left in /dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        finding = f"{folder} cannot be used: {error.strerror}"
        return Check(name, "problem" if gpus > 1 else "warning", finding, fix)
    facts = {"total_bytes": usage.total, "free_bytes": usage.free}
    if usage.free < LITTLE_SHM:
        finding = f"{usage.free / 2**20:.0f} MiB free in {folder}: NCCL between several GPUs may fail"
        return Check(name, "warning", finding, fix, facts)
    return Check(name, "ok", f"{size(usage.free)} free in {folder}", facts=facts)


def disk(name: str, folder: Path) -> Check:
    """Whether `folder`, or the parent it will be made in, can be written, and its free space."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(parent)
    facts = {"folder": str(folder), "free_bytes": usage.free}
    fix = f"make room, or name another place ({OTHER_PLACE[name]})"
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = fix.replace("make room", "give permission")
        return Check(name, "problem", f"{parent} cannot be written: {error.strerror}", fix, facts)
    finding = f"{size(usage.free)} free in {folder}"
    if usage.free < LITTLE_DISK:
        return Check(name, "warning", f"{finding}: little for checkpoints and models", fix, facts)
    return Check(name, "ok", finding, facts=facts)


def ports(rendezvous: int = RENDEZVOUS_PORT) -> Check:
    """Whether processes of this machine can meet on a port of the loopback device."""
    facts: dict[str, int] = {"rendezvous": rendezvous}
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            facts["port"] = server.getsockname()[1]
            socket.create_connection(server.getsockname(), timeout=5.0).close()
    except OSError as error:
        finding = f"two processes cannot meet on 127.0.0.1: {_reason(error)}"
        fix = "see `ip addr show lo`, `ulimit -n` and the firewall's rules for the loopback device"
        return Check("ports", "problem", finding, fix)
    try:
        socket.create_server(("", rendezvous)).close()
    except OSError as error:
        finding = f"port {rendezvous}, torchrun's and deepspeed's default, is taken: {_reason(error)}"
        fix = "`shardwise train` finds a free one; give the others --master_port, or see `ss -ltnp`"
        return Check("ports", "warning", finding, fix, facts)
    finding = f"a free port on 127.0.0.1, and {rendezvous} for torchrun and deepspeed"
    return Check("ports", "ok", finding, facts=facts)


def _reason(error: OSError) -> str:
    """Without the address that newer versions of Python add."""
    return str(error) if error.errno is None else os.strerror(error.errno)


def _file(path: Path) -> str | None:
    return str(path) if path.is_file() else None
