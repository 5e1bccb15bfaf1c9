"""What the planner takes this machine to be, from what its driver reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from recorded import device, install, values
from shardwise.device import Card
from shardwise.device.find import REPLAY
from shardwise.errors import MachineError, render
from shardwise.hardware.detect import (
    deepspeed_accelerator,
    detect_hardware,
    gpu_count,
    machine,
    visible,
)
from shardwise.hardware.hardware import Hardware

GIB = 2**30
UUID = "GPU-00004090-000{0}-4f1d-9c2e-0d5a7b3e000{0}"


def cards(name: str) -> list[Card]:
    return device(name).cards


def card(name: str, **facts: Any) -> Card:
    return Card(**{"index": 0, "uuid": "GPU-1", "name": name, **facts})


def seen(name: str, *, of: int | None = None, topology: str | None = None) -> Hardware:
    """The machine `name`, or its first `of` GPUs."""
    paths = device(topology or name).paths()
    return machine(cards(name)[:of], paths, memory_bytes=512 * GIB, cores=64)


@pytest.mark.parametrize(
    ("name", "of", "gpu", "link", "gb_s", "host"),
    [
        ("h200x8", None, "H200 SXM", "nvlink4", 370.8, "pcie5x16"),
        ("h200x8", 2, "H200 SXM", "nvlink4", 370.8, "pcie5x16"),  # a switch gives two GPUs all their links
        (
            "v100x8",
            None,
            "V100 SXM2 32GB",
            "nvlink2",
            120.0,
            "pcie3x16",
        ),  # a ring over NVLink, though not all pairs
        (
            "v100x8",
            4,
            "V100 SXM2 32GB",
            "nvlink2",
            80.0,
            "pcie3x16",
        ),  # GPU 0 has 4 of its 6 links in this half
        ("rtx3090x4", 2, "RTX 3090", "nvlink3-bridge", 48.0, "pcie4x16"),
        (
            "rtx3090x4",
            None,
            "RTX 3090",
            "pcie4x8 through host memory",
            6.5,
            "pcie4x8",
        ),  # two bridges join no ring
        ("rtx4090x4", None, "RTX 4090", "pcie4x16 through host memory", 13.0, "pcie4x16"),
        ("l40sx4", None, "L40S", "pcie4x16", 24.0, "pcie4x16"),
    ],
)
def test_a_machine(name: str, of: int | None, gpu: str, link: str, gb_s: float, host: str) -> None:
    hardware = seen(name, of=of)
    assert hardware.gpu.name == gpu
    assert hardware.gpus_per_node == (of or len(cards(name)))
    assert (hardware.nodes, hardware.inter) == (1, None)
    assert hardware.intra.name == link
    assert hardware.intra.bytes_per_second == pytest.approx(gb_s * 1e9)
    assert hardware.host_link.name == host
    assert (hardware.host_memory_bytes, hardware.cpu_cores) == (512 * GIB, 64)


def test_cards_with_peer_access_behind_a_host_bridge_meet_in_host_memory() -> None:
    assert seen("l40sx4", topology="rtx4090x4").intra.name == "pcie4x16 through host memory"


def test_without_a_matrix_the_links_are_those_that_such_cards_usually_have() -> None:
    def link(name: str) -> str:
        return machine(cards(name), {}, memory_bytes=None, cores=None).intra.name

    assert link("h200x8") == "nvlink4"
    assert link("l40sx4") == "pcie4x16"
    assert link("rtx4090x4") == "pcie4x16 through host memory"
    assert link("rtx3090x4") == "pcie4x8 through host memory", "a bridge is sold apart from the card"


def test_the_slowest_slot_counts() -> None:
    slots = [dataclasses.replace(card, pcie_generation=3) for card in cards("l40sx4")[:1]] + cards("l40sx4")[
        1:
    ]
    assert machine(slots, {}, memory_bytes=None, cores=None).host_link.name == "pcie3x16"


def test_memory_is_this_cards_and_not_the_catalogs() -> None:
    smaller = [dataclasses.replace(card, memory_bytes=45_000 << 20) for card in cards("l40sx4")]
    hardware = machine(smaller, {}, memory_bytes=None, cores=None)
    assert hardware.gpu.memory_bytes == 45_000 << 20
    assert hardware.gpu.name == "L40S"


def test_a_card_that_is_not_in_the_catalog_is_assumed_and_its_nvlink_known_by_its_generation() -> None:
    unknown = [
        dataclasses.replace(card, name="NVIDIA H20", memory_bytes=97871 << 20) for card in cards("h200x8")
    ]
    hardware = machine(unknown, device("h200x8").paths(), memory_bytes=None, cores=None)
    assert hardware.gpu.name == "H20"
    assert hardware.gpu.assumed_from == "RTX PRO 6000 Blackwell Max-Q"
    assert hardware.gpu.memory_bytes == 97871 << 20
    assert hardware.gpu.compute_capability == "9.0"
    assert hardware.intra.name == "nvlink4"
    assert hardware.intra.bytes_per_second == pytest.approx(370.8e9)


def test_gpus_that_differ_are_an_error_and_not_averaged() -> None:
    mixed = [*cards("rtx4090x4")[:2], *cards("rtx3090x4")[:1]]
    with pytest.raises(MachineError) as caught:
        machine(mixed, {}, memory_bytes=None, cores=None)
    shown = render(caught.value)
    assert "2 x NVIDIA GeForce RTX 4090 of 24 GiB, 1 x NVIDIA GeForce RTX 3090 of 24 GiB" in shown
    assert "CUDA_VISIBLE_DEVICES" in shown
    assert caught.value.exit_code == 4


def test_one_name_with_two_memory_sizes_is_two_cards() -> None:
    of_8, of_16 = (card("NVIDIA GeForce RTX 4060 Ti", memory_bytes=mib << 20) for mib in (8188, 16380))
    with pytest.raises(MachineError, match="GPUs differ"):
        machine([of_8, of_16], {}, memory_bytes=None, cores=None)


def test_a_divided_gpu_is_not_taken_for_an_entire_one() -> None:
    parts = [card("NVIDIA H200", memory_bytes=143771 << 20, divided=True)]
    with pytest.raises(MachineError, match="divided by MIG"):
        machine(parts, {}, memory_bytes=None, cores=None)


def test_a_driver_that_hides_the_memory_is_an_error() -> None:
    with pytest.raises(MachineError, match="does not report how much memory NVIDIA GB10 has"):
        machine([card("NVIDIA GB10")], {}, memory_bytes=None, cores=None)


def test_a_slot_that_the_driver_hides_is_the_usual_one() -> None:
    hidden = card("NVIDIA GeForce RTX 4060 Ti", memory_bytes=16380 << 20)
    hardware = machine([hidden], {}, memory_bytes=None, cores=None)
    assert hardware.gpu.name == "RTX 4060 Ti 16GB"
    assert hardware.host_link.name == "pcie4x8"


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("0,9,1", [0]),
        ("-1", []),
        (UUID.format(1), [1]),
        (f"{UUID.format(3)},{UUID.format(0)}", [3, 0]),
        ("GPU-00004090-0002,3", [2, 3]),
        ("GPU-00004090", []),  # four cards begin so
        ("GPU-abc", []),
    ],
)
def test_cuda_visible_devices_chooses(
    setting: str | None, indices: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(values("rtx4090x4"), tmp_path, monkeypatch)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [card.index for card in visible(device("rtx4090x4")) if isinstance(card, Card)] == indices
    assert gpu_count() == len(indices)


def test_parts_of_a_gpu_count_but_are_not_entire_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5b0c,MIG-77aa")
    assert visible(device("h200x8", of=1)) == ["MIG-5b0c", "MIG-77aa"]


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(values("rtx3090x4"), tmp_path, monkeypatch)
    found = detect_hardware()
    assert found is not None
    assert (found.gpus_per_node, found.intra.name) == (4, "pcie4x8 through host memory")
    assert found.cpu_cores is not None
    assert found.host_memory_bytes is not None
    assert found.host_memory_bytes > GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pair = detect_hardware()
    assert pair is not None
    assert (pair.gpus_per_node, pair.intra.name) == (2, "nvlink3-bridge")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert detect_hardware() is None


def test_no_gpu_means_no_hardware_and_deepspeed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLAY, "none")
    assert detect_hardware() is None
    assert gpu_count() == 0
    assert deepspeed_accelerator() == "cpu"


def test_deepspeed_is_not_sent_to_the_cpu_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(values("h200x8"), tmp_path, monkeypatch)
    assert deepspeed_accelerator() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert deepspeed_accelerator() == "cpu"


@pytest.mark.parametrize("build", ["2.13.0+rocm7.1", "2.13.0+xpu"])
def test_deepspeed_is_not_sent_to_the_cpu_under_a_torch_for_another_vendor(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPLAY, "none")
    monkeypatch.setattr("shardwise.device.find.version", lambda _: build)
    assert deepspeed_accelerator() is None
