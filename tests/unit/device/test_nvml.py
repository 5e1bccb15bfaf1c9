# ruff: noqa: N802
"""NVML's answers as the seam's values, from a stand-in for pynvml; and the real library without a driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from shardwise.device import NoDevice, Paths, Reading, Unavailable
from shardwise.device.nvml import Nvml, open_nvml

Link = tuple[str, int]
"""What a link leads to, and its state: `("switch", 1)`, or a GPU's number as text."""


class FakeNvml:
    """The part of pynvml that is used. A handle is the GPU's number."""

    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_ERROR_NO_PERMISSION = 4
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    nvmlMemory_v2 = 2  # noqa: N815

    class NVMLError(Exception):
        def __init__(self, value: int = 3) -> None:
            super().__init__({3: "Not Supported", 9: "Driver Not Loaded"}.get(value, f"error {value}"))
            self.value = value

    def __init__(
        self,
        gpus: int = 1,
        *,
        links: Mapping[int, Sequence[Link]] | None = None,
        level: Callable[[int, int], int] = lambda one, other: 50,
        fails: Mapping[str, int] | None = None,
        locked: Sequence[int] = (),
    ) -> None:
        """`fails`: error numbers by function; `locked`: GPUs this process may not use."""
        self.gpus, self.links, self.level = gpus, links or {}, level
        self.fails, self.locked = dict(fails or {}), locked
        self.mig = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return partial(self._fail, name) if name.startswith("nvml") and name in self.fails else found

    def _fail(self, name: str, *_: Any) -> None:
        raise self.NVMLError(self.fails[name])

    def nvmlInit(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number in self.locked:
            raise self.NVMLError(self.NVML_ERROR_NO_PERMISSION)
        return number + 1  # handles are not numbers that may be guessed

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: int = 1) -> Any:
        """Version 1 counts what the driver reserves as used."""
        return SimpleNamespace(total=143771 << 20, used=(5 << 20) if version == 2 else (620 << 20))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:
        return 16

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [self.mig, 1 - self.mig]  # the pending mode is not the present one

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        return 4891215

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 77454

    def nvmlDeviceGetPowerManagementLimit(self, gpu: int) -> int:
        return 450000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, gpu: int) -> int:
        return 700000

    def nvmlDeviceGetPowerManagementLimitConstraints(self, gpu: int) -> list[int]:
        return [200000, 710000]

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return {0: 61}[sensor]

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        return {1: 1755, 2: 3201}[clock]

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, clock: int) -> int:
        return {1: 1980}[clock]

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=98, memory=40)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 0x21

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=3 << 30), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        return self._link(gpu, link)[1]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if self._link(gpu, link)[0] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        end = self._link(gpu, link)[0]
        assert end != "switch", "a switch gives FFFFFFFF:FF:FF.0"
        return SimpleNamespace(busId=f"0000:0{int(end)}".encode())

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=f"0000:0{gpu - 1}".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self.level(one - 1, other - 1)

    def _link(self, gpu: int, link: int) -> Link:
        links = self.links.get(gpu - 1, ())
        if link >= len(links):
            raise self.NVMLError(2)
        return links[link]


def nvml(*arguments: Any, **keywords: Any) -> Nvml:
    found = open_nvml(FakeNvml(*arguments, **keywords))
    assert isinstance(found, Nvml)
    return found


def test_a_card_is_described() -> None:
    (card,) = nvml().cards
    assert (card.index, card.uuid, card.name) == (0, "GPU-1", "NVIDIA H200")
    assert (card.memory_bytes, card.pcie_generation, card.pcie_lanes) == (143771 << 20, 5, 16)
    assert (card.compute_capability, card.divided) == ("9.0", False)
    assert nvml().driver_version() == "580.95.05"


def test_mig_is_the_present_mode_and_none_where_a_gpu_has_none() -> None:
    library = FakeNvml()
    library.mig = 1
    assert open_nvml(library).cards[0].divided
    assert not nvml(fails={"nvmlDeviceGetMigMode": 3}).cards[0].divided


def test_readings_have_the_units_of_their_names() -> None:
    device = nvml()
    assert {what: device.read("GPU-1", what) for what in get_args(Reading)} == {
        "memory_used_bytes": 5 << 20,
        "energy_joules": 4891.215,
        "power_watts": 77.454,
        "power_limit_watts": 450.0,
        "power_default_watts": 700.0,
        "power_min_watts": 200.0,
        "power_max_watts": 710.0,
        "temperature_celsius": 61,
        "sm_clock_mhz": 1755,
        "sm_clock_max_mhz": 1980,
        "memory_clock_mhz": 3201,
        "utilization_fraction": 0.98,
        "clock_reasons": 0x21,
    }


def test_the_clock_bits_that_mean_trouble_are_nvmls() -> None:
    pynvml = pytest.importorskip("pynvml")
    bits = ("ApplicationsClocksSetting", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown",
            "HwPowerBrakeSlowdown")  # fmt: skip
    assert set(Nvml.clock_reasons) == {getattr(pynvml, f"nvmlClocksEventReason{bit}") for bit in bits}
    ordinary = ("GpuIdle", "SwPowerCap", "SyncBoost", "DisplayClockSetting")
    named = {getattr(pynvml, f"nvmlClocksEventReason{bit}") for bit in ordinary}
    assert set(Nvml.ordinary_clock_reasons) == named


def test_a_reading_that_fails_has_a_reason_and_the_others_are_read() -> None:
    device = nvml(fails={"nvmlDeviceGetTotalEnergyConsumption": 3, "nvmlDeviceGetMaxPcieLinkWidth": 3})
    assert device.read("GPU-1", "energy_joules") == Unavailable(reason="NVML: Not Supported")
    assert device.read("GPU-1", "power_watts") == 77.454
    assert isinstance(device.cards[0].pcie_lanes, Unavailable)
    for missing in (device.read("GPU-other", "power_watts"), device.processes("GPU-other")):
        assert missing == Unavailable(reason="NVML shows no GPU GPU-other")


def test_processes_by_id() -> None:
    found = nvml().processes("GPU-1")
    assert not isinstance(found, Unavailable)
    assert found[7] == 3 << 30
    assert isinstance(found[8], Unavailable)
    assert isinstance(nvml(fails={"nvmlDeviceGetComputeRunningProcesses": 3}).processes("GPU-1"), Unavailable)


def paths(*arguments: Any, **keywords: Any) -> Paths:
    return nvml(*arguments, **keywords).paths()


def test_a_switch_joins_every_pair_with_all_links() -> None:
    """Two H200 in a virtual machine answered so: 18 links to switches, then an error; PHB over PCIe."""
    links = {0: [("switch", 1)] * 18, 1: [("switch", 1)] * 18}
    assert paths(2, links=links, level=lambda *_: 30) == {(0, 1): "NV18", (1, 0): "NV18"}


def test_a_gpu_without_links_to_the_switch_is_joined_by_pcie_and_one_with_fewer_by_those() -> None:
    assert set(paths(2, links={0: [("switch", 1)] * 18}).values()) == {"SYS"}
    assert set(paths(2, links={0: [("switch", 1)] * 18, 1: [("switch", 1)] * 12}).values()) == {"NV12"}


def test_links_between_two_gpus_are_counted_for_each_pair() -> None:
    """A corner of a V100 mesh: 2 links to GPU 1, one to GPU 2, none between 1 and 2."""
    links = {0: [("1", 1), ("2", 1), ("1", 1)], 1: [("0", 1), ("0", 1)], 2: [("0", 1)]}
    assert paths(3, links=links) == {
        (0, 1): "NV2", (1, 0): "NV2", (0, 2): "NV1", (2, 0): "NV1", (1, 2): "SYS", (2, 1): "SYS",
    }  # fmt: skip


def test_a_link_that_is_down_or_leads_to_a_gpu_elsewhere_joins_nothing() -> None:
    links = {0: [("1", 0), ("9", 1), ("1", 1)], 1: [("0", 0), ("9", 1), ("0", 1)]}
    assert paths(2, links=links) == {(0, 1): "NV1", (1, 0): "NV1"}
    assert set(paths(2, links={0: [("9", 1)], 1: [("9", 1)]}).values()) == {"SYS"}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("INTERNAL", "PIX"),
        ("SINGLE", "PIX"),
        ("MULTIPLE", "PXB"),
        ("HOSTBRIDGE", "PHB"),
        ("NODE", "NODE"),
        ("SYSTEM", "SYS"),
    ],
)
def test_without_nvlink_the_pcie_topology_counts(name: str, path: str) -> None:
    level = getattr(pytest.importorskip("pynvml"), f"NVML_TOPOLOGY_{name}")
    assert paths(2, level=lambda *_: level) == {(0, 1): path, (1, 0): path}


def test_a_topology_that_is_hidden_is_not_known() -> None:
    assert paths(2, fails={"nvmlDeviceGetTopologyCommonAncestor": 3}) == {}


def test_gpus_this_process_may_not_use_do_not_count() -> None:
    """CUDA numbers those that are left from 0."""
    assert [(card.index, card.uuid) for card in nvml(3, locked=[1]).cards] == [(0, "GPU-1"), (1, "GPU-3")]


@pytest.mark.parametrize(
    ("fails", "gpus", "broken", "reason"),
    [
        ({"nvmlInit": 12}, 1, False, "there is no NVIDIA driver"),
        ({"nvmlInit": 9}, 1, True, "NVML: Driver Not Loaded"),
        ({"nvmlDeviceGetHandleByIndex": 15}, 2, True, "NVML: error 15"),  # a GPU is lost
        ({}, 0, True, "shows no GPU"),
    ],
)
def test_no_driver_is_not_a_broken_one(fails: dict[str, int], gpus: int, broken: bool, reason: str) -> None:
    device = open_nvml(FakeNvml(gpus, fails=fails))
    assert isinstance(device, NoDevice)
    assert (device.broken, device.cards, device.paths()) == (broken, [], {})
    assert reason in device.reason
    for answer in (device.driver_version(), device.read("GPU-1", "power_watts"), device.processes("GPU-1")):
        assert isinstance(answer, Unavailable)
        assert reason in answer.reason


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = open_nvml()
    assert isinstance(device, NoDevice)
    assert device.broken
    assert "pip install nvidia-ml-py" in device.reason


def test_the_real_library_has_every_name_that_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert (pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM) == (0, 1, 2)
    assert len(names) > 25
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_the_real_library_without_a_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert isinstance(open_nvml(), NoDevice)
    else:
        pytest.skip("there is a driver")
