"""What the planner takes this machine to be, from what nvidia-smi prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shardwise.errors import MachineError, render
from shardwise.hardware.detect import Card, chosen, detect_hardware, machine, read_cards
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.topology import read_paths

PRINTED = Path(__file__).parent / "nvidia_smi"
GIB = 2**30


def cards(name: str) -> list[Card]:
    return read_cards((PRINTED / f"{name}.query.txt").read_text())


def seen(name: str, *, of: int | None = None, topology: str | None = None) -> Hardware:
    """The machine `name`, or its first `of` GPUs."""
    matrix = (PRINTED / f"{topology or name}.topo.txt").read_text()
    return machine(cards(name)[:of], read_paths(matrix), memory_bytes=512 * GIB, cores=64)


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


def test_memory_is_this_cards_and_not_the_catalogs() -> None:
    smaller = [dataclasses.replace(card, memory_bytes=45_000 << 20) for card in cards("l40sx4")]
    hardware = machine(smaller, {}, memory_bytes=None, cores=None)
    assert hardware.gpu.memory_bytes == 45_000 << 20
    assert hardware.gpu.name == "L40S"


def test_a_card_that_is_not_in_the_catalog_is_assumed_and_its_nvlink_known_by_its_generation() -> None:
    unknown = [
        dataclasses.replace(card, name="NVIDIA H20", memory_bytes=97871 << 20) for card in cards("h200x8")
    ]
    paths = read_paths((PRINTED / "h200x8.topo.txt").read_text())
    hardware = machine(unknown, paths, memory_bytes=None, cores=None)
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
    of_8, of_16 = (
        f"0, GPU-1, NVIDIA GeForce RTX 4060 Ti, {mib}, 4, 8, 8.9, [N/A]\n" for mib in (8188, 16380)
    )
    with pytest.raises(MachineError, match="GPUs differ"):
        machine(read_cards(of_8 + of_16), {}, memory_bytes=None, cores=None)


def test_a_divided_gpu_is_not_taken_for_a_whole_one() -> None:
    parts = read_cards("0, GPU-1, NVIDIA H200, 143771, 5, 16, 9.0, Enabled\n")
    with pytest.raises(MachineError, match="divided by MIG"):
        machine(parts, {}, memory_bytes=None, cores=None)


def test_a_driver_that_hides_the_memory_is_an_error() -> None:
    with pytest.raises(MachineError, match="does not tell how much memory NVIDIA GB10 has"):
        read_cards("0, GPU-1, NVIDIA GB10, [N/A], [N/A], [N/A], 12.1, [N/A]\n")


def test_a_slot_that_the_driver_hides_is_the_usual_one() -> None:
    hidden = read_cards("0, GPU-1, NVIDIA GeForce RTX 4060 Ti, 16380, [N/A], [N/A], 8.9, [N/A]\n")
    hardware = machine(hidden, {}, memory_bytes=None, cores=None)
    assert hardware.gpu.name == "RTX 4060 Ti 16GB"
    assert hardware.host_link.name == "pcie4x8"


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("GPU-00004090-0001-4f1d-9c2e-0d5a7b3e0001", [1]),
        ("GPU-00004090-0002,3", [2, 3]),
        ("GPU-00004090", []),  # four cards begin so
    ],
)
def test_cuda_visible_devices_chooses(setting: str | None, indices: list[int]) -> None:
    assert [card.index for card in chosen(cards("rtx4090x4"), setting)] == indices


def _nvidia_smi(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    answer = (
        f'if [ "$1" = topo ]; then cat {PRINTED}/{name}.topo.txt; else cat {PRINTED}/{name}.query.txt; fi'
    )
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, "rtx3090x4", monkeypatch)
    whole = detect_hardware()
    assert whole is not None
    assert (whole.gpus_per_node, whole.intra.name) == (4, "pcie4x8 through host memory")
    assert whole.cpu_cores is not None
    assert whole.host_memory_bytes is not None
    assert whole.host_memory_bytes > GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pair = detect_hardware()
    assert pair is not None
    assert (pair.gpus_per_node, pair.intra.name) == (2, "nvlink3-bridge")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert detect_hardware() is None


def test_no_driver_means_no_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect_hardware() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    program.chmod(0o755)
    assert detect_hardware() is None
