"""Recorded passes of adapters under ZeRO-0, 1 and 2: DeepSpeed gets their gradients afterwards.

Its hooks, one for each weight, take longer on the host than small passes take on the GPU. So the passes are
those of a single process, recorded (decision 0103). Then DeepSpeed's own backward pass runs over a loss whose
gradients are these: the host goes through the hooks while the GPU still replays the passes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.parameters import trainable
from shardwise.engines.runtime.recorded import RecordedPasses
from shardwise.objective import Objective


class _Known(torch.autograd.Function):
    """A zero whose gradients are known beforehand."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=weights[0].device)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *_: torch.Tensor) -> Any:  # the other factor is 1: nothing scales the loss in bf16
        return None, *ctx.gradients


class _StandIn(nn.Module):
    """What DeepSpeed calls in the module's place."""

    def __init__(self, gradients: Sequence[torch.Tensor], weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._gradients, self._weights = gradients, weights

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _Known.apply(self._gradients, *self._weights)
        return loss


class AdapterPasses:
    """Passes of a micro-batch that end in DeepSpeed's own backward pass."""

    def __init__(
        self, objective: Objective, engine: Any, device: torch.device, *, before_hooks: Callable[[], None]
    ) -> None:
        """`before_hooks` is called when the passes have been issued, and before the hooks take memory."""
        self._before_hooks = before_hooks
        self._engine, self._objective = engine, objective
        weights = trainable(objective)
        # The same memory without DeepSpeed's hooks, and new to autograd, which ties a weight to a stream.
        # Checkpointed blocks are computed again with DeepSpeed's own: only values are taken of these.
        twins: dict[str, torch.Tensor] = {
            name: nn.Parameter(weight.detach()) for name, weight in weights.items()
        }
        sums = [torch.zeros_like(weight) for weight in weights.values()]
        self._stand_in = _StandIn(sums, [*weights.values()])
        self.recorded = RecordedPasses(
            lambda batch: functional_call(objective, twins, (batch,)),
            [*twins.values()],
            device,
            sums,
            separates=objective.separates(device),
        )

    def run(self, micro_batch: MicroBatch, factor: torch.Tensor) -> torch.Tensor:
        """The loss, fp32 scalar; DeepSpeed has taken the gradients of `factor` times it."""
        loss = self.recorded.run([micro_batch], factor)
        self._before_hooks()
        self._engine.module = self._stand_in
        try:
            known = self._engine()
        finally:
            self._engine.module = self._objective  # whose parameters stage 0 sums over the ranks
        self._engine.backward(known, scale_wrt_gas=False)
        return loss
