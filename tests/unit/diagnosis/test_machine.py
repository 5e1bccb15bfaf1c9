"""What is seen of the machine without starting anything."""

from __future__ import annotations

import json
import py_compile
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardwise.diagnosis import machine
from shardwise.units import GIB


def room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=free, used=0, free=free))


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


def test_this_machine_has_all_checks_and_each_says_something(tmp_path: Path) -> None:
    checks = list(machine.checks(gpus=0, cache=tmp_path, runs=tmp_path / "runs"))
    assert [check.name for check in checks] == [
        "Python", "compilers", "host memory", "shared memory", "disk for runs", "disk for the cache", "ports",
    ]  # fmt: skip
    assert all(check.finding for check in checks)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("free", "status"), [(100 * GIB, "ok"), (5 * GIB, "warning")])
def test_room_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    room(monkeypatch, free)
    check = machine.disk("disk for runs", tmp_path)
    assert (check.status, check.facts["free_bytes"]) == (status, free)
    assert ("`output` in the job" in check.fix) == (status == "warning")


def test_a_disk_that_takes_no_more_is_a_problem(tmp_path: Path) -> None:
    """The kernel refuses the bytes, by a limit on the size of files."""
    script = f"""
import json, pathlib, resource, signal
from shardwise.diagnosis.machine import disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(json.dumps(disk("disk for the cache", pathlib.Path({str(tmp_path)!r})).to_json()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    check = json.loads(done.stdout)
    assert check["status"] == "problem"
    assert check["finding"] == f"{tmp_path} cannot be written: File too large"
    assert check["fix"] == (
        "make room, or name another place (the environment variables SHARDWISE_CACHE and HF_HOME)"
    )
    assert list(tmp_path.iterdir()) == []


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = machine.shared_memory(gpus=4, folder=tmp_path / "none")
    assert (missing.status, "--shm-size" in missing.fix) == ("problem", True)
    assert machine.shared_memory(gpus=1, folder=tmp_path / "none").status == "warning"
    room(monkeypatch, 64 * 2**20)  # Docker's default
    little = machine.shared_memory(gpus=4)
    assert (little.status, little.finding[:11]) == ("warning", "64 MiB free")
    room(monkeypatch, 8 * GIB)
    assert machine.shared_memory(gpus=4).status == "ok"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        taken = machine.ports(port)
    assert taken.status == "warning"
    assert taken.finding == (
        f"port {port}, torchrun's and deepspeed's default, is taken: Address already in use"
    )
    assert "--master_port" in taken.fix
    assert machine.ports(port).status == "ok"


def test_a_machine_without_a_loopback_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    check = machine.ports()
    assert (check.status, "127.0.0.1: Cannot assign" in check.finding) == ("problem", True)


@pytest.mark.parametrize(("unset", "status"), [(False, "warning"), (True, "ok")])
def test_packages_that_each_start_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: bool, status: str
) -> None:
    """A container's PYTHONDONTWRITEBYTECODE: importing PEFT took 17.6 s there, and 8.4 s without it."""
    (tmp_path / "peft.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", not unset)
    found = machine.python()
    assert found.status == status
    assert ("compiles peft again" in found.finding) != unset
    py_compile.compile(str(tmp_path / "peft.py"))
    assert machine.python().status == "ok"


def test_missing_compilers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcc", "ninja"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    check = machine.compiler()
    assert check.status == "warning"
    assert check.finding.startswith("C++ compiler missing: ")
    assert "build-essential" in check.fix


def test_memory_says_what_an_offloaded_optimizer_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 64 * GIB)
    available(monkeypatch, 32 * GIB)
    check = machine.memory()
    assert check.status == "ok"
    assert check.finding.endswith("an offloaded optimizer of up to 2.15B parameters")  # 32 GiB / 16 bytes
    available(monkeypatch, 2 * GIB)
    assert machine.memory().status == "warning"
