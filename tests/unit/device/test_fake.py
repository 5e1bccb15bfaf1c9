"""The fake driver: what NVML would answer, from a file that several processes share."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from shardwise.device import NoDevice, NoPermission, Unavailable
from shardwise.device.fake import FakeNvml, create
from shardwise.device.find import REPLAY, find
from shardwise.device.nvml import Nvml, open_nvml
from shardwise.errors import MachineError

GPU = "GPU-fake-0"


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def fake(folder: Path, cards: int = 1, **changes: object) -> tuple[FakeNvml, Nvml, Clock]:
    """A machine whose time stands still until the test moves it."""
    clock, file = Clock(), create(folder / "gpus.json", cards, **changes)  # type: ignore[arg-type]
    nvml = FakeNvml(file, clock=clock)
    for number in range(cards):
        with nvml.changing() as state:
            state["gpus"][number]["seconds"] = clock.seconds
    device = open_nvml(nvml)
    assert isinstance(device, Nvml)
    return nvml, device, clock


def test_it_is_found_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLAY, f"fake:{create(tmp_path / 'gpus.json', 4)}")
    device = find()
    assert [card.name for card in device.cards] == ["NVIDIA H200"] * 4
    assert device.read(GPU, "power_limit_watts") == 700.0
    assert device.limit_power(GPU, 450.0) is None
    assert find().read(GPU, "power_limit_watts") == 450.0
    for text in ("", "{}", '{"gpus": [{}]}', "[]"):
        (tmp_path / "bad.json").write_text(text)
        monkeypatch.setenv(REPLAY, f"fake:{tmp_path / 'bad.json'}")
        with pytest.raises(MachineError, match="names no recorded or fake device"):
            find()


def test_the_energy_counter_moves_in_ticks_and_follows_load_and_limit(tmp_path: Path) -> None:
    nvml, device, clock = fake(tmp_path, joules=5.0, counted_joules=5.0)
    nvml.change(GPU, load=1.0)  # 690 W
    clock.seconds += 0.25
    assert device.read(GPU, "energy_joules") == pytest.approx(5 + 0.2 * 690)
    device.limit_power(GPU, 300.0)
    clock.seconds += 0.04  # still the same tick
    assert device.read(GPU, "energy_joules") == pytest.approx(5 + 0.2 * 690)
    clock.seconds += 0.71
    assert device.read(GPU, "energy_joules") == pytest.approx(5 + 0.25 * 690 + 0.75 * 300)
    nvml.change(GPU, load=0.2)  # 75 + 0.2 * 615 = 198 W, below the limit
    clock.seconds += 1000.0
    assert device.read(GPU, "energy_joules") == pytest.approx(5 + 0.25 * 690 + 0.75 * 300 + 198_000)
    assert device.read(GPU, "power_watts") == 198.0


def test_a_limit_that_binds_is_a_power_cap_and_slows_the_clock(tmp_path: Path) -> None:
    nvml, device, _ = fake(tmp_path)
    assert device.read(GPU, "clock_reasons") == 0x1, "idle"
    nvml.change(GPU, load=1.0)
    assert (device.read(GPU, "clock_reasons"), nvml.clock_ratio(GPU)) == (0, 1.0)
    device.limit_power(GPU, 300.0)
    assert device.read(GPU, "clock_reasons") == 0x4
    assert nvml.clock_ratio(GPU) == pytest.approx((225 / 615) ** (1 / 3))
    assert nvml.nvmlDeviceGetClockInfo(GPU, 1) == round(1980 * (225 / 615) ** (1 / 3))
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.nvmlClocksEventReasonSwPowerCap == 0x4


def test_what_real_cards_refuse_is_refused(tmp_path: Path) -> None:
    nvml, device, _ = fake(tmp_path)
    for watts in (199.0, 701.0):
        assert device.limit_power(GPU, watts) == Unavailable(reason="NVML: Invalid Argument")
    with nvml.changing() as state:
        state["root"] = False
    assert device.limit_power(GPU, 300.0) == NoPermission(reason="NVML: Insufficient Permissions")
    assert nvml.state()["calls"] == []
    assert device.limit_power("GPU-other", 300.0) == Unavailable(reason="NVML shows no GPU GPU-other")
    nvml.change(GPU, power_min_watts=None)
    assert device.read(GPU, "power_min_watts") == Unavailable(reason="NVML: Not Supported")
    nvml.change(GPU, lost=True)
    assert device.read(GPU, "power_watts") == Unavailable(reason="NVML: GPU is lost")
    assert isinstance(open_nvml(FakeNvml(nvml.file)), NoDevice)


def test_calls_fail_from_one_to_another_in_all_processes_together(tmp_path: Path) -> None:
    nvml, device, _ = fake(tmp_path)
    with nvml.changing() as state:
        state["fails"] = {"nvmlDeviceGetPowerUsage": {"from": 2, "until": 3, "error": 999}}
    answers = [device.read(GPU, "power_watts")]
    child = os.fork()
    if not child:
        os._exit(isinstance(device.read(GPU, "power_watts"), Unavailable))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    answers += [device.read(GPU, "power_watts") for _ in range(2)]
    assert [isinstance(answer, Unavailable) for answer in answers] == [False, True, False]


def test_every_change_is_recorded_though_processes_write_at_once(tmp_path: Path) -> None:
    _, device, _ = fake(tmp_path, 2)
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            for watts in range(300, 320):
                device.limit_power(f"GPU-fake-{number % 2}", float(watts))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    calls = json.loads((tmp_path / "gpus.json").read_text())["calls"]
    assert len(calls) == 80
    assert {call["pid"] for call in calls} == set(children)
    assert set(calls[0]) == {"function", "uuid", "before", "value", "pid", "seconds"}


def test_without_persistence_mode_limits_last_as_long_as_a_client(tmp_path: Path) -> None:
    nvml, device, _ = fake(tmp_path, persistence=0)
    device.limit_power(GPU, 300.0)
    open_nvml(FakeNvml(nvml.file))
    assert device.read(GPU, "power_limit_watts") == 300.0
    nvml.nvmlShutdown()
    nvml.nvmlShutdown()
    assert device.read(GPU, "power_limit_watts") == 700.0
    nvml.nvmlInit()
    device.limit_power(GPU, 300.0)
    nvml.nvmlDeviceSetPersistenceMode(GPU, 1)
    nvml.nvmlShutdown()
    assert device.read(GPU, "power_limit_watts") == 300.0


def test_it_stands_in_for_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and errors are the real ones, and no function of it reaches the real library."""
    real = pytest.importorskip("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake(tmp_path)[0])
    import pynvml

    assert pynvml.NVML_FEATURE_ENABLED == real.NVML_FEATURE_ENABLED
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    fields = [(pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_GPU), 1]
    found = pynvml.nvmlDeviceGetFieldValues(handle, fields)
    assert [one.nvmlReturn for one in found] == [0, real.NVML_ERROR_NOT_SUPPORTED]
    assert found[0].value.uiVal == 75_000
    for name in ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceGetBoardId", "_nvmlGetFunctionPointer"):
        with pytest.raises(real.NVMLError_NotSupported):
            getattr(pynvml, name)(handle)
    with pytest.raises(AttributeError):
        pynvml.no_such_name  # noqa: B018


def test_one_card_may_be_slow_to_answer(tmp_path: Path) -> None:
    nvml, device, _ = fake(tmp_path, cards=2)
    with nvml.changing() as state:
        state["slow_seconds"]["GPU-fake-1"] = 0.3
    taken = []
    for uuid in (GPU, "GPU-fake-1"):
        began = time.monotonic()
        assert device.read(uuid, "power_limit_watts") == 700.0
        taken.append(time.monotonic() - began >= 0.3)
    assert taken == [False, True]
