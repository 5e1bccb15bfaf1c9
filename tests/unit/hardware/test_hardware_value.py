"""Hardware as JSON: it says what a person asks first, and that a card is assumed."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.hardware.links import nvlink_of, pcie_link
from shardwise.hardware.parse import parse_hardware


def test_json_says_what_a_person_asks_first() -> None:
    shown = parse_hardware("2x8xH100").to_json()
    assert shown["world_size"] == 16
    assert shown["gpu"]["name"] == "H100 SXM"
    assert shown["gpu"]["memory_bytes"] == 81559 * 2**20
    assert shown["gpu"]["flops"]["bf16"] == pytest.approx(989.4e12)
    assert shown["gpu"]["assumed"] is False
    assert shown["intra"]["bytes_per_second"] == pytest.approx(370.8e9)
    assert shown["inter"]["name"] == "8xib400"
    assert shown["host_memory_bytes"] is None


def test_json_marks_an_assumed_card_and_names_the_one_it_was_taken_from() -> None:
    gpu = parse_hardware("4x24GB").to_json()["gpu"]
    assert gpu["assumed"] is True
    assert gpu["assumed_from"] == "A10G"
    assert gpu["source"].startswith("assumed as of A10G")


def test_a_plan_cannot_be_changed_behind_its_back() -> None:
    hardware = parse_hardware("4xRTX4080")
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.nodes = 2  # type: ignore[misc]
    assert hash(hardware) == hash(parse_hardware("4xRTX4080"))


def test_slots_older_or_newer_than_the_table() -> None:
    """A generation doubles the one before; a newer one than listed counts as the newest."""
    third = pcie_link(3, 16, peer_to_peer=True).bytes_per_second
    assert pcie_link(2, 16, peer_to_peer=True).bytes_per_second == third / 2
    assert pcie_link(1, 4, peer_to_peer=True).bytes_per_second == third / 16
    assert pcie_link(6, 16, peer_to_peer=True).bytes_per_second == pytest.approx(48e9)


@pytest.mark.parametrize(
    ("capability", "generation"),
    [
        ("10.3", "nvlink5"),
        ("9.0", "nvlink4"),
        ("8.6", "nvlink3-bridge"),
        ("8.0", "nvlink3"),
        ("7.0", "nvlink2"),
        ("6.1", None),
        (None, None),
    ],
)
def test_nvlink_of_a_card_that_is_not_in_the_catalog(capability: str | None, generation: str | None) -> None:
    assert nvlink_of(capability) == generation
