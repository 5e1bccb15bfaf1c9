"""The program that starts a node on another host: what it passes on, and that the node never outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.launch.remote import greeting

SAVES = """
import os, signal, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
time.sleep(60)
"""
DEAF = SAVES.replace('signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75))', "15, 1")


@contextlib.contextmanager
def agent(stop_seconds: float = 120.0) -> Iterator[subprocess.Popen[str]]:
    code = f"import sys, shardwise.launch.remote as r; r.STOP_SECONDS = {stop_seconds}; sys.exit(r.main())"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process


def order(process: subprocess.Popen[str], *command: str, **environment: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"command": command, "environment": environment}) + "\n")
    process.stdin.flush()


def pid_in(path: Path) -> int:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError("it did not start")


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_output_environment_and_exit_code_are_passed_on() -> None:
    with agent() as process:
        code = "import os, sys; print(os.environ['NAME']); print('and errors', file=sys.stderr); sys.exit(7)"
        order(process, sys.executable, "-c", code, NAME="value")
        assert process.stdout is not None
        assert process.wait(60) == 7
        assert process.stdout.read().splitlines() == [greeting(), "value", "and errors"]


def test_a_killed_node_is_an_exit_code_as_a_shell_gives_it() -> None:
    with agent() as process:
        order(process, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
        assert process.wait(60) == 128 + 9


def test_without_an_order_it_ends() -> None:
    with agent() as process:
        out, _ = process.communicate("", timeout=60)
    assert out.splitlines() == [greeting()]


def test_when_the_line_closes_the_node_saves(tmp_path: Path) -> None:
    with agent() as process:
        order(process, sys.executable, "-c", SAVES, str(tmp_path / "pid"))
        pid = pid_in(tmp_path / "pid")
        time.sleep(0.5)  # until it has its handler
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.wait(30) == 75
        assert process.stdout.read().splitlines()[-1] == "saved"
        assert gone(pid)


@pytest.mark.parametrize("killed", [False, True], ids=["it does not listen", "the program is killed"])
def test_the_node_never_stays(killed: bool, tmp_path: Path) -> None:
    with agent(stop_seconds=0.5) as process:
        order(process, sys.executable, "-c", DEAF, str(tmp_path / "pid"))
        pid = pid_in(tmp_path / "pid")
        time.sleep(0.5)
        assert process.stdin is not None
        if killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            process.stdin.close()
        assert process.wait(30) == (-9 if killed else 128 + 9)
        assert gone(pid)
