"""Recorded passes under ZeRO: DeepSpeed's hooks run while a graph is recorded (decisions 0105 and 0106).

A replay repeats what they put on the streams, collectives included, and calls no Python. What DeepSpeed knows
after a backward pass, the gradients that its step takes, is kept with each graph. ZeRO-0 has no hooks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.data.batch import MicroBatch
from shardwise.engines.deepspeed.policy import adds_up
from shardwise.engines.deepspeed.runtime.gradients import Gradients
from shardwise.engines.deepspeed.runtime.patches import DEEPSPEED, rely_on, replace
from shardwise.engines.deepspeed.runtime.zero3 import HOME, Released, release_gathered
from shardwise.engines.runtime.parameters import trainable
from shardwise.engines.runtime.recorded import Kind, RecordedPasses, zero
from shardwise.objective import Objective
from shardwise.patch import patch
from shardwise.simulate.memory.recorded import gradients_stay
from shardwise.strategy import Strategy

_EVENTS = "_PartitionedParameterCoordinator__ongoing_fetch_events"


class Zero12Order:
    """The stream on which ZeRO-1 and 2 reduce, and that of the passes."""

    def __init__(self, optimizer: Any) -> None:
        self._side = [optimizer.reduction_stream] if optimizer.overlap_comm else []
        for group in optimizer.bit16_groups:
            for parameter in group:  # a view that autograd knows ties the parameter to the stream of now
                if (own := parameter._hp_mapping) is not None:
                    own.lp_fragment = own.lp_fragment.detach()

    def ready(self) -> bool:
        return True

    def begin(self) -> None:
        for stream in self._side:
            stream.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        for stream in self._side:
            torch.cuda.current_stream().wait_stream(stream)


class Zero3Order:
    """Streams of ZeRO-3 whose passes are recorded. The host waits nowhere, and asks for no events."""

    def __init__(
        self,
        optimizer: Any,
        parameters: Sequence[Any],
        gradients: Gradients,
        released: Released,
        *,
        sums: bool,
        streams: Any = torch.cuda,
    ) -> None:
        """`sums`: gradients are added to the partition, which is zero before a step.

        `parameters`: all of the module, frozen ones, too. `streams` provides `current_stream`.
        """
        self._streams, self._parameters = streams, parameters
        self._gradients, self._released, self._sums = gradients, released, sums
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._epilogue, self._reducing = gradients.epilogue, gradients.reducing
        gradients.epilogue, gradients.take_shares = self._end_backward, self._take_shares
        patch(self._coordinator, _EVENTS, deque(maxlen=0), library=DEEPSPEED, source_hash=None)
        for one in optimizer.persistent_parameters:
            if one.ds_zero_partition_world_size > 1:
                size = one.ds_tensor.numel() * one.ds_zero_partition_world_size
                setattr(one, HOME, one.ds_tensor.new_empty(size))

    def ready(self) -> bool:
        """Whether DeepSpeed knows the order of modules. Until then it asks other ranks and waits."""
        if self._coordinator.is_record_trace():
            self._coordinator.reset_step()
        return bool(self._coordinator.is_complete_trace())

    def begin(self) -> None:
        self._released.clear()
        self._reducing.wait_stream(self._streams.current_stream())
        self._gradients.clear()

    def end(self) -> None:
        """No pass finds weights that another one has gathered."""
        release_gathered(self._coordinator, self._parameters)
        self._released.end()
        self._gradients.clear()

    def _end_backward(self) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        accelerator.resolves_data_dependency = lambda: True  # the host does not wait
        try:
            self._epilogue()
        finally:
            del accelerator.resolves_data_dependency
        self._streams.current_stream().wait_stream(self._reducing)

    @torch.no_grad()
    def _take_shares(self, parameters: Sequence[Any], shares: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `partition_grads` on the GPU, by one kernel for all."""
        taken, targets = [], []
        for parameter, share in self._gradients.real(parameters, shares):
            targets.append(self._gradients.shares[parameter.ds_id][: share.numel()])
            taken.append(share)
        if targets:
            (torch._foreach_add_ if self._sums else torch._foreach_copy_)(targets, taken)
        return targets


class PlainPasses:
    """Passes of ZeRO-0, which leave gradients of all parameters. These are reduced when all are over."""

    def __init__(
        self, engine: Any, objective: Objective, weights: Sequence[torch.Tensor], *, stay: bool
    ) -> None:
        """`stay`: gradients are allocated once."""
        self._engine, device = engine, weights[0].device
        sums = [torch.zeros_like(one) for one in weights if stay]
        separates = objective.separates(device)
        self.recorded = RecordedPasses(objective, weights, device, sums, separates=separates)

    def run(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, fp32 scalar; DeepSpeed has the gradients of `factor` times it."""
        total = self.recorded.run(micro_batches, factor)
        for _ in micro_batches[1:]:
            self._engine.step()  # counts a micro-batch
        self._engine.allreduce_gradients()
        return total


class HookedPasses:
    """Passes that end with DeepSpeed's own backward pass."""

    def __init__(
        self,
        engine: Any,
        strategy: Strategy,
        objective: Objective,
        apart: Sequence[torch.Tensor],
        order: Zero12Order | Zero3Order,
    ) -> None:
        """`apart`: trained parameters that DeepSpeed does not see; their gradients are allocated once."""
        self._engine, optimizer = engine, engine.optimizer
        weights = [one for group in optimizer.bit16_groups for one in group] if adds_up(strategy) else []
        if weights and optimizer.overlap_comm:
            reduce_all(optimizer)
        self.recorded = _Recorded(engine, objective, apart, order, weights)
        self._sums = [*self.recorded.gradients, *self.recorded.unreduced]  # What all graphs add to
        if strategy.stage < 3:
            self._sums += self._partitions(optimizer)
        elif strategy.accumulation > 1:
            self._sums.append(optimizer.grad_partitions_flat_buffer)

    def _partitions(self, optimizer: Any) -> list[torch.Tensor]:
        """Make this rank's gradients in fp32, as for several micro-batches; DeepSpeed does in each step."""
        patch(optimizer, "gradient_accumulation_dtype", torch.float32, library=DEEPSPEED, source_hash=None)
        for index in range(len(optimizer.bit16_groups)):
            self.recorded.kept[index] = optimizer._build_compact_grad_partition_buffer(index)
        return [group.flat_partition for group in self.recorded.kept.values()]

    def run(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, fp32 scalar; DeepSpeed has taken the gradients of `factor` times it."""
        zero(self._sums)
        self.recorded.leave(self.recorded.kept)
        total = torch.zeros_like(factor)
        for index, micro_batch in enumerate(micro_batches):
            if index:
                self._engine.step()  # counts the one before
            total += self.recorded.run([micro_batch], factor)
        return total


def reduce_all(optimizer: Any) -> None:
    """Have ZeRO-1 reduce what a step's last backward pass did not reach, such as experts without a token.

    With `overlap_comm` only hooks reduce, and a weight that is not reached calls none.
    """
    reduce = rely_on(optimizer, "reduce_gradients")
    add = rely_on(optimizer, "reduce_ready_partitions_and_remove_grads")

    def reduce_gradients(*args: Any, **kwargs: Any) -> None:
        waiting = {number for bucket in optimizer.ipg_buckets.values() for *_, number in bucket.params}
        for index, group in enumerate(optimizer.bit16_groups):
            for weight in group:
                number = optimizer.get_param_id(weight)
                if not optimizer.params_already_reduced[number] and number not in waiting:
                    add(weight, index)
        reduce(*args, **kwargs)

    replace(optimizer, "reduce_gradients", reduce_gradients)


Passes = PlainPasses | HookedPasses


def passes_of(
    engine: Any,
    strategy: Strategy,
    objective: Objective,
    apart: Sequence[torch.Tensor],
    released: Released | None,
) -> Passes:
    """The recorded passes of DeepSpeed's engine.

    `apart`: trained parameters that DeepSpeed does not see. `released`: what ZeRO-3 has released.
    """
    if strategy.stage == 0:
        weights = [*trainable(objective).values(), *apart]
        frozen = any(not weight.requires_grad for weight in objective.parameters())
        stay = gradients_stay(strategy, adapters=frozen)
        return PlainPasses(engine, objective, weights, stay=stay)
    if released is None:
        order: Zero12Order | Zero3Order = Zero12Order(engine.optimizer)
    else:
        parameters, sums = [*objective.parameters()], strategy.accumulation > 1
        gradients = Gradients(engine.optimizer)
        order = Zero3Order(engine.optimizer, parameters, gradients, released, sums=sums)
    return HookedPasses(engine, strategy, objective, apart, order)


class _Recorded(RecordedPasses):
    def __init__(
        self, engine: Any, objective: Objective, apart: Sequence[torch.Tensor], order: Any, weights: Any
    ) -> None:
        """`weights`: what ZeRO-1 adds gradients up of, before it reduces them in the last micro-batch."""
        device = torch.device(engine.optimizer.device)
        super().__init__(objective, (), device, separates=objective.separates(device))
        self._engine, self._optimizer, self._order, self._apart = engine, engine.optimizer, order, apart
        self._weights, self.unreduced = weights, [torch.zeros_like(one) for one in weights]
        self.gradients = [torch.zeros_like(one) for one in apart]
        self.kept: dict[int, Any] = {}
        """This rank's gradients under ZeRO-1 and 2, by group of parameters. ZeRO-3 has its own."""

    @contextmanager
    def place(self) -> Iterator[None]:
        with super().place():
            self._order.begin()
            try:
                yield
            finally:
                self._order.end()

    def settle(self) -> None:
        torch.cuda.synchronize()  # what other streams have used is free then
        super().settle()

    def kind(self, batch: MicroBatch) -> Kind:
        last = bool(self._weights) and self._engine.is_gradient_accumulation_boundary()
        return super().kind(batch)._replace(last=last)

    def one(self, batch: MicroBatch) -> torch.Tensor:
        if self._order.ready():
            return super().one(batch)
        self.settle()
        with self.place():
            return self.passes(batch)

    def passes(self, batch: MicroBatch) -> torch.Tensor:
        for weight, gradient in zip(self._weights, self.unreduced, strict=True):
            weight.grad = gradient.detach()  # DeepSpeed has this tensor, not the other, refer to a bucket
        with torch.autograd.set_multithreading_enabled(False):
            self._order.begin()
            loss = self._engine(batch)
            self._engine.backward(loss * self._factor, scale_wrt_gas=False)
            self._order.end()
        detached: torch.Tensor = loss.detach()
        return detached

    def left(self) -> dict[int, Any]:
        """Gradients of this rank, by group of parameters: all in memory that stays."""
        return dict(self._optimizer.averaged_gradients)

    def leave(self, left: dict[int, Any]) -> None:
        self._optimizer.averaged_gradients = dict(left)
        for parameter, gradient in zip(self._apart, self.gradients, strict=True):
            parameter.grad = gradient
