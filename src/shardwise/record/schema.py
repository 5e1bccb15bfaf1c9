"""The events of a run: one JSON object a line in `events.jsonl`, each with `kind` and `time`.

Losses are nats per target token, `time` is Unix seconds, lists have one value per rank; other units are in
the names. A number that is not finite is written as null and listed in `not_finite`: {"grad_norm": "inf"}.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """The first line of a launch: what it is going to run."""

    kind: ClassVar[str] = "run"
    name: str
    strategy: str
    processes: int
    total_steps: int
    global_batch: int  # Rows per optimizer step
    sequence_length: int
    parameters: int
    trainable_parameters: int
    energy_source: str | None = None
    """Source of `joules`: NVML's energy `counter` or `power samples`; null where there is none. `simulated`:
    nothing about energy and power is measured in this run, and its steps are slowed down on purpose."""
    outside_allocator_source: str | None = None
    """`process`: NVML counts this process's memory; `device`: it counts all processes on the GPU."""


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One optimizer step, over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float  # Before clipping
    skipped: bool  # The weights were not updated because a value was not finite
    tokens: int  # Tokens of this step without padding
    target_tokens: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float  # Per process, where there is no GPU
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOP/s as a share of the GPU's peak; null with `mfu_unavailable` saying why."""
    mfu_unavailable: str | None = None
    loss_scale: float | None = None  # fp16 only
    memory_allocated_bytes: list[int] = field(default_factory=list)
    memory_reserved_bytes: list[int] = field(default_factory=list)
    peak_memory_allocated_bytes: list[int] = field(default_factory=list)
    peak_memory_reserved_bytes: list[int] = field(default_factory=list)
    outside_allocator_bytes: list[int] | None = None
    """GPU memory outside torch's allocator: the CUDA context, loaded kernels, NCCL. Read in the first steps,
    then every 50th. Null where there is no GPU."""
    host_memory_bytes: list[int] = field(default_factory=list)  # Resident set of each process
    pinned_memory_bytes: list[int] | None = None
    """Page-locked host memory of torch, as last read; null where there is no GPU."""
    joules: float | None = None
    """Energy of all GPUs in this step, without the host. It is counted from the launch of the step before to
    the launch of this one. The counter moves every 20 to 100 ms: add up several short steps."""
    joules_unavailable: str | None = None  # Why `joules` is null


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """An evaluation on the held-out data after `step` steps."""

    kind: ClassVar[str] = "eval"
    step: int
    loss: float
    target_tokens: int
    seconds: float
    samples: Sequence[tuple[str, str]] = ()  # `train.sample_prompts`, and what the model wrote


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A checkpoint was committed."""

    kind: ClassVar[str] = "save"
    step: int
    seconds: float  # Training stood still
    background_seconds: float | None = None  # Then it went on, while a thread wrote; null: it waited
    bytes: int | None = None
    mirror: dict[str, object] | None = None
    """With `train.keep: mirror`, as it was then: `step`, the newest one there, and `failed`, or null."""


@dataclass(frozen=True, kw_only=True)
class ResumeEvent:
    """The run continues from the checkpoint of `step`; later lines were removed."""

    kind: ClassVar[str] = "resume"
    step: int


@dataclass(frozen=True, kw_only=True)
class PowerEvent:
    """What was done about the power limit after `step`."""

    kind: ClassVar[str] = "power"
    step: int
    what: str
    """`begin`, `level` (a limit was set), `window` (measured at it), `choice`, `drift` (searched again),
    `measure` (nothing is set any more), `end` (all is put back)."""
    reasons: list[str]  # Sentences
    watts: int | None = None  # The limit of each GPU, where its range allows it
    limits_watts: dict[str, float] | None = None  # By UUID, as they were set
    steps: int | None = None  # Of a window; of the search, for a choice
    seconds: float | None = None
    joules: float | None = None
    held: bool | None = None  # Whether the limit held clocks down; null if that is not known
    saved_joules: float | None = None  # Against the present limit at the start; what the search cost is in it
    saved_seconds: float | None = None
    simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class StopEvent:
    """The last line of a launch."""

    kind: ClassVar[str] = "stop"
    step: int
    status: str  # `finished` (all steps), `paused` (at --max-steps), `stopped` (on request) or `failed`
    seconds: float  # Wall seconds of this launch, from its first line
    kwh: float | None = None
    """Energy of all GPUs in all launches, without the host: see record/energy.py."""
    kwh_unavailable: str | None = None
    mirror: dict[str, object] | None = None  # As in SaveEvent


Event = RunEvent | StepEvent | EvalEvent | SaveEvent | ResumeEvent | PowerEvent | StopEvent

OUT_OF_MEMORY = "out_of_memory.json"
"""Written next to events.jsonl where a process ran out of GPU memory: {"schema": 1, "failures": [...]}.
A failure has the `evidence` (below), the `error` as printed, and `retried_with` and `from_step`, or null."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """How one process ran out of GPU memory. Bytes that are not known are null: on a CPU, all are."""

    rank: int
    ranks: tuple[int, ...]  # All ranks that ran out of memory before the run ended, this one first
    phase: str
    """`building`, `restoring`, `batch`, `forward`, `backward`, `optimizer`, `evaluation`, `saving`, or
    `other`."""
    step: int | None  # The current optimizer step; in an evaluation or a save, the last finished one
    module: str | None
    """Name of the innermost module; in a backward pass, the block whose gradient was computed."""
    call: str  # The innermost line of Python: `stage3.py:812 in partition_grads`
    message: str  # First line of the error of the allocator or the library
    strategy: dict[str, object]  # `Strategy.to_json()`
    vocab_size: int | None  # Rows of the embedding, where a new tokenizer sets them
    asked_bytes: int | None
    allocated_bytes: int | None  # In tensors at that moment
    resident_bytes: int | None
    """Part of `allocated_bytes` that outlives the step: weights, optimizer, gradients so far, buffers."""
    reserved_bytes: int | None
    """Held by torch's allocator; what exceeds `allocated_bytes` are fragments too small for the request."""
    process_bytes: int | None  # GPU memory of this process, CUDA's context and NCCL included
    free_bytes: int | None
    total_bytes: int | None  # Of the GPU
    allowed_bytes: int | None  # Limit of torch's allocator under --memory-cap; null without one
