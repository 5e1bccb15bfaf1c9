"""The protocol that all engines follow."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines import ENGINES
from shardwise.engines.runtime.parameters import Fill
from shardwise.job import schema
from shardwise.strategy import Strategy

if TYPE_CHECKING:
    from shardwise.engines.runtime.state import Part


@dataclass(frozen=True, kw_only=True)
class World:
    """This process: data-parallel ranks get different rows, tensor-parallel ranks the same."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    data_rank: int
    data_size: int
    local_disks: bool = False  # Each node keeps the checkpoint files of its ranks on a disk of its own


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one optimizer step, on the device: the loop decides when to read them."""

    loss: torch.Tensor
    """Cross entropy in nats per target token, over all ranks and micro-batches; fp32 scalar."""
    grad_norm: torch.Tensor  # Global L2 norm of the gradient of that loss, before clipping; fp32 scalar
    skipped: torch.Tensor
    """1.0 where the optimizer step was not applied because a value was not finite; fp32 scalar."""
    loss_scale: torch.Tensor | None = None  # fp16's loss scale, fp32 scalar; None otherwise


class Engine(Protocol):
    """Owns the model's weights, gradients and optimizer state on this rank."""

    world: World

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """Take one optimizer step over this rank's micro-batches.

        The loss is the sum over target tokens divided by `target_tokens`, the number of targets of
        all ranks and micro-batches of this step. A non-finite loss or gradient leaves the weights
        unchanged and sets `skipped`.
        """

    def passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        """The passes of a step, which add up gradients. This rank's share of the loss, not yet divided."""

    def apart(self) -> AbstractContextManager[nn.Module]:
        """The module, as it gives summed losses and their gradients apart from any step; no pipeline's."""

    def evaluate(self, micro_batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        """Summed cross entropy of a micro-batch on this rank, fp32 scalar; eval mode, no gradients.

        Or logits [N, vocabulary] `at` N of the flattened B*S tokens, not under pipelines. Collective.
        """

    def named_state(self) -> "tuple[dict[str, torch.Tensor], dict[str, Part]] | None":
        """What `save` writes, see state.py, not copied; None where DeepSpeed writes files of its own."""

    def save(self, directory: Path) -> None:
        """Write this rank's part of weights, optimizer and loss scaler into a folder. Collective."""

    def load(self, directory: Path) -> None:
        """Restore what `save` of any engine wrote on any number of ranks: see state.py. Collective."""

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Full weights by Hugging Face name, on the CPU, in the computation's dtype. Collective.

        All trainable ones, or those in `names`, which may be frozen. Every rank iterates; ranks other
        than 0 may get empty tensors.
        """

    def config(self) -> dict[str, Any]:
        """Exactly the settings that the engine got, for the run folder's `engine/`."""


def build_engine(
    strategy: Strategy,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    fill: Fill,
    optimizer: schema.Optimizer,
    world: World,
) -> Engine:
    """Fill and shard `module`, and give it an optimizer. Collective.

    `module` is on the meta device and, called with a MicroBatch, returns the summed cross entropy as an fp32
    scalar. `blocks` are its repeated layers. They are filled and sharded one after the other, so that no
    device ever holds more than its share and one block.
    """
    engine: Engine = resolve_name(ENGINES[strategy.engine].runtime)(
        strategy, module, blocks, fill, optimizer, world
    )
    return engine
