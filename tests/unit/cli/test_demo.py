"""How many processes the demo asks for."""

from __future__ import annotations

import pytest

from shardwise.cli.demo import demo


@pytest.mark.parametrize(("gpus", "cores", "processes"), [(1, 16, 1), (8, 64, 2), (0, 8, 2), (0, 1, 1)])
def test_the_demo_takes_as_many_processes_as_there_are_gpus_but_two_at_most(
    tmp_path, monkeypatch, gpus, cores, processes
):
    asked = []
    monkeypatch.setattr("shardwise.cli.main", lambda command: asked.append(command) or 0)
    monkeypatch.setattr("shardwise.hardware.detect.gpu_count", lambda: gpus)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert demo(tmp_path / "demo") == 0
    assert asked[1] == ["train", "job.yaml", "--processes", str(processes)]
