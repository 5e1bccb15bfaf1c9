"""GPU memory traffic of ZeRO's collectives and steps in bytes, by DeepSpeed 0.19.8's functions.

Each adds up what the kernels around a collective read and write, without the computation. `item` is the bytes
of an element in the computation's format; `elements` are those of a bucket or unit, `own` this rank's share.
"""

from __future__ import annotations

from shardwise.simulate.step_trace import FP32, FP64
from shardwise.simulate.time.traffic import added, converted, copied


def zero0_reduce(num_bytes: float) -> float:
    """Gradients are concatenated, scaled and copied back (runtime/engine.py: allreduce_and_copy)."""
    return 3 * copied(1) * num_bytes


def zero12_reduce(item: int, elements: float, own: float, *, ranks: int, fp32_sum: bool) -> float:
    """One bucket of stages 1 and 2 (stage_1_and_2.py: average_tensor).

    All of it is scaled (allreduce_bucket). This rank's share is concatenated, copied back
    (allreduce_and_copy_with_multiple_ranks) and copied to its partition (copy_grads_in_partition); on one
    rank only the last. With `fp32_sum` it is added to the fp32 sum, too (_add_to_grad_partition_buffer).

    Concatenating the other ranks' shares, one more copy, is not counted.
    """
    copies = 3 if ranks > 1 else 1
    moved = copied(item) * elements + copies * copied(item) * own
    return moved + added(item, FP32) * own if fp32_sum else moved


def zero3_reduce(item: int, elements: float, own: float, *, adds: bool) -> float:
    """One bucket of stage 3 (stage3.py: __reduce_and_partition_ipg_grads).

    All of it is laid out by rank and scaled (reduce_scatter_coalesced), this rank's share copied to its
    buffer, and added to it (`adds`) after the first micro-batch (partition_grads).
    """
    moved = 2 * copied(item) * elements + copied(item) * own
    return moved + added(FP32, FP32) * own if adds else moved


def zero3_gather(item: int, elements: float, *, ranks: int) -> float:
    """This rank's shares are concatenated (_all_gather_dtype), all parameters copied out.

    partition_parameters.py: AllGatherCoalescedHandle.wait.
    """
    return copied(item) * elements * (1 + 1 / ranks)


def collective(item: int, elements: float, *, ranks: int) -> float:
    """A collective reads and writes its buffer; on one rank there is none."""
    return copied(item) * elements if ranks > 1 else 0.0


def norm_with_infinities(item: int) -> tuple[int, int, int]:
    """Norms of single gradients under tensor parallelism, per element: bytes of three kernels.

    The smallest and the largest value (has_overflow), a copy in fp64, the copy's norm (get_grad_norm_direct).
    """
    return 2 * item, converted(item, FP64), FP64


def zero3_offload(item: int, own: float, *, last: bool) -> float:
    """Gradients to their sums on the host and back, in the end once more for their norm.

    stage3.py: partition_grads, _offload_grad_partition_at_boundary. `item`: bytes of an element of the sum.
    """
    return 2 * item * own + (FP32 * own if last else 0.0)
