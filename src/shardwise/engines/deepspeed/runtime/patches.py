"""What shardwise replaces in DeepSpeed, with the source that was read (decision 0033); zero3.py has more."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import MachineError
from shardwise.patch import Library, check, patch, supported

DEEPSPEED = Library(
    name="deepspeed",
    versions=">=0.19.8,<0.20",
    lost="Steps of ZeRO take longer, and ZeRO-3 reserves more GPU memory than planned.",
)

READ = {
    "DeepSpeedEngine._configure_tensor_parallel_states": "5a87659543705caa",
    "DeepSpeedZeroOptimizer._update_model_bit16_weights": "f6e3c0c53b4a7e06",
    "DeepSpeedZeroOptimizer.check_overflow": "623c2e9b3e44961b",
    "DeepSpeedZeroOptimizer.complete_grad_norm_calculation_for_cpu_offload": "7051c8064246f325",
    "DeepSpeedZeroOptimizer.get_grad_norm_direct": "72af0993ad8cde2c",
    "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue": "26ceef6d75b34b97",
    "DeepSpeedZeroOptimizer.reduce_gradients": "385b8e94b1d3cee7",
    "DeepSpeedZeroOptimizer.reduce_ready_partitions_and_remove_grads": "46ef5f92c1b87d6f",
    "DeepSpeedZeroOptimizer.scaled_global_norm": "63c6a6fe100c4e49",
    "DeepSpeedZeroOptimizer.step": "9520884fd916d178",
    "DeepSpeedZeroOptimizer.unscale_and_clip_grads": "6bf2ce6f97eafcc2",
    "DeepSpeedZeroOptimizer.update_lp_params": "3cdce069e3c66082",
    "DeepSpeedZeroOptimizer.update_offload_overflow_tracker": "0cb67c0a3f669a35",
    "DeepSpeedZeroOptimizer_Stage3.__add_grad_to_ipg_bucket": "94d52f5b4af961a2",
    "DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads": "24d09d54e4e6c38d",
    "DeepSpeedZeroOptimizer_Stage3._get_norm_groups": "6a068faa3149b1f4",
    "DeepSpeedZeroOptimizer_Stage3._offload_grad_partition_at_boundary": "0a84c049d8c77972",
    "DeepSpeedZeroOptimizer_Stage3._unflatten_partitioned_parameters": "00cc8a3f65af736f",
    "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue": "9b05d627407cb41c",
    "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue": "01713a52e24b200e",
    "DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload": "a89a9b0320ae9438",
    "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct": "5ba2252d5f16b541",
    "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue": "f1575b87b3d6c083",
    "DeepSpeedZeroOptimizer_Stage3.partition_grads": "93119b25314ec6d3",
    "DeepSpeedZeroOptimizer_Stage3.step": "c751b3209f83d3b9",
    "DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads": "3f0d9e8e7861fd44",
    "FP16_UnfusedOptimizer._skip_invalid_grad_norm": "4d93702baa0d43b5",
    "FP16_UnfusedOptimizer.step": "626bd9aa8af843e9",
    "FP16_UnfusedOptimizer.unscale_and_clip_grads": "748792c7d1075f9d",
    "Init._all_gather": "24e484914416ddf7",
    "Init._convert_to_deepspeed_param": "77281d2526a148fb",
    "PartitionedParameterCoordinator._clean_inflight_param_registry": "872ae709ce043811",
    "PartitionedParameterCoordinator.fetch_sub_module": "a5abaed0971c8fbd",
    "PartitionedParameterCoordinator.release_and_reset_all": "dba16cef435ceb5e",
    "PartitionedParameterCoordinator.release_sub_module": "c3e9bb9e6ae99872",
    "deepspeed.comm.torch.build_shm_op": "2bf3cff9e3d1f058",
    "deepspeed.runtime.fp16.unfused_optimizer.is_invalid_grad_norm": "6afd483e2c88e25e",
    "deepspeed.runtime.zero.partition_parameters.free_param": "96cebaaa66079050",
    "deepspeed.runtime.zero.partition_parameters.zero3_linear_wrap": "31b69b43331878c7",
    "deepspeed.runtime.zero.partitioned_param_coordinator.get_all_parameters": "859e0b924ea8fbbc",
    "deepspeed.runtime.zero.stage3.is_invalid_grad_norm": "6afd483e2c88e25e",
    "deepspeed.runtime.zero.stage_1_and_2.is_invalid_grad_norm": "6afd483e2c88e25e",
}
"""`shardwise.patch.hash_of` each function that is replaced or relied on, in DeepSpeed 0.19.8."""

INVALID = -1.0  # The norm of a group of gradients that DeepSpeed's optimizers take as not finite


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace a function of DeepSpeed; the return value undoes it. Raises MachineError, see `patch`."""
    return patch(owner, name, replacement, library=DEEPSPEED, source_hash=_read(owner, name))


def rely_on(owner: Any, name: str) -> Any:
    """Return `owner.name`, a function. Raises MachineError unless it is as it was read."""
    check(owner, name, library=DEEPSPEED, source_hash=_read(owner, name))
    return getattr(owner, name)


def require(feature: str) -> None:
    """Raise MachineError where DeepSpeed's version is not supported and `feature` would train wrongly."""
    if not supported(DEEPSPEED):
        what = f"{feature} relies on changes to DeepSpeed that are not made to this version"
        fix = f"pip install 'deepspeed{DEEPSPEED.versions}', or another strategy such as fsdp2"
        raise MachineError(what, where="deepspeed", fix=fix)


def _read(owner: Any, name: str) -> str:
    kind = getattr(owner, "__name__", type(owner).__name__)
    return READ.get(f"{kind}.{name.removeprefix(f'_{kind}')}", "never read")


@contextmanager
def without_reducing(optimizer: Any) -> Iterator[None]:
    """Within, ZeRO-3 takes no gradients of a block's backward pass, which it does even if there are none."""
    hooks = [module._backward_hooks for module in getattr(optimizer, "leaf_parameters", ())]
    before = [dict(one) for one in hooks]
    ours = {handle.id for handle in getattr(optimizer, "_leaf_module_hooks", ())}
    try:
        for one in hooks:
            for key in ours & one.keys():
                del one[key]
        yield
    finally:
        for one, all_of_them in zip(hooks, before, strict=True):
            one.clear()
            one.update(all_of_them)


def use_joint_norms(optimizer: Any, stage: int) -> None:
    """Take the norm of all gradients of a ZeRO-1, 2 or 3 optimizer at once (decision 0012).

    DeepSpeed searches each gradient for values that are not finite (ZeRO-1 and 2), then copies each to fp64.
    One norm in fp32 does both: it is not finite where a gradient is not. The search is left out only where
    `step` is known to refuse such a norm and to get it from the function that is replaced here.

    For gradients on the device only. Under tensor parallelism what all its ranks hold counts once.
    """
    if not supported(DEEPSPEED):
        return
    groups, rank = [optimizer.dp_process_group], 0
    if getattr(optimizer, "model_parallel_group", None) is not None:
        groups, rank = [*groups, optimizer.model_parallel_group], optimizer.model_parallel_rank

    def get_grad_norm_direct(
        gradients: Iterable[torch.Tensor], params: Iterable[Any], norm_type: float = 2.0
    ) -> torch.Tensor:
        if norm_type != 2.0:
            raise ValueError(f"shardwise computes the Euclidean norm, not the {norm_type}-norm")
        counted = list(gradients)
        if rank:
            from deepspeed.runtime.utils import is_model_parallel_parameter

            own = (one for one in counted if not getattr(one, "_zero_padding", False))
            pairs = zip(own, params, strict=False)  # zeros stand for no parameter at all
            counted = [one for one, parameter in pairs if is_model_parallel_parameter(parameter)]
        return group_norm(counted, groups, optimizer.device)

    rely_on(optimizer, "step")
    rely_on(optimizer, "_get_norm_groups" if stage == 3 else "scaled_global_norm")
    replace(optimizer, "get_grad_norm_direct", get_grad_norm_direct)
    if stage < 3:
        replace(optimizer, "check_overflow", lambda **_: None)


def trust_norms(optimizer: Any) -> None:
    """Search no gradient of an offloaded ZeRO-1 or 2 for values that are not finite.

    DeepSpeed has the host wait for each answer, so that copies to the host and the backward pass take turns.
    `step` refuses a norm that is not finite, and takes it from the functions that are relied on.
    """
    for name in ("step", "scaled_global_norm", "complete_grad_norm_calculation_for_cpu_offload"):
        rely_on(optimizer, name)
    replace(optimizer, "update_offload_overflow_tracker", _nothing)


def order_streams(optimizer: Any, accelerator: Any) -> Callable[[], None]:
    """After a step's passes, let streams of ZeRO-1 and 2 wait where DeepSpeed has the host wait (0103, 0104).

    It waits so that gradients are freed after their reduction: an order on the GPU is enough, as gradients
    are contiguous. Between micro-batches the host would run ahead, and more memory would be in use; while
    passes are recorded as a graph it waits nowhere.
    Returns what makes the host wait until those gradients are reduced: memory that another stream used is
    free then. Without overlap there is no other stream, and no wait.
    """
    if not supported(DEEPSPEED):
        return lambda: None
    epilogue = rely_on(optimizer, "independent_gradient_partition_epilogue")
    reduced = accelerator.Event()

    def in_order() -> None:
        if not (optimizer.is_gradient_accumulation_boundary() or torch.cuda.is_current_stream_capturing()):
            epilogue()
            return
        accelerator.synchronize = lambda: accelerator.current_stream().wait_stream(optimizer.reduction_stream)
        try:
            epilogue()
        finally:
            del accelerator.synchronize
        reduced.record(optimizer.reduction_stream)

    replace(optimizer, "independent_gradient_partition_epilogue", in_order)
    wait: Callable[[], None] = reduced.synchronize
    return wait


def keep_views(optimizer: Any) -> None:
    """Leave the weights of ZeRO-1 and 2 where they are: views of a buffer that stays.

    DeepSpeed makes these views again after each step, "just to be safe", while the GPU waits.
    """
    replace(optimizer, "_update_model_bit16_weights", _nothing)


def group_norm(
    gradients: list[torch.Tensor], groups: Iterable[dist.ProcessGroup | None], device: torch.device | str
) -> torch.Tensor:
    """Euclidean norm of all `gradients` of all ranks of `groups`: an fp32 scalar, INVALID if not finite."""
    total = torch.zeros((), device=device, dtype=torch.float32)
    if gradients:
        # public functions round each norm to the gradients' own format
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        total = torch.stack(norms).double().square().sum().float()
    for group in groups:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    return torch.where(norm.isfinite(), norm, INVALID)


def join_norm(optimizer: Any, stage: int, further: Callable[[], torch.Tensor]) -> None:
    """Make DeepSpeed count `further` into the gradient norm by which it clips and finds bad steps."""
    require("training parameters in fp32 next to DeepSpeed")
    rely_on(optimizer, "step")
    if stage == 3:
        groups = rely_on(optimizer, "_get_norm_groups")

        def all_groups() -> list[torch.Tensor]:
            norms = list(groups())
            return [*norms, further().to(norms[0].device)]  # on the host if the optimizer is offloaded

        replace(optimizer, "_get_norm_groups", all_groups)
    elif stage > 0:
        norm = rely_on(optimizer, "scaled_global_norm")
        replace(
            optimizer, "scaled_global_norm", lambda *args, **kwargs: hypot(norm(*args, **kwargs), further())
        )
    else:
        own = optimizer.scaled_global_norm  # step.py: step_in_parts
        optimizer.scaled_global_norm = lambda: hypot(own(), further())


def hypot(norm: Any, further: torch.Tensor) -> torch.Tensor:
    """Norm of both, on the device of `norm`: the host if the gradients that it clips are there.

    INVALID stays as it is: the hypotenuse of -1 and a finite norm would look like a finite norm.
    """
    own = torch.as_tensor(norm, dtype=torch.float32)
    return torch.where(own < 0, own, torch.hypot(own, further.to(own.device)))


def drop_first_batch_check(engine: Any) -> None:
    """Remove DeepSpeed's hook that compares the first batch of the ranks of a tensor-parallel group.

    It pickles the entire batch and fails on a MicroBatch; `check_same_rows` compares instead.
    """
    require("tensor parallelism")
    rely_on(engine, "_configure_tensor_parallel_states")
    engine.first_dataloader_check.remove()


def skip_shared_memory_transport() -> None:
    """Keep each first use on a CPU from compiling a transport that gloo already provides."""
    replace(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", _nothing)


def _nothing(*_: object) -> None:  # one function: to set the same again has no effect
    return None
