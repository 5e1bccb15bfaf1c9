"""One process, nothing sharded: weights in the computation's format, AdamW on fp32 masters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.parameters import (
    Fill,
    chosen,
    decay_by_name,
    move_buffers,
    public_name,
    trainable,
)
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.engines.runtime.state import load_state, save_state
from shardwise.job import schema
from shardwise.strategy import Strategy


class SingleEngine:
    """Trains a module on one device."""

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        fill: Fill,
        optimizer: schema.Optimizer,
        world: World,
    ) -> None:
        self.world = world
        self.module = module
        self._strategy = strategy
        self._settings = optimizer
        for part in (*blocks, module):  # one after the other: filling takes memory, too
            fill(part, world.device)
        move_buffers(module, world.device)
        decay = decay_by_name(module, optimizer.weight_decay)
        self._weights = trainable(module)
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}
        self._optimizer = AdamW(
            self._masters,
            decay,
            optimizer,
            clip_norm=strategy.clip_norm,
            fp16=strategy.precision == "fp16",
            sharded=False,
            device=world.device,
        )
        module.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        factor = self._optimizer.guard.loss_scale / target_tokens
        loss_sum = torch.zeros((), device=self.world.device)
        for micro_batch in micro_batches:
            loss = self.module(micro_batch)
            loss_sum += loss.detach()
            (loss * factor).backward()
        result = self._optimizer.step(loss_sum / target_tokens, learning_rate=learning_rate)
        self._publish()
        return result

    @torch.no_grad()
    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        self.module.eval()
        try:
            return self.module(micro_batch)
        finally:
            self.module.train()

    def save(self, directory: Path) -> None:
        save_state(directory, self.world, self._optimizer.state())

    def load(self, directory: Path) -> None:
        self._optimizer.restore(load_state(directory, self.world))
        self._publish()

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in chosen(self.module, names).items():
            yield public_name(name), weight.detach().cpu()

    def config(self) -> dict[str, Any]:
        return {
            "engine": "single",
            "precision": self._strategy.precision,
            "clip_norm": self._strategy.clip_norm,
            "optimizer": self._settings.model_dump(),
        }

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the masters to the weights that compute."""
        pairs = [
            (self._weights[name], m) for name, m in self._masters.items() if m is not self._weights[name]
        ]
        if pairs:
            weights, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(weights, masters)


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
