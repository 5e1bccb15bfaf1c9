"""Peak memory of a strategy: the trace replayed through the allocator, with the engine's own allocations.

Building the model and the optimizer is replayed, then two optimizer steps; the second finds the cache as the
first has left it. Of many micro-batches two are replayed: a third would repeat the second.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.allocator import CachingAllocator, OutOfMemoryError
from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GpuMemory
from shardwise.simulate.memory.spans import PRODUCT, Step, steps
from shardwise.simulate.prediction import Memory, MemoryTerms
from shardwise.simulate.step_trace import BACKWARD, BACKWARD_END, FORWARD, FORWARD_END, GRADIENT, StepTrace
from shardwise.strategy import Strategy

STEPS = 2
MICRO_BATCHES = 2

HOPPER = 9.0
WORKSPACE_BYTES = 32 * 1024**2
SMALL_WORKSPACE_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
"""cuBLAS's workspace on Hopper and newer, and on older GPUs (getChosenWorkspaceSize in CUDABlas.cpp). The
thread of the forward pass has one, and that of the backward pass; they stay."""

PLENTY = 1 << 90
"""Capacity of a replay that goes on where the GPU would be full, to say by how much."""

Run = Callable[[int], tuple[GpuMemory, int]]
"""Replays the model's construction and some steps with an allocator of so many bytes. Returns the memory, and
how often the last step gave the allocator's cache back. OutOfMemoryError: they are not enough."""


def peak_of(run: Run, hardware: Hardware, *, outside_allocator_bytes: int, capacity_bytes: int) -> Memory:
    """Memory of the fullest GPU, whose process may use `capacity_bytes`, context included.

    Where the GPU has room for all tensors but not for the allocator's cache, it is that of a run whose
    allocator gives its cache back, if that is enough.
    """
    memory, flushes = run(PLENTY)
    room = capacity_bytes - outside_allocator_bytes
    if memory.allocator.peak_allocated_bytes <= room < memory.allocator.peak_reserved_bytes:
        with suppress(OutOfMemoryError):
            memory, flushes = run(room)
    terms = memory.fullest
    reserved = memory.allocator.peak_reserved_bytes
    return Memory(
        peak_reserved_bytes=reserved,
        peak_allocated_bytes=memory.allocator.peak_allocated_bytes,
        outside_allocator_bytes=outside_allocator_bytes,
        capacity_bytes=capacity_bytes,
        cache_flushes=flushes,
        terms=MemoryTerms(
            weights_bytes=terms[0],
            gradients_bytes=terms[1],
            optimizer_bytes=terms[2],
            activations_bytes=terms[3],
            loss_bytes=terms[4],
            engine_buffers_bytes=terms[5],
            fragmentation_bytes=reserved - sum(terms),
        ),
        host_bytes=memory.host_bytes * hardware.gpus_per_node,
        timeline=memory.timeline,
    )


def replayed(
    trace: StepTrace, strategy: Strategy, hardware: Hardware, engine: EngineMemory, allocator_bytes: int
) -> tuple[GpuMemory, int]:
    """The memory after it was built and two steps, and how often the second gave the allocator's cache back.

    OutOfMemoryError: `allocator_bytes` is not enough.
    """
    memory = GpuMemory(CachingAllocator(capacity_bytes=allocator_bytes))
    engine.build(memory)
    for _ in range(3 * strategy.accumulation):  # token ids, labels and positions of a step's micro-batches
        memory.take(ACTIVATIONS, 8 * trace.tokens)
    workspace = workspace_bytes(hardware)
    before = 0
    for number in range(STEPS):
        before = memory.allocator.alloc_retries
        count = min(strategy.accumulation, MICRO_BATCHES)
        for micro_batch in range(count):
            last = micro_batch == count - 1
            engine.begin(memory, micro_batch, last=last)
            once = 0 if number or micro_batch else workspace
            replay_steps(trace, steps(trace), memory, engine, once, {})
            engine.end(memory, micro_batch, last=last)
        memory.at("optimizer")
        engine.step(memory)
    return memory, memory.allocator.alloc_retries - before


def workspace_bytes(hardware: Hardware) -> int:
    """What the first matrix product of each pass allocates."""
    new = float(hardware.gpu.compute_capability or 0) >= HOPPER
    return WORKSPACE_BYTES if new else SMALL_WORKSPACE_BYTES


def replay_steps(
    trace: StepTrace,
    part: Iterable[Step],
    memory: GpuMemory,
    engine: EngineMemory,
    workspace: int,
    addresses: dict[int, int],
) -> None:
    """Replay a part of a trace's steps.

    `workspace`: bytes that the first matrix product of each pass allocates. `addresses`: of the micro-batch's
    tensors, which later parts free.
    """
    names = [unit.name if unit.block < 0 else f"block {unit.block}" for unit in trace.units]
    for span, event in part:
        if span is not None:
            memory.run(span, addresses)
        kind = event[0]
        if kind == GRADIENT:
            _, parameter, tensor, size, account = event
            engine.gradient(memory, parameter, memory.handed_over(addresses.get(tensor, 0), size, account))
        elif kind == FORWARD:
            memory.at(f"{names[event[1]]} forward")
            engine.forward(memory, event[1])
        elif kind == FORWARD_END:
            engine.forward_end(memory, event[1])
        elif kind == BACKWARD:
            memory.at(f"{names[event[1]]} backward")
            engine.backward(memory, event[1])
        elif kind == BACKWARD_END:
            engine.backward_end(memory, event[1])
        elif kind == PRODUCT and workspace:
            memory.take_in_pass(BUFFERS, workspace)
            workspace = 0 if memory.allocator.passes else workspace  # both passes are on one thread
