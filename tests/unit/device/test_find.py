"""Which device a machine has, and what is said where it has none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from recorded import MACHINES, device
from shardwise.device import NoDevice, Replay
from shardwise.device import find as find_module
from shardwise.device.find import REPLAY, find, unseen_vendor
from shardwise.errors import MachineError, render

NONE, BROKEN = NoDevice("there is no driver"), NoDevice("the driver fails", broken=True)


@pytest.fixture(autouse=True)
def _no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPLAY, raising=False)


def test_the_first_vendor_with_gpus_counts_then_one_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = device("h200x8")
    for devices, expected in (
        ([NONE, gpus], gpus), ([BROKEN, gpus], gpus), ([NONE, BROKEN], BROKEN), ([NONE, NONE], NONE),
    ):  # fmt: skip
        monkeypatch.setattr(find_module, "VENDORS", [lambda one=one: one for one in devices])
        assert find() is expected


def test_a_driver_that_hangs_is_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_module, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(find_module, "VENDORS", [lambda: time.sleep(2)])
    found = find()
    assert isinstance(found, NoDevice)
    assert (found.broken, found.reason) == (True, "the GPU driver did not answer within 0 s")


def test_a_recorded_machine_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLAY, str(MACHINES / "l40sx4.json"))
    found = find()
    assert isinstance(found, Replay)
    assert [card.name for card in found.cards] == ["NVIDIA L40S"] * 4
    monkeypatch.setenv(REPLAY, "none")
    assert isinstance(find(), NoDevice)


@pytest.mark.parametrize("text", [None, "[]", "{}", '{"gpus": [{}]}', "no JSON"])
def test_a_file_that_is_no_recorded_machine_is_an_error(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "device.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(REPLAY, str(file))
    with pytest.raises(MachineError) as caught:
        find()
    assert str(file) in render(caught.value)


@pytest.mark.parametrize(
    ("build", "vendor"),
    [("2.13.0+rocm7.1", "AMD"), ("2.13.0+xpu", "Intel"), ("2.13.0+cpu", None), ("2.13.0", None)],
)
def test_a_torch_for_gpus_that_cannot_be_seen_is_named(
    build: str, vendor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_module, "version", lambda _: build)
    said = unseen_vendor()
    assert (said is None) is (vendor is None)
    assert vendor is None or (f"built for {vendor} GPUs" in str(said) and "--processes" in str(said))


def test_looking_for_a_device_imports_no_torch() -> None:
    code = "import sys; from shardwise.device.find import find; find(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
