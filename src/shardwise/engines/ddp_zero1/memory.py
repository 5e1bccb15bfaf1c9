"""Memory of replicas that share the optimizer's state: engines/ddp_zero1/runtime.py."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from shardwise.engines.single.memory import SingleMemory
from shardwise.simulate.memory.engine import fill
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.strategy import Precision, Strategy

Key = TypeVar("Key")

BUCKET = 1 << 27  # Elements after which a bucket is full
ALIGNED = 64  # Elements: each weight, and each rank's part, begins where kernels can read vectors


def buckets_of(weights: Mapping[Key, tuple[int, Hashable]]) -> list[list[Key]]:
    """Trained weights, by (elements, format), in buckets of one format, about as a backward pass comes by."""
    closed: list[list[Key]] = []
    filling, elements = defaultdict[Hashable, list[Key]](list), defaultdict[Hashable, int](int)
    for key, (numel, form) in reversed(list(weights.items())):
        filling[form].append(key)
        elements[form] += numel
        if elements[form] >= BUCKET:
            closed.append(filling.pop(form))
            del elements[form]
    return [*closed, *filling.values()]


def aligned(numel: int) -> int:
    """Elements of a weight with what is left free behind it."""
    return -(-numel // ALIGNED) * ALIGNED


def part_of(numels: Iterable[int], ranks: int) -> int:
    """Elements of a bucket of such weights that each rank steps."""
    return aligned(-(-sum(map(aligned, numels)) // ranks))


def overlaps(strategy: Strategy) -> bool:
    """Whether buckets are reduced during the backward pass; if not, micro-batches are added up in fp32."""
    return strategy.accumulation == 1


def formats(item: int, strategy: Strategy) -> tuple[Precision, Precision]:
    """In which gradients of weights of `item` bytes are added up, and sent."""
    kept = item == FP32 and strategy.precision != "fp32"  # in fp32 among others
    sent = "fp32" if kept else strategy.reduced_in(strategy.precision)
    return sent if overlaps(strategy) else "fp32", sent


class _Bucket(NamedTuple):
    numels: list[int]
    part: int  # Elements that a rank steps
    item: int  # Bytes of a weight
    sums: int  # Of a sum of gradients
    sent: int  # The same as it is sent


class DdpZero1Memory(SingleMemory):
    """All weights and gradients in buckets; a part of the fp32 weights and of their moments."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(trace, strategy)
        self._stay, self._ranks, self._strategy = True, strategy.data_parallel, strategy
        weights = {index: trace.parameters[index] for index in trace.trainable}
        self._indices = buckets_of({index: (one.numel, one.item_bytes) for index, one in weights.items()})
        self._buckets = [self._bucket(indices) for indices in self._indices]

    def _bucket(self, indices: list[int]) -> _Bucket:
        numels = [self._trace.parameters[index].numel for index in indices]
        item = self._trace.parameters[indices[0]].item_bytes
        sums, sent = (ITEM_BYTES[one] for one in formats(item, self._strategy))
        return _Bucket(numels, part_of(numels, self._ranks), item, sums, sent)

    def build(self, memory: GpuMemory) -> None:
        weights: dict[int, Block] = {}
        for part in self._trace.parts:
            weights |= fill(memory, self._trace, part)
        for size in self._trace.buffers:
            memory.take(WEIGHTS, size)
        for indices, bucket in zip(self._indices, self._buckets, strict=True):
            memory.take(WEIGHTS, bucket.item * bucket.part * self._ranks)
            memory.give(*(weights[index] for index in indices))
            if bucket.item < FP32:
                memory.take(OPTIMIZER, FP32 * bucket.part)
            memory.take(GRADIENTS, bucket.sums * bucket.part * self._ranks)
        for numel in self._pieces():
            memory.take_adamw_state(numel, self._optimizer)

    def _pieces(self, *, low: bool = False) -> Iterator[int]:
        """Elements of each weight that the first rank steps; `low`: those whose gradient is not in fp32."""
        for bucket in (one for one in self._buckets if not low or one.sent < FP32):
            left = bucket.part
            for numel in bucket.numels:
                if left > 0:
                    yield min(left, numel)
                left -= aligned(numel)

    def step(self, memory: GpuMemory) -> None:
        """What is sent in another format than that of the sums is a copy, of which a part is kept."""
        kept: list[Block] = []
        for bucket in self._buckets:
            if bucket.sent != bucket.sums:
                copied = memory.take(BUFFERS, bucket.sent * bucket.part * self._ranks)
                kept.append(memory.take(GRADIENTS, bucket.sent * bucket.part))
                memory.give(copied)
        memory.scratch(OPTIMIZER, *[FP32 for _ in self._pieces()])  # the norm of each
        for numel in self._pieces(low=True) if self._optimizer == "adamw8bit" else ():
            memory.scratch(OPTIMIZER, FP32 * numel)  # its kernel wants fp32
        memory.give(*kept)
