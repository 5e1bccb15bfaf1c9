"""Starting nodes over ssh, with a program in the place of ssh that runs the command here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import MachineError, render
from shardwise.launch import ssh
from shardwise.launch.hostfile import Host
from shardwise.launch.nodes import SECRET

NODE = """
import os, signal, sys, time
rank = sys.argv[sys.argv.index("--node-rank") + 1]
print("node", rank, flush=True)
open(f"rank-{rank}", "w").write(" ".join(sys.argv[1:]) + "\\n" + os.environ["SHARDWISE_SECRET"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program `ssh`; `python -m shardwise` runs `node.py` there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text('#!/bin/sh\nexec sh -c "$(eval echo \\"\\${$#}\\")"\n')
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr(ssh, "_ALONE_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder: Path, node: str, *, count: int = 2) -> int:
    hosts = [Host(name=f"n{number}", slots=None, where=f"hosts:{number}") for number in range(count)]
    script = folder / "node.py"
    script.write_text(NODE + node)
    real = ssh.sys.executable
    try:  # `python -P -m shardwise train ...` becomes `python node.py train ...`
        ssh.sys.executable = str(folder / "python")
        (folder / "python").write_text(
            f'#!/bin/sh\n[ "$3" = shardwise ] && shift 3 && exec {real} {script} "$@"\nexec {real} "$@"\n'
        )
        (folder / "python").chmod(0o755)
        place = {"rendezvous": "127.0.0.1:29500", "workdir": folder, "run_dir": folder / "run"}
        return ssh.launch_on(hosts, ["train", "job.yaml"], **place)  # type: ignore[arg-type]
    finally:
        ssh.sys.executable = real
        assert not list(folder.glob("shardwise-*"))


def test_every_node_gets_its_rank_and_the_same_secret(folder: Path) -> None:
    assert train(folder, "", count=3) == 0
    told = [(folder / f"rank-{rank}").read_text().splitlines() for rank in range(3)]
    meeting = "train job.yaml --nodes 3 --rendezvous 127.0.0.1:29500 --node-rank"
    assert [line for line, _ in told] == [f"{meeting} {rank}" for rank in range(3)]
    assert len({secret for _, secret in told}) == 1
    assert len(told[0][1]) == 64


def test_the_exit_code_is_the_first_node_s_or_another_s(folder: Path) -> None:
    assert train(folder, "sys.exit(75)") == 75
    assert train(folder, "time.sleep(1); sys.exit(0 if rank == '0' else 4)") == 4


def test_what_the_others_print_is_kept_with_the_run(folder: Path) -> None:
    made = 'import pathlib; pathlib.Path("run").mkdir(exist_ok=True)\n'
    made += 'for name in ("job.yaml", "plan.json"): open(f"run/{name}", "w").close()\n'
    assert train(folder, made) == 0
    assert (folder / "run" / "logs" / "node-1.log").read_text().splitlines()[1] == "node 1"


def test_nobody_waits_for_a_node_that_has_failed_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    with pytest.raises(MachineError) as caught:
        train(folder, "if rank == '0': time.sleep(60)\nprint('error: no such flag'); sys.exit(2)")
    assert time.monotonic() - begun < 30
    assert caught.value.exit_code == 2
    assert "node 1 (n1) ended before it had met the others" in render(caught.value)
    assert "\nerror: no such flag\n---" in capsys.readouterr().err


def test_a_signal_goes_to_the_first_node_alone(folder: Path) -> None:
    body = "signal.signal(10, lambda *_: sys.exit(75))\n"
    body += "open('ready', 'w').close() if rank == '0' else None\n"
    body += "end = time.time() + (60 if rank == '0' else 3)\nwhile time.time() < end: time.sleep(0.1)\n"
    body += "sys.exit(75)"
    waiting = "import os, time\nwhile not os.path.exists('ready'): time.sleep(0.05)\n"
    waiting += f"time.sleep(0.3); os.kill({os.getpid()}, {int(signal.SIGUSR1)})"
    sender = subprocess.Popen([sys.executable, "-c", waiting], cwd=folder)
    begun = time.monotonic()
    assert train(folder, body) == 75
    assert time.monotonic() - begun < 30
    sender.wait(10)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
