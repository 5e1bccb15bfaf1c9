"""A training process as its launcher starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.launch.spec import LaunchSpec
from shardwise.training import worker


@pytest.mark.parametrize(("rank", "measure_steps", "said"), [("0", None, 1), ("1", None, 0), ("0", 3, 0)])
def test_the_first_rank_of_a_run_says_at_once_that_it_starts(
    rank: str,
    measure_steps: int | None,
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model and the data take ten seconds on a small machine, and hours on large data."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(worker, "_work", lambda _: None)
    spec = LaunchSpec(job={}, run_dir=str(tmp_path / "run"), processes=2, measure_steps=measure_steps)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    assert worker.main([str(tmp_path / "spec.json")]) == 0
    assert capsys.readouterr().err.count("starting: loading the model, preparing the data\n") == said


def test_an_interface_that_this_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError("third_party/gloo/gloo/transport/tcp/device.cc:84: Unable to find address")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "NCCL_DEBUG" in worker._translate(failure).problems[0].fix
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens999")
    fix = worker._translate(failure).problems[0].fix
    assert fix.startswith("unset GLOO_SOCKET_IFNAME: there is no ens999 here, but ")
    assert "lo" in fix


def test_an_operator_that_cannot_be_compiled_is_no_bug() -> None:
    failure = RuntimeError("Unable to JIT load the async_io op due to it not being compatible")
    error = worker._translate(failure)
    assert error.exit_code == 4
    assert error.problems[0].what == "DeepSpeed cannot compile async_io here"
    assert error.problems[0].fix.startswith("apt install libaio-dev")
