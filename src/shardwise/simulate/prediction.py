"""What the simulator says of a strategy, term by term; all of it predicted, nothing measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """What is allocated when that is most, on the fullest GPU, and what is reserved beyond it; bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """Master weights and moments, and what the optimizer's step takes besides."""
    activations_bytes: int
    loss_bytes: int
    """Logits and what else the output head needs."""
    engine_buffers_bytes: int
    """Buckets, gathered parameters, communication and library workspaces."""
    fragmentation_bytes: int
    """Reserved at most, and in no tensor even when most is allocated."""

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most memory allocated while one part of the step ran."""

    where: str
    """`block 12 backward`, `optimizer`, `output head`, ..."""
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of the fullest GPU, from the start of the process on; and of its node's host."""

    peak_reserved_bytes: int
    """What torch's allocator takes from the GPU at most."""
    peak_allocated_bytes: int
    outside_allocator_bytes: int
    """CUDA context, kernels, NCCL."""
    capacity_bytes: int
    """What the process may use of the GPU: torch sees less than the label says."""
    cache_flushes: int = 0
    """Times a step that the allocator finds the GPU full, gives its cached memory back and takes anew, as
    `num_alloc_retries` of torch counts. The GPU waits meanwhile; the time that takes is not predicted."""
    terms: MemoryTerms
    host_bytes: int
    """Of one node, all its processes: what the strategy keeps there, beside the processes themselves."""
    timeline: tuple[Moment, ...] = ()

    @property
    def needed_bytes(self) -> int:
        return self.peak_reserved_bytes + self.outside_allocator_bytes

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the capacity; without any margin."""
        return self.needed_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class Time:
    """Of one optimizer step; seconds."""

    step_seconds: float
    compute_seconds: float
    """The GPU's kernels alone."""
    communication_seconds: float
    """All collectives, overlapped or not."""
    exposed_communication_seconds: float
    """What the step waits for communication."""
    exposed_to_peers_seconds: float = 0.0
    """Of that, for the sums of the tensor-parallel group; the rest is for the data-parallel one."""
    exposed_to_copies_seconds: float = 0.0
    """What the step waits for copies between host and GPU, beside that."""
    copy_seconds: float
    """Copies between host and GPU, overlapped or not."""
    optimizer_seconds: float
    launch_seconds: float
    """What the host needs to issue the step; a step is no faster than this."""
    tokens_per_step: int
    """Of all GPUs."""
    world_size: int

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def exposed_communication_fraction(self) -> float:
        return self.exposed_communication_seconds / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Of one optimizer step, all GPUs; joules."""

    joules_per_step: float
    idle_joules: float
    """What the GPUs take for being on."""
    tokens_per_step: int

    @property
    def joules_per_token(self) -> float:
        return self.joules_per_step / self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A strategy on a hardware, predicted."""

    memory: Memory
    time: Time
    energy: Energy

    def to_json(self) -> dict[str, Any]:
        """The `prediction` of a plan; bytes, seconds, joules."""
        memory = {key: value for key, value in asdict(self.memory).items() if key != "timeline"}
        return {
            "memory": memory,
            "time": {
                **asdict(self.time),
                "tokens_per_second_per_gpu": self.time.tokens_per_second_per_gpu,
                "exposed_communication_fraction": self.time.exposed_communication_fraction,
            },
            "energy": {**asdict(self.energy), "joules_per_token": self.energy.joules_per_token},
        }
