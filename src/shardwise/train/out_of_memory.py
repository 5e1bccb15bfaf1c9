"""What a process that ran out of GPU memory can still tell: where, for what, and what the memory held.

Everything is read after the failure: from the error's words, which hold the allocator's numbers of that
moment, from its traceback (whereabouts.py), and from what stays allocated once the traceback's frames have
let go of the step's tensors.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.errors import DoesNotFitError
from shardwise.record.schema import OutOfMemory
from shardwise.train.process import device_of, place
from shardwise.train.ready import Ready
from shardwise.train.whereabouts import Place, Whereabouts
from shardwise.units import gib

IN_WORDS = {
    "building": "building the engine",
    "restoring": "restoring the checkpoint",
    "batch": "copying the batch to the GPU",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
    "evaluation": "the evaluation",
    "saving": "saving",
    "other": "setting up",
}
"""The phases of `OutOfMemory`, as a person calls them."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Of c10/cuda/CUDACachingAllocator.cpp; the same from torch 2.1 to 2.13.
_SAID = {
    "asked": r"Tried to allocate {}",
    "total": r"total capacity of {}",
    "free": r"of which {} is free",
    "process": r"this process has {} memory in use",
    "allowed": r"{} allowed;",
    "allocated": r"Of the allocated memory {} is allocated by PyTorch",
    "unused": r"{} is reserved by PyTorch but unallocated",
}
_SIZE = r"([0-9.]+) (bytes|KiB|MiB|GiB)"
# What is said outside torch's allocator: by CUDA, by Triton, by NCCL.
_OTHERS = ("CUDA error: out of memory", "[CUDA]: out of memory", "Cuda failure 2 'out of memory'")


class OutOfGpuMemoryError(DoesNotFitError):
    """This process ran out of GPU memory; the launcher turns the evidence into an explanation."""

    def __init__(self, evidence: OutOfMemory) -> None:
        """Its own words are for a run without the launcher (torchrun)."""
        super().__init__(
            headline(evidence),
            where=f"rank {evidence.rank}, {evidence.call}",
            fix="train.checkpointing: full, a smaller train.micro_batch, or the next strategy of "
            "zero2, zero3, zero3-offload; each keeps the global batch",
        )
        self.evidence = evidence


def headline(evidence: OutOfMemory) -> str:
    """`out of GPU memory in the backward pass of step 3, in model.layers.12.mlp, on rank 1`."""
    said = f"out of GPU memory in {IN_WORDS[evidence.phase]}"
    if evidence.step is not None:
        said += f" {'after' if evidence.phase in ('evaluation', 'saving') else 'of'} step {evidence.step}"
    if evidence.module is not None:
        said += f", in {evidence.module}"
    ranks = ", ".join(map(str, evidence.ranks))
    return f"{said}, on rank{'s' if len(evidence.ranks) > 1 else ''} {ranks}"


@contextmanager
def explained(ready: Ready) -> Iterator[None]:
    """Turns running out of GPU memory into OutOfGpuMemoryError, with what there is to know about it."""
    whereabouts = Whereabouts(ready.built.model, ready.built.blocks)
    try:
        yield
    except Exception as error:
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        found = _evidence(error, cause, whereabouts, ready)
    else:
        return
    raise OutOfGpuMemoryError(found)  # outside: nothing of the failed step hangs on it


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """The error itself or one that caused it, if that is GPU memory that ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHERS)
        ):
            return error
        error = error.__cause__
    return None


def numbers_in(message: str) -> dict[str, int]:
    """Bytes that the allocator's message names, by the keys of `_SAID`; what it does not say is left out."""
    found = {}
    for key, words in _SAID.items():
        match = re.search(words.format(_SIZE), message)
        if match:
            found[key] = round(float(match[1]) * _UNITS[match[2]])
    return found


def _evidence(
    error: BaseException, cause: BaseException, whereabouts: Whereabouts, ready: Ready
) -> OutOfMemory:
    where = whereabouts.of(error.__traceback__, cause.__traceback__)
    rank, _, local_rank = place()
    device = device_of(local_rank)
    said = numbers_in(str(cause))
    reserved = said["allocated"] + said.get("unused", 0) if "allocated" in said else None
    job = ready.job
    return OutOfMemory(
        rank=rank,
        ranks=(rank,),
        phase=where.phase,
        step=where.step,
        module=where.module,
        call=where.call,
        message=str(cause).partition("\n")[0].partition(" If reserved but")[0],
        strategy=ready.strategy.to_json(),
        vocab_size=ready.built.config.get_text_config().vocab_size if job.model.weights == "random" else None,
        asked_bytes=said.get("asked"),
        allocated_bytes=said.get("allocated"),
        reserved_bytes=reserved,
        process_bytes=said.get("process"),
        free_bytes=said.get("free"),
        total_bytes=said.get("total"),
        allowed_bytes=said.get("allowed"),
        resident_bytes=_resident(cause, where, device),  # last: it takes the traceback apart
    )


def _resident(error: BaseException, where: Place, device: torch.device) -> int | None:
    """Bytes in tensors once the frames of the failed step are gone; the loop keeps the engine alive."""
    if device.type != "cuda" or where.loop is None:
        return None
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    return torch.cuda.memory_allocated(device)


def memory_in_words(evidence: OutOfMemory) -> str:
    """`2.0 GiB were asked for; ...`: every number that is known."""
    parts = []
    if evidence.asked_bytes is not None:
        parts.append(f"{size(evidence.asked_bytes)} were asked for")
    if evidence.allocated_bytes is not None and evidence.reserved_bytes is not None:
        unused = evidence.reserved_bytes - evidence.allocated_bytes
        parts.append(f"{gib(evidence.allocated_bytes)} are in tensors, {size(unused)} reserved in fragments")
    if evidence.free_bytes is not None and evidence.total_bytes is not None:
        parts.append(f"{size(evidence.free_bytes)} of the GPU's {gib(evidence.total_bytes)} are free")
    if evidence.allowed_bytes is not None:
        parts.append(f"--memory-cap leaves torch {gib(evidence.allowed_bytes)}")
    return ", ".join(parts) or evidence.message


def size(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB below a tenth of one."""
    return gib(num_bytes) if abs(num_bytes) >= 0.1 * 2**30 else f"{num_bytes / 2**20:.0f} MiB"
