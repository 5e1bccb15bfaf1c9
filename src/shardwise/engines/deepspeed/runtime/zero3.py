"""What is replaced in ZeRO-3: a GPU waits less for DeepSpeed's Python, and keeps less memory (decision 0101).

`patches.READ` has the functions that were read. At another version of DeepSpeed nothing is replaced.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from shardwise.engines.deepspeed.runtime.patches import DEEPSPEED, rely_on, replace
from shardwise.patch import check, patch, supported

NO_LIMIT = 10**9
_STREAM = "_DeepSpeedZeRoOffload__allgather_stream"
_LIMIT = "_PartitionedParameterCoordinator__max_ongoing_fetch_events"  # Of gathers; read by fetch_sub_module

_RELEASED = "_shardwise_released"  # Attribute of a parameter: the `Released` of its engine
_STORAGE = "_shardwise_storage"  # Attribute of a parameter: where it is gathered; of no bytes in between
HOME = "_shardwise_home"  # Attribute of a parameter: the memory into which it is gathered each time
_FOUND = "_shardwise_parameters"  # Attribute of a module: its parameters; those of modules in it, too


def work_less_on_the_host() -> None:
    """Replace, for the process, what costs DeepSpeed's Python most. Before `deepspeed.zero.Init`."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator

    replace(partition_parameters, "zero3_linear_wrap", _linear)
    replace(partitioned_param_coordinator, "get_all_parameters", _parameters)


def _linear(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`nn.functional.linear` under ZeRO-3: it keeps the parameter for the backward pass, not its memory.

    In DeepSpeed's own, torch reads the signature of `forward` in each call, and each backward pass enters
    autocast: some 30 us of the host's time (benchmarks/deepspeed_host/linear.py). Only custom code needs it.
    """
    kind: type[torch.autograd.Function] = _Linear
    # torch 2.11 refuses the question for meta tensors, those of a trace
    if not input.is_meta and torch.is_autocast_enabled(input.device.type):
        from deepspeed.runtime.zero import linear

        kind = linear.LinearFunctionForZeroStage3
    found: torch.Tensor = kind.apply(input, weight, bias)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        output: torch.Tensor = torch._C._nn.linear(x, weight, bias)  # `nn.functional.linear` is ours now
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        weight: Any
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        gone = of_x and not weight.numel()  # the backward pass of no module gathers it
        if gone:
            weight.all_gather()
        results = (
            gradient.matmul(weight) if of_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
        if gone:
            weight.partition()
        return results


def _parameters(module: Any, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's parameters by name, looked for once: DeepSpeed asks in every fetch and release."""
    found = module.__dict__.setdefault(_FOUND, {})
    if recurse not in found:
        found[recurse] = list(module.named_parameters(recurse=recurse))
    return itertools.chain(found[recurse], module.ds_external_parameters())


def gather_in_place(parameters: Sequence[Any], device: torch.device) -> None:
    """Make ZeRO-3 gather each parameter into memory of its own, many of them by one call.

    DeepSpeed 0.19.8 joins the shares of several parameters, gathers that, and copies each parameter out.
    After a step it gathers what stays gathered, one by one. On one GPU, which has all of a parameter, the
    host waits for nothing. NVMe and int8 (qwZ) remain as they are, and offloading on one GPU.
    """
    if not supported(DEEPSPEED):
        return
    from deepspeed.runtime.zero.partition_parameters import Init

    rely_on(Init, "_convert_to_deepspeed_param")  # it makes the functions
    rely_on(Init, "_all_gather")
    for parameter in parameters:
        ahead, now = parameter.all_gather_coalesced, parameter.all_gather
        parameter.all_gather_coalesced = functools.partial(_ahead, ahead, device)
        parameter.all_gather = functools.partial(_now, now, device)


def _ahead(
    original: Any, device: Any, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False
) -> Any:
    params = sorted(params, key=lambda one: one.ds_id)  # the same order on all ranks
    if quantize or not _in_place(params):
        return original(params, safe_mode=safe_mode, quantize=quantize)
    return _Gathering(params, device, copies=params[0].ds_secondary_tensor is not None)


def _now(
    original: Any, device: Any, param_list: Any = None, async_op: bool = False, hierarchy: int = 0
) -> Any:
    if async_op or not param_list or not _in_place(param_list):
        return original(param_list, async_op, hierarchy)
    if missing := [one for one in param_list if one.ds_status.name == "NOT_AVAILABLE"]:
        _Gathering(missing, device, copies=False).wait()  # hpZ's copies are outdated after a step
    return None


def _in_place(params: Sequence[Any]) -> bool:
    one = params[0]
    as_is = one.nvme_swapper is None and not hasattr(one.ds_tensor, "ds_quant_scale")
    return as_is and (one.ds_zero_partition_world_size > 1 or one.ds_tensor.device == one.device)


class _Gathering:
    """Parameters on their way: what DeepSpeed calls the handle of an all-gather."""

    def __init__(self, params: Sequence[Any], device: torch.device, *, copies: bool) -> None:
        """`copies`: from the ranks of hpZ's group, each of which holds a part of a copy."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._params, self._arrived = params, ZeroParamStatus.AVAILABLE
        group = params[0].ds_zero_param_process_group if copies else params[0].ds_process_group
        shares, gathered = [], []
        for one in params:
            own = one.ds_secondary_tensor if copies else one.ds_tensor
            # an offloaded share is in page-locked memory
            shares.append(own.to(device, non_blocking=True))
            stays = shares[-1] if group.size() == 1 else getattr(one, HOME, None)
            gathered.append(_room(one, shares[-1], group.size()) if stays is None else stays)
            one.data = gathered[-1][: one.ds_numel].view(one.ds_shape)
            one.ds_status = ZeroParamStatus.INFLIGHT
        self._work: Any = None
        if group.size() == 1:
            return
        options: Any = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options.asyncOp = True
        self._work = group.allgather_into_tensor_coalesced(gathered, shares, options)

    def wait(self, handle_dependency: bool = True) -> None:
        if self._work is not None:
            self._work.wait()
        for one in self._params:
            one.ds_status = self._arrived
        self._work, self._params = None, []


def _room(parameter: Any, share: torch.Tensor, ranks: int) -> torch.Tensor:
    """Memory to gather a parameter into: of one storage, which has no bytes while the parameter is released.

    Autograd may keep a view of a weight for the backward pass, such as experts transposed. The view has the
    storage: its values are there again once the weight is gathered, and it keeps no memory until then.
    """
    numel, released = share.numel() * ranks, getattr(parameter, _RELEASED, None)
    if released is None:
        return share.new_empty(numel)
    if _STORAGE not in parameter.__dict__:
        setattr(parameter, _STORAGE, share.new_empty(0).untyped_storage())
    storage = getattr(parameter, _STORAGE)
    released.take_back(storage)
    if storage.nbytes() != share.nbytes * ranks:
        storage.resize_(share.nbytes * ranks)
    return share.new_empty(0).set_(storage, 0, (numel,), (1,))


def release_gathered(coordinator: Any, parameters: Iterable[Any]) -> None:
    """Release what a forward pass without a backward pass leaves gathered, or on its way.

    DeepSpeed 0.19.8 keeps it for the backward pass, until the next step. A graph that is recorded before that
    would not gather it, and read this memory ever after.
    """
    rely_on(coordinator, "_clean_inflight_param_registry")()
    for one in parameters:
        if one.ds_status.name == "AVAILABLE" and not one.ds_persist:
            one.ds_active_sub_modules.clear()
            one.partition()


def release_in_order(
    optimizer: Any, parameters: Iterable[Any], streams: Any = torch.cuda
) -> "Released | None":
    """Make a ZeRO-3 optimizer wait on the GPU, not on the host, for the memory of released parameters.

    DeepSpeed 0.19.8 marks released memory as used by the computation (`record_stream`), and the allocator
    keeps it until the GPU has come that far: the host is blocks ahead by then and gathers into new memory.
    Here the gathering stream waits for the computation instead (decision 0017).

    Only `parameters` are affected, so that several engines can live in one process. `streams` provides
    `current_stream` and `Event`. Returns what keeps that memory; None if nothing is replaced.
    """
    if not supported(DEEPSPEED):
        return None
    offload = optimizer.parameter_offload
    check(offload, _STREAM, library=DEEPSPEED, source_hash=None)
    released = Released(getattr(offload, _STREAM), streams)
    coordinator = offload.get_param_coordinator()
    fetch = rely_on(coordinator, "fetch_sub_module")
    release = rely_on(coordinator, "release_sub_module")
    release_all = rely_on(coordinator, "release_and_reset_all")

    def fetch_sub_module(*args: Any, **kwargs: Any) -> None:
        released.advance()
        fetch(*args, **kwargs)

    def release_sub_module(*args: Any, **kwargs: Any) -> None:
        released.holds = True
        try:
            release(*args, **kwargs)
        finally:
            released.holds = False

    def release_and_reset_all(*args: Any, **kwargs: Any) -> None:
        release_all(*args, **kwargs)
        released.clear()

    _free_by_engine()
    for parameter in parameters:
        setattr(parameter, _RELEASED, released)
    replace(coordinator, "fetch_sub_module", fetch_sub_module)
    replace(coordinator, "release_sub_module", release_sub_module)
    replace(coordinator, "release_and_reset_all", release_and_reset_all)
    patch(coordinator, _LIMIT, NO_LIMIT, library=DEEPSPEED, source_hash=None)
    return released


@functools.cache
def _free_by_engine() -> None:
    """Replace `free_param` once per process; parameters that no engine has marked are freed as before."""
    from deepspeed.runtime.zero import partition_parameters

    original = rely_on(partition_parameters, "free_param")

    def free_param(param: Any) -> None:
        released = getattr(param, _RELEASED, None)
        if released is None:
            original(param)
            return
        if param.ds_active_sub_modules:
            raise RuntimeError(f"DeepSpeed would free a parameter that is still in use: {param.ds_summary()}")
        memory, stays = param.data, getattr(param, HOME, param.ds_tensor)
        param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        param.ds_status = partition_parameters.ZeroParamStatus.NOT_AVAILABLE
        if memory.data_ptr() != stays.data_ptr():
            storage = getattr(param, _STORAGE, None)
            ours = storage is not None and memory.data_ptr() == storage.data_ptr()
            released.add(storage if ours else memory)

    replace(partition_parameters, "free_param", free_param)


_Memory = torch.UntypedStorage | torch.Tensor  # A storage of ours, or a tensor that DeepSpeed has made


def _users(tensor: torch.Tensor) -> int:
    """How many tensors and objects share the memory of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _users(torch.empty(0))


class Released:
    """Memory of released parameters, kept until the stream `gathering` may use it again.

    That is when the next module but one begins. By then the GPU has usually finished what is waited for, and
    still has the module in between to compute.
    """

    def __init__(self, gathering: Any, streams: Any) -> None:
        self.holds = False
        """Whether a module releases the parameters. If not, they were gathered for a moment only."""
        self._gathering = gathering
        self._current_stream = streams.current_stream
        self._computing = streams.current_stream()
        self._latest: list[_Memory] = []
        self._earlier: list[_Memory] = []
        self._event = streams.Event
        self._began = self._event()

    def add(self, memory: _Memory) -> None:
        self._computing = self._current_stream()
        if isinstance(memory, torch.Tensor) and _users(memory) > _ALONE:
            memory.record_stream(self._computing)  # autograd has a view of it until it is used
        if self.holds:
            self._latest.append(memory)
        else:
            self._gathering.wait_stream(self._computing)
            self._free([memory])

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Do not free `storage`: its parameter is gathered again."""
        for held in (self._earlier, self._latest):
            if any(one is storage for one in held):
                held[:] = [one for one in held if one is not storage]
                self._gathering.wait_stream(self._computing)

    def end(self) -> None:
        """Let the computation wait for the gathering stream, at the end of what is recorded as a graph."""
        self._current_stream().wait_stream(self._gathering)
        self._forget()

    def advance(self) -> None:
        """Reuse what was released before the latest module began: the next one begins now."""
        self._gathering.wait_event(self._began)
        self._free(self._earlier)
        self._earlier, self._latest = self._latest, []
        self._began.record()

    def clear(self) -> None:
        self._gathering.wait_stream(self._current_stream())
        self._forget()

    def _forget(self) -> None:
        self._free(self._earlier + self._latest)
        self._earlier, self._latest = [], []
        self._began = self._event()  # one that was recorded in a graph is of no use outside

    def _free(self, memories: Iterable[_Memory]) -> None:
        for memory in memories:
            if isinstance(memory, torch.UntypedStorage):
                memory.resize_(0)


def require_input_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the first block of a frozen base an input with a gradient.

    DeepSpeed 0.19.8 takes this gradient as the end of a block's backward pass. Without it, the parameters of
    the block are freed too early.
    """
    if not inputs:
        return inputs
    hidden, *rest = inputs
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *rest)
