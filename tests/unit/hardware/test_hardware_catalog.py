"""The GPU catalog: the figures MFU and every predicted time are computed from."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.hardware.catalog import MODERN, Gpu, assumed, find, gpus, peak_flops
from shardwise.hardware.links import fabric_link, link_count, table

ARCHITECTURES = {"volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna3"}


def card(name: str) -> Gpu:
    return next(gpu for gpu in gpus() if gpu.name == name)


@pytest.mark.parametrize(
    ("device_name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A30", "bf16", 165.0),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA L40S", "fp8", 733.0),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090", "fp8", 330.3),
        ("NVIDIA GeForce RTX 4080", "fp32", 48.7),
        ("NVIDIA GeForce RTX 3090", "fp16", 71.0),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_peak_of_the_name_the_driver_reports(device_name: str, precision: str, tflops: float) -> None:
    assert peak_flops(device_name, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "memory_gb_s", "watts", "nvlink_gb_s"),
    [
        ("RTX 3080 Ti", 912, 350, None),
        ("RTX 4070 Ti SUPER", 672, 285, None),
        ("RTX 4080", 717, 320, None),
        ("RTX 5060 Ti 16GB", 448, 180, None),
        ("RTX 3090", 936, 350, 56.25),
        ("A30", 933, 165, 100),
        ("A40", 696, 300, 56.25),
        ("A100 SXM 80GB", 2039, 400, 300),
        ("H100 SXM", 3350, 700, 450),
        ("H200 SXM", 4800, 700, 450),
        ("B200", 8000, 1000, 900),
        ("V100 SXM2 32GB", 900, 300, 150),
        ("MI300X", 5300, 750, 448),
    ],
)
def test_published_bandwidth_power_and_links(
    name: str, memory_gb_s: float, watts: float, nvlink_gb_s: float | None
) -> None:
    gpu = card(name)
    assert gpu.memory_bytes_per_second == memory_gb_s * 1e9
    assert gpu.power_watts == watts
    assert (None if gpu.fabric is None else gpu.fabric.bytes_per_second / 1e9) == nvlink_gb_s


def test_another_chip_of_a_similar_name_is_not_taken_for_it() -> None:
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 D", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16") is None


def test_a_precision_without_hardware_has_no_peak() -> None:
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla V100-PCIE-16GB", "tf32") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_there_are_at_least_40_of_six_generations() -> None:
    assert len(gpus()) >= 40
    assert {gpu.architecture for gpu in gpus()} == ARCHITECTURES
    assert len({gpu.name for gpu in gpus()}) == len(gpus())


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_every_row_holds_together(gpu: Gpu) -> None:
    bf16_or_fp16 = gpu.flops["fp16"]
    assert gpu.flops.get("bf16", bf16_or_fp16) == bf16_or_fp16
    assert gpu.flops.get("fp8", 2 * bf16_or_fp16) == pytest.approx(2 * bf16_or_fp16, rel=0.02)
    assert bf16_or_fp16 >= 1.9 * gpu.flops["fp32"]
    assert bf16_or_fp16 >= 1.9 * gpu.flops.get("tf32", 0.0)
    assert gpu.flops.get("tf32", gpu.flops["fp32"]) >= gpu.flops["fp32"]
    assert 8e9 <= gpu.memory_bytes <= 2.1e11
    assert 2e11 <= gpu.memory_bytes_per_second <= 1e13
    assert 70 <= gpu.power_watts <= 1200
    # FLOP for each byte of memory traffic; outside of this, one of the two is another card's
    assert 60 <= bf16_or_fp16 / gpu.memory_bytes_per_second <= 460
    assert len(gpu.source) > 10
    assert gpu.assumed_from is None


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_a_rate_exists_where_the_architecture_has_it(gpu: Gpu) -> None:
    assert ("bf16" in gpu.flops) == (gpu.architecture not in ("volta", "turing"))
    assert ("tf32" in gpu.flops) == ("bf16" in gpu.flops)
    assert ("fp8" in gpu.flops) == (gpu.architecture in ("ada", "hopper", "blackwell", "cdna3"))
    capability = {"volta": "7.0", "turing": "7.5", "ada": "8.9", "hopper": "9.0", "cdna3": None}
    if gpu.architecture in capability:
        assert gpu.compute_capability == capability[gpu.architecture]
    else:
        assert (
            gpu.compute_capability
            in {"ampere": ("8.0", "8.6"), "blackwell": ("10.0", "12.0")}[gpu.architecture]
        )


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_the_size_in_the_name_is_never_more_than_the_card_has(gpu: Gpu) -> None:
    """`24GB` for an unknown card is 24 * 10^9 bytes: every card sold as 24 GB has at least that."""
    assert gpu.sold_as_gb * 1e9 <= gpu.memory_bytes <= gpu.sold_as_gb * 1.075e9


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_links_exist_and_are_whole(gpu: Gpu) -> None:
    assert gpu.pcie.generation == {"volta": 3, "turing": 3, "ampere": 4, "ada": 4}.get(gpu.architecture, 5)
    assert gpu.pcie.lanes in (8, 16)
    geforce = any(name.startswith("GeForce") for name in gpu.driver_names)
    assert gpu.pcie.peer_to_peer is not geforce
    assert gpu.host is None or gpu.host in table()["host"]
    assert gpu.network is None or gpu.network.name in table()["network"]
    if gpu.fabric is not None:
        links = gpu.fabric.bytes_per_second / (
            table()["fabric"][gpu.fabric.name]["published_link_gb_s"] * 1e9
        )
        assert links == link_count(gpu.fabric) in (2, 4, 6, 7, 12, 18)
        reached = fabric_link(gpu.fabric, gpu.fabric.gpus).bytes_per_second
        assert 0.65 <= reached / gpu.fabric.bytes_per_second <= 0.87


def test_driver_names_are_unique_but_for_cards_of_two_sizes() -> None:
    count = Counter(name.casefold() for gpu in gpus() for name in gpu.driver_names)
    assert {name for name, times in count.items() if times > 1} == {
        "geforce rtx 4060 ti",
        "geforce rtx 5060 ti",
    }
    for gpu in gpus():
        for name in gpu.driver_names:
            assert find(f"NVIDIA {name}", gpu.memory_bytes) is gpu


def test_memory_tells_cards_of_one_name_apart() -> None:
    small, large = (
        find("NVIDIA GeForce RTX 5060 Ti", 8151 << 20),
        find("NVIDIA GeForce RTX 5060 Ti", 16311 << 20),
    )
    assert small is not None
    assert large is not None
    assert (small.sold_as_gb, large.sold_as_gb) == (8, 16)


def test_memory_is_what_the_driver_shows() -> None:
    assert card("RTX 4090").memory_bytes == 24564 * 1024**2
    assert card("MI300X").memory_bytes == 206141652992


@pytest.mark.parametrize(
    "slower_to_faster",
    [
        ("RTX 3060", "RTX 3070", "RTX 3080", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti"),
        ("RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 Ti", "RTX 4080", "RTX 4090"),
        ("RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090"),
        ("T4", "V100 SXM2 32GB", "A100 SXM 80GB", "H100 SXM", "B200"),
        ("A30", "A100 PCIe 40GB", "H100 PCIe", "H100 NVL", "H200 SXM"),
    ],
)
def test_a_faster_card_is_faster(slower_to_faster: tuple[str, ...]) -> None:
    rates = [card(name).flops["fp16"] for name in slower_to_faster]
    assert rates == sorted(rates)
    assert len(set(rates)) == len(rates)


@pytest.mark.parametrize(
    ("gb", "stands_in"),
    [
        (8, "RTX 4060"),
        (12, "RTX 3060"),
        (16, "RTX 4060 Ti 16GB"),
        (24, "A10G"),
        (48, "A40"),
        (80, "A100 PCIe 80GB"),
        (20, "RTX 4060 Ti 16GB"),  # as near as 24: the smaller
        (15.5, "RTX 4060 Ti 16GB"),
        (500, "B200"),
    ],
)
def test_an_unknown_card_is_taken_to_be_the_slowest_of_its_size(gb: float, stands_in: str) -> None:
    unknown = assumed("card", round(gb * 1e9), gb)
    assert unknown.assumed_from == stands_in
    assert unknown.flops == card(stands_in).flops
    assert unknown.memory_bytes == round(gb * 1e9)
    assert stands_in in unknown.source
    assert unknown.fabric is None
    assert not unknown.pcie.peer_to_peer
    assert card(stands_in).architecture in MODERN


@pytest.mark.parametrize(("gb", "size"), [(1, 1), (23.99, 24), (48, 48), (90, 90)])
def test_a_card_known_by_its_memory_alone_is_of_its_own_size(gb: float, size: int) -> None:
    """Not of that of the card whose rates it has: what is larger than it is told by this number."""
    assert assumed("card", round(gb * 1e9), gb).sold_as_gb == size
