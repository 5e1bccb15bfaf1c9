"""Joules and process memory as NVML gives them, and what is said where it does not."""

from __future__ import annotations

import os
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.energy.meter import SAMPLE_SECONDS, Gpu, Unavailable, find_gpu
from shardwise.energy.steps import FIRST, INTERRUPTED, StepJoules

UUID = "GPU-6e3a64d2-0000-1111-2222-333344445555"


class FakeNvml:
    """The part of pynvml that is used, with one GPU of a constant power."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, watts: float = 200.0, missing: tuple[str, ...] = ()) -> None:
        self.watts = watts
        self.missing = missing
        """Functions that this GPU does not support."""
        self.processes: list[Any] = []
        self.seconds = 0.0
        """Since the driver was loaded; the energy counter follows it in steps of 0.1."""

    def nvmlInit(self) -> None:  # noqa: N802
        self._supported("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUID:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:  # noqa: N802
        self._supported("nvmlDeviceGetTotalEnergyConsumption")
        return int(self.watts * 100) * int(self.seconds / 0.1 + 1e-9)

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:  # noqa: N802
        self._supported("nvmlDeviceGetPowerUsage")
        return int(self.watts * 1000)

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[Any]:  # noqa: N802
        self._supported("nvmlDeviceGetComputeRunningProcesses")
        return self.processes

    def _supported(self, name: str) -> None:
        if name in self.missing:
            raise self.NVMLError("Not Supported")


def gpu(nvml: FakeNvml) -> Gpu:
    found = find_gpu(UUID, library=nvml)
    assert isinstance(found, Gpu)
    return found


def test_the_counters_millijoules_become_joules() -> None:
    nvml = FakeNvml(watts=200.0)
    meter = gpu(nvml)
    assert meter.energy_source == "counter"
    before = meter.joules()
    nvml.seconds = 2.55  # the counter stands at 2.5
    time.sleep(3 * SAMPLE_SECONDS)
    after = meter.joules()
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert after - before == pytest.approx(500.0)


def test_without_a_counter_power_is_sampled_and_the_source_says_so() -> None:
    began = time.perf_counter()
    meter = gpu(FakeNvml(watts=200.0, missing=("nvmlDeviceGetTotalEnergyConsumption",)))
    assert meter.energy_source == "power samples"
    time.sleep(0.65)
    joules, seconds = meter.joules(), time.perf_counter() - began
    assert isinstance(joules, float)
    assert 200.0 * (seconds - 0.25) < joules <= 200.0 * seconds


def test_without_counter_and_power_there_are_no_joules_not_zero() -> None:
    missing = ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage")
    joules = gpu(FakeNvml(missing=missing)).joules()
    assert isinstance(joules, Unavailable)
    assert "Not Supported" in joules.reason


def test_a_counter_that_fails_later_is_no_number() -> None:
    nvml = FakeNvml()
    meter = gpu(nvml)
    nvml.missing = ("nvmlDeviceGetTotalEnergyConsumption",)
    time.sleep(3 * SAMPLE_SECONDS)
    assert isinstance(meter.joules(), Unavailable)


@pytest.mark.parametrize(
    ("nvml", "uuid", "reason"),
    [(FakeNvml(missing=("nvmlInit",)), UUID, "Not Supported"), (FakeNvml(), "GPU-other", "GPU-other")],
)
def test_no_driver_and_no_such_gpu_are_reasons(nvml: FakeNvml, uuid: str, reason: str) -> None:
    found = find_gpu(uuid, library=nvml)
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = find_gpu(UUID)
    assert isinstance(found, Unavailable)
    assert "nvidia-ml-py" in found.reason


def test_real_nvml_without_a_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        found = find_gpu(UUID)
        assert isinstance(found, Unavailable)
        assert found.reason.startswith("NVML: ")
    else:
        pytest.skip("there is a driver")


def test_only_this_process_counts() -> None:
    nvml = FakeNvml()
    meter = gpu(nvml)
    assert meter.process_bytes() is None, "the driver shows no processes: a container"
    nvml.processes = [SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=5 << 30)]
    assert meter.process_bytes() is None
    nvml.processes.append(SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30))
    assert meter.process_bytes() == 3 << 30
    nvml.processes[1].usedGpuMemory = None
    assert meter.process_bytes() is None
    nvml.missing = ("nvmlDeviceGetComputeRunningProcesses",)
    assert meter.process_bytes() is None


def reason(joules: float | Unavailable) -> str:
    assert isinstance(joules, Unavailable)
    return joules.reason


def test_a_step_has_the_energy_of_all_gpus_since_the_step_before() -> None:
    steps = StepJoules()
    assert reason(steps.of_step([1_000_000, 5_000_000])) == FIRST
    assert steps.of_step([1_250_000, 5_300_500]) == pytest.approx(550.5)
    assert steps.of_step([1_250_000, 5_300_500]) == 0.0, "the counters have not moved: a short step"


def test_an_evaluation_is_not_charged_to_the_next_step() -> None:
    steps = StepJoules()
    steps.of_step([0])
    steps.interrupt()
    assert reason(steps.of_step([900_000])) == INTERRUPTED
    assert steps.of_step([1_000_000]) == pytest.approx(100.0)


def test_a_gpu_without_a_reading_makes_the_sum_unknown() -> None:
    steps = StepJoules()
    steps.of_step([0, 0])
    assert reason(steps.of_step([1000, None])) == "rank 1 has no reading"
    assert "before" in reason(steps.of_step([2000, 2000]))
    assert steps.of_step([3000, 3000]) == pytest.approx(2.0)


def test_a_counter_that_goes_backwards_is_no_energy() -> None:
    steps = StepJoules()
    steps.of_step([5000])
    assert "backwards" in reason(steps.of_step([10]))
    assert steps.of_step([1010]) == pytest.approx(1.0)


def test_the_reason_known_beforehand_is_given() -> None:
    assert reason(StepJoules("no GPU").of_step([None])) == "no GPU"


@pytest.mark.gpu
def test_reading_a_real_counter_is_cheap_and_it_counts() -> None:
    """Prints what a read costs: it is done once a step. An idle GPU takes 5 W at least, none takes 2 kW."""
    import torch

    torch.cuda.init()
    meter = find_gpu(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert isinstance(meter, Gpu), meter
    costs = []
    began, first = time.perf_counter(), meter.joules()
    while time.perf_counter() - began < 2.0:
        since = time.perf_counter()
        last = meter.joules()
        costs.append(time.perf_counter() - since)
        time.sleep(0.01)
    assert isinstance(first, float)
    assert isinstance(last, float)
    watts = (last - first) / (time.perf_counter() - began)
    used = meter.process_bytes()
    middle, worst = statistics.median(costs) * 1e6, max(costs) * 1e6
    print(f"{meter.energy_source}: {middle:.0f} us a read, {worst:.0f} us at most")
    print(f"{watts:.0f} W; this process's memory: {used}")
    assert 5 < watts < 2000
    assert statistics.median(costs) < 0.01
