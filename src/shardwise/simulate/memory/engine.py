"""The moments of a replay at which an engine allocates and frees, and what engines do alike."""

from collections.abc import Iterable

from shardwise.job.schema import OptimizerName
from shardwise.simulate.memory.gpu import GRADIENTS, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy


class EngineMemory:
    """An engine's allocations on the fullest GPU, in addition to the events of the trace; by default none."""

    sums_stay = False  # Whether gradients are allocated once, those of fp32 parameters too

    def build(self, memory: GpuMemory) -> None:
        """Weights and optimizer, until the first step begins."""

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """Before the forward pass of one of a step's micro-batches."""

    def forward(self, memory: GpuMemory, unit: int) -> None:
        """A unit's forward pass begins."""

    def forward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def backward(self, memory: GpuMemory, unit: int) -> None:
        """A unit's backward pass begins."""

    def backward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        """A parameter's gradient, in the computation's format, is complete; the engine frees `block`."""

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """The backward pass of a micro-batch is over."""

    def step(self, memory: GpuMemory) -> None:
        """The optimizer's step, after which the gradients are freed."""


FP16 = 2


def fill(memory: GpuMemory, trace: StepTrace, part: Iterable[int]) -> dict[int, Block]:
    """Allocate the weights of one part, unsharded; returns them by parameter. Adapters come last."""
    weights: dict[int, Block] = {}
    base = [index for index in part if ".lora_" not in trace.parameters[index].name]
    drawn = {index: memory.take(WEIGHTS, _drawn_bytes(trace, index)) for index in base}
    outside = [index for unit in trace.units if unit.block < 0 for index in unit.parameters]
    for index in base:
        if outside.count(index) > 1:  # drawn in both places, the second one stays (random_weights.py)
            first = drawn[index]
            drawn[index] = memory.take(WEIGHTS, _drawn_bytes(trace, index))
            memory.give(first)
    for index in base:
        weights[index] = _rounded(memory, trace, index, drawn[index])
    for index in part:
        if index not in weights:
            adapter = memory.take(WEIGHTS, FP32 * trace.parameters[index].uncut_numel)
            weights[index] = _rounded(memory, trace, index, adapter)
    return weights


def _drawn_bytes(trace: StepTrace, index: int) -> int:
    return FP32 * (trace.parameters[index].made_of or trace.parameters[index].uncut_numel)


def _rounded(memory: GpuMemory, trace: StepTrace, index: int, drawn: Block) -> Block:
    parameter = trace.parameters[index]
    if parameter.item_bytes == FP32 and not parameter.made_of:
        return drawn
    # Copies in the computation's format, and for int8 in fp16 (kernels/quantized_linear.py).
    items = [parameter.item_bytes] if parameter.item_bytes != FP32 else []
    items += [FP16] if parameter.size_bytes == parameter.made_of else []
    rounded = [memory.take(WEIGHTS, item * parameter.made_of) for item in items if parameter.made_of]
    weight = memory.take(WEIGHTS, parameter.item_bytes * parameter.uncut_numel)
    memory.give(*rounded, drawn)
    return weight


def cut(memory: GpuMemory, trace: StepTrace, weights: dict[int, Block]) -> dict[int, Block]:
    """Keep one tensor-parallel rank's part of the full weights, layer by layer; returns all that is kept.

    A part is copied, then the full weight is freed (deepspeed/module_inject/layers.py: move).
    """
    kept = dict(weights)
    for index, parameter in enumerate(trace.parameters):
        if parameter.cut_from is not None:
            kept[index] = memory.take(WEIGHTS, parameter.size_bytes)
            memory.give(weights[index])
    return kept


def pinned(size_bytes: int) -> int:
    """Host bytes of a page-locked tensor: the next power of two (CachingHostAllocator.h: allocate)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


class SummedGradients(EngineMemory):
    """Gradients are summed in fp32: each in the first one's memory where that is fp32, else in its own."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace, self._mixed = trace, strategy.precision != "fp32"
        self._gradients: dict[int, Block] = {}

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        first = parameter not in self._gradients
        if first and not self._mixed:
            self._gradients[parameter] = memory.move(block, GRADIENTS)
            return
        if first:
            size = FP32 * self._trace.parameters[parameter].numel
            self._gradients[parameter] = memory.take_in_pass(GRADIENTS, size)
        memory.give(block)


class WithFp32Parameters(EngineMemory):
    """An engine, and the fp32 parameters that it does not see: every rank has all of them (decision 0019).

    Follows Fp32Parameters of engines/runtime/parameters.py.
    """

    def __init__(
        self, engine: EngineMemory, trace: StepTrace, apart: frozenset[int], optimizer: OptimizerName
    ) -> None:
        self._engine, self._apart, self._optimizer = engine, apart, optimizer
        for moment in ("begin", "forward", "forward_end", "backward", "backward_end", "end"):
            setattr(self, moment, getattr(engine, moment))  # nothing happens to these parameters
        self._sizes = {index: FP32 * trace.parameters[index].numel for index in sorted(apart)}
        self._trained = [index for index in self._sizes if trace.parameters[index].trainable]
        self._gradients: dict[int, Block] = {}

    def build(self, memory: GpuMemory) -> None:
        for size in self._sizes.values():
            memory.take(WEIGHTS, size)
        self._engine.build(memory)
        for index in self._trained if self._engine.sums_stay else ():
            memory.take(GRADIENTS, self._sizes[index])
        for index in self._trained:
            memory.take_adamw_state(self._sizes[index] // FP32, self._optimizer)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if parameter not in self._apart:
            self._engine.gradient(memory, parameter, block)
        elif self._engine.sums_stay or parameter in self._gradients:  # autograd adds to it
            memory.give(block)
        else:
            self._gradients[parameter] = memory.move(block, GRADIENTS)

    def step(self, memory: GpuMemory) -> None:
        """Concatenate the gradients and sum them over the ranks; free them after AdamW's step."""
        total = memory.take(GRADIENTS, sum(self._sizes[index] for index in self._trained))
        memory.give(*self._gradients.values())
        self._gradients.clear()
        self._engine.step(memory)
        memory.give(total)
