"""What nvidia-smi tells, as checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.doctor import gpus
from shardwise.doctor.check import Check
from shardwise.hardware import driver as driver_module

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


def test_a_driver_that_fails_is_a_problem_and_not_no_gpu(driver: Driver) -> None:
    driver(instead="echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9")
    (check,) = gpus.checks(gpus.look())
    assert check.status == "problem"
    assert "exit code 9: NVIDIA-SMI has failed" in check.finding
    assert "dmesg" in check.fix


def test_a_driver_that_hangs_is_a_problem(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "LIMIT_SECONDS", 0.5)
    driver(instead="exec sleep 60")
    (check,) = gpus.checks(gpus.look())
    assert check.status == "problem"
    assert "did not answer" in check.finding


def test_gpus_that_are_hidden(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    found = looked()
    assert found["GPUs"].finding == "2 × H200, 140.4 GiB each; CUDA_VISIBLE_DEVICES hides 2 more"
    assert set(found["power limit"].facts["limits_watts"]) == {"2", "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = gpus.checks(gpus.look())
    assert (check.status, check.facts["hidden"]) == ("warning", 4)


def test_a_divided_gpu_keeps_the_planners_words(driver: Driver, tmp_path: Path) -> None:
    driver(of=1)
    row = "0, GPU-1, NVIDIA H200, 143771, 5, 16, 9.0, Enabled\n"
    (tmp_path / "driver" / "query").write_text(row)
    found = looked()
    assert found["GPUs"].status == "warning"
    assert "divided by MIG" in found["GPUs"].finding


def test_parts_of_a_gpu_are_counted_as_the_launcher_counts_them(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(of=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5b0c,MIG-77aa")
    found = gpus.look()
    assert (found.count, found.cards) == (2, [])
    assert gpus.present(found).status == "warning"


def test_memory_that_others_hold(driver: Driver) -> None:
    driver(of=2, used=30 * 1024)
    check = looked()["GPU memory"]
    assert (check.status, check.finding) == (
        "warning",
        "other processes hold 30.0 GiB of GPU 0, 30.0 GiB of GPU 1",
    )


@pytest.mark.parametrize(
    ("bits", "status", "told"),
    [
        ("0x0000000000000001", "ok", "nothing"),  # idle
        ("0x0000000000000004", "ok", "nothing"),  # at the power limit: that is what it is for
        ("0x0000000000000060", "warning", "GPU 0: heat (software slowdown), heat (hardware slowdown)"),
        ("0x0000000000000080", "warning", "power brake"),
        ("[N/A]", "skipped", "does not tell"),
    ],
)
def test_clocks(driver: Driver, bits: str, status: str, told: str) -> None:
    driver(of=1, throttle=bits)
    check = looked()["clocks"]
    assert check.status == status
    assert told in check.finding


def test_a_driver_that_does_not_know_the_clocks_still_tells_the_rest(driver: Driver) -> None:
    driver(knows_clocks=False)
    found = looked()
    assert found["clocks"].status == "skipped"
    assert found["power limit"].status == "ok"


def test_a_lowered_power_limit_is_a_warning_with_the_default(driver: Driver) -> None:
    driver(limit="450.00")
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


def test_nothing_is_ever_set(driver: Driver, tmp_path: Path) -> None:
    """Every question to the driver is one that only reads."""
    driver()
    program = tmp_path / "driver" / "nvidia-smi"
    text = program.read_text().replace("#!/bin/sh", f'#!/bin/sh\necho "$@" >> {tmp_path}/asked', 1)
    program.write_text(text)
    looked()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked
    assert all(line.startswith(("--query-gpu=", "topo -m", "-L")) for line in asked)
