"""The GPU catalog: the figures MFU is computed from."""

from __future__ import annotations

import pytest

from shardwise.hardware.catalog import find, gpus, peak_flops


@pytest.mark.parametrize(
    ("device_name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4080", "fp32", 48.7),
        ("NVIDIA GeForce RTX 3090", "fp16", 71.0),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("NVIDIA B200", "bf16", 2250.0),
    ],
)
def test_peak_of_the_name_the_driver_reports(device_name: str, precision: str, tflops: float) -> None:
    assert peak_flops(device_name, precision) == pytest.approx(tflops * 1e12)


def test_another_chip_of_a_similar_name_is_not_taken_for_it() -> None:
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 D", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16") is None


def test_a_precision_without_hardware_has_no_peak() -> None:
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla V100-PCIE-16GB", "tf32") is None


def test_every_row_holds_together() -> None:
    for gpu in gpus():
        assert gpu.flops["fp16"] >= gpu.flops.get("tf32", 0.0) >= 0.0, gpu.name
        assert gpu.flops["fp16"] >= 1.9 * gpu.flops["fp32"], gpu.name
        assert 8e9 <= gpu.memory_bytes <= 2e11, gpu.name
        assert 2e11 <= gpu.bandwidth <= 1e13, gpu.name
        assert 50 <= gpu.power_watts <= 1200, gpu.name
        assert gpu.source, gpu.name
        assert all(find(f"NVIDIA {name}") is not None for name in gpu.driver_names), gpu.name


def test_memory_is_what_the_driver_shows() -> None:
    card = find("NVIDIA GeForce RTX 4090")
    assert card is not None
    assert card.memory_bytes == 24564 * 1024**2
