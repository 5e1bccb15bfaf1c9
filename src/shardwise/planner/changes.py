"""Small changes to try, in a fixed order, where nothing fits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from shardwise.errors import JobError
from shardwise.hardware.catalog import MODERN, Gpu, gpus
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job, Lora, Quantization
from shardwise.models.catalog import lookup
from shardwise.planner.simulate import capacity_bytes
from shardwise.units import GIB, gib

SHORTEST_ROW = 256
MOST_GPUS = 8  # The number of GPUs of a node is doubled up to this


@dataclass(frozen=True, kw_only=True)
class Change:
    """A job and a hardware with one difference from what was asked."""

    what: str
    how: str
    job: Job
    hardware: Hardware
    memory_cap_bytes: int | None


def small_changes(job: Job, hardware: Hardware, memory_cap_bytes: int | None = None) -> Iterator[Change]:
    """Shorter rows, any strategy, LoRA or a quantised base, all of each GPU, more GPUs, larger GPUs.

    Each comes with the flag that asks for it.
    """
    asked = Change(what="", how="", job=job, hardware=hardware, memory_cap_bytes=memory_cap_bytes)
    yield from _shorter_rows(asked)
    if job.strategy != "auto" and job.model.lora is None:  # with adapters a quantised base is faster
        freely = job.model_copy(update={"strategy": "auto"})
        yield replace(asked, what="any strategy", how="--set strategy=auto", job=freely)
    if job.model.lora is None and job.model.weights == "pretrained" and published(job.model.source):
        lora = Lora()
        for kind, how, base in (("none", f"--lora {lora.rank}", ""), ("nf4", "--qlora", " on a base in NF4")):
            model = job.model.model_copy(update={"lora": lora, "quantization": kind})
            what = f"LoRA of rank {lora.rank}{base} instead of training all weights"
            yield replace(asked, what=what, how=how, job=job.model_copy(update={"model": model}))
    if job.model.lora is not None:
        yield from _fewer_bits(asked)
    held_back = binds(memory_cap_bytes, hardware.gpu)
    if memory_cap_bytes is not None and held_back:
        what = f"the GPU's {gib(hardware.gpu.memory_bytes)} instead of {gib(memory_cap_bytes)}"
        yield replace(asked, what=what, how="leave --memory-cap out", memory_cap_bytes=None)
    yield from _more_gpus(asked)
    if not held_back:
        yield from _larger_gpus(asked)


def published(source: str) -> bool:
    """Whether a model may have trained weights for adapters; some catalog shapes never had any.

    A folder with the name of such a shape (without `./`) counts as that shape: the planner reads no disk.
    """
    shape = lookup(source)
    return shape is None or shape.hub is not None


def binds(memory_cap_bytes: int | None, gpu: Gpu) -> bool:
    """Whether a cap is below what a process may use of the card."""
    return memory_cap_bytes is not None and memory_cap_bytes < capacity_bytes(gpu)


def with_host_memory(hardware: Hardware, host_memory_bytes: int) -> str | None:
    """`4xRTX-4080+144GiB`: the value of --gpus for this hardware with other host memory.

    None where --gpus cannot describe it: not every card has a name there.
    """
    wanted = replace(hardware, host_memory_bytes=host_memory_bytes)
    spec = _spec(wanted, wanted.gpus_per_node, wanted.gpu)
    return None if _like(wanted, spec) is None else spec


def larger_gpus(gpu: Gpu) -> list[Gpu]:
    """One CUDA GPU for each larger memory size of the catalog, ascending.

    Of several with one size: the same architecture first, then a recent one, then the catalog's order.
    """

    def strangeness(other: Gpu) -> int:
        return 0 if other.architecture == gpu.architecture else 1 if other.architecture in MODERN else 2

    larger = [g for g in gpus() if g.compute_capability is not None and g.sold_as_gb > gpu.sold_as_gb]
    sizes = sorted({g.sold_as_gb for g in larger})
    return [min((g for g in larger if g.sold_as_gb == size), key=strangeness) for size in sizes]


def _shorter_rows(asked: Change) -> Iterator[Change]:
    asked_length = asked.job.data.sequence_length
    for length in (asked_length // 2, asked_length // 4):
        if length >= SHORTEST_ROW:
            data = asked.job.data.model_copy(update={"sequence_length": length})
            job = asked.job.model_copy(update={"data": data})
            what = f"rows of {length} tokens instead of {asked_length}"
            yield replace(asked, what=what, how=f"--sequence {length}", job=job)


def _fewer_bits(asked: Change) -> Iterator[Change]:
    """The frozen base in smaller formats."""
    now = asked.job.model.quantization
    kinds = get_args(Quantization)  # from the widest to the narrowest
    for kind in kinds[kinds.index(now) + 1 :]:
        model = asked.job.model.model_copy(update={"quantization": kind})
        job = asked.job.model_copy(update={"model": model})
        what = f"a base in {kind} instead of {job.train.precision if now == 'none' else now}"
        yield replace(asked, what=what, how=f"--set model.quantization={kind}", job=job)


def _more_gpus(asked: Change) -> Iterator[Change]:
    now, rows = asked.hardware, asked.job.train.global_batch
    number = now.gpus_per_node * 2
    while number <= MOST_GPUS:
        spec = _spec(now, number, now.gpu)
        hardware = _like(now, spec)
        if hardware is not None and rows % hardware.world_size == 0:
            what = f"{hardware.world_size} GPUs instead of {now.world_size}"
            yield replace(asked, what=what, how=f"--gpus {spec}", hardware=hardware)
        number *= 2


def _larger_gpus(asked: Change) -> Iterator[Change]:
    now = asked.hardware
    for gpu in larger_gpus(now.gpu):
        spec = _spec(now, now.gpus_per_node, gpu)
        hardware = _like(now, spec)
        if hardware is not None:
            what = f"{gpu.name}, of {gpu.sold_as_gb} GB, instead of {now.gpu.name}"
            held_back = binds(asked.memory_cap_bytes, gpu)  # the smaller card was not capped
            how = f"--gpus {spec}{', and leave --memory-cap out' * held_back}"
            cap = None if held_back else asked.memory_cap_bytes
            yield replace(asked, what=what, how=how, hardware=hardware, memory_cap_bytes=cap)


def _like(now: Hardware, spec: str) -> Hardware | None:
    """The hardware of `spec` with today's hosts; None where no such node can be built."""
    try:
        hardware = parse_hardware(spec)
    except JobError:
        return None
    return replace(hardware, host_memory_bytes=now.host_memory_bytes, cpu_cores=now.cpu_cores)


def _spec(now: Hardware, gpus_per_node: int, gpu: Gpu) -> str:
    """The value of --gpus for other GPUs with the same links, network and hosts.

    A link that cannot join these GPUs is left out.
    """
    nodes = "" if now.inter is None else f"{now.nodes}x"
    cards = f"{nodes}{gpus_per_node}x{gpu.name.replace(' ', '-')}"
    rest = [] if now.inter is None else [now.inter.name]
    if now.host_memory_bytes is not None:
        in_gib = now.host_memory_bytes % GIB == 0
        rest.append(f"{now.host_memory_bytes // GIB}GiB" if in_gib else f"{now.host_memory_bytes // 10**9}GB")
    linked, unlinked = ("+".join([cards + link, *rest]) for link in (_asked_link(now), ""))
    return linked if _like(now, linked) is not None else unlinked


def _asked_link(now: Hardware) -> str:
    """`@pcie4x4` where the GPUs are not joined the usual way."""
    usual = _like(now, f"{now.gpus_per_node}x{now.gpu.name.replace(' ', '-')}")
    if usual is None or usual.intra.name == now.intra.name:
        return ""
    slot = re.match(r"pcie[0-9]x[0-9]+|nvlink", now.intra.name)
    return "" if slot is None else f"@{slot[0]}"
