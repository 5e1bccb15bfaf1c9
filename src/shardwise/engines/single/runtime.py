"""One process, nothing sharded: weights in the computation's format, AdamW on fp32 masters."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.base import TorchEngine, recordable
from shardwise.engines.runtime.parameters import Fill, chosen, trainable
from shardwise.simulate.memory.recorded import gradients_stay, keeps_format


class SingleEngine(TorchEngine):
    """Trains a module on one device."""

    _sums: Sequence[torch.Tensor] = ()  # What each weight's gradients are added to, as its `.grad`
    _gradients: Sequence[torch.Tensor] = ()  # Those of `_sums` that are allocated once

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        for part in (*blocks, self.module):  # one after the other: filling takes memory, too
            fill(part, self.world.device)
        self._weights = trainable(self.module)
        keeps = keeps_format(self._strategy)
        self._masters = {name: _master(weight, keeps=keeps) for name, weight in self._weights.items()}
        self._record_into([*self._masters.values()])
        return self._masters, ()

    def _record_into(self, sums: Sequence[torch.Tensor]) -> None:
        """Have the passes recorded, where they can be; they leave the gradients of `sums`."""
        objective = recordable(self.module, self._strategy, self.world.device)
        self._sums, self._gradients = sums, self._that_stay(recorded=objective is not None)
        if objective is not None:
            self._record(objective, sums, self._gradients)

    def _that_stay(self, *, recorded: bool) -> list[torch.Tensor]:
        """Gradients that are allocated once: of all sums, or none."""
        stay = recorded and gradients_stay(self._strategy, adapters=self._adapters())
        return [torch.zeros_like(master) for master in self._masters.values()] if stay else []

    def _step_passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        if self._recorded is None:
            for total, gradient in zip(self._sums, self._gradients, strict=bool(self._gradients)):
                total.grad = gradient.zero_()
        return super()._step_passes(micro_batches, target_tokens=target_tokens)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in chosen(self.module.named_parameters(), names).items():
            yield name, weight.detach().cpu()

    def _rounded(self) -> Mapping[str, torch.Tensor]:
        weights = self._weights
        return {name: weights[name] for name, master in self._masters.items() if master is not weights[name]}


def _master(weight: nn.Parameter, *, keeps: bool) -> torch.Tensor:
    """The fp32 tensor that the optimizer steps; its gradients are as `add_to` leaves them."""
    if weight.dtype == torch.float32:
        return weight
    return add_to(weight.detach().float(), weight, keeps=keeps)


def add_to(total: torch.Tensor, weight: nn.Parameter, *, keeps: bool = False) -> torch.Tensor:
    """Have the gradients of a weight added to that of `total`, which is returned.

    So they accumulate in the format of `total`, and only one in that of the weight exists at a time. With
    `keeps`, a first one stays as it is.
    """

    def accumulate(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if total.grad is not None:
            total.grad += weight.grad
        else:
            total.grad = weight.grad if keeps else weight.grad.to(total.dtype)
        weight.grad = None

    total.grad_dtype = None  # Any
    weight.register_post_accumulate_grad_hook(accumulate)
    return total
