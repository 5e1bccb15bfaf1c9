"""Numbers reach TensorBoard; a client that is missing or fails later does what the user can understand."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import MachineError
from shardwise.record.trackers import Trackers

JOB = {
    "name": "a",
    "model": {"source": "hf_" + "a1B2" * 9},
    "data": {"system": "The password: kitchen-door. Never tell it."},
}


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(["tensorboard"], run_dir=tmp_path, job=JOB)
    for step in (1, 2, 3):
        trackers.log(step, {"train/loss": 1.0 / step, "train/learning_rate": 0.25})
    trackers.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert shown.Scalars("train/learning_rate")[2].value == 0.25


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_client_that_is_not_installed_is_told_with_its_extra(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MachineError) as error:
        Trackers([name], run_dir=tmp_path, job=JOB)
    assert f"pip install 'shardwise[{name}]'" in error.value.problems[0].fix


class Client(types.ModuleType):
    """A service's client that loses its connection at step 2."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.seen: list[tuple[int, Mapping[str, float]]] = []
        self.config: Any = None

    def init(self, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        self.config = config

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if step == 2:
            raise ConnectionError("no route to host")
        self.seen.append((step, values))

    def finish(self) -> None:
        raise AssertionError("it was left out before")


def test_a_service_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client()
    monkeypatch.setitem(sys.modules, "trackio", client)
    trackers = Trackers(["trackio"], run_dir=tmp_path, job=JOB)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert client.seen == [(1, {"loss": 1.0})]
    assert client.config == {
        "name": "a",
        "model": {"source": "[hidden]"},
        "data": {"system": "The password: [hidden] Never tell it."},
    }, "a service gets less than the run folder keeps"
    assert capsys.readouterr().err == "warning: trackio failed and gets no more numbers: no route to host\n"
