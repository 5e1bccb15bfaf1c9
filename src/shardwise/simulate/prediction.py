"""Predictions of the simulator for a strategy, term by term."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Bytes on the fullest GPU when most is allocated, and what is reserved beyond that."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int  # Master weights, moments, and temporary memory of the optimizer's step
    activations_bytes: int
    loss_bytes: int  # Logits and other memory of the output head
    engine_buffers_bytes: int  # Buckets, gathered parameters, communication and library workspaces
    fragmentation_bytes: int  # Peak reserved bytes that no tensor uses when most is allocated

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most memory allocated while one part of the step ran."""

    where: str  # `block 12 backward`, `optimizer`, `output head`, ..
    allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the fullest GPU, from the start of the process on, and of its node's host."""

    peak_reserved_bytes: int  # torch.cuda.max_memory_reserved(): without CUDA's and NCCL's memory
    peak_allocated_bytes: int  # torch.cuda.max_memory_allocated()
    outside_allocator_bytes: int  # CUDA context, kernels, NCCL
    capacity_bytes: int  # GPU memory that the process may use: torch sees less than the label says
    cache_flushes: int = 0
    """How often in a step the allocator finds the GPU full and gives its cache back, as torch's
    `num_alloc_retries` counts. The GPU waits meanwhile; that time is not predicted."""
    terms: MemoryTerms
    host_bytes: int
    """What the strategy keeps in a node's host memory, of all processes, without the processes themselves."""
    timeline: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def needed_bytes(self) -> int:
        """What a plan's table shows and nvidia-smi at the peak: reserved by torch, and CUDA's and NCCL's."""
        return self.peak_reserved_bytes + self.outside_allocator_bytes

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the capacity, without a margin."""
        return self.needed_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class Time:
    """Of one optimizer step; seconds."""

    step_seconds: float
    compute_seconds: float  # The GPU's kernels alone
    communication_seconds: float  # All collectives, overlapped or not
    exposed_communication_seconds: float  # How long the step waits for communication
    exposed_to_peers_seconds: float = 0.0
    """The share of that for sums of the tensor-parallel group; the rest is for the data-parallel one."""
    exposed_to_copies_seconds: float = 0.0
    """How long the step waits for copies between host and GPU, in addition."""
    bubble_seconds: float = 0.0  # How long the average GPU waits for the computation of other stages
    contended_seconds: float = 0.0  # How much longer the computation takes than without collectives
    copy_seconds: float  # Copies of weights and of gradients between host and GPU, overlapped or not
    optimizer_seconds: float
    launch_seconds: float  # Time in which the host issues the step; a step is no faster than this
    tokens_per_step: int  # Of all GPUs
    world_size: int
    full_clock_seconds: float  # The step if power did not limit the clock
    clocked_seconds: float  # Of `compute_seconds`, what grows when the clock falls; the rest waits for memory
    link: str  # The slowest link between data-parallel ranks and stages; of a single GPU, that to its host
    link_to_peers: str  # The slowest of a tensor-parallel group

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def rest_seconds(self) -> float:
        """Neither computing at full clock nor a wait for a link or a stage: the host, a lower clock."""
        waits = self.exposed_communication_seconds + self.exposed_to_copies_seconds + self.bubble_seconds
        return max(0.0, self.step_seconds - self.compute_seconds - waits)

    @property
    def exposed_communication_fraction(self) -> float:
        return self.exposed_communication_seconds / self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Of one optimizer step, all GPUs; joules."""

    joules_per_step: float
    idle_joules: float  # The GPUs' constant draw
    tokens_per_step: int
    at_power_limit: bool  # Whether the clock falls, so that the average draw is the limit

    @property
    def joules_per_token(self) -> float:
        return self.joules_per_step / self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for a strategy on a hardware."""

    memory: Memory
    time: Time
    energy: Energy

    def to_json(self) -> dict[str, Any]:
        """The `prediction` of a plan; bytes, seconds, joules."""
        memory, time, energy = asdict(self.memory), asdict(self.time), asdict(self.energy)
        del memory["timeline"]
        for name in ("tokens_per_second_per_gpu", "exposed_communication_fraction"):
            time[name] = getattr(self.time, name)
        return {
            "memory": memory,
            "time": time,
            "energy": {**energy, "joules_per_token": self.energy.joules_per_token},
        }
