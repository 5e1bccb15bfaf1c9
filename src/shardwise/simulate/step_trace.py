"""What one micro-batch's forward and backward pass does to a GPU, in order, as plain numbers.

`shardwise.trace` records it from the real model; the simulator replays it under a strategy. Sizes are those
of one GPU that holds everything, or of one of a tensor-parallel group. What an engine shards, gathers or
buffers is not part of it.

An event is a tuple of integers whose first is its kind:

    (ALLOC, tensor, bytes, tag)     a tensor's storage is allocated; `tag` indexes TAGS
    (FREE, tensor)                  its last reference is dropped
    (GRADIENT, parameter, tensor)   backward has completed a parameter's gradient, which lies in `tensor`; the
                                    engine frees it, no FREE follows
    (OP, index)                     the GPU computes `ops[index]`
    (FORWARD, unit)                 a unit's forward pass begins: the engine must have gathered its parameters
    (FORWARD_END, unit)
    (BACKWARD, unit)                a unit's backward pass begins (with its forward pass again if it is
                                    checkpointed)
    (BACKWARD_END, unit)            the gradient of the unit's input is complete

Tensor numbers are unique within a trace. Everything allocated is freed or handed over by GRADIENT.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from shardwise.strategy import Precision

FP32, FP64 = 4, 8
"""Bytes of an element."""
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": FP32}

ALLOC, FREE, GRADIENT, OP, FORWARD, FORWARD_END, BACKWARD, BACKWARD_END = range(8)

Event = tuple[int, ...]

T = TypeVar("T")

TAGS = ("activation", "loss", "gradient", "workspace")
"""What a storage is for: values saved or passed on between layers; the output head and the loss; a
parameter's gradient; one kernel's scratch space."""
ACTIVATION, LOSS, GRADIENT_TAG, WORKSPACE = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter; tied ones count once."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int  # Of the format it is computed in
    trainable: bool
    made_of: int = 0  # Values that a quantised weight represents; 0 for any other
    cut_from: tuple[int, ...] | None = None
    """The full shape, where `shape` is the part of one rank of a tensor-parallel group."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def uncut_numel(self) -> int:
        """Elements before tensor parallelism cuts it."""
        return prod(self.shape if self.cut_from is None else self.cut_from)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered together: a transformer block, or a leaf module outside them."""

    name: str
    block: int  # Which transformer block it is; -1 for the embeddings, the last norm and the output head
    parameters: tuple[int, ...]  # Indices into the trace's parameters; a tied one is in several units


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel, or a few launched by one call."""

    kind: str
    """`matmul`, `attention`, `scan`, `elementwise`, `reduction`, `normalization`, `loss`, `embedding`,
    `copy`, or `collective`: a sum over the tensor-parallel group, in place, that what follows waits for."""
    flops: float  # Multiplications and additions; of causal attention only those that its mask keeps
    read_bytes: int
    written_bytes: int
    item_bytes: int = 2  # Of its inputs' format
    shape: tuple[int, ...] = ()
    """matmul: (batch, m, n, k), of experts (experts, tokens of one, n, k). attention: (batch, heads,
    key-value heads, queries, keys, head size). scan: (tokens, channels, states)."""
    name: str = ""  # torch's name of the operator


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One micro-batch of a model on a GPU, in training."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[int, ...]  # Bytes of each buffer on the GPU that is no parameter
    units: tuple[Unit, ...]  # The blocks in order, then the modules outside them
    events: tuple[Event, ...]
    ops: tuple[Op, ...]  # Distinct ones; events name them by index, repeatedly
    rows: int
    sequence_length: int
    checkpoint_every: int
    precision: str
    one_shape: bool = False  # Whether all micro-batches of the job have the shape of this one
    host_waits: bool = False  # Whether Python reads a value in it, or a tensor is copied from the host
    tensor_parallel: int = 1
    """GPUs that share each row; the trace is that of the first one, which has the largest parts."""

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the parameters that get a gradient."""
        return tuple(index for index, p in enumerate(self.parameters) if p.trainable)

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the parameters of each block, then of those outside the blocks.

        A model is built in this order; engines that gather blocks take each part as one group.
        """
        blocks = [unit.parameters for unit in self.units if unit.block >= 0]
        inside = {index for block in blocks for index in block}
        return *blocks, tuple(index for index in range(len(self.parameters)) if index not in inside)

    @cached_property
    def _derived(self) -> dict[Hashable, Any]:
        return {}

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` computes from this trace: computed once for each key, and kept with the trace."""
        if key not in self._derived:
            self._derived[key] = make()
        value: T = self._derived[key]
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_derived"}


def fp32_parameters(trace: StepTrace, precision: Precision) -> frozenset[int]:
    """Indices of the parameters that are kept in fp32; none where everything is computed in fp32."""
    if precision == "fp32":
        return frozenset()
    return frozenset(index for index, p in enumerate(trace.parameters) if p.item_bytes == FP32)


def without(trace: StepTrace, apart: frozenset[int]) -> StepTrace:
    """The trace of a module without those parameters, as its engine sees it; indices stay."""
    parameters = tuple(
        replace(p, shape=(0,), trainable=False) if index in apart else p
        for index, p in enumerate(trace.parameters)
    )
    units = tuple(
        replace(unit, parameters=tuple(index for index in unit.parameters if index not in apart))
        for unit in trace.units
    )
    return replace(trace, parameters=parameters, units=units)
