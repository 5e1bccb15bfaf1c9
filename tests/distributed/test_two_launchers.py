"""Two nodes with disks of their own, as two launchers of this machine; tests/machines has real borders."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_command import Command
from harness import steps_of
from test_command_line import write_job

from shardwise.launch.nodes import free_port

pytestmark = pytest.mark.slow


def on_both(folders: list[Path], *arguments: str) -> None:
    nodes = ["--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--processes", "1"]
    both = [
        Command("train", *arguments, *nodes, "--node-rank", str(rank), cwd=folder)
        for rank, folder in enumerate(folders)
    ]
    ends = [command.finish() for command in both]
    assert [code for code, _, _ in ends] == [0, 0], ends


def test_a_run_is_resumed_where_only_the_first_node_has_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_job(folder)
    on_both(folders, "job.yaml", "--max-steps", "2")
    assert not (folders[1] / "runs/run/events.jsonl").exists()
    on_both(folders, "runs/run", "--resume", "--max-steps", "3")
    assert [step["step"] for step in steps_of(folders[0] / "runs/run")] == [1, 2, 3]
