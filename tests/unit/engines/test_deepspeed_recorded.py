"""Which passes of ZeRO are recorded with DeepSpeed's hooks, and gradients that wait for their reduction."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.engines.deepspeed.policy import decides_on_gpu, records
from shardwise.engines.deepspeed.runtime import engine, gradients, recorded
from shardwise.engines.deepspeed.runtime.gradients import Gradients
from shardwise.engines.deepspeed.runtime.recorded import Zero3Order, _Recorded
from shardwise.engines.deepspeed.runtime.zero3 import Released
from shardwise.engines.runtime.recorded import RecordedPasses
from shardwise.strategy import Strategy

ZERO = {stage: Strategy(engine="deepspeed", stage=stage, precision="bf16") for stage in range(4)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_stages_are_recorded(stage: int) -> None:
    strategy = replace(ZERO[stage], data_parallel=2)
    assert records(strategy)
    assert decides_on_gpu(strategy)
    assert records(replace(strategy, accumulation=4))
    assert records(replace(strategy, tensor_parallel=2))


def test_without_a_guard_of_its_own_the_host_decides() -> None:
    """In fp32 ZeRO-0 steps with torch's optimizer alone."""
    assert not decides_on_gpu(replace(ZERO[0], precision="fp32"))
    assert decides_on_gpu(replace(ZERO[1], precision="fp32"))


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
        {"shard_group": 2},
        {"quantized_weights": True},
        {"quantized_gradients": True},
        {"overlap_comm": False},
    ],
    ids=str,
)
def test_what_the_host_takes_part_in_is_not_recorded(change: dict[str, Any]) -> None:
    assert not records(replace(ZERO[3], data_parallel=4, **change))


@pytest.mark.parametrize("reduced", [[], [0], [0, 1]])
def test_zero_1_reduces_what_the_last_backward_pass_did_not_reach(
    monkeypatch: pytest.MonkeyPatch, reduced: list[int]
) -> None:
    """Of three weights the second waits in a bucket, unless it is reduced."""
    monkeypatch.setattr(recorded, "rely_on", getattr)
    monkeypatch.setattr(recorded, "replace", setattr)
    calls: list[Any] = []
    bucket = SimpleNamespace(params=[] if 1 in reduced else [(0, 1, 1)])
    optimizer = SimpleNamespace(
        ipg_buckets={torch.bfloat16: bucket},
        bit16_groups=[[0, 1], [2]],
        get_param_id=lambda weight: weight,
        params_already_reduced=[number in reduced for number in range(3)],
        reduce_ready_partitions_and_remove_grads=lambda weight, group: calls.append((weight, group)),
        reduce_gradients=lambda **_: calls.append("rest"),
    )
    recorded.reduce_all(optimizer)
    optimizer.reduce_gradients(pipeline_parallel=False)
    assert calls == [*([] if 0 in reduced else [(0, 0)]), (2, 1), "rest"]


class Streams:
    """The reducing stream and the computation's, which run at once."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self) -> Streams:
        return self

    def stream(self, _: object) -> Any:
        return nullcontext()

    def Event(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(record=lambda *_: self.log.append("record"))

    def wait_stream(self, _: object) -> None:
        self.log.append("wait for stream")

    def wait_event(self, _: object) -> None:
        self.log.append("wait for event")


@pytest.fixture
def zero3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ZeRO-3 optimizer of two ranks, of which this is the second; only what the hooks use."""
    for module in (recorded, gradients):
        monkeypatch.setattr(module, "patch", lambda owner, name, value, **_: setattr(owner, name, value))
    monkeypatch.setattr(gradients, "rely_on", getattr)
    monkeypatch.setattr(gradients, "replace", setattr)
    bucket = SimpleNamespace(buffer=torch.zeros(8), elements=0, params=[], process_group=None)
    monkeypatch.setattr(recorded, "release_gathered", lambda *_: None)
    coordinator = SimpleNamespace(fetch_sub_module=lambda *_: None)
    optimizer = SimpleNamespace(
        reduce_and_partition_stream=Streams(),
        parameter_offload=SimpleNamespace(get_param_coordinator=lambda: coordinator),
        coordinator=coordinator,
        bucket=bucket,
        ipg_buckets={"bf16": bucket},
        reduce_bucket_size=8,
        persistent_parameters=[],
        partition_grads=lambda *_: "DeepSpeed's own",
        get_param_comm_dtype=lambda _: "bf16",
        _get_param_partition_group=lambda _: "both",
        _get_param_partition_rank=lambda _: 1,
    )
    for name in (gradients._REDUCE, gradients._EPILOGUE, *gradients._OF_HOST):
        setattr(optimizer, name, lambda: None)
    setattr(optimizer, gradients._PARTITIONS, {1: torch.ones(2), 2: torch.ones(2)})
    return optimizer


def order_of(optimizer: Any, *, sums: bool) -> Zero3Order:
    streams = Streams()
    held = Gradients(optimizer, streams=streams), Released(streams, streams)
    return Zero3Order(optimizer, [], *held, sums=sums, streams=streams)


def parameter(number: int, values: list[float]) -> Any:
    numel = len(values)
    made = SimpleNamespace(ds_id=number, ds_numel=numel, partition_numel=lambda: -(-numel // 2))
    made.grad = torch.tensor(values)
    return made


@pytest.mark.parametrize(("sums", "expected"), [(False, [3.0, 4.0]), (True, [4.0, 5.0])])
def test_gradients_go_to_the_bucket_and_shares_to_the_partition(
    zero3: Any, sums: bool, expected: list[float]
) -> None:
    order = order_of(zero3, sums=sums)
    one = parameter(1, [1.0, 2.0, 3.0, 4.0])
    getattr(zero3, gradients._COLLECT)(one)
    assert zero3.bucket.buffer.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    assert one.grad.data_ptr() == zero3.bucket.buffer.data_ptr()
    assert (zero3.bucket.elements, zero3.bucket.params, zero3.bucket.process_group) == (4, [one], "both")
    zero3.partition_grads([one], [torch.tensor([3.0, 4.0])])
    assert one.grad is None
    assert order._gradients.shares[1].tolist() == expected


def test_a_share_that_is_padding_alone_is_left_out(zero3: Any) -> None:
    order = order_of(zero3, sums=False)
    one = parameter(1, [1.0])
    assert zero3.partition_grads([one], [torch.tensor([7.0])]) == []
    assert order._gradients.shares[1].tolist() == [1.0, 1.0]


def test_a_gradient_that_is_larger_than_the_bucket_keeps_its_memory_until_after_it(zero3: Any) -> None:
    order_of(zero3, sums=False)
    one = parameter(2, [float(at) for at in range(9)])
    memory = weakref.ref(one.grad)
    getattr(zero3, gradients._COLLECT)(one)
    zero3.coordinator.fetch_sub_module()
    zero3.coordinator.fetch_sub_module()
    assert memory() is one.grad
    assert zero3.bucket.buffer.tolist() == [0.0] * 8
    zero3.partition_grads([one], [torch.zeros(2)])
    assert memory() is not None, "the reducing stream reads it"
    zero3.coordinator.fetch_sub_module()
    zero3.coordinator.fetch_sub_module()
    assert memory() is None


def test_memory_of_a_gradient_is_free_when_the_module_after_the_next_one_begins(zero3: Any) -> None:
    """The computation waits then for what the reducing stream had to do when the next one began."""
    order = order_of(zero3, sums=False)
    one = parameter(1, [1.0, 2.0])
    getattr(zero3, gradients._COLLECT)(one)
    [held] = order._gradients._latest
    memory = weakref.ref(held)
    del held
    order._streams.log.clear()
    zero3.coordinator.fetch_sub_module()
    assert memory() is not None
    zero3.coordinator.fetch_sub_module()
    assert memory() is None
    assert order._streams.log == ["wait for event", "record"] * 2


def test_nothing_is_held_and_no_event_of_a_graph_is_left_after_it(zero3: Any) -> None:
    order = order_of(zero3, sums=False)
    getattr(zero3, gradients._COLLECT)(parameter(1, [1.0, 2.0]))
    before = order._gradients._copied
    order.end()
    assert order._gradients._latest == order._gradients._earlier == []
    assert order._gradients._copied is not before


def test_passes_that_are_not_recorded_keep_deepspeeds_own_partition(zero3: Any) -> None:
    """Memory is free in the same way, and nothing is held once a backward pass is over."""
    held = Gradients(zero3, streams=Streams())
    one = parameter(1, [1.0, 2.0, 3.0, 4.0])
    getattr(zero3, gradients._COLLECT)(one)
    assert zero3.partition_grads([one], [torch.zeros(2)]) == "DeepSpeed's own"
    assert one.grad is None
    assert len(held._latest) == 2
    getattr(zero3, gradients._EPILOGUE)()
    assert held._latest == held._earlier == []


def test_the_only_gradients_of_a_step_go_to_the_host_once(zero3: Any) -> None:
    """In fp32, where the optimizer reads them, with a norm of each share. Padding alone does not go."""
    flat = torch.nn.Parameter(torch.zeros(8))
    flat.grad = torch.full((8,), 9.0)
    zero3.fp32_partitioned_groups_flat = [flat]
    zero3.grad_position, zero3.norm_for_param_grads = {1: [0, 3, 2], 2: [0, 5, 1]}, {}
    zero3.get_param_id = lambda one: one.ds_id
    Gradients(zero3, to_host=True, streams=Streams())
    two = [parameter(1, [1.0, 2.0, 3.0, 4.0]), parameter(2, [1.0])]
    shares = [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([7.0], dtype=torch.bfloat16)]
    zero3.partition_grads(two, shares)
    assert flat.grad.tolist() == [9.0, 9.0, 9.0, 3.0, 4.0, 9.0, 9.0, 9.0]
    assert {number: float(norm) for number, norm in zero3.norm_for_param_grads.items()} == {1: 5.0}
    assert zero3.norm_for_param_grads[1].dtype == torch.float32
    assert [one.grad for one in two] == [None, None]


@pytest.mark.parametrize(
    ("change", "made"),
    [
        ({"offload_optimizer": "cpu"}, [True]),
        ({"offload_optimizer": "cpu", "accumulation": 2}, [False]),
        ({"offload_optimizer": "cpu", "precision": "fp16"}, [False]),
        ({"offload_optimizer": "nvme"}, [False]),
        ({}, []),  # recorded passes make their own; others have DeepSpeed's order
        ({"shard_group": 2}, []),
    ],
    ids=str,
)
def test_offloaded_gradients_are_ordered_and_the_only_ones_sent_once(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], made: list[bool]
) -> None:
    found: list[bool] = []
    for name in ("use_joint_norms", "gather_in_place", "release_in_order"):
        monkeypatch.setattr(engine, name, lambda *_: "released")
    monkeypatch.setattr(engine, "Gradients", lambda _, to_host: found.append(to_host))
    world = SimpleNamespace(device=torch.device("cuda"))
    ours = SimpleNamespace(world=world, _strategy=replace(ZERO[3], **change), _optimizer=None)
    engine.DeepSpeedEngine._patch_optimizer(ours, [])  # type: ignore[arg-type]
    assert found == made


@pytest.mark.parametrize(
    ("recording", "complete", "ready", "resets"),
    [(False, False, False, 0), (True, True, True, 1), (False, True, True, 0)],
)
def test_zero_3_is_recorded_once_the_order_of_modules_is_known(
    zero3: Any, recording: bool, complete: bool, ready: bool, resets: int
) -> None:
    order, calls = order_of(zero3, sums=False), []
    zero3.coordinator.is_record_trace = lambda: recording
    zero3.coordinator.is_complete_trace = lambda: complete
    zero3.coordinator.reset_step = lambda: calls.append(1)
    assert order.ready() == ready
    assert len(calls) == resets


def test_what_a_graph_left_is_given_to_each_step() -> None:
    """Those of parameters that DeepSpeed does not see, too."""
    passes = object.__new__(_Recorded)
    apart, gradient = torch.zeros(2), torch.ones(2)
    passes._optimizer = SimpleNamespace(averaged_gradients={0: None})
    passes._apart, passes.gradients = [apart], [gradient]
    passes.leave({0: ["of the graph"]})
    assert passes._optimizer.averaged_gradients == {0: ["of the graph"]}
    assert apart.grad is gradient
    passes._optimizer.averaged_gradients[0] = None  # as the step does
    assert passes.left() == {0: None}


def test_what_runs_next_to_the_graphs_ends_in_order_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(RecordedPasses, "place", lambda _: nullcontext())
    passes = object.__new__(_Recorded)
    passes._order = SimpleNamespace(begin=lambda: log.append("begin"), end=lambda: log.append("end"))
    with pytest.raises(ValueError, match="evaluation"), passes.place():
        raise ValueError("evaluation")
    assert log == ["begin", "end"]
