"""What is known of each GPU model: speed, memory, bandwidth and power, each row with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model as its maker specifies it."""

    name: str
    driver_names: tuple[str, ...]
    """What the driver calls it, without a leading `NVIDIA`."""
    flops: Mapping[str, float]
    """Dense FLOP/s of matrix products by precision (bf16, fp16, tf32, fp32); absent: not in hardware."""
    memory_bytes: int
    """Total memory as the driver reports it."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    power_watts: float
    """Default power limit of the board."""
    source: str
    """Where the numbers were published."""


@cache
def gpus() -> tuple[Gpu, ...]:
    """All rows of `catalog.toml`, in its order."""
    text = resources.files("shardwise.hardware").joinpath("catalog.toml").read_text(encoding="utf-8")
    return tuple(_gpu(name, row) for name, row in tomllib.loads(text)["gpu"].items())


def find(device_name: str) -> Gpu | None:
    """The GPU that the driver reports as `device_name`; None where it is not in the catalog.

    The whole name has to match: a laptop's `GeForce RTX 4090 Laptop GPU` is another chip.
    """
    wanted = device_name.strip().casefold().removeprefix("nvidia ")
    for gpu in gpus():
        if wanted in (name.casefold() for name in gpu.driver_names):
            return gpu
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of matrix products in `precision`; None where the GPU or its rate is not known."""
    gpu = find(device_name)
    return None if gpu is None else gpu.flops.get(precision)


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    return Gpu(
        name=name,
        driver_names=tuple(row["driver"]),
        flops={precision: rate * 1e12 for precision, rate in row["tflops"].items()},
        memory_bytes=row["memory_mib"] * 1024**2,
        bandwidth=row["bandwidth_gb_s"] * 1e9,
        power_watts=row["power_w"],
        source=row["source"],
    )
