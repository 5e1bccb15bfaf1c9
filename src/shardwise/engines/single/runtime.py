"""One process, nothing sharded: weights in the computation's format, AdamW on fp32 masters."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from shardwise.engines.runtime.base import TorchEngine
from shardwise.engines.runtime.parameters import Fill, chosen, trainable


class SingleEngine(TorchEngine):
    """Trains a module on one device."""

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        for part in (*blocks, self.module):  # one after the other: filling takes memory, too
            fill(part, self.world.device)
        self._weights = trainable(self.module)
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        return self._masters, ()

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in chosen(self.module.named_parameters(), names).items():
            yield name, weight.detach().cpu()

    @torch.no_grad()
    def _publish(self) -> None:
        names = [name for name, master in self._masters.items() if master is not self._weights[name]]
        if names:
            torch._foreach_copy_([self._weights[n] for n in names], [self._masters[n] for n in names])


def _master(weight: nn.Parameter) -> torch.Tensor:
    """The fp32 tensor that the optimizer steps. Each gradient is added to it as soon as it is complete.

    So gradients accumulate in fp32, and only one low-precision gradient exists at a time.
    """
    if weight.dtype == torch.float32:
        return weight
    master = weight.detach().float()

    def accumulate(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    weight.register_post_accumulate_grad_hook(accumulate)
    return master
