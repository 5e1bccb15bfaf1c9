"""The events of a run: one JSON object a line in `events.jsonl`, each with `kind` and `time`.

Units are in the names (seconds, bytes) or here: losses are nats per target token, `time` is Unix
seconds, lists are by rank. A number that is not finite is written as null and named in the key
`not_finite`, e.g. {"grad_norm": "inf"}.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """The first line: what is going to be run."""

    kind: ClassVar[str] = "run"
    name: str
    strategy: str
    processes: int
    total_steps: int
    global_batch: int
    """Rows per optimizer step."""
    sequence_length: int
    parameters: int
    trainable_parameters: int
    energy_source: str | None = None
    """What `joules` come from: NVML's energy `counter`, or `power samples`; null where there are none."""
    outside_allocator_source: str | None = None
    """`process`: NVML counts this process's memory; `device`: what all processes on the GPU use was taken."""


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step, over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    skipped: bool
    """The weights were left as they were because a value was not finite."""
    tokens: int
    """Tokens of this step, padding left out."""
    target_tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    """Per process, where there is no GPU."""
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOP/s as a share of the GPU's peak; null with `mfu_unavailable` saying why."""
    mfu_unavailable: str | None = None
    loss_scale: float | None = None
    """fp16 only."""
    memory_allocated_bytes: list[int] = field(default_factory=list)
    memory_reserved_bytes: list[int] = field(default_factory=list)
    peak_memory_allocated_bytes: list[int] = field(default_factory=list)
    peak_memory_reserved_bytes: list[int] = field(default_factory=list)
    outside_allocator_bytes: list[int] | None = None
    """GPU memory beside what torch's allocator has reserved, as last read (the first steps, then every 50th):
    the CUDA context, loaded kernels, NCCL. Null where there is no GPU."""
    host_memory_bytes: list[int] = field(default_factory=list)
    """Resident set of each process."""
    pinned_memory_bytes: list[int] | None = None
    """Host memory that torch holds page-locked, as last read; null where there is no GPU."""
    joules: float | None = None
    """Energy of all GPUs in this step, host excluded. It is counted from when the step before was issued to
    when this one was: over several steps that is as long as `seconds`. The counter moves every 20 to 100 ms,
    so the energy of a short step is noise: add up several."""
    joules_unavailable: str | None = None
    """Why `joules` is null."""


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """An evaluation on the held-out data after `step` steps."""

    kind: ClassVar[str] = "eval"
    step: int
    loss: float
    target_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A checkpoint was committed."""

    kind: ClassVar[str] = "save"
    step: int
    seconds: float
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeEvent:
    """The run goes on from the checkpoint of `step`; later lines of before are gone."""

    kind: ClassVar[str] = "resume"
    step: int


@dataclass(frozen=True, kw_only=True)
class StopEvent:
    """The last line of a launch."""

    kind: ClassVar[str] = "stop"
    step: int
    status: str
    """`finished` (all steps), `paused` (at --max-steps), `stopped` (on request) or `failed`."""
    seconds: float
    """Wall seconds of this launch, from its first line."""


Event = RunEvent | StepEvent | EvalEvent | SaveEvent | ResumeEvent | StopEvent

OUT_OF_MEMORY = "out_of_memory.json"
"""Beside events.jsonl, where a process ran out of GPU memory: {"schema": 1, "failures": [...]}, of each the
`evidence` (below), the `error` as it was told, and the strategy `retried_with` and `from_step`, or null."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """How one process ran out of GPU memory. Bytes are null where nobody could tell (on a CPU, all are)."""

    rank: int
    ranks: tuple[int, ...]
    """All that ran out before the run was ended, this one first."""
    phase: str
    """`building`, `restoring`, `batch`, `forward`, `backward`, `optimizer`, `evaluation`, `saving`, or
    `other`."""
    step: int | None
    """The optimizer step that was under way, or, evaluating and saving, the last one done."""
    module: str | None
    """The innermost one known by name; in a backward pass the block whose gradient was being computed."""
    call: str
    """The innermost line of Python: `stage3.py:812 in partition_grads`."""
    message: str
    """The first line of what the allocator, or the library, said."""
    strategy: dict[str, object]
    """`Strategy.to_json()`."""
    vocab_size: int | None
    """Rows of the embedding, where a new tokenizer decided them."""
    asked_bytes: int | None
    allocated_bytes: int | None
    """In tensors at that moment."""
    resident_bytes: int | None
    """Of these, what stays when the step is let go of: weights, optimizer, gradients so far, buffers."""
    reserved_bytes: int | None
    """What torch's allocator held; beyond `allocated_bytes` it is fragments too small for what was asked."""
    process_bytes: int | None
    """What this process held of the GPU, CUDA's context and NCCL included."""
    free_bytes: int | None
    total_bytes: int | None
    """Of the GPU."""
    allowed_bytes: int | None
    """What torch's allocator may reserve under --memory-cap; null without one."""
