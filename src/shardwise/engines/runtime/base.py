"""What engines share: a state file for each rank, and in plain PyTorch the loop over micro-batches and AdamW.

A rank's state is a safetensors file without pickle: reading one cannot run code. The header has the number of
ranks and the global shapes of sharded tensors. Rows are split as `torch.chunk` does, so each file's part
follows from its rank (decision 0032), or its rank within a group: replicas each write theirs (decision 0045).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.parameters import Fill, groups_by_name, move_buffers
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.errors import CheckpointError
from shardwise.job import schema
from shardwise.strategy import Strategy


def save_state(
    directory: Path,
    world: World,
    tensors: Mapping[str, torch.Tensor],
    sharded: Mapping[str, torch.Size] | None = None,
) -> None:
    """Write this rank's tensors into an existing folder; `sharded` maps names to global shapes."""
    layout = {"ranks": world.size, "sharded": {name: list(shape) for name, shape in (sharded or {}).items()}}
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        _path(directory, world.rank),
        metadata={"layout": json.dumps(layout)},
    )


def load_state(directory: Path, world: World) -> dict[str, torch.Tensor]:
    """Read on the CPU what this rank saved. Raises CheckpointError."""
    path = _path(directory, world.rank)
    try:
        with safe_open(path, framework="pt") as file:
            ranks = int(json.loads(file.metadata()["layout"])["ranks"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        what = f"this rank's part of the checkpoint cannot be read: {error}"
        fix = "resume from an older checkpoint, with the number of processes that wrote it"
        raise CheckpointError(what, where=str(path), fix=fix) from error
    if ranks != world.size:
        what = f"the checkpoint was written by {ranks} processes and this run has {world.size}"
        raise CheckpointError(what, where=str(path), fix=f"resume with --processes {ranks}")
    return tensors


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


class TorchEngine:
    """Trains `module`; subclasses decide where weights, gradients and fp32 masters are."""

    sharded = False  # Whether each rank holds a part of every tensor that AdamW steps
    copies = 1  # Complete copies of those tensors that the ranks hold together, where it does

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        fill: Fill,
        optimizer: schema.Optimizer,
        world: World,
    ) -> None:
        self.world, self.module = world, module
        self._strategy, self._settings = strategy, optimizer
        groups = groups_by_name(module, optimizer)
        move_buffers(module, world.device)
        tensors, not_counted = self._prepare(blocks, fill)
        self._optimizer = AdamW(
            tensors,
            groups,
            optimizer,
            clip_norm=strategy.clip_norm,
            fp16=strategy.precision == "fp16",
            sharded=self.sharded,
            copies=self.copies,
            device=world.device,
            not_counted=not_counted,
        )
        module.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        loss_sum = self._passes(micro_batches, self._optimizer.loss_scale / target_tokens)
        self._collect_gradients()
        result = self._optimizer.step(loss_sum / target_tokens, learning_rate=learning_rate)
        self._publish()
        return result

    def _passes(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of the loss times `factor`; returns this rank's share of the loss."""
        loss_sum = torch.zeros((), device=self.world.device)
        for index, micro_batch in enumerate(micro_batches):
            self._begin(last=index == len(micro_batches) - 1)
            loss = self._loss(micro_batch)
            loss_sum += loss.detach()
            (loss * factor).backward()
        return loss_sum

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return self.logits(micro_batch, None)

    @torch.no_grad()
    def logits(self, micro_batch: MicroBatch, at: torch.Tensor | None) -> torch.Tensor:
        self.module.eval()
        try:
            return self.module(micro_batch) if at is None else self.module(micro_batch, at)
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
        """Fill the module, and return the fp32 tensors to step.

        And the names of those whose gradient another rank counts into the norm.
        """
        raise NotImplementedError

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.module(micro_batch)
        return loss

    def _begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch."""

    def _collect_gradients(self) -> None:
        """Set `.grad` of the tensors that AdamW steps."""

    def _publish(self) -> None:
        """Make the weights follow the tensors that AdamW stepped."""

    def _shapes(self) -> Mapping[str, torch.Size]:
        """Global shapes of sharded tensors, by their name in a checkpoint."""
        return {}
