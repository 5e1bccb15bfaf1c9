"""A step's work, piece by piece: GPU memory traffic against reads and writes counted by hand, and waits.

Work on a stream carries the joules of the bytes that it reads and writes; divided by the joules of one byte
they are the bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.deepspeed import policy
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.step_trace import (
    BACKWARD,
    FORWARD,
    FORWARD_END,
    GRADIENT,
    Event,
    Parameter,
    StepTrace,
    Unit,
)
from shardwise.simulate.time import collectives
from shardwise.simulate.time.roofline import table
from shardwise.simulate.time.schedule import Schedule
from shardwise.simulate.time.streams import (
    COMMUNICATE,
    COMPUTE,
    COMPUTE_WAITS,
    COPY,
    HOST_READS,
    HOST_WAITS,
    ISSUE,
    PEERS,
    REDUCED,
    REPLICATE,
    Work,
)
from shardwise.strategy import Strategy

HARDWARE = parse_hardware("4xH200")
N = 4_000_000
"""Elements of the model's two matrices together, in equal parts."""
CPU = {"offload_optimizer": "cpu"}


def _trace(*, item: int = 2, numel: int = N // 2) -> StepTrace:
    """A block of one matrix and an embedding, without operators: forward passes do nothing."""
    names = ("embedding", "block")
    events: list[Event] = [(FORWARD, 1), (FORWARD_END, 1), (FORWARD, 0), (FORWARD_END, 0)]
    events += [(BACKWARD, 0), (GRADIENT, 0, 0), (BACKWARD, 1), (GRADIENT, 1, 0)]
    return StepTrace(
        parameters=tuple(Parameter(name=n, shape=(numel,), item_bytes=item, trainable=True) for n in names),
        buffers=(),
        units=tuple(Unit(name=n, block=i - 1, parameters=(i,)) for i, n in enumerate(names)),
        events=tuple(events),
        ops=(),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16" if item == 2 else "fp32",
    )


def _schedule(engine: str, *, item: int = 2, gpus: int = 4, **values: Any) -> Schedule:
    trace = _trace(item=item)
    strategy = Strategy(engine=engine, data_parallel=gpus, precision=trace.precision, **values)  # type: ignore[arg-type]
    trace = replace(trace, tensor_parallel=strategy.tensor_parallel)
    return descriptor(strategy).schedule(trace, strategy, HARDWARE)


def _zero(stage: int, **values: Any) -> Schedule:
    return _schedule("deepspeed", stage=stage, **values)


def _per_element(schedule: Schedule, kind: int, write: Any) -> list[float]:
    """Bytes over the model's elements of each piece of work that moves any."""
    joules = {COMPUTE: 3, COMMUNICATE: 2, COPY: 2}[kind]
    work = schedule._recorded(write)
    draw = schedule.streams.draw
    one = draw.moving(1) if kind == COMPUTE else draw.linking(1)
    return [round(item[joules] / one / N, 9) for item in work if item[0] == kind and item[joules]]


def _pass(schedule: Schedule, kind: int, *, first: bool = True, last: bool = True) -> list[float]:
    return _per_element(schedule, kind, lambda: schedule.micro_batch(first=first, last=last))


def _update(schedule: Schedule, kind: int = COMPUTE) -> list[float]:
    return _per_element(schedule, kind, schedule.update)


HALF = 0.5
"""One of the two matrices."""


# A single process


@pytest.mark.parametrize(("item", "first", "later"), [(2, [6, 6], [10, 10]), (4, [], [12, 12])])
def test_one_process_adds_each_gradient_to_an_fp32_sum(item: int, first: list, later: list) -> None:
    schedule = _schedule("single", item=item, gpus=1, accumulation=2)
    assert _pass(schedule, COMPUTE) == [HALF * each for each in first]
    assert _pass(schedule, COMPUTE, first=False) == [HALF * each for each in later]


def test_one_process_keeps_the_gradients_of_one_micro_batch() -> None:
    assert _pass(_schedule("single", gpus=1), COMPUTE) == []


def test_one_process_steps_with_norm_and_adamw() -> None:
    """Gradients as they are, or fp32 sums; three fp32 numbers, read and written; the weight in bf16."""
    assert _update(_schedule("single", gpus=1)) == [2, 2 + 24 + 2]
    assert _update(_schedule("single", gpus=1, accumulation=2)) == [4, 4 + 24 + 2]
    assert _update(_schedule("single", gpus=1, item=4)) == [4, 28]
    in_8_bits = _schedule("single", gpus=1, optimizer="adamw8bit")
    assert _update(in_8_bits) == [2, 2 + 4, 24, 4 + 2], "norm, in fp32, moments in bytes, the weight in bf16"


# DeepSpeed


def test_stage_0_concatenates_scales_and_copies_back_all_gradients() -> None:
    schedule = _zero(0)
    assert _pass(schedule, COMPUTE) == [3 * (2 + 2)]
    assert _pass(schedule, COMPUTE, first=False, last=False) == [HALF * 6] * 2
    assert _pass(schedule, COMMUNICATE) == [2 + 2]


def test_stage_0_steps_on_fp32_copies() -> None:
    """Norm, copies, AdamW, which clips, and the weights' cast; in fp32 norm, clipping and AdamW."""
    assert _update(_zero(0)) == [2, 2 + 4, 28, 4 + 2]
    assert _update(_zero(0, item=4)) == [4, 4 + 4, 28]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_copied_into_a_bucket(stage: int) -> None:
    assert _pass(_zero(stage), COMPUTE) == [HALF * (2 + 2)] * 2
    larger = _zero(stage, bucket=N // 4)
    assert _pass(larger, COMPUTE) == [], "a gradient larger than a bucket stays where it is"


def test_stage_1_adds_micro_batches_up_before_it_copies_them() -> None:
    assert _pass(_zero(1, accumulation=2), COMPUTE, last=False) == []
    assert _pass(_zero(1, accumulation=2), COMPUTE, first=False) == [HALF * 6, HALF * 4] * 2


@pytest.mark.parametrize(
    ("stage", "values", "moved"),
    [
        # the bucket is scaled; this rank's quarter copied three times; the collective reads and writes it
        (1, {}, 4 + 3 * 4 / 4 + 4),
        (2, {}, 4 + 3 * 4 / 4 + 4),
        # not the last time: it is converted, and added
        (2, {"accumulation": 3}, 4 + 2 * 4 / 4 + (2 + 4) / 4 + (4 + 4 + 4) / 4 + 4),
        # interleaved by rank, scaled; the quarter copied to its buffer
        (3, {}, 4 + 4 + 4 / 4 + 4),
        (3, {"gpus": 1}, 4 + 4 + 4),
    ],
)
def test_a_bucket_is_reduced(stage: int, values: dict[str, Any], moved: float) -> None:
    gathers = 2 if stage == 3 and values.get("gpus", 4) > 1 else 0
    assert _pass(_zero(stage, **values), COMMUNICATE)[gathers:] == [moved]


def test_a_single_ranks_bucket_takes_time_of_the_computation() -> None:
    """It is scaled and copied once, on another stream, with which the memory's bandwidth is shared."""
    schedule = _zero(2, gpus=1)
    assert _pass(schedule, COMPUTE) == [HALF * (2 + 2)] * 2 + [4 + 4]
    assert _pass(schedule, COMMUNICATE) == []


def test_stage_3_adds_later_micro_batches_in_fp32() -> None:
    schedule = _zero(3, accumulation=2)
    first, later = (_pass(schedule, COMMUNICATE, first=flag)[-1] for flag in (True, False))
    assert later - first == (4 + 4 + 4) / 4


def test_a_gather_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed gathers, it concatenates the shares and copies each parameter out."""
    assert _pass(_zero(3), COMMUNICATE)[:2] == [HALF * 2] * 2
    monkeypatch.setattr(policy, "joins", lambda _: True)
    assert _pass(_zero(3), COMMUNICATE)[:2] == [HALF * (4 / 4 + 4 + 2)] * 2


def test_a_rank_steps_its_part() -> None:
    """Norm; one flat gradient, its fp32 copy, AdamW, cast: a quarter of each. Stage 3 clips on its own."""
    for stage, clipping in ((1, []), (2, []), (3, [4 + 4])):
        step = [2, 4, 2 + 4, *clipping, 28, 4 + 2]
        assert _update(_zero(stage)) == [each / 4 for each in step]
    assert _update(_zero(2, item=4)) == [each / 4 for each in (4, 28)]
    assert _update(_zero(2), COMMUNICATE) == [2]


def test_the_host_waits_for_the_reduction_alone_before_zero_1_and_2_step() -> None:
    def waits(schedule: Schedule) -> list[Work]:
        work = [schedule._recorded(lambda: schedule.micro_batch(first=True, last=True))]
        work.append(schedule._recorded(schedule.update))
        return [item for part in work for item in part if item[0] in (HOST_READS, HOST_WAITS)]

    assert waits(_zero(1)) == waits(_zero(2)) == [(HOST_READS, REDUCED)]
    assert waits(_zero(3)) == [(HOST_WAITS,)] * 2


def test_tensor_parallel_ranks_take_one_norm_of_their_halves() -> None:
    schedule = _schedule("deepspeed", stage=1, gpus=2, tensor_parallel=2)
    assert _update(schedule)[:3] == [2 / 2, 4 / 2, (2 + 4) / 2]


@pytest.mark.parametrize(
    ("stage", "first", "last", "copied"),
    [
        (2, True, True, [4 / 4]),  # in fp32
        (2, False, True, [2 / 4, 4 / 4]),  # what was added up before comes back first
        (3, True, False, [2 * 4 / 4]),  # the fp32 sum goes and comes
        (3, False, True, [2 * 4 / 4 + 4 / 4]),  # and once more for its norm
    ],
)
def test_gradients_are_copied_to_the_host(stage: int, first: bool, last: bool, copied: list[float]) -> None:
    schedule = _zero(stage, accumulation=2, **CPU)
    assert _pass(schedule, COPY, first=first, last=last) == copied
    if stage == 3 and last:
        assert _pass(_zero(3, **CPU), COPY) == [4 / 4], "the only gradients go once, in fp32"
        nvme = _pass(_zero(3, offload_optimizer="nvme"), COPY)
        assert nvme == [2 * 2 / 4 + 4 / 4], "without accumulation the sum has the weights' format"


def test_an_offloaded_step_copies_the_weights_back() -> None:
    assert _update(_zero(2, **CPU), COPY) == [2 / 4]


# FSDP2


def test_a_group_is_cast_gathered_and_copied_apart() -> None:
    schedule = _schedule("fsdp2")
    assert _pass(schedule, COMPUTE) == [HALF * (2 + 2)] * 2  # root and block
    gathers = [moved for moved in _pass(schedule, COMMUNICATE) if moved < 4]
    assert gathers == [HALF * (4 / 4 + 2)] * 2


def test_a_group_is_reduced_in_fp32() -> None:
    schedule = _schedule("fsdp2", accumulation=2)
    reduced = 2 + 4 + (4 + 4)  # concatenated in fp32; the collective reads and writes
    for first, more in ((True, 0.0), (False, (4 + 4 + 4) / 4)):
        found = _pass(schedule, COMMUNICATE, first=first)
        assert found[-1] == found[-2] == HALF * (reduced + more)


def test_fsdp2_steps_its_shards() -> None:
    assert _update(_schedule("fsdp2")) == [4 / 4, 28 / 4]


def test_fsdp2_offloads_shards_and_gradients() -> None:
    schedule = _schedule("fsdp2", offload_parameters="cpu", **CPU)
    assert sorted(_pass(schedule, COPY)) == [HALF * 4 / 4] * 4  # two gathers, two gradients


def test_fsdp2_adds_offloaded_gradients_up_on_the_host() -> None:
    """The GPU reads no earlier sum: a later micro-batch moves as much there as the first one."""
    schedule = _schedule("fsdp2", accumulation=2, offload_parameters="cpu", **CPU)
    first, later = (_pass(schedule, COMMUNICATE, first=one) for one in (True, False))
    assert first[-2:] == later[-2:] == [HALF * (2 + 4 + (4 + 4))] * 2
    issued = [
        sum(item[1] for item in _work(schedule, first=one) if item[0] == ISSUE) for one in (True, False)
    ]
    assert issued[1] > issued[0]


def test_fsdp2_without_resharding_releases_all_groups_after_the_last_micro_batch() -> None:
    schedule = _schedule("fsdp2", reshard=False, accumulation=2)
    for last, gathered in ((False, {0, 1}), (True, set())):
        schedule._recorded(lambda last=last: schedule.micro_batch(first=not last, last=last))
        assert schedule.gathered == gathered


# Groups of ranks: two nodes of two GPUs

NODES = parse_hardware("2x2xH200")
NODE, OTHER = collectives.group(NODES, 2), collectives.group(NODES, 2, stride=2)
ALL = collectives.group(NODES, 4)


def _grouped(group: int = 2, **values: Any) -> Schedule:
    trace = _trace()
    strategy = Strategy(data_parallel=4, shard_group=group, **values)
    return descriptor(strategy).schedule(trace, strategy, NODES)


def _collectives(schedule: Schedule, *, first: bool = True, last: bool = True) -> list[float]:
    """Seconds of each collective without the kernels around it, which take none here."""
    schedule.streams.moving = lambda *_, **__: 0.0  # type: ignore[method-assign]
    work = schedule._recorded(lambda: schedule.micro_batch(first=first, last=last))
    return [item[1] for item in work if item[0] == COMMUNICATE]


def test_hsdp_gathers_and_scatters_within_a_node() -> None:
    gather = collectives.all_gather(2 * HALF * N, NODE)
    assert gather < collectives.all_gather(2 * HALF * N, ALL) / 2
    scatter = collectives.reduce_scatter(4 * HALF * N, NODE)
    assert _collectives(_grouped(engine="fsdp2")) == [gather] * 2 + [scatter] * 2


def test_hsdp_sums_shares_over_nodes_in_the_last_micro_batch_of_a_step() -> None:
    schedule = _grouped(engine="fsdp2", accumulation=2)

    def sums(*, last: bool) -> list[float]:
        work = schedule._recorded(lambda: schedule.micro_batch(first=not last, last=last))
        return [item[1] for item in work if item[0] == REPLICATE]

    assert sums(last=False) == []
    assert sums(last=True) == [collectives.all_reduce(4 * HALF * N / 2, OTHER)] * 2


@pytest.mark.parametrize("shape", ["1x4xH200", "4x1xH200"])
def test_groups_that_share_links_wait_for_each_other(shape: str) -> None:
    """Replicas in one node, or groups over nodes, use the links of the other collectives."""
    strategy = Strategy(engine="fsdp2", data_parallel=4, shard_group=2)
    schedule = descriptor(strategy).schedule(_trace(), strategy, parse_hardware(shape))
    kinds = [item[0] for item in _work(schedule) if item[0] in (COMMUNICATE, REPLICATE)]
    assert kinds == [COMMUNICATE] * (2 + 2 + 2)


def test_sums_in_bf16_halve_what_is_sent() -> None:
    schedule = _grouped(engine="fsdp2", reduce_dtype="bf16")
    gather, scatter = collectives.all_gather(N, NODE), collectives.reduce_scatter(2 * HALF * N, NODE)
    assert _collectives(schedule) == [gather] * 2 + [scatter] * 2
    work = schedule._recorded(lambda: schedule.micro_batch(first=True, last=True))
    sums = [item[1] for item in work if item[0] == REPLICATE]
    assert sums == [collectives.all_reduce(2 * HALF * N / 2, OTHER)] * 2


@pytest.mark.parametrize(
    ("first", "last", "moved"),
    [
        # concatenated; added up; converted to fp32, each of the half that stays; the collective
        (True, True, 4 + 6 / 2 + 4),
        (False, False, 4 + 6 / 2 + 4),
        (False, True, 4 + 6 / 2 + 6 / 2 + 4),
        (True, False, 4 + 4),
    ],
)
def test_in_groups_micro_batches_are_added_up_in_bf16(first: bool, last: bool, moved: float) -> None:
    schedule = _grouped(engine="fsdp2", reduce_dtype="bf16", accumulation=2)
    assert _pass(schedule, COMMUNICATE, first=first, last=last)[-1] == HALF * moved


@pytest.mark.parametrize(("stage", "passes"), [(1, 2), (2, 2), (3, 1)])
def test_deepspeed_converts_gradients_that_are_reduced_in_fp32(stage: int, passes: int) -> None:
    """Stages 1 and 2 convert back as well; the collective reads and writes 4 bytes instead of 2."""
    plain, wide = (_pass(_zero(stage, reduce_dtype=kind), COMMUNICATE)[-1] for kind in ("auto", "fp32"))
    assert wide - plain == passes * (2 + 4) + (8 - 4)


def test_hsdp_steps_the_share_of_a_group() -> None:
    assert _update(_grouped(engine="fsdp2")) == [4 / 2, 28 / 2]


# Waits and the host's time


def _work(schedule: Schedule, *, first: bool = True) -> list[Work]:
    return schedule._recorded(lambda: schedule.micro_batch(first=first, last=True))


def test_a_reduction_waits_for_the_one_before_it() -> None:
    work = _work(_zero(2, bucket=N // 2))
    before = [work[place - 1] for place, item in enumerate(work) if item[0] == COMMUNICATE]
    assert before == [(COMPUTE_WAITS, REDUCED)] * 2


def test_stage_3_visits_a_units_parameters_before_and_after_each_pass() -> None:
    visits = 2 * (1 + 2)  # one parameter, and two for the unit itself
    issued = [item[1] for item in _work(_zero(3)) if item[0] == ISSUE]
    assert issued == [visits * table()["host"]["zero3_visit"]] * 2


@pytest.mark.parametrize(("place", "rate"), [("cpu", 0.0), ("nvme", 6e9)])
def test_offloaded_parameters_are_read_from_a_drive_by_all_processes_of_a_node(
    place: str, rate: float
) -> None:
    path = "/drive" if rate else None
    schedule = _zero(3, offload_optimizer=place, offload_parameters=place, nvme_path=path)
    read = [item[4] for item in _work(schedule) if item[0] == COPY and not item[3]]
    assert read == [4 * 2 * HALF * N / 4 / rate if rate else 0.0] * 2


def test_weights_that_are_converted_on_the_host_are_not_page_locked() -> None:
    def issued(**values: Any) -> list[float]:
        schedule = _zero(3, **CPU, **values)
        return [item[1] for item in schedule._recorded(schedule.update) if item[0] == ISSUE]

    assert issued()[1:] == [2 * N / 4 / table()["cpu"]["pageable_bytes_per_second"]]
    assert issued(offload_parameters="cpu")[1:] == []


def test_tensor_parallel_ranks_agree_on_the_norm() -> None:
    schedule = _schedule("deepspeed", stage=1, gpus=2, tensor_parallel=2)
    sums = [item[1] for item in schedule._recorded(schedule.update) if item[0] == PEERS]
    assert sums == [collectives.all_reduce(4, collectives.group(HARDWARE, 2))]
