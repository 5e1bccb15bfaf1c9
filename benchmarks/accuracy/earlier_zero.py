"""How steps of DeepSpeed differed when older rows were measured; `earlier.py` says which rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from shardwise import strategy as strategies
from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.config import SUB_GROUP_OF_HOST, sums_in_fp32
from shardwise.engines.deepspeed.memory import zero3
from shardwise.engines.deepspeed.memory.coordinator import Marked
from shardwise.engines.deepspeed.memory.zero012 import Zero0Memory, Zero12Memory
from shardwise.engines.deepspeed.memory.zero3 import Zero3Memory
from shardwise.engines.deepspeed.time import REDUCED, Zero0, Zero12
from shardwise.job.schema import BUCKET
from shardwise.simulate.memory.gpu import GRADIENTS, OPTIMIZER, GpuMemory
from shardwise.simulate.step_trace import FP32, FP64
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.roofline import table
from shardwise.simulate.time.schedule import NORM_BYTES, converted, copied

VISIT = 85e-6  # `zero3_visit` of efficiency.toml before


def _norm_of_each(schedule: Zero12) -> None:
    """DeepSpeed's own under tensor parallelism: `has_overflow`, then `get_grad_norm_direct`.

    The first looks for the smallest and the largest value of each gradient and waits, the second copies each
    to fp64. The host is assumed to need as long for one as stage 0 does for nearly the same.
    """
    streams, parameters = schedule.streams, -(-len(schedule.trace.trainable) // schedule.ranks)
    issue, read = parameters * schedule.host.seconds("zero0_parameter"), schedule.item * schedule.part
    streams.move(2 * read, "foreach_norm", kernels=2 * parameters, issue=issue)
    streams.sum_over_peers(2 * communication.all_reduce(FP32, schedule.peers), 0.0)
    streams.host_waits()
    streams.move(converted(schedule.item, FP64) * schedule.part, "mixed", kernels=parameters)
    streams.move(FP64 * schedule.part, "foreach_norm", kernels=parameters)
    seconds = communication.all_reduce(FP32, schedule.group)
    streams.compute_waits(streams.communicate(seconds, 0.0, after_compute=True))
    streams.host_waits()


_STEP = Zero12Memory.step


def _step_with_norms(engine: Zero12Memory, memory: GpuMemory) -> None:
    """Each gradient in fp64, for its norm (get_grad_norm_direct)."""
    for index in sorted(engine._owned):
        memory.scratch(OPTIMIZER, FP64 * dict(engine._flat.pieces(index))[engine._rank])
    _STEP(engine, memory)


def _step_at_once(schedule: Zero0) -> None:
    """DeepSpeed's own step of ZeRO-0 (fp16/unfused_optimizer.py), which waits for the norm of each gradient.

    The fp32 copies are counted as concatenated, which they are not: rows were predicted so.
    """
    streams, elements = schedule.streams, schedule.trainable
    streams.host_waits()
    streams.issue(len(schedule.trace.trainable) * schedule.host.seconds("zero0_parameter"))
    if schedule.mixed:
        streams.move(schedule.item * elements, "foreach_norm")
        streams.move(converted(schedule.item, FP32) * elements, "mixed")
        streams.move(copied(FP32) * elements, "foreach_copy")
    streams.move(NORM_BYTES * elements, "foreach_norm")
    streams.host_waits()
    streams.move(copied(FP32) * elements)
    schedule.adamw(elements, len(schedule.trace.trainable))
    if schedule.mixed:
        streams.move(converted(FP32, schedule.item) * elements, "foreach_copy")


def _gradients_at_once(engine: Zero0Memory, memory: GpuMemory) -> None:
    """Its memory: each gradient in fp32, for its norm (utils.py: get_weight_norm), then all."""
    for numel in engine._numel if engine._masters else ():
        memory.scratch(OPTIMIZER, FP32 * numel)
    high = [memory.take(GRADIENTS, FP32 * numel) for numel in engine._numel if engine._masters]
    engine._take_states(memory)
    memory.give(*high, *engine._gradients.values())
    engine._gradients.clear()


class _UntilIssued(Marked):
    """With copies to the host assumed was until a bucket has been issued."""

    def advance(self, memory: GpuMemory) -> None:
        pass


_ZERO3, _REDUCE = Zero3Memory.__init__, Zero3Memory._reduce


def _with_marks(engine: Zero3Memory, *args: Any) -> None:
    _ZERO3(engine, *args)
    engine._coordinator.gradients = _UntilIssued()


def _reduce_and_free(engine: Zero3Memory, memory: GpuMemory) -> None:
    _REDUCE(engine, memory)
    engine._coordinator.gradients.end(memory)


_REDUCE12 = Zero12.reduce


def _reduce_and_search(schedule: Zero12, elements: float, *, first: bool, last: bool) -> None:
    """With an optimizer on the host it waited to learn if a gradient is finite, and so for the copies."""
    _REDUCE12(schedule, elements, first=first, last=last)
    if schedule.offload:
        schedule.streams.host_reads(REDUCED)


PATCHES: dict[str, list[Any]] = {
    "gathers": [
        patch.object(policy, "joins", lambda _: True),
        patch.dict(table()["host"], zero3_visit=VISIT),
    ],
    "waits": [patch.object(policy, "decides_on_gpu", lambda _: False)],
    "hooks": [patch.object(policy, "records", lambda _: False)],
    "sums": [patch.object(policy, "keeps_sums", lambda _, strategy: sums_in_fp32(strategy))],
    "groups": [patch.object(zero3, "sub_group", lambda _: SUB_GROUP_OF_HOST)],
    "marked": [
        patch.object(Zero3Memory, "__init__", _with_marks),
        patch.object(Zero3Memory, "_reduce", _reduce_and_free),
        patch.object(policy, "sends_once", lambda _: False),
    ],
    "buckets": [patch.object(strategies, "BUCKET_OF_HOST", BUCKET)],
    "searched": [patch.object(Zero12, "reduce", _reduce_and_search)],
    "parts": [
        patch.object(Zero0, "update", _step_at_once),
        patch.object(Zero0Memory, "step", _gradients_at_once),
    ],
    "norms": [
        patch.object(Zero12, "norm", _norm_of_each),
        patch.object(Zero12Memory, "step", _step_with_norms),
    ],
}
"""What `earlier.earlier_kernels` names, as it was."""
