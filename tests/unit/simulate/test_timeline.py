"""A step's time: what each engine adds to the computation, and what hides behind what."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.prediction import Time
from shardwise.simulate.step_trace import FORWARD, FORWARD_END, OP, Op, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.roofline import Roofline, held, table
from shardwise.simulate.time.schedule import Schedule
from shardwise.simulate.time.step import Played, predict_time
from shardwise.simulate.time.streams import REDUCED, Clocks, Streams, Totals, Work, event
from shardwise.strategy import Strategy

HARDWARE = parse_hardware("4xH200")
BANDWIDTH = 4.8e12


def predict(trace: StepTrace, *, gpus: int = 1, spec: str = "", **strategy: Any) -> Time:
    strategy = {"engine": "single", "data_parallel": gpus, **strategy}
    hardware = parse_hardware(spec) if spec else HARDWARE
    chosen = Strategy(**strategy)
    return predict_time(trace, chosen, hardware, descriptor(chosen).play(trace, chosen, hardware))


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"engine": "deepspeed", "stage": stage, "gpus": 4, **more}


OFFLOAD = {"offload_optimizer": "cpu"}


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power limits nothing."""
    monkeypatch.setitem(table()["energy"], "limit", 1000.0)


@pytest.mark.parametrize(
    "strategy",
    [
        {"gpus": 1},
        zero(0),
        zero(1),
        zero(2),
        zero(2, **OFFLOAD),
        zero(3),
        {"engine": "fsdp2", "gpus": 4},
    ],
)
@pytest.mark.parametrize("width", [256, 4096])  # bound by the host, by the GPU
def test_many_micro_batches_are_as_many_played_one_by_one(
    layers, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], width: int
) -> None:
    trace = layers(width=width, tokens=1024)
    short = predict(trace, accumulation=201, **strategy)
    monkeypatch.setattr("shardwise.simulate.time.step.MOST_PLAYED", 1000)
    whole = predict(trace, accumulation=201, **strategy)
    assert short.link == whole.link
    numbers = [replace(time, link=0, link_to_peers=0) for time in (short, whole)]
    assert asdict(numbers[0]) == pytest.approx(asdict(numbers[1]), rel=1e-9)


# One GPU


def test_a_step_is_its_products_and_its_update(layers, product, unlimited) -> None:
    trace = layers(blocks=16, width=8192, tokens=8192)
    time = predict(trace)
    products = 3 * 16 * Roofline(HARDWARE.gpu, "bf16").seconds(product(8192, 8192, 8192))
    elements = 16 * 8192**2 + 1024 * 8192
    # bytes an element over shares of the bandwidth: norm of bf16 gradients; AdamW, which also writes bf16
    update = elements * (2 / 0.47 + 28 / 0.85) / BANDWIDTH
    assert time.step_seconds == pytest.approx(products + update, rel=0.01)
    assert time.compute_seconds == pytest.approx(time.step_seconds, rel=0.01)
    assert time.optimizer_seconds == pytest.approx(update, rel=0.02)
    assert time.communication_seconds == time.copy_seconds == 0.0


def test_a_small_model_is_bound_by_the_process(layers) -> None:
    """24 calls of torch, 9 gradients and one step of bookkeeping."""
    host = table()["host"]
    time = predict(layers(width=256, tokens=256))
    issue = 8 * host["forward"] + 16 * host["backward"] + 9 * host["gradient_hook"] + host["step"]
    assert time.launch_seconds == pytest.approx(issue)
    assert time.step_seconds == pytest.approx(issue, rel=0.01)
    assert time.compute_seconds < time.step_seconds / 2


def test_micro_batches_repeat_the_computation_and_not_the_update(layers, unlimited) -> None:
    trace = layers(width=8192, tokens=8192)
    two, four = predict(trace, accumulation=2), predict(trace, accumulation=4)
    assert four.optimizer_seconds == pytest.approx(two.optimizer_seconds, rel=0.01)
    assert four.tokens_per_step == 2 * two.tokens_per_step
    once = two.step_seconds - two.optimizer_seconds
    assert four.step_seconds - four.optimizer_seconds == pytest.approx(2 * once, rel=0.06)


def test_several_micro_batches_have_gradients_in_fp32(layers, unlimited) -> None:
    elements = 8 * 8192**2 + 1024 * 8192
    one, two = (predict(layers(width=8192), accumulation=count) for count in (1, 2))
    more = elements * (4 / 0.74 - 2 / 0.47 + 2 / 0.85) / BANDWIDTH  # norm; AdamW
    assert two.optimizer_seconds - one.optimizer_seconds == pytest.approx(more, rel=0.02)


def test_checkpointing_computes_a_third_again(layers, unlimited) -> None:
    plain = predict(layers(width=8192, tokens=8192))
    again = predict(layers(width=8192, tokens=8192, checkpoint_every=1))
    added = again.compute_seconds - plain.compute_seconds
    assert added / (plain.compute_seconds - plain.optimizer_seconds) == pytest.approx(1 / 3, rel=0.1)
    assert again.launch_seconds > plain.launch_seconds + 8 * table()["host"]["checkpoint"]


def test_power_slows_down_what_the_clock_would_allow(layers, unlimited, monkeypatch) -> None:
    trace = layers(blocks=16, width=8192, tokens=8192)
    free = predict(trace)
    monkeypatch.setitem(table()["energy"], "limit", 0.985)
    limited = predict(trace)
    assert 1.1 < limited.step_seconds / free.step_seconds < 1.35
    assert limited.compute_seconds == free.compute_seconds


@pytest.mark.parametrize(("to_peers", "seconds"), [(0.0, 0.6), (0.2, 0.4)])
def test_a_wait_for_other_ranks_saves_no_power(layers, to_peers: float, seconds: float) -> None:
    """Of 0.3 s it works 0.1 and waits 0.2; its joules need 0.4. Waits for tensor parallelism are averaged."""
    joules = 0.4 * (0.985 - 0.21) * 700
    totals = Totals(compute=0.1, exposed=0.2, exposed_to_peers=to_peers, joules=joules)
    played = Played(seconds=0.3, totals=totals)
    found = predict_time(layers(), Strategy(engine="single"), parse_hardware("1xH200"), played)
    assert found.step_seconds == pytest.approx(seconds)


def test_a_number_read_back_ends_running_ahead(layers, unlimited) -> None:
    """What is slow to issue then is no longer issued while the GPU is busy with the step before."""
    slow = Op(kind="normalization", flops=1.0, read_bytes=8, written_bytes=8, name="liger_rms_norm")
    look = Op(kind="reduction", flops=1.0, read_bytes=8, written_bytes=1, name="all")
    blind = predict(layers(blocks=64, width=2560, tail=(slow,) * 20))
    looking = predict(layers(blocks=64, width=2560, tail=(look, *(slow,) * 20)))
    assert blind.step_seconds == pytest.approx(blind.compute_seconds, rel=0.02)
    assert looking.step_seconds > blind.step_seconds + 0.9 * 20 * table()["host"]["triton"]


def test_gradients_in_fp32_take_longer_to_read(layers, unlimited) -> None:
    trace = layers(width=8192)
    full = replace(
        trace,
        precision="fp32",
        parameters=tuple(replace(p, item_bytes=4) for p in trace.parameters),
    )
    assert predict(trace).optimizer_seconds < predict(full).optimizer_seconds


# DeepSpeed


def test_zero_1_and_2_reduce_and_gather_the_whole_model(layers) -> None:
    trace = layers(width=8192)
    num_bytes = 2 * (8 * 8192**2 + 1024 * 8192)
    group = communication.group(HARDWARE, 4)
    wires = communication.all_reduce(num_bytes, group) + communication.all_gather(num_bytes, group)
    for stage in (1, 2):
        seconds = predict(trace, **zero(stage)).communication_seconds
        assert wires < seconds < 1.8 * wires  # the rest are copies around the collectives


def test_zero_1_reduces_once_a_step_and_zero_2_once_a_micro_batch(layers) -> None:
    trace = layers(width=8192)
    first = [predict(trace, **zero(1, accumulation=n)).communication_seconds for n in (1, 4)]
    second = [predict(trace, **zero(2, accumulation=n)).communication_seconds for n in (1, 4)]
    assert first[1] == pytest.approx(first[0], rel=0.01)
    assert second[1] > 2 * second[0]


def test_a_bucket_is_reduced_beside_the_backward_pass(layers, unlimited) -> None:
    """Of 1.07e9 elements in buckets of 5e8, all but the last bucket hide behind the products."""
    time = predict(layers(blocks=16, width=8192, tokens=16384), **zero(2))
    gathered = communication.all_gather(2 * 16 * 8192**2, communication.group(HARDWARE, 4))
    reduced = time.communication_seconds - gathered
    assert time.exposed_communication_seconds < gathered + reduced / 2
    assert time.exposed_communication_seconds > gathered


def test_without_overlap_every_bucket_is_waited_for(layers, unlimited) -> None:
    time = predict(layers(blocks=16, width=8192, tokens=16384), **zero(2, overlap_comm=False))
    assert time.exposed_communication_seconds == pytest.approx(time.communication_seconds, rel=0.01)


def test_stage_0_hides_nothing(layers) -> None:
    time = predict(layers(width=8192), **zero(0))
    assert time.exposed_communication_seconds == pytest.approx(time.communication_seconds, rel=0.02)


def test_sharding_the_optimizer_divides_the_update(layers) -> None:
    trace = layers(blocks=16, width=8192)
    one, four = (predict(trace, **zero(2, gpus=gpus)) for gpus in (1, 4))
    assert four.optimizer_seconds < 0.6 * one.optimizer_seconds


def test_zero_3_gathers_for_forward_and_backward_unless_it_keeps_them(layers) -> None:
    """24 blocks of 0.067e9 are more than the reuse distance of 1e9, so that most are gathered twice."""
    trace = layers(blocks=24, width=8192, tokens=16384)
    twice = predict(trace, **zero(3))
    once = predict(trace, **zero(3, reshard=False))
    gather = communication.all_gather(2 * 24 * 8192**2, communication.group(HARDWARE, 4))
    assert twice.communication_seconds - once.communication_seconds > 0.6 * gather
    assert once.communication_seconds > gather


def test_zero_3_keeps_what_is_needed_again_soon(layers) -> None:
    small = layers(blocks=4, width=8192, tokens=16384)
    resharded, kept = (predict(small, **zero(3, reshard=flag)) for flag in (True, False))
    assert resharded.communication_seconds == pytest.approx(kept.communication_seconds)


def test_prefetching_hides_the_gathers(layers, unlimited) -> None:
    time = predict(layers(blocks=24, width=8192, tokens=32768), **zero(3))
    assert time.exposed_communication_fraction < 0.05
    assert time.communication_seconds > 4 * time.exposed_communication_seconds


def test_adapters_reduce_next_to_nothing(layers) -> None:
    frozen = predict(layers(width=8192, trainable=False), **zero(2))
    whole = predict(layers(width=8192), **zero(2))
    assert frozen.communication_seconds < whole.communication_seconds / 10
    assert frozen.optimizer_seconds < whole.optimizer_seconds / 10


# FSDP2


def test_fsdp2_gathers_twice_and_scatters_in_fp32(layers) -> None:
    trace = layers(width=8192)
    group = communication.group(HARDWARE, 4)
    blocks, root = 8 * 8192**2, 1024 * 8192
    gathers = communication.all_gather(2 * blocks, group)
    scatters = communication.reduce_scatter(4 * (blocks + root), group)
    time = predict(trace, engine="fsdp2", gpus=4)
    assert 2 * gathers + scatters < time.communication_seconds < 1.8 * (2 * gathers + scatters)
    kept = predict(trace, engine="fsdp2", gpus=4, reshard=False)
    assert time.communication_seconds - kept.communication_seconds > gathers


def test_fsdp2_hides_its_gathers_one_block_ahead(layers, unlimited) -> None:
    time = predict(layers(blocks=24, width=8192, tokens=16384), engine="fsdp2", gpus=4)
    first_and_last = time.communication_seconds / 24
    assert time.exposed_communication_seconds < 2 * first_and_last


def test_unsharded_fsdp2_gathers_once_for_all_micro_batches(layers) -> None:
    trace = layers(width=8192)
    one, four = (predict(trace, engine="fsdp2", gpus=4, reshard=False, accumulation=n) for n in (1, 4))
    scatter = communication.reduce_scatter(4 * 8 * 8192**2, communication.group(HARDWARE, 4))
    added = four.communication_seconds - one.communication_seconds
    assert 3 * scatter < added < 5 * scatter


def test_a_slow_link_is_exposed(layers) -> None:
    trace = layers(blocks=16, width=4096, tokens=2048)
    fast = predict(trace, engine="fsdp2", gpus=8, spec="8xH200")
    slow = predict(trace, engine="fsdp2", gpus=8, spec="8xRTX4090")
    assert slow.exposed_communication_fraction > 0.5
    assert slow.communication_seconds > 10 * fast.communication_seconds


# Offload


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_updates_wait_for_host_memory(layers, stage: int) -> None:
    """42 bytes an element of this rank's quarter, all four at once, at the host's measured rate."""
    trace = layers(width=8192)
    elements = 8 * 8192**2 + 1024 * 8192
    time = predict(trace, **zero(stage, **OFFLOAD))
    host = 42 * elements / table()["cpu"]["deepspeed"]["node"]
    assert time.optimizer_seconds == pytest.approx(host, rel=0.25)
    gradients = elements / 4 * 4 / HARDWARE.host_link.bytes_per_second
    assert time.copy_seconds > gradients
    assert time.step_seconds > predict(trace, **zero(stage)).step_seconds + 0.9 * host


def test_offloaded_weights_are_copied_for_every_gather(layers) -> None:
    trace = layers(blocks=24, width=8192)
    optimizer = predict(trace, **zero(3, **OFFLOAD))
    both = predict(trace, **zero(3, offload_parameters="cpu", **OFFLOAD))
    part = 2 * 24 * 8192**2 / 4 / HARDWARE.host_link.bytes_per_second
    assert both.copy_seconds - optimizer.copy_seconds > 0.3 * part
    fsdp = predict(trace, engine="fsdp2", gpus=4, offload_parameters="cpu", offload_optimizer="cpu")
    assert fsdp.copy_seconds > 4 * part  # fp32 shards, forward and backward, and gradients back


def test_a_drive_is_slower_than_memory(layers) -> None:
    trace = layers(width=8192)
    memory = predict(trace, **zero(3, **OFFLOAD))
    drive = predict(trace, **zero(3, offload_optimizer="nvme", nvme_path="/x"))
    assert drive.optimizer_seconds > 4 * memory.optimizer_seconds


# Streams


def played(streams: Streams) -> Clocks:
    clocks = Clocks(events=1)
    clocks.run(streams.work)
    return clocks


def test_collectives_take_multiprocessors_from_the_computation() -> None:
    share = held(HARDWARE.intra.name)
    streams = Streams(HARDWARE, "bf16")
    streams.communicate(1.0, 0.0, after_compute=False)
    streams.compute(0.5)
    assert played(streams).compute == pytest.approx(0.5 / (1 - share), rel=1e-3)
    streams.compute(1.0)  # what is left when the collective ends runs at full speed
    assert played(streams).compute == pytest.approx(1.0 + 1.5 - (1 - share), rel=1e-3)


def test_products_with_experts_wait_for_multiprocessors_and_few_are_held_without_nvlink() -> None:
    def seconds(gpus: str, **of: float) -> float:
        streams = Streams(parse_hardware(gpus), "bf16")
        streams.communicate(10.0, 0.0, after_compute=False)
        streams.compute(1.0, **of)
        clocks = played(streams)
        assert clocks.totals.contended == pytest.approx(clocks.compute - clocks._launch - 1.0)
        return clocks.compute

    assert seconds("2xH200") == pytest.approx(1.22, abs=0.01)
    assert seconds("2xH200", grouped=1.0) == pytest.approx(1.64, abs=0.01)
    assert seconds("2xH200", grouped=0.5) == pytest.approx((1.22 + 1.64) / 2, abs=0.01)
    assert seconds("2xRTX4090") == pytest.approx(1.016, abs=0.001)
    assert seconds("2xRTX4090", grouped=1.0) == pytest.approx(1.64, abs=0.01)
    assert seconds("2x8xH200") == pytest.approx(1.22, abs=0.01)
    assert seconds("2x1xH200+ib400") == pytest.approx(1.016, abs=0.001)  # all that is sent leaves the node


def test_a_copy_and_a_collective_run_beside_each_other() -> None:
    streams = Streams(HARDWARE, "bf16")
    copied = streams.copy(HARDWARE.host_link.bytes_per_second, done=event(0))
    streams.communicate(0.7, 0.0, after_compute=False)
    streams.compute_waits(copied)
    streams.host_waits()
    clocks = played(streams)
    assert clocks.copies == [pytest.approx(1.0, rel=1e-3), 0.0]
    assert clocks.communication == pytest.approx(0.7, rel=1e-3)
    assert clocks.totals.exposed_to_copies == pytest.approx(1.0, rel=1e-3)
    assert clocks.totals.exposed == 0.0
    assert clocks.host == clocks.copies[0]


def test_weights_are_copied_while_gradients_leave() -> None:
    """Gradients of 1 s behind a reduction of 0.7 s, weights of 1 s, and gradients of 1 s once more."""
    streams, second = Streams(HARDWARE, "bf16"), HARDWARE.host_link.bytes_per_second
    streams.communicate(0.7, 0.0, after_compute=False, done=REDUCED)
    streams.copy(second, after=REDUCED, done=REDUCED)
    streams.compute_waits(streams.copy(second))
    streams.copy(second, after=REDUCED, done=REDUCED)
    clocks = played(streams)
    assert clocks.copies == [pytest.approx(1.0, rel=1e-3), pytest.approx(2.7, rel=1e-3)]
    assert clocks.compute == clocks.copies[0]
    assert clocks.totals.copy == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(("computed", "for_copies", "for_collectives"), [(0.0, 1.0, 0.9), (1.6, 0.0, 0.3)])
def test_who_waits_for_a_collective_waits_for_the_copy_before_it(
    computed: float, for_copies: float, for_collectives: float
) -> None:
    """A copy of 1 s, then two collectives in turn, of 0.7 and 0.2 s, beside a computation."""
    streams = Streams(HARDWARE, "bf16")
    copied = streams.copy(HARDWARE.host_link.bytes_per_second, done=event(0))
    streams.communication_waits(copied)
    streams.communicate(0.7, 0.0, after_compute=False)
    gathered = streams.communicate(0.2, 0.0, after_compute=False, done=event(0))
    if computed:
        streams.host_reads()
        streams.issue(computed)
    streams.compute_waits(gathered)
    totals = played(streams).totals
    assert totals.exposed_to_copies == pytest.approx(for_copies, abs=1e-3)
    assert totals.exposed == pytest.approx(for_collectives, abs=1e-3)


@pytest.mark.parametrize(
    "strategy",
    [
        {"engine": "deepspeed", "stage": 1},
        {"engine": "deepspeed", "stage": 2, **OFFLOAD},
        {"engine": "deepspeed", "stage": 3, "offload_parameters": "cpu", **OFFLOAD},
        {"engine": "fsdp2", "reshard": False},
        {"engine": "fsdp2"},
    ],
)
def test_work_that_is_played_again_is_what_would_be_asked_for(
    layers, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any]
) -> None:
    """Four micro-batches of three steps are three kinds; here each of the twelve is asked for."""
    trace = layers(blocks=6, checkpoint_every=2)
    chosen = Strategy(data_parallel=4, accumulation=4, **strategy)
    again = descriptor(chosen).play(trace, chosen, HARDWARE)
    asked = []

    def written(self: Schedule, *, first: bool, last: bool) -> list[Work]:
        asked.append((first, last))
        return self._recorded(lambda: self.micro_batch(first=first, last=last))

    monkeypatch.setattr(Schedule, "_micro_batch", written)
    assert descriptor(chosen).play(trace, chosen, HARDWARE) == again
    assert len(asked) == 12


# Tensor parallelism, and all together


SUMMED = Op(
    kind="collective",
    flops=0.0,
    read_bytes=8192 * 8192 * 2,
    written_bytes=8192 * 8192 * 2,
    name="all_reduce",
)


def parallel(layers: Any, degree: int, *, sums: int = 1, **shape: Any) -> StepTrace:
    """A trace of `layers` in which each forward pass of a block ends with `sums` sums over the group."""
    trace: StepTrace = layers(tail=(SUMMED,), **shape)
    blocks = {i for i, unit in enumerate(trace.units) if unit.block >= 0}
    events = [e for e in trace.events if e != (OP, 1)]
    for place in reversed(range(len(events))):
        if events[place][0] == FORWARD_END or (
            events[place][0] == FORWARD and events[place][1] not in blocks
        ):
            continue
        if events[place][0] == FORWARD:
            events[place + 2 : place + 2] = [(OP, 1)] * sums
    return replace(trace, events=tuple(events), tensor_parallel=degree)


def test_sums_over_a_tensor_parallel_group_hold_up_the_computation(layers, unlimited) -> None:
    shape = {"blocks": 16, "width": 8192, "tokens": 8192}
    plain = replace(layers(**shape), tensor_parallel=2)
    trace = parallel(layers, 2, sums=2, **shape)
    strategy = zero(1, gpus=1, tensor_parallel=2)
    without, with_sums = predict(plain, **strategy), predict(trace, **strategy)
    one = communication.all_reduce(8192 * 8192 * 2, communication.group(HARDWARE, 2))
    added = with_sums.exposed_communication_seconds - without.exposed_communication_seconds
    assert added == pytest.approx(16 * 2 * one)
    to_peers = with_sums.exposed_to_peers_seconds - without.exposed_to_peers_seconds
    assert to_peers == pytest.approx(added)
    assert with_sums.step_seconds - without.step_seconds == pytest.approx(16 * 2 * one, rel=0.01)
    assert with_sums.communication_seconds - without.communication_seconds == pytest.approx(16 * 2 * one)
    assert with_sums.compute_seconds == pytest.approx(without.compute_seconds)
    assert with_sums.world_size == 2
    assert with_sums.tokens_per_step == without.tokens_per_step == 8192


def test_sums_take_the_links_within_the_node(layers, unlimited) -> None:
    shape = {"blocks": 16, "width": 8192, "tokens": 8192}
    plain, trace = replace(layers(**shape), tensor_parallel=2), parallel(layers, 2, **shape)
    strategy = zero(1, gpus=1, tensor_parallel=2)

    def added(spec: str) -> float:
        with_sums, without = (predict(t, spec=spec, **strategy) for t in (trace, plain))
        return with_sums.exposed_communication_seconds - without.exposed_communication_seconds

    for spec, rate in (("4xH100", 300e9), ("4xH100@pcie4", 24e9)):  # of a pair
        assert added(spec) == pytest.approx(16 * 8192 * 8192 * 2 / rate, rel=0.05)


def test_a_sum_and_a_collective_beside_it_have_half_of_the_links_each() -> None:
    """A bucket of 10 s, of which 4 s are over; 3 s of sums last 6, and the bucket is over 3 s later."""
    streams, clocks = Streams(HARDWARE, "bf16"), Clocks(events=1)
    streams.communicate(10.0, 0.0, after_compute=False, done=event(0))
    streams.sum_over_peers(3.0, 0.0)
    clocks.run(streams.work[:1])
    clocks.compute = 4.0 + clocks._launch
    clocks.run(streams.work[1:])
    assert clocks.compute - clocks._launch == pytest.approx(4.0 + 6.0)
    assert clocks.communication - clocks._launch == pytest.approx(13.0)
    assert clocks._events[event(0)] == clocks.communication
    assert clocks.totals.exposed == pytest.approx(6.0)
    later = Streams(HARDWARE, "bf16")
    later.sum_over_peers(5.0, 0.0)  # outlasts the bucket: 3 s of both take 6, then 2 s alone
    clocks.run(later.work)
    assert clocks.compute - clocks._launch == pytest.approx(10.0 + 8.0)
    assert clocks.communication - clocks._launch == pytest.approx(16.0)


@pytest.mark.parametrize("order", [1, -1], ids=["computation first", "collective first"])
@pytest.mark.parametrize("seconds", [4.0, 11.0, 20.0])
def test_a_collective_takes_its_multiprocessors_in_whatever_order_both_were_issued(
    order: int, seconds: float
) -> None:
    streams, clocks = Streams(HARDWARE, "bf16"), Clocks()
    streams.compute(10.0)
    streams.communicate(seconds, 0.0, after_compute=False)
    clocks.run(streams.work[::order])
    taken = held(HARDWARE.intra.name)
    most = 10.0 / (1.0 - taken)
    assert clocks.totals.contended == pytest.approx(min(seconds * taken, most - 10.0))
    assert clocks.compute - clocks._launch == pytest.approx(min(10.0 + seconds * taken, most))


@pytest.mark.parametrize(("until", "taken"), [(18.0, 0.0), (5.0, 2.0)], ids=["waits", "is over"])
def test_a_computation_that_waits_has_nothing_to_give_to_a_collective(until: float, taken: float) -> None:
    streams, clocks = Streams(HARDWARE, "bf16"), Clocks(events=1)
    streams.compute(10.0)
    streams.compute_waits(event(0))
    streams.communicate(2.0, 0.0, after_compute=False)
    clocks._events[event(0)] = until
    clocks.run(streams.work)
    ends = max(10.0 + clocks._launch, until)
    assert clocks.compute == pytest.approx(ends + taken * held(HARDWARE.intra.name))


def test_tensor_parallel_ranks_step_as_one_does(layers, unlimited) -> None:
    """One norm of all gradients, and no clipping but that of AdamW's kernel: only a number is summed more."""
    shape = {"blocks": 16, "width": 8192, "tokens": 8192}
    alone = predict(layers(**shape), **zero(1, gpus=1))
    trace = replace(layers(**shape), tensor_parallel=2)
    cut = predict(trace, **zero(1, gpus=1, tensor_parallel=2))
    assert alone.optimizer_seconds > 0.015
    assert 0 < cut.optimizer_seconds - alone.optimizer_seconds < 50e-6


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        {"engine": "single"},
        *({"engine": "deepspeed", "stage": stage} for stage in range(4)),
        {"engine": "fsdp2"},
        {"engine": "fsdp2", "reshard": False},
        {"engine": "deepspeed", "stage": 2, **OFFLOAD},
        {"engine": "deepspeed", "stage": 3, "offload_parameters": "cpu", **OFFLOAD},
        {"engine": "fsdp2", "offload_parameters": "cpu", **OFFLOAD},
    ],
)
def test_no_step_is_shorter_than_its_parts(layers, gpus: int, strategy: dict[str, Any]) -> None:
    if strategy["engine"] == "single" and gpus > 1:
        pytest.skip("a single process has one GPU")
    for accumulation in (1, 3):
        time = predict(layers(checkpoint_every=2), gpus=gpus, accumulation=accumulation, **strategy)
        # copies of weights and of gradients overlap, but here by less than the update on the host takes
        floor = max(time.compute_seconds, time.launch_seconds, time.copy_seconds)
        assert time.step_seconds >= 0.999 * floor
        assert time.exposed_communication_seconds <= 1.001 * time.communication_seconds
        assert time.exposed_to_copies_seconds <= 1.001 * time.copy_seconds
        assert time.tokens_per_step == 4096 * accumulation * gpus
        assert time.world_size == gpus
