"""What the driver reports, as checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.device import NoDevice, nvml
from shardwise.diagnosis import Check, gpus

Driver = Callable[..., None]


def looked() -> dict[str, Check]:
    return {check.name: check for check in gpus.checks(gpus.look())}


def test_a_healthy_machine(driver: Driver) -> None:
    driver()
    found = looked()
    assert {check.status for check in found.values()} == {"ok"}
    assert found["GPUs"].finding == "4 × H200, 140.4 GiB each"
    assert found["links"].finding == "nvlink4: 370.8 GB/s from each GPU, by the catalog"
    assert found["power limit"].facts["limits_watts"] == {"0": 700.0, "1": 700.0, "2": 700.0, "3": 700.0}


def test_one_gpu_has_no_links(driver: Driver) -> None:
    driver(of=1)
    assert "links" not in looked()


def test_without_a_driver_training_is_the_cpus(no_driver: None) -> None:
    (check,) = gpus.checks(gpus.look())
    assert check.status == "warning"
    assert "no NVIDIA GPU" in check.finding


def test_a_driver_that_fails_is_a_problem_and_not_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = NoDevice("NVML: Driver Not Loaded", broken=True)
    monkeypatch.setattr("shardwise.diagnosis.gpus.find", lambda: device)
    (check,) = gpus.checks(gpus.look())
    assert check.status == "problem"
    assert check.finding == "NVML: Driver Not Loaded"
    assert "dmesg" in check.fix


def test_a_torch_for_gpus_that_cannot_be_seen_is_named(
    no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.device.find.version", lambda _: "2.13.0+rocm7.1")
    (check,) = gpus.checks(gpus.look())
    assert check.status == "warning"
    assert "torch is built for AMD GPUs" in check.finding


def test_gpus_that_are_hidden(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = looked()
    assert found["GPUs"].finding == "2 × H200, 140.4 GiB each; CUDA_VISIBLE_DEVICES hides 2 more"
    assert set(found["power limit"].facts["limits_watts"]) == {"2", "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = gpus.checks(gpus.look())
    assert (check.status, check.facts["hidden"]) == ("warning", 4)


def test_a_divided_gpu_keeps_the_planners_words(driver: Driver) -> None:
    driver(of=1, facts={"divided": True})
    found = looked()
    assert found["GPUs"].status == "warning"
    assert "divided by MIG" in found["GPUs"].finding


def test_a_gpu_that_hides_its_memory_is_checked_all_the_same(driver: Driver) -> None:
    driver(of=1, facts={"memory_bytes": None})
    found = looked()
    assert "does not report how much memory" in found["GPUs"].finding
    assert found["power limit"].status == "ok"


def test_parts_of_a_gpu_are_counted_as_the_launcher_counts_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(of=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5b0c,MIG-77aa")
    found = gpus.look()
    assert (found.count, found.cards) == (2, [])
    assert gpus.present(found).status == "warning"


def test_memory_that_others_hold(driver: Driver) -> None:
    driver(of=2, memory_used_bytes=30 << 30)
    check = looked()["GPU memory"]
    assert (check.status, check.finding) == (
        "warning",
        "other processes hold 30.0 GiB of GPU 0, 30.0 GiB of GPU 1",
    )


@pytest.mark.parametrize(
    ("bits", "status", "told"),
    [
        (0x01, "ok", "nothing"),  # idle
        (0x04, "ok", "nothing"),  # at the power limit: that is what it is for
        (0x60, "warning", "GPU 0: heat (software slowdown), heat (hardware slowdown)"),
        (0x80, "warning", "power brake"),
        (None, "skipped", "does not report"),
    ],
)
def test_clocks(driver: Driver, bits: int | None, status: str, told: str) -> None:
    driver(of=1, clock_reasons=bits)
    check = looked()["clocks"]
    assert check.status == status
    assert told in check.finding


def test_a_driver_that_does_not_report_the_clocks_still_reports_the_rest(driver: Driver) -> None:
    driver(clock_reasons=None)
    found = looked()
    assert found["clocks"].status == "skipped"
    assert found["power limit"].status == "ok"


def test_memory_in_use_that_is_not_known_is_null(driver: Driver) -> None:
    driver(of=1, memory_used_bytes=None)
    assert looked()["GPU memory"].facts == {"used_bytes": {"0": None}}


@pytest.mark.parametrize(
    ("readings", "status", "sources"),
    [
        ({}, "ok", ["energy", "power"]),
        ({"energy_joules": None}, "ok", ["power"]),
        ({"energy_joules": None, "power_watts": None}, "warning", []),
    ],
)
def test_joules_come_from_the_counter_or_from_power(
    driver: Driver, readings: dict[str, None], status: str, sources: list[str]
) -> None:
    driver(of=1, **readings)
    check = looked()["energy"]
    assert check.status == status
    assert check.facts.get("tells", []) == sources
    assert ("no joules: not recorded; not recorded" in check.finding) is (not sources)


def test_a_lowered_power_limit_is_a_warning_with_the_default(driver: Driver) -> None:
    driver(power_limit_watts=450.0)
    check = looked()["power limit"]
    assert check.status == "warning"
    assert check.finding.startswith("450 W, 200 to 700 W possible")
    assert check.fix.endswith("nvidia-smi -pl 700")


@pytest.mark.parametrize(("bits", "allowed"), [("000001ffffffffff", True), ("00000000a80425fb", False)])
def test_setting_the_power_limit_takes_root_and_sys_admin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: str, allowed: bool
) -> None:
    """The second is what Docker leaves to root."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{bits}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert gpus.may_set_power(status) is allowed
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert gpus.may_set_power(status) is False


def test_only_the_power_limit_is_ever_set() -> None:
    """Every other function of NVML that the device uses only reads."""
    used = set(re.findall(r"nvml[A-Z]\w+", Path(nvml.__file__).read_text()))
    names = {name for name in used if not name.startswith(("nvmlDeviceGet", "nvmlSystemGet", "nvmlMemory"))}
    words = {"nvmlInit", "nvmlGpuTopologyLevel_t", "nvmlClocksEventReasons"}
    assert names == {*words, "nvmlDeviceSetPowerManagementLimit"}


def test_only_leases_and_their_control_set_it() -> None:
    source = Path(nvml.__file__).parents[1]
    files = [path for path in source.rglob("*.py") if ".limit_power(" in path.read_text()]
    used = {path.relative_to(source).as_posix() for path in files}
    assert used == {"power/control.py", "power/lease.py"}
