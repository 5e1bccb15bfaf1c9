"""What is replaced in DeepSpeed: refused where DeepSpeed differs, left alone at other versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.engines.deepspeed.runtime import patches, zero3
from shardwise.engines.deepspeed.runtime.gradients import Gradients
from shardwise.engines.deepspeed.runtime.recorded import Zero3Order, reduce_all
from shardwise.engines.deepspeed.runtime.state import PUBLISHING, NamedState
from shardwise.engines.deepspeed.runtime.step import StepOnGpu, step_in_parts
from shardwise.errors import MachineError
from shardwise.patch import hash_of, supported

ZERO12 = ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
ZERO3 = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
ZERO0 = ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
COORDINATOR = ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator")
ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")
PARTITION = ("deepspeed.runtime.zero.partition_parameters", None)
INIT = ("deepspeed.runtime.zero.partition_parameters", "Init")
COORDINATION = ("deepspeed.runtime.zero.partitioned_param_coordinator", None)
TRANSPORT = ("deepspeed.comm.torch", None)
LIMIT = "_PartitionedParameterCoordinator__max_ongoing_fetch_events"
EVENTS = "_PartitionedParameterCoordinator__ongoing_fetch_events"
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def owner(place: tuple[str, str | None]) -> Any:
    module = importlib.import_module(place[0])
    return getattr(module, place[1]) if place[1] else module


def bare(place: tuple[str, str | None], **values: Any) -> Any:
    """An instance of a class of DeepSpeed that was not initialised."""
    made = object.__new__(owner(place))
    made.__dict__.update(values)
    return made


def joint(stage: int, place: tuple[str, str | None]) -> Any:
    optimizer = bare(place, dp_process_group=None, device="cpu")
    patches.use_joint_norms(optimizer, stage)
    return optimizer


def stepped(device: str = "cpu") -> Any:
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = bare(ZERO0, fp16_groups=[[weight]], fp32_groups=[[weight]], optimizer=SimpleNamespace())
    step_in_parts(optimizer)
    return optimizer


def all_reduced() -> Any:
    optimizer = bare(ZERO12)
    reduce_all(optimizer)
    return optimizer


def joined(stage: int, place: tuple[str, str | None]) -> Any:
    optimizer = bare(place) if stage else stepped()
    patches.join_norm(optimizer, stage, lambda: torch.tensor(4.0))
    return optimizer


def published(stage: int, place: tuple[str, str | None]) -> Any:
    flats = {"single_partition_of_fp32_groups": [], "fp32_partitioned_groups_flat": []}
    return NamedState(bare(place, optimizer=None, **flats), torch.nn.Linear(1, 1), stage=stage)


def in_order() -> Any:
    coordinator = bare(COORDINATOR, **{LIMIT: 2})
    offload = SimpleNamespace(
        _DeepSpeedZeRoOffload__allgather_stream=Streams(), get_param_coordinator=lambda: coordinator
    )
    zero3.release_in_order(SimpleNamespace(parameter_offload=offload), [], Streams())
    return coordinator


def recorded(*, to_host: bool = False, **values: Any) -> Any:
    """A ZeRO-3 optimizer whose passes are recorded."""
    coordinator = bare(COORDINATOR, **{LIMIT: 2, EVENTS: [1]})
    values |= {"parameter_offload": SimpleNamespace(get_param_coordinator=lambda: coordinator)}
    values |= {"reduce_and_partition_stream": Streams(), "persistent_parameters": [], PARTITIONS: {}}
    optimizer = bare(ZERO3, param_reduce_events=[1], **values)
    held = Gradients(optimizer, to_host=to_host, streams=Streams()), zero3.Released(Streams(), Streams())
    Zero3Order(optimizer, [], *held, sums=False, streams=Streams())
    return optimizer


def sent_to_host() -> Any:
    return recorded(to_host=True)


def gone() -> None:
    registry = "_PartitionedParameterCoordinator__inflight_param_registry"
    zero3.release_gathered(bare(COORDINATOR, **{registry: {}}), [])


def in_place() -> Any:
    parameter = SimpleNamespace(all_gather_coalesced=None, all_gather=None)
    zero3.gather_in_place([parameter], torch.device("cpu"))
    return parameter.all_gather_coalesced


def ordered() -> Any:
    optimizer = bare(ZERO12)
    patches.order_streams(optimizer, SimpleNamespace(Event=lambda: SimpleNamespace(synchronize=None)))
    return optimizer


def decided(place: tuple[str, str | None] = ZERO12) -> tuple[Any, StepOnGpu]:
    optimizer = stepped() if place == ZERO0 else bare(place, optimizer=SimpleNamespace())
    how: dict[str, Any] = {"clip_norm": 0.5, "device": torch.device("cpu")}
    return optimizer, StepOnGpu(optimizer, **how, wait=lambda: None)


def trusted() -> Any:
    optimizer = bare(ZERO12)
    patches.trust_norms(optimizer)
    return optimizer


def viewed() -> Any:
    optimizer = bare(ZERO12)
    patches.keep_views(optimizer)
    return optimizer


def without_check() -> Any:
    hook = torch.nn.Linear(1, 1).register_forward_pre_hook(lambda *_: None)
    engine = bare(ENGINE, first_dataloader_check=hook)
    patches.drop_first_batch_check(engine)
    return engine


CASES: list[tuple[Callable[[], Any], tuple[str, str | None], str]] = [
    (lambda: joint(2, ZERO12), ZERO12, "get_grad_norm_direct"),
    (lambda: joint(2, ZERO12), ZERO12, "check_overflow"),
    (lambda: joint(2, ZERO12), ZERO12, "scaled_global_norm"),
    (lambda: joint(2, ZERO12), ZERO12, "step"),
    (viewed, ZERO12, "_update_model_bit16_weights"),
    (trusted, ZERO12, "step"),
    (trusted, ZERO12, "scaled_global_norm"),
    (trusted, ZERO12, "complete_grad_norm_calculation_for_cpu_offload"),
    (trusted, ZERO12, "update_offload_overflow_tracker"),
    (ordered, ZERO12, "independent_gradient_partition_epilogue"),
    (decided, ZERO12, "step"),
    (decided, ZERO12, "unscale_and_clip_grads"),
    (decided, (ZERO12[0], None), "is_invalid_grad_norm"),
    (lambda: decided(ZERO3), ZERO3, "unscale_and_clip_grads"),
    (lambda: decided(ZERO3), (ZERO3[0], None), "is_invalid_grad_norm"),
    (lambda: joint(3, ZERO3), ZERO3, "get_grad_norm_direct"),
    (lambda: joint(3, ZERO3), ZERO3, "_get_norm_groups"),
    (lambda: joint(3, ZERO3), ZERO3, "step"),
    (all_reduced, ZERO12, "reduce_gradients"),
    (all_reduced, ZERO12, "reduce_ready_partitions_and_remove_grads"),
    (stepped, ZERO0, "step"),
    (stepped, ZERO0, "_skip_invalid_grad_norm"),
    (lambda: decided(ZERO0), ZERO0, "unscale_and_clip_grads"),
    (lambda: decided(ZERO0), (ZERO0[0], None), "is_invalid_grad_norm"),
    (lambda: joined(1, ZERO12), ZERO12, "scaled_global_norm"),
    (lambda: joined(3, ZERO3), ZERO3, "_get_norm_groups"),
    (recorded, ZERO3, f"_{ZERO3[1]}__add_grad_to_ipg_bucket"),
    (sent_to_host, ZERO3, "_offload_grad_partition_at_boundary"),
    (sent_to_host, ZERO3, "complete_grad_norm_calculation_for_cpu_offload"),
    (recorded, ZERO3, f"_{ZERO3[1]}__reduce_and_partition_ipg_grads"),
    (recorded, ZERO3, "independent_gradient_partition_epilogue"),
    (recorded, ZERO3, "partition_grads"),
    (in_order, COORDINATOR, "fetch_sub_module"),
    (in_order, COORDINATOR, "release_sub_module"),
    (in_order, COORDINATOR, "release_and_reset_all"),
    (gone, COORDINATOR, "_clean_inflight_param_registry"),
    (in_order, PARTITION, "free_param"),
    (in_place, INIT, "_convert_to_deepspeed_param"),
    (in_place, INIT, "_all_gather"),
    (zero3.work_less_on_the_host, PARTITION, "zero3_linear_wrap"),
    (zero3.work_less_on_the_host, COORDINATION, "get_all_parameters"),
    *((partial(published, 2, ZERO12), ZERO12, name) for name in PUBLISHING[2]),
    *((partial(published, 3, ZERO3), ZERO3, name) for name in PUBLISHING[3]),
    (without_check, ENGINE, "_configure_tensor_parallel_states"),
    (patches.skip_shared_memory_transport, TRANSPORT, "build_shm_op"),
]
GLOBAL = [(place, name) for _, place, name in CASES if place in (PARTITION, COORDINATION, TRANSPORT)]
NAMES = [f"{place[1] or place[0]}.{name}" for _, place, name in CASES]


def read(place: tuple[str, str | None], name: str) -> str:
    kind = owner(place).__name__
    return f"{kind}.{name.removeprefix(f'_{kind}')}"


def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in GLOBAL:
        monkeypatch.setattr(owner(place), name, getattr(owner(place), name))


@pytest.fixture(autouse=True)
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is changed for the entire process is restored, and made again by the next test."""
    keep(monkeypatch)
    zero3._free_by_engine.cache_clear()
    supported.cache_clear()
    yield
    zero3._free_by_engine.cache_clear()
    supported.cache_clear()


@pytest.mark.parametrize(("apply", "place", "name"), CASES, ids=NAMES)
def test_a_renamed_function_is_an_error(
    apply: Callable[[], Any], place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply()
    zero3._free_by_engine.cache_clear()
    monkeypatch.undo()
    keep(monkeypatch)
    monkeypatch.delattr(owner(place), name)
    with pytest.raises(MachineError, match=f"{name}, which does not exist"):
        apply()


@pytest.mark.parametrize(("apply", "place", "name"), CASES, ids=NAMES)
def test_a_changed_function_is_an_error(
    apply: Callable[[], Any], place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(owner(place), name, changed)
    with pytest.raises(MachineError, match=f"{name}, whose source has changed"):
        apply()


@pytest.mark.parametrize(("place", "name"), sorted({case[1:] for case in CASES}, key=str))
def test_the_installed_source_is_the_one_that_was_read(place: Any, name: str) -> None:
    """Whatever its version: `make newest` shows what a new release changed."""
    assert hash_of(getattr(owner(place), name)) == patches.READ[read(place, name)]


def test_nothing_is_listed_that_is_not_replaced_or_relied_on() -> None:
    assert {read(place, name) for _, place, name in CASES} == set(patches.READ)


def test_a_renamed_limit_or_stream_is_an_error() -> None:
    coordinator = bare(COORDINATOR)
    offload = SimpleNamespace(
        _DeepSpeedZeRoOffload__allgather_stream=Streams(), get_param_coordinator=lambda: coordinator
    )
    with pytest.raises(MachineError, match="max_ongoing_fetch_events, which does not exist"):
        zero3.release_in_order(SimpleNamespace(parameter_offload=offload), [], Streams())
    del offload._DeepSpeedZeRoOffload__allgather_stream
    with pytest.raises(MachineError, match="allgather_stream, which does not exist"):
        zero3.release_in_order(SimpleNamespace(parameter_offload=offload), [], Streams())


def test_another_version_is_not_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.20.0")
    before = [getattr(owner(place), name) for place, name in GLOBAL]
    assert joint(2, ZERO12).__dict__.keys() == {"dp_process_group", "device"}
    assert joint(3, ZERO3).__dict__.keys() == {"dp_process_group", "device"}
    assert in_order().__dict__ == {LIMIT: 2}
    patches.skip_shared_memory_transport()
    zero3.work_less_on_the_host()
    assert in_place() is None
    assert [getattr(owner(place), name) for place, name in GLOBAL] == before
    [warning] = caplog.messages
    assert "deepspeed 0.20.0 is installed, and shardwise knows >=0.19.8,<0.20" in warning
    assert "ZeRO-3 reserves more GPU memory" in warning


@pytest.mark.parametrize("apply", [lambda: joined(1, ZERO12), lambda: joined(0, ZERO0), without_check])
def test_what_would_train_wrongly_without_a_change_is_refused_at_another_version(
    apply: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.20.0")
    with pytest.raises(MachineError, match="not made to this version"):
        apply()


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("stage", "place"), [(2, ZERO12), (3, ZERO3)])
def test_the_joint_norm_is_that_of_all_gradients_and_finds_nan(stage: int, place: Any, alone: None) -> None:
    optimizer = joint(stage, place)
    gradients = [torch.full((2, 2), 3.0), torch.full((7,), 4.0).bfloat16()]
    assert optimizer.get_grad_norm_direct(gradients, None).item() == pytest.approx(math.sqrt(4 * 9 + 7 * 16))
    gradients[1][3] = float("nan")
    assert optimizer.get_grad_norm_direct(gradients, None).item() == patches.INVALID
    if stage < 3:
        assert optimizer.check_overflow(partition_gradients=True) is None


def test_torchs_kernel_clips_and_skips_all_steps_from_one_that_is_not_finite() -> None:
    optimizer, ours = decided()
    seen = []
    for norm in (0.1, 2.0, float("inf"), 2.0):
        optimizer.unscale_and_clip_grads([], torch.tensor(norm))
        seen.append((optimizer.optimizer.grad_scale.item(), optimizer.optimizer.found_inf.item()))
    assert seen == [(1.0, 0.0), (pytest.approx(4.0), 0.0), (math.inf, 1.0), (pytest.approx(4.0), 1.0)]
    assert ours.stopped.item() == 1.0


def test_the_norm_is_read_back_again_after_a_step_that_failed() -> None:
    optimizer, _ = decided()
    module = importlib.import_module(ZERO12[0])
    with pytest.raises(AttributeError):  # this one was not initialised
        optimizer.step()
    assert module.is_invalid_grad_norm(torch.tensor(math.inf))


def test_norms_are_joined_as_a_hypotenuse_and_an_invalid_one_stays_invalid() -> None:
    four = torch.tensor(4.0)
    assert patches.hypot(3.0, four).item() == 5.0
    assert patches.hypot(torch.tensor(3.0), four).item() == 5.0
    assert patches.hypot(-1, four).item() < 0
    assert math.isinf(patches.hypot(float("inf"), four).item())
    assert math.isnan(patches.hypot(3.0, torch.tensor(float("nan"))).item())


@pytest.mark.parametrize(("stage", "place"), [(1, ZERO12), (3, ZERO3)])
def test_further_gradients_count_into_the_norm_of_zero(stage: int, place: Any, alone: None) -> None:
    optimizer = joint(stage, place)
    gradient = torch.tensor([3.0, 0.0])
    groups = [[torch.nn.Parameter(torch.zeros(2))]]
    vars(optimizer).update(
        averaged_gradients=[[gradient]],
        bit16_groups=groups,
        fp16_groups=groups,
        params_in_partition=groups,
        cpu_offload=False,
        offload_optimizer=False,
        has_moe_layers=False,
        custom_loss_scaler=True,
        external_loss_scale=1.0,
    )
    patches.join_norm(optimizer, stage, lambda: torch.tensor(4.0))
    utils = importlib.import_module("deepspeed.runtime.utils")

    def norm() -> Any:
        if stage == 1:
            return optimizer.scaled_global_norm()
        return utils.combine_grad_norm_groups(optimizer._get_norm_groups())

    assert float(norm()) == 5.0
    gradient[1] = float("nan")
    assert utils.is_invalid_grad_norm(norm()), "the optimizer has to skip this step"


def test_further_gradients_count_into_the_norm_of_stage_0() -> None:
    optimizer = joined(0, ZERO0)
    optimizer.fp16_groups[0][0].grad = torch.tensor([3.0])
    assert optimizer.scaled_global_norm().item() == 5.0


@pytest.mark.parametrize("value", [4.0, float("nan")])
def test_stage_0_skips_a_step_whose_further_gradients_are_not_finite(value: float) -> None:
    optimizer, skipped = stepped(), []
    optimizer.loss_scale_config = SimpleNamespace(cur_scale=1.0)
    optimizer.clip_grad, optimizer.optimizer.step = 1.0, lambda: None
    optimizer._update_scale = skipped.append
    patches.join_norm(optimizer, 0, lambda: torch.tensor(value))
    assert optimizer.step() == (not math.isfinite(value)) == bool(skipped)


def test_the_first_batch_is_not_compared() -> None:
    layer = torch.nn.Linear(1, 1)
    engine = bare(ENGINE, first_dataloader_check=layer.register_forward_pre_hook(lambda *_: 1 / 0))
    patches.drop_first_batch_check(engine)
    layer(torch.ones(1))


def test_no_transport_is_compiled() -> None:
    patches.skip_shared_memory_transport()
    assert owner(TRANSPORT).build_shm_op() is None


class Streams:
    """In the place of CUDA's streams and events: notes what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def current_stream(self) -> str:
        return "computation"

    def Event(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(record=lambda: self.log.append("record"))

    def wait_stream(self, stream: str) -> None:
        self.log.append(f"wait for {stream}")

    def wait_event(self, event: Any) -> None:
        self.log.append("wait for event")


def test_memory_is_reused_when_the_next_module_but_one_begins() -> None:
    streams = Streams()
    released = zero3.Released(streams, streams)
    released.advance()
    memory = torch.ones(3)
    alive = weakref.ref(memory)
    released.holds = True
    released.add(memory)
    del memory
    streams.log.clear()
    released.advance()
    assert alive() is not None
    assert streams.log == ["wait for event", "record"]
    released.advance()
    assert alive() is None
    assert streams.log == ["wait for event", "record"] * 2, "it waits for what ran when the next module began"


def released_weight(released: Any) -> tuple[Any, torch.Tensor]:
    """A weight of four elements that was gathered, and a view that autograd would keep."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight._shardwise_released = released
    gather(weight)
    return weight, weight.data.view(2, 2).t()


def gather(weight: Any) -> None:
    weight.data = zero3._room(weight, torch.ones(2), 2)
    weight.data.copy_(torch.arange(4.0))


def test_a_view_of_a_released_weight_keeps_no_memory_and_has_its_values_when_it_is_gathered_again() -> None:
    streams = Streams()
    released = zero3.Released(streams, streams)
    weight, view = released_weight(released)
    released.holds = True
    released.add(weight._shardwise_storage)
    weight.data = torch.empty(0)
    released.advance()
    assert view.untyped_storage().nbytes() == 16
    released.advance()
    assert view.untyped_storage().nbytes() == 0
    gather(weight)
    assert view.tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_a_weight_that_no_module_released_is_freed_at_once() -> None:
    streams = Streams()
    weight, view = released_weight(zero3.Released(streams, streams))
    weight._shardwise_released.add(weight._shardwise_storage)
    assert view.untyped_storage().nbytes() == 0


def test_memory_that_is_gathered_again_is_not_freed_and_the_gather_waits_for_the_computation() -> None:
    streams = Streams()
    released = zero3.Released(streams, streams)
    weight, view = released_weight(released)
    released.holds = True
    for _ in range(2):
        released.add(weight._shardwise_storage)
        released.advance()
        streams.log.clear()
        gather(weight)
        assert streams.log == ["wait for computation"]
    released.advance()
    released.advance()
    assert view.untyped_storage().nbytes() == 16


def test_memory_of_deepspeeds_own_is_kept_until_autograd_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[tuple[int, str]] = []
    mark = lambda memory, stream: marked.append((memory.data_ptr(), stream))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", mark)
    streams = Streams()
    released = zero3.Released(streams, streams)
    released.holds = True
    plain, viewed = torch.ones(4), torch.ones(4)
    view = viewed.view(2, 2).t()
    for memory in (plain, viewed):
        released.add(memory)
    assert marked == [(view.data_ptr(), streams.current_stream())]


@pytest.mark.parametrize(
    ("place", "held"), [("home", False), ("share", False), ("storage", True), ("deepspeed", True)]
)
def test_what_is_freed_of_a_parameter_is_what_it_was_gathered_into(place: str, held: bool) -> None:
    """Not the memory that a graph reads, nor the only rank's own share."""
    in_order()
    partitions = owner(PARTITION)
    weight = torch.nn.Parameter(torch.ones(4))
    streams = Streams()
    released = weight._shardwise_released = zero3.Released(streams, streams)
    released.holds = True
    weight._shardwise_storage = torch.ones(4).untyped_storage()
    weight.ds_active_sub_modules, weight.ds_status = set(), partitions.ZeroParamStatus.AVAILABLE
    weight.ds_tensor = weight.data if place == "share" else torch.ones(2)
    if place == "home":
        setattr(weight, zero3.HOME, weight.data)
    if place == "storage":
        weight.data = torch.empty(0).set_(weight._shardwise_storage, 0, (4,), (1,))
    at = weight.data.data_ptr()
    partitions.free_param(weight)
    assert weight.numel() == 0
    assert [one.data_ptr() for one in released._latest] == [at] * held
    assert (released._latest == [weight._shardwise_storage]) is (place == "storage")


def test_memory_that_no_module_released_and_all_at_the_end_wait_for_the_computation() -> None:
    streams = Streams()
    released = zero3.Released(streams, streams)
    memory = torch.ones(3)
    alive = weakref.ref(memory)
    released.add(memory)
    del memory
    assert alive() is None
    assert streams.log == ["wait for computation"]
    released.holds = True
    kept = torch.ones(3)
    released.add(kept)
    released.clear()
    assert streams.log == ["wait for computation"] * 2
    assert released._latest == released._earlier == []


def test_each_engine_frees_its_own_parameters_and_leaves_others_to_deepspeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = owner(PARTITION).ZeroParamStatus
    in_order()
    free = owner(PARTITION).free_param
    first, second, none = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    for p in (first, second, none):
        p.ds_active_sub_modules, p.ds_status, p.ds_summary = set(), status.AVAILABLE, dict
        p.ds_tensor = torch.empty(1)
    logs = []
    for p in (first, second):
        streams = Streams()
        p._shardwise_released = zero3.Released(streams, streams)
        logs.append(streams.log)
    free(second)
    assert logs == [[], ["wait for computation"]]
    free(first)
    free(none)
    assert logs == [["wait for computation"]] * 2
    assert {p.numel() for p in (first, second, none)} == {0}
    assert {p.ds_status for p in (first, second, none)} == {status.NOT_AVAILABLE}
    first.ds_active_sub_modules.add(1)
    with pytest.raises(RuntimeError, match="still in use"):
        free(first)
