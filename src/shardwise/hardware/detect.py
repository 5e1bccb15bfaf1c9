"""What this machine has, asked without torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.errors import MachineError
from shardwise.hardware.calibration import calibrated
from shardwise.hardware.catalog import Gpu, assumed, find
from shardwise.hardware.driver import ask
from shardwise.hardware.hardware import Hardware, Link
from shardwise.hardware.host import cpu_cores, host_memory_bytes
from shardwise.hardware.links import (
    default_slot,
    fabric_link,
    host_link,
    joined,
    link_count,
    nvlink_of,
    pcie_link,
)
from shardwise.hardware.topology import Paths, nvlinks, read_paths, switched
from shardwise.units import GIB

MIB = 1024**2
FIELDS = "index,uuid,name,memory.total,pcie.link.gen.max,pcie.link.width.max,compute_cap,mig.mode.current"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU as the driver describes it; None where the driver does not tell."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pcie_generation: int | None
    pcie_lanes: int | None
    compute_capability: str | None
    divided: bool
    """MIG is on: what CUDA shows are parts of it."""


def detect_hardware() -> Hardware | None:
    """This machine's own GPUs, those that CUDA_VISIBLE_DEVICES leaves; None without a GPU or a driver.

    Their links are as `doctor --calibrate` measured them, where it did (hardware/calibration.py).

    Raises:
        MachineError: the GPUs differ, are divided by MIG, or their memory is not told.
    """
    listing = ask(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits").text
    if listing is None:
        return None
    cards = chosen(read_cards(listing), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not cards:
        return None
    paths = read_paths(ask("topo", "-m").text or "")
    return calibrated(machine(cards, paths, memory_bytes=host_memory_bytes(), cores=cpu_cores()))


def read_cards(listing: str) -> list[Card]:
    """The GPUs in what `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits` prints."""
    return [
        _card([part.strip() for part in line.split(",")]) for line in listing.splitlines() if line.strip()
    ]


def machine(cards: Sequence[Card], paths: Paths, *, memory_bytes: int | None, cores: int | None) -> Hardware:
    """One node of `cards`, joined as `paths` tells; without `paths`, as such cards usually are.

    Raises:
        MachineError: the cards differ, or are divided by MIG.
    """
    _check_equal(cards)
    gpu = _gpu(cards[0])
    generation, lanes = _slot(cards, gpu)
    return Hardware(
        gpu=gpu,
        gpus_per_node=len(cards),
        nodes=1,
        intra=_between(gpu, cards, paths, generation, lanes),
        inter=None,
        host_link=host_link(gpu, generation, lanes),
        host_memory_bytes=memory_bytes,
        cpu_cores=cores,
    )


def gpu_count() -> int:
    """NVIDIA GPUs a process started here would see; 0 without a driver.

    CUDA_VISIBLE_DEVICES narrows them as CUDA does: entries after the first invalid one do not count.
    """
    listing = ask("-L").text
    if listing is None:
        return 0
    present = sum(line.startswith("GPU ") for line in listing.splitlines())
    return visible(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(present: int, setting: str | None) -> int:
    """How many of `present` GPUs CUDA_VISIBLE_DEVICES=`setting` leaves."""
    if setting is None:
        return present
    count = 0
    for entry in (entry.strip() for entry in setting.split(",")):
        named = entry.startswith(("GPU-", "MIG-"))
        if not named and not (entry.isdigit() and int(entry) < present):
            break
        count += 1
    return count


def chosen(cards: Sequence[Card], setting: str | None) -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES=`setting` leaves, in its order; a UUID may be cut short."""
    if setting is None:
        return list(cards)
    found: list[Card] = []
    for entry in (entry.strip() for entry in setting.split(",")):
        named = [
            card
            for card in cards
            if entry == str(card.index) or (entry.startswith("GPU-") and card.uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        found += named
    return found


def _card(parts: Sequence[str]) -> Card:
    index, uuid, name, memory, generation, lanes, capability, mig = parts
    if not memory.isdigit():
        raise MachineError(
            f"the driver does not tell how much memory {name} has",
            where="nvidia-smi",
            fix="name it by its memory, as --gpus 1x96GiB",
        )
    return Card(
        index=int(index),
        uuid=uuid,
        name=name,
        memory_bytes=int(memory) * MIB,
        pcie_generation=int(generation) if generation.isdigit() else None,
        pcie_lanes=int(lanes) if lanes.isdigit() else None,
        compute_capability=capability if capability[:1].isdigit() else None,
        divided=mig == "Enabled",
    )


def _check_equal(cards: Sequence[Card]) -> None:
    models = Counter(f"{card.name} of {card.memory_bytes / GIB:.0f} GiB" for card in cards)
    if len(models) > 1:
        counted = ", ".join(f"{count} x {model}" for model, count in models.items())
        raise MachineError(
            f"this machine's GPUs differ: {counted}",
            where="nvidia-smi",
            fix="name equal ones with CUDA_VISIBLE_DEVICES=0,1, or the hardware to plan for with --gpus",
        )
    if any(card.divided for card in cards):
        raise MachineError(
            f"{cards[0].name} is divided by MIG, and its parts cannot be told from here",
            where="nvidia-smi",
            fix="name the part by its memory, as --gpus 1x20GiB, or switch MIG off",
        )


def _gpu(card: Card) -> Gpu:
    """The catalog's row with the memory that the driver shows here (ECC changes it)."""
    known = find(card.name, card.memory_bytes)
    if known is None:
        name = card.name.removeprefix("NVIDIA ")
        return replace(
            assumed(name, card.memory_bytes, card.memory_bytes / GIB),
            compute_capability=card.compute_capability,
        )
    return replace(known, memory_bytes=card.memory_bytes)


def _slot(cards: Sequence[Card], gpu: Gpu) -> tuple[int, int]:
    """The slowest slot's generation and lanes; what such a card usually has where the driver is silent."""
    generation, lanes = default_slot(gpu)
    generations = [card.pcie_generation for card in cards if card.pcie_generation is not None]
    widths = [card.pcie_lanes for card in cards if card.pcie_lanes is not None]
    return min(generations, default=generation), min(widths, default=lanes)


def _between(gpu: Gpu, cards: Sequence[Card], paths: Paths, generation: int, lanes: int) -> Link:
    indices = [card.index for card in cards]
    if not paths and gpu.fabric is not None and not gpu.fabric.bridge:
        return fabric_link(gpu.fabric, len(cards))
    links = nvlinks(paths, indices, None if gpu.fabric is None else link_count(gpu.fabric))
    nvlink = nvlink_of(gpu.compute_capability) if gpu.fabric is None else gpu.fabric.name
    if links and nvlink is not None:
        return joined(nvlink, links)
    direct = gpu.pcie.peer_to_peer and (not paths or switched(paths, indices))
    return pcie_link(generation, lanes, peer_to_peer=direct)
