"""What is known of each GPU model: speed, memory, bandwidth, links and power, each row with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from shardwise.folders import packaged

GB = 1e9
MODERN = ("ampere", "ada", "hopper", "blackwell")
"""Architectures with bf16 tensor cores; a card known by its memory alone is taken to be one of them."""


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """A card's slot on PCI Express."""

    generation: int
    lanes: int = 16
    peer_to_peer: bool  # whether the driver lets one card read another's memory over PCIe


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Direct links between GPUs of one node: NVLink, or Infinity Fabric."""

    name: str  # the entry of `links.toml` with its latency and the share of the rate that collectives reach
    bytes_per_second: float  # published rate of all links of one GPU, in one direction
    gpus: int  # most GPUs of one node that are joined
    bridge: bool = False  # sold apart from the card, so a node has it only where the user says so


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The network of the maker's own system."""

    name: str  # the entry of `links.toml`
    gpus_per_adapter: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model as its maker specifies it."""

    name: str
    driver_names: tuple[str, ...]  # what the driver calls it, without a leading `NVIDIA`
    architecture: str
    compute_capability: str | None  # CUDA's, as `8.9`; None on GPUs of other makers
    flops: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s of matrix products by precision (bf16, fp16, tf32, fp32, fp8); absent: not in hardware."""
    memory_bytes: int  # total memory as the driver reports it
    sold_as_gb: int  # the size in the card's name: 24 for a card whose driver shows 24564 MiB
    memory_bytes_per_second: float
    power_watts: int  # default power limit of the board
    power_range_watts: tuple[int, int] | None = None
    """Least and largest limit that the driver accepts; None where it is not known. Boards may differ."""
    pcie: Pcie
    fabric: Fabric | None = None
    host: str | None = None  # the entry of `links.toml` between the GPU and its CPU; None: PCIe
    network: Adapters | None = None
    source: str  # where the numbers were published
    assumed_from: str | None = None  # the catalogued GPU that stands in, where only the memory is known

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability; Ampere's where the GPU has none or it is not known."""
        major, _, minor = (self.compute_capability or "8.0").partition(".")
        return int(major), int(minor)


@cache
def gpus() -> tuple[Gpu, ...]:
    """All rows of `catalog.toml`, in its order."""
    families = packaged("hardware/catalog.toml")["family"].values()
    return tuple(_gpu(name, {**family, **row}) for family in families for name, row in family["gpu"].items())


def find(device_name: str, memory_bytes: int | None = None) -> Gpu | None:
    """The GPU that the driver reports as `device_name`; None where it is not in the catalog.

    The full name has to match: a laptop's `GeForce RTX 4090 Laptop GPU` is another chip. Of cards that share
    a name (RTX 4060 Ti) it is the one whose memory is nearest to `memory_bytes`, or the catalog's first.
    """
    wanted = device_name.strip().casefold().removeprefix("nvidia ")
    named = [gpu for gpu in gpus() if wanted in (name.casefold() for name in gpu.driver_names)]
    if memory_bytes is None or not named:
        return named[0] if named else None
    return min(named, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense FLOP/s of matrix products in `precision`; None where the GPU or its rate is not known."""
    gpu = find(device_name)
    return None if gpu is None else gpu.flops.get(precision)


def assumed(name: str, memory_bytes: int, sold_as_gb: float) -> Gpu:
    """A card known by its memory alone, with the rates of a slow card of its size.

    Of the cards since Ampere whose size is nearest to `sold_as_gb` (the smaller of two sizes) it is the one
    with the lowest bf16 rate. Its links are those of a desktop: PCIe 4.0 without peer access.
    """
    modern = [gpu for gpu in gpus() if gpu.architecture in MODERN]
    size = min({gpu.sold_as_gb for gpu in modern}, key=lambda gb: (abs(gb - sold_as_gb), gb))
    of_size = [gpu for gpu in modern if gpu.sold_as_gb == size]
    slowest = min(of_size, key=lambda gpu: (gpu.flops["bf16"], gpu.memory_bytes_per_second))
    return replace(
        slowest,
        name=name,
        driver_names=(),
        memory_bytes=memory_bytes,
        sold_as_gb=round(sold_as_gb),
        pcie=Pcie(generation=4, lanes=16, peer_to_peer=False),
        fabric=None,
        host=None,
        network=None,
        power_range_watts=None,
        source=f"assumed as of {slowest.name}, the slowest card of {size} GB since Ampere: {slowest.source}",
        assumed_from=slowest.name,
    )


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    link, network, limits = row.get("nvlink"), row.get("network"), row.get("power_range_w")
    return Gpu(
        name=name,
        driver_names=tuple(row["driver"]),
        architecture=row["architecture"],
        compute_capability=row.get("compute_capability"),
        flops={precision: rate * 1e12 for precision, rate in row["tflops"].items()},
        memory_bytes=row["memory"]["mib"] * 1024**2,
        sold_as_gb=row["memory"]["gb"],
        memory_bytes_per_second=row["memory"]["gb_s"] * GB,
        power_watts=row["power_w"],
        power_range_watts=None if limits is None else (limits[0], limits[1]),
        pcie=Pcie(**row["pcie"]),
        fabric=None if link is None else _fabric(link),
        host=row.get("host"),
        network=None if network is None else Adapters(**network),
        source=row["source"],
    )


def _fabric(row: Mapping[str, Any]) -> Fabric:
    rest = {key: value for key, value in row.items() if key not in ("fabric", "gb_s")}
    return Fabric(name=row["fabric"], bytes_per_second=row["gb_s"] * GB, **rest)
