"""How a model's weights come to a GPU: models/weights.py, one part after the other.

Modelled are random weights, which are drawn in fp32 and rounded. Loaded ones take less on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.simulate.memory.gpu import WEIGHTS, Machine
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import Parameter, StepTrace

FP32, FP16 = 4, 2


def parts(trace: StepTrace) -> Iterator[list[int]]:
    """Indices of the parameters of each block, then of those outside the blocks: the order of filling."""
    blocks = [list(unit.parameters) for unit in trace.units if unit.block >= 0]
    inside = {index for block in blocks for index in block}
    yield from blocks
    yield [index for index in range(len(trace.parameters)) if index not in inside]


def fill(machine: Machine, trace: StepTrace, part: list[int]) -> dict[int, Block]:
    """The weights of one part, by parameter, whole; adapters come last."""
    weights: dict[int, Block] = {}
    base = [index for index in part if ".lora_" not in trace.parameters[index].name]
    drawn = {index: machine.take(WEIGHTS, _drawn_bytes(trace, index)) for index in base}
    outside = [index for unit in trace.units if unit.block < 0 for index in unit.parameters]
    for index in base:
        if outside.count(index) > 1:  # drawn for both places, of which the second stays (random_weights.py)
            first = drawn[index]
            drawn[index] = machine.take(WEIGHTS, _drawn_bytes(trace, index))
            machine.give(first)
    for index in base:
        weights[index] = _rounded(machine, trace, index, drawn[index])
    for index in part:
        if index not in weights:
            adapter = machine.take(WEIGHTS, FP32 * trace.parameters[index].whole_numel)
            weights[index] = _rounded(machine, trace, index, adapter)
    return weights


def _drawn_bytes(trace: StepTrace, index: int) -> int:
    return FP32 * (trace.parameters[index].made_of or trace.parameters[index].whole_numel)


def _rounded(machine: Machine, trace: StepTrace, index: int, drawn: Block) -> Block:
    parameter = trace.parameters[index]
    if parameter.item_bytes == FP32 and not parameter.made_of:
        return drawn
    rounded = [machine.take(WEIGHTS, size) for size in _before_quantising(parameter)]
    weight = machine.take(WEIGHTS, parameter.item_bytes * parameter.whole_numel)
    for block in (*rounded, drawn):
        machine.give(block)
    return weight


def _before_quantising(parameter: Parameter) -> list[int]:
    """Bytes of the copies in the computation's format, and for int8 in fp16 (kernels/quantized_linear.py)."""
    copies = [parameter.item_bytes] if parameter.item_bytes != FP32 else []
    copies += [FP16] if parameter.size_bytes == parameter.made_of else []
    return [item * parameter.made_of for item in copies] if parameter.made_of else []


def cut(machine: Machine, trace: StepTrace, weights: dict[int, Block]) -> dict[int, Block]:
    """What a rank of a tensor-parallel group keeps of whole weights, layer by layer.

    Parts are copies, after which the whole is given back (deepspeed/module_inject/layers.py: move).
    """
    kept = dict(weights)
    for index, parameter in enumerate(trace.parameters):
        if parameter.cut_from is not None:
            kept[index] = machine.take(WEIGHTS, parameter.size_bytes)
            machine.give(weights[index])
    return kept
