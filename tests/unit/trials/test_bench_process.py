"""A row's processes end: by themselves, at the time limit, and with the bench that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shardwise.launch.spec import LaunchSpec
from shardwise.trials import process

SPEC = LaunchSpec(job={}, run_dir="runs/x", processes=1)

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], process_group=0)  # as the launcher's workers have
print("started", flush=True)
open(sys.argv[1] + ".pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def run(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, *, timeout: float = 30.0) -> int | None:
    monkeypatch.setattr(process, "LAUNCHER", ("-c", code))
    return process.run_to_the_end(
        SPEC, spec_file=folder / "spec.json", log=folder / "log", timeout_seconds=timeout, look=lambda: None
    )


def gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or " Z " in state.read_text()


def test_the_exit_code_and_what_was_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, sys; print(json.load(open(sys.argv[1]))['run_dir']); sys.exit(3)"
    assert run(tmp_path, code, monkeypatch) == 3
    assert (tmp_path / "log").read_text() == "runs/x\n"


def test_what_hangs_is_ended_with_all_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, HANGS, monkeypatch, timeout=2.0) is None
    pids = [int(pid) for pid in (tmp_path / "spec.json.pids").read_text().split()]
    assert len(pids) == 2
    assert all(map(gone, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """On SIGTERM through `finally`, with all processes; on SIGKILL the kernel ends the launcher."""
    hangs = f"def launch(spec):\n{textwrap.indent(HANGS, '    ')}\n"
    real = "from shardwise.trials import process\nprocess.local.launch = launch\nprocess.main()\n"
    (tmp_path / "hangs.py").write_text(hangs + real)
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom shardwise.trials import process\n"
        "from shardwise.launch.spec import LaunchSpec\n"
        "asked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        f"here = Path({str(tmp_path)!r})\nprocess.LAUNCHER = (str(here / 'hangs.py'),)\n"
        "process.run_to_the_end(LaunchSpec(job={}, run_dir='x', processes=1),\n"
        "    spec_file=here / 'spec.json', log=here / 'log', timeout_seconds=600,\n"
        "    look=lambda: asked and sys.exit(143))\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    pids = tmp_path / "spec.json.pids"
    try:
        until = time.monotonic() + 30
        while not (pids.exists() and pids.read_text().count(" ")) and time.monotonic() < until:
            time.sleep(0.05)
        leader, child = map(int, pids.read_text().split())
        bench.send_signal(number)
        assert bench.wait(30) == (143 if number == signal.SIGTERM else -9)
        until = time.monotonic() + 10
        while not gone(leader) and time.monotonic() < until:
            time.sleep(0.05)
        assert gone(leader)
        assert number == signal.SIGKILL or gone(child)
    finally:
        bench.kill()
        for pid in map(int, pids.read_text().split()):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
