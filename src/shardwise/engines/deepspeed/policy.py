"""When ZeRO gathers, releases and reduces: bookkeeping without bytes or seconds, read by memory and by time.

Functions in parentheses are DeepSpeed 0.19.8's. Memory follows every call of a module, as DeepSpeed does,
time only those that compute. Calls of the base model traverse all parameters in memory, not in time. What
persists counts as live and as distance in memory, not in time. To make that common would change predictions
(decision 0031).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from shardwise.engines.deepspeed.config import (
    NEVER_RELEASE,
    PERSIST,
    PREFETCH,
    RELEASE_AT,
    SUB_GROUP,
    sums_in_fp32,
)
from shardwise.simulate.memory.recorded import own_pool
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy


def gather_order(trace: StepTrace) -> dict[int, int]:
    """The place of each parameter in the order in which they were partitioned, and are gathered (ds_id)."""
    return {index: place for place, index in enumerate(i for part in trace.parts for i in part)}


def persists(numel: float) -> bool:
    """Whether a parameter stays gathered (parameter_offload.py: mark_persistent_parameters)."""
    return numel <= PERSIST


def live_limit(strategy: Strategy) -> int:
    """Elements that may be gathered at once, and within which a reuse is waited for."""
    return RELEASE_AT if strategy.reshard else NEVER_RELEASE


def joins(strategy: Strategy) -> bool:
    """Whether parameters are gathered in one buffer and copied out, as DeepSpeed does (runtime/zero3.py)."""
    return strategy.quantized_weights or strategy.offload_parameters == "nvme"


def steps_on_gpu(strategy: Strategy) -> bool:
    """Whether the optimizer's state is there."""
    return strategy.offload_optimizer == "none"


def sends_once(strategy: Strategy) -> bool:
    """Whether ZeRO-3's gradients go to the host in fp32 at once: those of a step with one micro-batch.

    NVMe has a way of its own. fp16's overflow is searched in sums that this way does not fill (has_overflow).
    """
    one = strategy.accumulation == 1 and strategy.precision != "fp16"
    return strategy.stage == 3 and strategy.offload_optimizer == "cpu" and one


def decides_on_gpu(strategy: Strategy) -> bool:
    """Whether the GPU alone learns if a step is finite, and the host goes on (runtime/step.py).

    Under ZeRO-3 only if passes are recorded: otherwise the memory in use depends on how far the host is
    ahead. fp16's loss scale is the host's in DeepSpeed, and in fp32 ZeRO-0 has an optimizer without a guard.
    Of AdamW kernels only torch's asks the GPU.
    """
    asks = strategy.optimizer == "adamw" and strategy.precision != "fp16"
    guarded = strategy.stage > 0 or strategy.precision == "bf16"
    return guarded and steps_on_gpu(strategy) and asks


def records(strategy: Strategy) -> bool:
    """Whether passes are recorded (runtime/recorded.py).

    Not where the host takes part in them: offloading, fp16's loss scale, what is quantized. hpZ's gathers
    differ between the first micro-batch and others.
    """
    quantized = strategy.quantized_weights or strategy.quantized_gradients
    on_gpu = steps_on_gpu(strategy) and strategy.offload_parameters == "none" and not quantized
    apart = strategy.overlap_comm or strategy.stage < 3  # ZeRO-3 gathers on the default stream otherwise
    return strategy.precision == "bf16" and not strategy.shard_group and on_gpu and apart


def records_passes(trace: StepTrace, strategy: Strategy) -> bool:
    """The same of a trace."""
    return own_pool(trace) and records(strategy)


def keeps_sums(trace: StepTrace, strategy: Strategy) -> bool:
    """Whether this rank's gradients of ZeRO-1 and 2 are fp32 (_use_compact_grad_partition_buffer).

    With recorded passes they always are: the step takes them as they are. In bf16 it would copy them twice,
    to memory that is not that of the passes.
    """
    return strategy.stage < 3 and (sums_in_fp32(strategy) or records_passes(trace, strategy))


def stepped_together(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Which of so many elements ZeRO-0 steps at once (runtime/step.py: step_in_parts)."""
    part: list[int] = []
    for size in sizes:
        if part and sum(part) + size > SUB_GROUP:
            yield part
            part = []
        part.append(size)
    if part:
        yield part


def look_ahead(
    queue: deque[tuple[int, int]],
    *,
    live: float,
    limit: int,
    numel: Callable[[int], float],
    available: Callable[[int], bool],
) -> tuple[list[tuple[int, int]], list[int]]:
    """Take uses from the queue until enough is gathered ahead (fetch_sub_module).

    Returns the uses that were taken, and what of them has to be gathered, in order. `queue`: what is used
    next, each with the number of the use. `live`: elements that are gathered or on their way. `limit`: as
    `live_limit`. `numel`: elements of what is gathered. `available`: whether it is, or is on its way.
    """
    room = min(PREFETCH, limit - live)
    taken: list[tuple[int, int]] = []
    missing: list[int] = []
    gathered = 0.0
    while queue and gathered < room:
        use = queue.popleft()
        taken.append(use)
        if not available(use[0]) and use[0] not in missing:
            missing.append(use[0])
            gathered += numel(use[0])
    return taken, missing


def released(
    candidates: Iterable[int], later: Iterable[tuple[Collection[int], float]], *, limit: int
) -> frozenset[int]:
    """What is released after a module: not used again within `limit` elements (__params_to_release).

    `later`: for each module from there on, what it uses and its elements.
    """
    going = set(candidates)
    distance = 0.0
    for used, numel in later:
        if distance >= limit or not going:
            break
        going.difference_update(used)
        distance += numel
    return frozenset(going)


def reduces(strategy: Strategy, *, last: bool) -> bool:
    """Whether a micro-batch's gradients are reduced; stage 1 adds them up until the last one."""
    return strategy.stage >= 2 or last


def adds_up(strategy: Strategy) -> bool:
    """Whether gradients are added up unreduced; where passes are recorded, in memory that stays."""
    return strategy.stage == 1 and strategy.accumulation > 1


class Bucket:
    """Gradients that are reduced together, `reduce_bucket_size` elements at most, or one that is larger.

    stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads; stage3.py: __add_grad_to_ipg_bucket.
    """

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        # The setting is at most the model's size, before tensor parallelism cuts the model (config.py).
        learned = sum(trace.parameters[index].uncut_numel for index in trace.trainable)
        self.size = min(strategy.bucket_size, learned)
        self.parameters: list[int] = []
        self.used = 0.0

    def is_full_for(self, numel: float) -> bool:
        """Whether the bucket is flushed before it takes a gradient of so many elements."""
        return bool(self.used) and self.used + numel > self.size

    def has_room_for(self, numel: float) -> bool:
        """Whether gradients are copied into the buffer; one that is too large stays in its own memory."""
        return numel <= self.size

    def add(self, parameters: Sequence[int], numel: float) -> None:
        self.parameters += parameters
        self.used += numel

    def clear(self) -> None:
        self.parameters.clear()
        self.used = 0.0
