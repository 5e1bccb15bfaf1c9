"""What this machine has: its GPUs by the device seam, and memory and cores within its control group."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from shardwise.device import Card, Device, Paths, Unavailable
from shardwise.device.find import fake_file, find, unseen_vendor
from shardwise.errors import MachineError
from shardwise.hardware import catalog, links
from shardwise.hardware.calibration import calibrated
from shardwise.hardware.hardware import Hardware, Link
from shardwise.units import GIB

SWITCHED = ("PIX", "PXB")
"""Paths over PCIe switches alone. Over a host bridge (PHB, NODE, SYS) NCCL uses host memory even where GPUs
could reach each other: its default P2P level is PXB (NCCL 2.30 src/graph/paths.cc)."""

DRIVER = "the GPU driver"
ROOT = Path("/")
_MOST_PERMUTED = 8


def detect_hardware() -> Hardware | None:
    """This machine's own GPUs, as CUDA_VISIBLE_DEVICES leaves them; None without a GPU or a driver.

    Their links are as `doctor --calibrate` measured them, where it did. MachineError as in `machine`.
    """
    device = find()
    cards = [card for card in visible(device) if isinstance(card, Card)]
    if not cards:
        return None
    return calibrated(machine(cards, device.paths(), memory_bytes=host_memory_bytes(), cores=cpu_cores()))


def gpu_count() -> int:
    """GPUs, or parts of them, that a process started here would use; 0 without a real driver."""
    return 0 if fake_file() is not None else len(visible(find()))


def driver_version() -> str | None:
    """The GPU driver's version; None where there is no driver."""
    found = find().driver_version()
    return found if isinstance(found, str) else None


def deepspeed_accelerator() -> str | None:
    """The value of DS_ACCELERATOR for processes started here; None where DeepSpeed finds out by itself."""
    return "cpu" if gpu_count() == 0 and unseen_vendor() is None else None


def visible(device: Device) -> list[Card | str]:
    """What the device's visibility variable leaves, in its order: GPUs, and parts of GPUs (MIG) by UUID.

    As in CUDA, entries after the first invalid one do not count; a UUID may be cut short.
    """
    setting = os.environ.get(device.visible_variable)
    if setting is None or not device.cards:
        return list(device.cards)
    found: list[Card | str] = []
    for entry in map(str.strip, setting.split(",")):
        by_uuid = entry.startswith("GPU-")
        named = [c for c in device.cards if entry == str(c.index) or (by_uuid and c.uuid.startswith(entry))]
        if len(named) != 1 and not entry.startswith("MIG-"):
            break
        found += named or [entry]
    return found


def machine(cards: Sequence[Card], paths: Paths, *, memory_bytes: int | None, cores: int | None) -> Hardware:
    """One node of `cards`, joined as `paths` says; without `paths`, as such cards usually are.

    MachineError where the cards differ, are divided by MIG, or their memory is not known.
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
        host_link=links.host_link(gpu, generation, lanes),
        host_memory_bytes=memory_bytes,
        cpu_cores=cores,
    )


def nvlinks(paths: Paths, gpus: Sequence[int], most: int | None) -> int:
    """Links of one GPU that rings over NVLink alone can use; 0 where no such ring joins all of `gpus`.

    A switch reports all links of a GPU for each peer and a mesh those to that peer, so the sum over peers is
    cut at `most`, the links a GPU has; where that is not known, at the largest number seen.
    """
    counts = {pair: int(path[2:]) for pair, path in paths.items() if re.fullmatch(r"NV\d+", path)}
    first, *others = gpus
    # machines of many GPUs have switches, which join every pair
    orders = itertools.permutations(others) if len(gpus) <= _MOST_PERMUTED else [tuple(others)]
    rings = (itertools.pairwise((first, *order, first)) for order in orders)
    if not others or not any(all(pair in counts for pair in ring) for ring in rings):
        return 0
    of_each = [sum(counts.get((gpu, peer), 0) for peer in gpus) for gpu in gpus]
    return min(*of_each, most or max(counts.values()))


def _check_equal(cards: Sequence[Card]) -> None:
    models = Counter(f"{card.name} of {_memory(card) / GIB:.0f} GiB" for card in cards)
    if len(models) > 1:
        counted = ", ".join(f"{count} x {model}" for model, count in models.items())
        what = f"this machine's GPUs differ: {counted}"
        fix = "name equal ones with CUDA_VISIBLE_DEVICES=0,1, or the hardware to plan for with --gpus"
        raise MachineError(what, where=DRIVER, fix=fix)
    if any(card.divided for card in cards):
        what = f"{cards[0].name} is divided by MIG, and the driver does not describe its parts"
        fix = "name the part by its memory, as --gpus 1x20GiB, or switch MIG off"
        raise MachineError(what, where=DRIVER, fix=fix)


def _memory(card: Card) -> int:
    if isinstance(card.memory_bytes, Unavailable):
        what = f"the driver does not report how much memory {card.name} has"
        raise MachineError(what, where=DRIVER, fix="name it by its memory, as --gpus 1x96GiB")
    return card.memory_bytes


def _gpu(card: Card) -> catalog.Gpu:
    """The catalog's row with the memory that the driver shows here (ECC changes it)."""
    memory_bytes, capability = _memory(card), card.compute_capability
    known = catalog.find(card.name, memory_bytes)
    if known is not None:
        return replace(known, memory_bytes=memory_bytes)
    stand_in = catalog.assumed(card.name.removeprefix("NVIDIA "), memory_bytes, memory_bytes / GIB)
    return replace(stand_in, compute_capability=capability if isinstance(capability, str) else None)


def _slot(cards: Sequence[Card], gpu: catalog.Gpu) -> tuple[int, int]:
    """The slowest slot's generation and lanes; what such a card usually has where the driver is silent."""
    generation, lanes = links.default_slot(gpu)
    generations = [card.pcie_generation for card in cards if isinstance(card.pcie_generation, int)]
    widths = [card.pcie_lanes for card in cards if isinstance(card.pcie_lanes, int)]
    return min(generations, default=generation), min(widths, default=lanes)


def _between(gpu: catalog.Gpu, cards: Sequence[Card], paths: Paths, generation: int, lanes: int) -> Link:
    indices = [card.index for card in cards]
    if not paths and gpu.fabric is not None and not gpu.fabric.bridge:
        return links.fabric_link(gpu.fabric, len(cards))
    count = nvlinks(paths, indices, None if gpu.fabric is None else links.link_count(gpu.fabric))
    nvlink = links.nvlink_of(gpu.compute_capability) if gpu.fabric is None else gpu.fabric.name
    if count and nvlink is not None:
        return links.joined(nvlink, count)
    switched = all(paths.get(pair) in SWITCHED for pair in itertools.permutations(indices, 2))
    return links.pcie_link(generation, lanes, peer_to_peer=gpu.pcie.peer_to_peer and (not paths or switched))


def host_memory_bytes(root: Path = ROOT) -> int:
    """Memory of the machine, or its control group's limit where that is smaller."""
    limits = [*_settings(root, "memory.max"), *_content(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    return min([int(psutil.virtual_memory().total), *(int(text) for text in limits if text != "max")])


def cpu_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on, or fewer where its control group has less CPU time."""
    shares = [text.split() for text in _settings(root, "cpu.max")]
    version_1 = [_content(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    shares += [[quota, period] for quota, period in zip(*version_1, strict=False)]
    limits = [int(quota) // int(period) for quota, period in shares if quota not in ("max", "-1")]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def multiplies_bf16(root: Path = ROOT) -> bool:
    """Whether the processor has instructions for products in bf16; torch is many times slower without."""
    known = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
    return any(known & set(text.split()) for text in _content(root / "proc/cpuinfo"))


def _settings(root: Path, name: str) -> Iterator[str]:
    """`name` of this process's control group and of the groups above it, each of which limits it."""
    mounted = root / "sys/fs/cgroup"
    lines = [line for text in _content(root / "proc/self/cgroup") for line in text.splitlines()]
    group = mounted / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mounted):
            break
        yield from _content(folder / name)


def _content(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return
