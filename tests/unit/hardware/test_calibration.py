"""What was measured of a machine reaches the planner, and nobody else's does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recorded import install, values
from shardwise.hardware.calibration import (
    Calibration,
    Product,
    Rate,
    Sample,
    calibrated,
    load,
    of_hardware,
    save,
)
from shardwise.hardware.detect import detect_hardware
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware

FOUND = Calibration(
    device="H200 SXM",
    count=2,
    driver="580.95.05",
    date="2026-08-31",
    versions={"torch": "2.13.0"},
    link="nvlink4",
    between=Rate(latency_seconds=5e-6, bytes_per_second=321e9),
    host=Rate(latency_seconds=8e-6, bytes_per_second=44e9),
    memory_bytes_per_second=4e12,
    host_call_seconds=2e-6,
    products=(Product(side=8192, flops_per_second=7e14),),
    samples=(Sample(what="all_gather", bytes=4096, seconds=2e-5),),
    skipped=(),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[..., Hardware | None]:
    """A machine of two H200."""

    def look(driver: str = "580.95.05") -> Hardware | None:
        install({**values("h200x8", of=2), "driver": driver}, tmp_path, monkeypatch)
        return detect_hardware()

    return look


def test_it_is_read_as_it_was_written(cache: Path) -> None:
    path = save(FOUND)
    assert path.parent.parent == cache
    assert load("H200 SXM", 2, "580.95.05") == FOUND
    assert json.loads(path.read_text())["schema"] == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_machine_gets_the_links_that_were_measured(machine: Callable[..., Hardware | None]) -> None:
    before = machine()
    save(FOUND)
    after = machine()
    assert before is not None
    assert after is not None
    assert (before.intra.measured, after.intra.measured, after.host_link.measured) == (False, True, True)
    assert (after.intra.name, after.intra.latency_seconds, after.intra.bytes_per_second) == (
        "nvlink4", 5e-6, 321e9,
    )  # fmt: skip
    assert after.host_link.bytes_per_second == 44e9
    assert "2026-08-31" in after.intra.source
    catalog = replace(after, intra=before.intra, host_link=before.host_link, host_pace=1.0)
    assert catalog == before


def test_a_slower_call_of_torch_slows_the_host(machine: Callable[..., Hardware | None]) -> None:
    save(replace(FOUND, host_call_seconds=5.4e-6))
    found = machine()
    assert found is not None
    assert found.host_pace == pytest.approx(2.0**0.7)


@pytest.mark.parametrize(
    "other", [{"driver": "570.124.06"}, {"count": 4}, {"device": "H100 SXM"}, {"link": "pcie5x16"}]
)
def test_another_machines_calibration_changes_nothing(
    machine: Callable[..., Hardware | None], other: dict[str, Any]
) -> None:
    before = machine()
    save(replace(FOUND, **other))
    assert machine() == before


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"schema": 2}',
        json.dumps({**FOUND.to_json(), "between": {"latency_seconds": 0, "bytes_per_second": 0}}),
        json.dumps({**FOUND.to_json(), "more": 1}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_none(cache: Path, text: str) -> None:
    save(FOUND).write_text(text)
    assert load("H200 SXM", 2, "580.95.05") is None


def test_one_gpu_has_copies_only(
    machine: Callable[..., Hardware | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(replace(FOUND, count=1, link=None, between=None))
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = detect_hardware()
    assert found is not None
    assert (found.gpus_per_node, found.intra.measured, found.host_link.measured) == (1, False, True)


def test_hardware_that_is_only_named_is_the_catalogs(cache: Path) -> None:
    """`--gpus` does not ask; the machine here need not be meant."""
    save(FOUND)
    assert not parse_hardware("2xH200").intra.measured


def test_without_any_the_hardware_is_the_same(cache: Path) -> None:
    hardware = parse_hardware("2xH200")
    assert of_hardware(hardware) is None
    assert calibrated(hardware) is hardware
