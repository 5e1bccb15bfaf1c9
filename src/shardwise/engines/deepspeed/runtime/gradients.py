"""Gradients of ZeRO-3 that wait for their reduction on the GPU, and their way to the host (decision 0112).

For passes that are recorded, and for an optimizer that is not on the GPU. Others have DeepSpeed's order: over
a slow network a reduction takes longer than the module that it hides behind here.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.engines.deepspeed.runtime.patches import DEEPSPEED, rely_on, replace
from shardwise.patch import patch

_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_COLLECT = "_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket"
_REDUCE = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
_EPILOGUE = "independent_gradient_partition_epilogue"
_OF_HOST = ("_offload_grad_partition_at_boundary", "complete_grad_norm_calculation_for_cpu_offload")
"""They say where the gradients of masters and their norms are kept."""

TakeShares = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]


class Gradients:
    """Memory of gradients, kept until the computation may use it again.

    DeepSpeed 0.19.8 marks a gradient as used by the stream that reduces (`record_stream`). The allocator
    keeps it until the GPU has come that far, up to three buckets later, and in a graph until its end. Here a
    gradient of module m is free when module m+2 begins: the computation waits until it is in the bucket, and
    so for reductions before that. The host neither waits nor asks for events, and memory does not depend on
    its pace.
    """

    def __init__(self, optimizer: Any, *, to_host: bool = False, streams: Any = torch.cuda) -> None:
        """`to_host`: the step's only gradients go to the host in fp32, and nowhere else.

        `streams` provides `current_stream`, `stream` and `Event`.
        """
        self._optimizer, self._streams = optimizer, streams
        self.reducing = optimizer.reduce_and_partition_stream
        self._latest: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []
        self._copied = streams.Event()
        self.shares: dict[int, torch.Tensor] = getattr(optimizer, _PARTITIONS)
        """This rank's part of each gradient, by `ds_id`."""
        rely_on(optimizer, _REDUCE)
        self.epilogue = rely_on(optimizer, _EPILOGUE)
        own = rely_on(optimizer, "partition_grads")
        for name in _OF_HOST if to_host else ():
            rely_on(optimizer, name)
        self.take_shares: TakeShares = self._to_host if to_host else own
        """What is done with the shares of parameters that have been reduced."""
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        replace(optimizer, _COLLECT, self._collect)
        replace(optimizer, _EPILOGUE, self._end_backward)
        replace(optimizer, "partition_grads", self._partition)
        # which `release_in_order` has replaced already
        coordinator.fetch_sub_module = self._then(coordinator.fetch_sub_module)
        patch(optimizer, "param_reduce_events", deque(maxlen=0), library=DEEPSPEED, source_hash=None)

    def clear(self) -> None:
        """Nothing is on its way any more."""
        self._latest, self._earlier = [], []
        self._copied = self._streams.Event()  # one that was recorded in a graph is of no use outside

    def _then(self, fetch: Callable[..., None]) -> Callable[..., None]:
        def advance(*args: Any, **kwargs: Any) -> None:
            self._streams.current_stream().wait_event(self._copied)
            self._earlier, self._latest = self._latest, []
            self._copied.record(self.reducing)
            fetch(*args, **kwargs)

        return advance

    def _end_backward(self) -> None:
        self.epilogue()
        self.clear()

    @torch.no_grad()
    def _collect(self, parameter: Any) -> None:
        """As `__add_grad_to_ipg_bucket`, without a mark on the gradient."""
        optimizer, gradient = self._optimizer, parameter.grad
        bucket = optimizer.ipg_buckets[optimizer.get_param_comm_dtype(parameter)]
        self.reducing.wait_stream(self._streams.current_stream())
        end = bucket.elements + gradient.numel()
        if end <= optimizer.reduce_bucket_size:
            self._latest.append(gradient.detach())
            copy = bucket.buffer[bucket.elements : end].view_as(gradient)
            with self._streams.stream(self.reducing):
                copy.copy_(gradient)
            gradient.data = copy
        bucket.params.append(parameter)
        bucket.process_group = optimizer._get_param_partition_group(parameter)
        bucket.elements = end

    def _partition(self, parameters: Sequence[Any], shares: Sequence[torch.Tensor]) -> Any:
        for parameter in parameters:
            self._latest.append(parameter.grad)
            parameter.grad = None
        return self.take_shares(parameters, shares)

    def real(
        self, parameters: Sequence[Any], shares: Sequence[torch.Tensor]
    ) -> list[tuple[Any, torch.Tensor]]:
        """The pairs whose share is not all padding."""
        rank_of = self._optimizer._get_param_partition_rank
        pairs = zip(parameters, shares, strict=True)
        return [(one, share) for one, share in pairs if one.partition_numel() * rank_of(one) < one.ds_numel]

    @torch.no_grad()
    def _to_host(self, parameters: Sequence[Any], shares: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `partition_grads` with one micro-batch, whose shares DeepSpeed also copies there and back."""
        optimizer = self._optimizer
        for parameter, share in self.real(parameters, shares):
            number = optimizer.get_param_id(parameter)
            group, start, _ = optimizer.grad_position[number]
            norm = torch.linalg.vector_norm(share, dtype=torch.float32)
            optimizer.norm_for_param_grads[number] = norm
            masters = optimizer.fp32_partitioned_groups_flat[group].grad
            masters[start : start + share.numel()].copy_(share.float(), non_blocking=True)
        return []
