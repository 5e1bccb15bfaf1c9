"""What the engines in plain PyTorch share: the loop over micro-batches, AdamW, one file per rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.parameters import Fill, decay_by_name, move_buffers
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.engines.runtime.state import load_state, save_state
from shardwise.job import schema
from shardwise.strategy import Strategy


class TorchEngine:
    """Trains `module`; subclasses decide where weights, gradients and fp32 masters are."""

    sharded = False
    """Whether each rank holds a part of every tensor that AdamW steps."""

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
        decay = decay_by_name(module, optimizer.weight_decay)
        move_buffers(module, world.device)
        tensors, replicated = self._prepare(blocks, fill)
        self._optimizer = AdamW(
            tensors,
            decay,
            optimizer,
            clip_norm=strategy.clip_norm,
            fp16=strategy.precision == "fp16",
            sharded=self.sharded,
            device=world.device,
            replicated=replicated,
        )
        module.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        factor = self._optimizer.loss_scale / target_tokens
        loss_sum = torch.zeros((), device=self.world.device)
        for index, micro_batch in enumerate(micro_batches):
            self._begin(last=index == len(micro_batches) - 1)
            loss = self.module(micro_batch)
            loss_sum += loss.detach()
            (loss * factor).backward()
        self._collect_gradients()
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
        save_state(directory, self.world, self._optimizer.state(), self._shapes())

    def load(self, directory: Path) -> None:
        self._optimizer.restore(load_state(directory, self.world))
        self._publish()

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        """Fill the module, and return the fp32 tensors to step and the names of those on every rank."""
        raise NotImplementedError

    def _begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch."""

    def _collect_gradients(self) -> None:
        """Set `.grad` of the tensors that AdamW steps."""

    def _publish(self) -> None:
        """Make the weights follow the tensors that AdamW stepped."""

    def _shapes(self) -> Mapping[str, torch.Size]:
        """Global shapes of sharded tensors, by their name in a checkpoint."""
        return {}
