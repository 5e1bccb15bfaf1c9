"""How a process ran out of GPU memory: where, for what, and what the memory held; read after the failure.

The phase and the module come from the traceback. A backward pass runs in C++, where a traceback shows no
modules: a hook on each block notes when it begins (cost: docs/out-of-memory.md). What was asked for and what
was in tensors at that moment stands only in the allocator's message; all else are torch's own counters.
"""

import gc
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import DoesNotFitError
from shardwise.record.schema import OutOfMemory
from shardwise.training.loop import Loop
from shardwise.training.process import device_of, place
from shardwise.training.ready import Ready
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
"""The phases of `OutOfMemory`, for a person."""

PHASES = {
    ("shardwise.training.run", "make_engine"): "building",
    ("shardwise.training.run", "check_weights"): "building",
    ("shardwise.training.snapshot", "restore"): "restoring",
    ("shardwise.training.loop", "evaluate"): "evaluation",
    ("shardwise.training.loop", "save"): "saving",
}
"""Functions by module and name that are a phase of their own, whatever they call."""

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Of c10/cuda/CUDACachingAllocator.cpp; the same from torch 2.1 to 2.13.
_MESSAGE = {"Tried to allocate": "asked_bytes", "this process has": "process_bytes"}
_MESSAGE["Of the allocated memory"] = "allocated_bytes"
# Messages from outside torch's allocator: by CUDA, by Triton, by NCCL.
_OTHERS = ("CUDA error: out of memory", "[CUDA]: out of memory", "Cuda failure 2 'out of memory'")


class OutOfGpuMemoryError(DoesNotFitError):
    """This process ran out of GPU memory; the launcher turns the evidence into an explanation."""

    def __init__(self, evidence: OutOfMemory, trace: str) -> None:
        """Its own words are for a run without the launcher (torchrun); `trace`: the failed call's."""
        fix = "train.checkpointing: full, a smaller train.micro_batch, or the next strategy of "
        fix += "zero2, zero3, zero3-offload; each keeps the global batch"
        super().__init__(headline(evidence), where=f"rank {evidence.rank}, {evidence.call}", fix=fix)
        self.evidence, self.trace = evidence, trace


class Place(NamedTuple):
    """See `record.schema.OutOfMemory`."""

    phase: str
    step: int | None
    module: str | None
    call: str
    loop: Loop | None  # The running loop, and with it the engine


class FailureLocation:
    """Knows a model's modules by name, and in which block a backward pass is."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Create it before an engine takes the model. `blocks`: its repeated layers."""
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._block: str | None = None
        for block in blocks:
            self._follow(block, self._names.get(id(block)))

    def find(self, trace: TracebackType | None, cause: TracebackType | None) -> Place:
        """Where an error was raised; `cause`: the traceback of the error behind it, or its own again."""
        frames = [frame for one in dict.fromkeys((trace, cause)) for frame, _ in traceback.walk_tb(one)]
        owners = [frame.f_locals.get("self") for frame in frames]
        phase = _phase(frames)
        called = (self._names.get(id(owner)) for owner in reversed(owners))
        module = next((name for name in called if name), self._block if phase == "backward" else None)
        loop = next((owner for owner in owners if isinstance(owner, Loop)), None)
        step = None if loop is None else loop.progress.step + (phase not in ("evaluation", "saving"))
        last = traceback.extract_tb(cause)[-1]
        call = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        return Place(phase, step, module, call, loop)

    def _follow(self, block: nn.Module, name: str | None) -> None:
        def begins(_: Any) -> None:
            self._block = name

        def returned(_: nn.Module, __: Any, output: Any) -> None:
            self._block = None  # a backward pass begins behind the last block
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(begins)  # a third of the cost of a hook on the tensor

        block.register_forward_hook(returned)


@contextmanager
def explained(ready: Ready) -> Iterator[None]:
    """Turn running out of GPU memory into OutOfGpuMemoryError, with the evidence."""
    location = FailureLocation(ready.built.model, ready.built.blocks)
    try:
        yield
    except Exception as error:
        cause = out_of_memory_in(error)
        if cause is None:
            raise
        trace = traceback.format_exc()
        where = location.find(error.__traceback__, cause.__traceback__)
        for failed in {error, cause}:  # frees the step's tensors; the loop keeps the engine
            release_frames(failed)
        found = _evidence(cause, where, ready)
    else:
        return
    raise OutOfGpuMemoryError(found, trace)  # outside: keeps nothing of the failed step alive


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """The error itself or one that caused it, if that is GPU memory that ran out."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHERS):
            break
        error = error.__cause__
    return error


def numbers_in(message: str) -> dict[str, int]:
    """Bytes that the allocator's message names, by field of `OutOfMemory`; only those it has."""
    found = re.findall(rf"({'|'.join(_MESSAGE)}) ([0-9.]+) ({'|'.join(_UNITS)})", message)
    return {_MESSAGE[words]: round(float(number) * _UNITS[unit]) for words, number, unit in reversed(found)}


def counters(device: torch.device) -> dict[str, int]:
    """Numbers of torch that the failure has not changed since; bytes, by field of `OutOfMemory`."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    found = {"reserved_bytes": reserved, "free_bytes": free, "total_bytes": total}
    share = torch.cuda.get_per_process_memory_fraction(device)
    return found if share >= 1.0 else {**found, "allowed_bytes": int(share * total)}


def release_frames(error: BaseException) -> None:
    """Free what only the calls of its traceback hold, also where others hold the traceback."""
    traceback.clear_frames(error.__traceback__)
    # A cleared frame keeps its function, and so what that closed over: with hooks, a module's arguments.
    step = error.__traceback__
    while step is not None:
        following, step.tb_next = step.tb_next, None
        step = following
    gc.collect()


def _evidence(cause: BaseException, where: Place, ready: Ready) -> OutOfMemory:
    rank, _, local_rank = place()
    device = device_of(local_rank)
    numbers: dict[str, Any] = {
        **dict.fromkeys(name for name in OutOfMemory.__dataclass_fields__ if name.endswith("_bytes")),
        **counters(device),
        **numbers_in(str(cause)),
    }
    if device.type == "cuda" and where.loop is not None:
        numbers["resident_bytes"] = torch.cuda.memory_allocated(device)
    vocabulary = ready.built.config.get_text_config().vocab_size
    return OutOfMemory(
        rank=rank,
        ranks=(rank,),
        **{key: value for key, value in where._asdict().items() if key != "loop"},
        message=str(cause).partition("\n")[0].partition(" If reserved but")[0],
        strategy=ready.strategy.to_json(),
        vocab_size=vocabulary if ready.job.model.weights == "random" else None,
        **numbers,
    )


def _phase(frames: Sequence[FrameType]) -> str:
    functions = [(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name) for frame in frames]
    known = next((PHASES[function] for function in functions if function in PHASES), None)
    if known is not None or ("shardwise.training.loop", "_issue") not in functions:
        return known or "other"
    if not any(module.startswith("shardwise.engines.") for module, _ in functions):
        return "batch"
    if any(name == "backward" for _, name in functions):  # torch's, DeepSpeed's, a custom operation's
        return "backward"
    calls = (f for f in frames if f.f_code.co_name in ("_call_impl", "_wrapped_call_impl"))
    return "forward" if any(isinstance(f.f_locals.get("self"), nn.Module) for f in calls) else "optimizer"


def headline(evidence: OutOfMemory) -> str:
    """`out of GPU memory in the backward pass of step 3, in model.layers.12.mlp, on rank 1`."""
    of = "after" if evidence.phase in ("evaluation", "saving") else "of"
    step = "" if evidence.step is None else f" {of} step {evidence.step}"
    module = "" if evidence.module is None else f", in {evidence.module}"
    ranks = f"rank{'s' if len(evidence.ranks) > 1 else ''} {', '.join(map(str, evidence.ranks))}"
    return f"out of GPU memory in {IN_WORDS[evidence.phase]}{step}{module}, on {ranks}"


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
