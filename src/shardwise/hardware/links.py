"""Latency and rate of each kind of link, from `links.toml`."""

from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.folders import packaged
from shardwise.hardware.catalog import GB, Fabric, Gpu
from shardwise.hardware.hardware import Link

FULL_LANES = 16
DESKTOP_GENERATION = 4  # of a GeForce card's slot: boards that hold several seldom give each PCIe 5.0


table = partial(packaged, "hardware/links.toml")
"""Fabric, pcie, host and network."""


def network_names() -> list[str]:
    """Networks that a node may have, slowest first within each kind."""
    return list(table()["network"])


def default_slot(gpu: Gpu) -> tuple[int, int]:
    """PCIe generation and lanes of the slot that a card is taken to sit in."""
    if gpu.pcie.peer_to_peer:
        return gpu.pcie.generation, gpu.pcie.lanes
    return min(gpu.pcie.generation, DESKTOP_GENERATION), gpu.pcie.lanes


def fabric_link(fabric: Fabric, gpus: int) -> Link:
    """NVLink or Infinity Fabric between `gpus` GPUs of a node.

    On a mesh a GPU has one link to each other GPU, so fewer GPUs use fewer links; a switch uses all of them.
    """
    links = link_count(fabric)
    if table()["fabric"][fabric.name].get("mesh", False) and gpus > 1:
        links = links * (gpus - 1) // (fabric.gpus - 1)
    return joined(fabric.name, links)


def joined(fabric: str, links: int) -> Link:
    """GPUs that use `links` links each of the entry `fabric`."""
    row = table()["fabric"][fabric]
    link = _link(fabric, row["latency_us"], row["link_gb_s"] * links, row["source"])
    own = row["link_gb_s"]
    gather = row.get("pair_gather_link_gb_s", own) / own
    return replace(link, pair_share=row.get("pair_link_gb_s", own) / own, pair_gather_share=gather)


def link_count(fabric: Fabric) -> int:
    """Links of one GPU."""
    published: float = table()["fabric"][fabric.name]["published_link_gb_s"]
    return round(fabric.bytes_per_second / (published * GB))


def nvlink_of(compute_capability: str | None) -> str | None:
    """The NVLink generation of GPUs that the catalog does not know; None before Volta.

    As NCCL 2.30 distinguishes them (src/graph/topo.h, ncclTopoNVLinkBw).
    """
    if compute_capability == "8.6":
        return "nvlink3-bridge"
    major = int((compute_capability or "0").partition(".")[0])
    since = {10: "nvlink5", 9: "nvlink4", 8: "nvlink3", 7: "nvlink2"}
    return next((name for first, name in since.items() if major >= first), None)


def pcie_link(generation: int, lanes: int, *, peer_to_peer: bool) -> Link:
    """PCIe between the GPUs of a node: directly, or else by way of host memory."""
    row, share = _pcie(generation, lanes)
    path = "peer" if peer_to_peer else "through_host"
    name = f"pcie{generation}x{lanes}" + ("" if peer_to_peer else " through host memory")
    return _link(name, row["latency_us"], row[f"{path}_gb_s"] * share, row[f"{path}_source"])


def host_link(gpu: Gpu, generation: int, lanes: int) -> Link:
    """Between pinned host memory and one GPU."""
    host = table()["host"]
    name, (row, share) = f"pcie{generation}x{lanes}", _pcie(generation, lanes)
    if gpu.host is not None:
        name, row, share = gpu.host, host[gpu.host], 1.0
    source = f"{row['copy_source']}; {host['latency_source']}"
    return _link(name, host["latency_us"], row["copy_gb_s"] * share, source)


def network_link(name: str, *, adapters: int, gpus_per_node: int, oversubscribed: float = 1.0) -> Link:
    """`adapters` of a node shared by its GPUs; each GPU's share while all of them send.

    `oversubscribed`: the rate of all adapters together over what the switches carry between nodes.
    """
    row = table()["network"][name]
    rate = row["gb_s"] * adapters / gpus_per_node / oversubscribed
    shared = "" if oversubscribed == 1.0 else f"/{oversubscribed:g}"
    return _link(f"{adapters}x{name}{shared}", row["latency_us"], rate, row["source"])


def _pcie(generation: int, lanes: int) -> tuple[Any, float]:
    """The row of the nearest generation, and the share of its rates; a generation doubles the one before."""
    listed = [int(number) for number in table()["pcie"]]
    nearest = min(max(generation, min(listed)), max(listed))
    slower = 2.0 ** min(generation - nearest, 0)
    return table()["pcie"][str(nearest)], slower * lanes / FULL_LANES


def _link(name: str, latency_us: float, gb_s: float, source: str) -> Link:
    return Link(name=name, latency_seconds=latency_us * 1e-6, bytes_per_second=gb_s * GB, source=source)
