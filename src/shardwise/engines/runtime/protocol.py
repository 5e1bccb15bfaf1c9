"""The one protocol behind which DeepSpeed, FSDP2 and a single process look the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.data.batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place: data-parallel ranks see different rows, tensor-parallel ones the same."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    data_rank: int
    data_size: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step gave. Scalars stay on the device: when to read them is for the loop to say."""

    loss: torch.Tensor
    """Cross entropy in nats per target token, over all ranks and micro-batches; fp32 scalar."""
    grad_norm: torch.Tensor
    """Global L2 norm of the gradient of that loss, before clipping; fp32 scalar."""
    skipped: torch.Tensor
    """1.0 where the optimizer step was not applied because a value was not finite; fp32 scalar."""
    loss_scale: float | None = None
    """fp16's loss scale, None otherwise."""


class Engine(Protocol):
    """Owns the model's weights, gradients and optimizer state on this rank."""

    world: World

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches.

        The loss is the sum over target tokens divided by `target_tokens`, the number of targets of
        all ranks and micro-batches of this step. A non-finite loss or gradient leaves the weights as
        they were and sets `skipped`.
        """

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Summed cross entropy of one micro-batch on this rank; eval mode, no gradients; fp32 scalar."""

    def save(self, directory: Path) -> None:
        """Writes this rank's part of weights, optimizer and loss scaler into a folder. Collective."""

    def load(self, directory: Path) -> None:
        """Restores exactly what `save` wrote, at the same strategy and world size. Collective."""

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights by Hugging Face name, on the CPU, in the computation's dtype. Collective.

        All trainable ones, or those of `names`, which may be frozen.

        Every rank iterates; only rank 0 receives tensors that hold data (others may get empty ones).
        """

    def config(self) -> dict[str, Any]:
        """Exactly what the engine was given, as written to the run folder's `engine/`."""
