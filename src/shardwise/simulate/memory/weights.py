"""Memory of filling a model's weights on a GPU: models/weights.py, one part after the other.

Modelled are random weights, which are drawn in fp32 and rounded. Loading weights takes less.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.simulate.memory.gpu import WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, Parameter, StepTrace

FP16 = 2


def fill(memory: GpuMemory, trace: StepTrace, part: Iterable[int]) -> dict[int, Block]:
    """Allocate the weights of one part, unsharded; returns them by parameter. Adapters come last."""
    weights: dict[int, Block] = {}
    base = [index for index in part if ".lora_" not in trace.parameters[index].name]
    drawn = {index: memory.take(WEIGHTS, _drawn_bytes(trace, index)) for index in base}
    outside = [index for unit in trace.units if unit.block < 0 for index in unit.parameters]
    for index in base:
        if outside.count(index) > 1:  # drawn in both places, the second one stays (models/weights.py)
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
    rounded = [memory.take(WEIGHTS, size) for size in _before_quantising(parameter)]
    weight = memory.take(WEIGHTS, parameter.item_bytes * parameter.uncut_numel)
    for block in (*rounded, drawn):
        memory.give(block)
    return weight


def _before_quantising(parameter: Parameter) -> list[int]:
    """Bytes of the copies in the computation's format, and for int8 in fp16 (kernels/quantized_linear.py)."""
    copies = [parameter.item_bytes] if parameter.item_bytes != FP32 else []
    copies += [FP16] if parameter.size_bytes == parameter.made_of else []
    return [item * parameter.made_of for item in copies] if parameter.made_of else []


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
