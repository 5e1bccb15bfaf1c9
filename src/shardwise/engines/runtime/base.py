"""What engines in plain PyTorch share: the loop over micro-batches, AdamW, and their state."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.adamw import AdamW, Stage
from shardwise.engines.runtime.parameters import Fill, groups_by_name, move_buffers
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.engines.runtime.recorded import RecordedPasses
from shardwise.engines.runtime.state import Part, load_state, parts_of, save_state
from shardwise.job import schema
from shardwise.objective import Objective
from shardwise.strategy import Strategy

# Two names for each: the second was deprecated by torch 2.13.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def recordable(module: nn.Module, strategy: Strategy, device: torch.device) -> Objective | None:
    """The module, if its passes may be recorded: packed rows on a GPU, not in fp32 (decision 0088)."""
    may = device.type == "cuda" and strategy.precision != "fp32"
    return module if may and isinstance(module, Objective) and module.one_shape else None


@contextmanager
def placed(recorded: RecordedPasses | None) -> Iterator[None]:
    """Within, passes that are not recorded take the memory of those that are, if any are."""
    if recorded is None:
        yield
        return
    with recorded.place(), torch.autograd.set_multithreading_enabled(False):
        yield


@torch.no_grad()
def evaluated(model: nn.Module, micro_batch: MicroBatch, at: torch.Tensor | None) -> torch.Tensor:
    """See `Engine.evaluate`."""
    model.eval()
    try:
        return model(*[micro_batch] if at is None else [micro_batch, at])  # type: ignore[no-any-return]
    finally:
        model.train()


class TorchEngine:
    """Trains `module`; subclasses decide where weights, gradients and fp32 masters are."""

    sharded = False  # Whether each rank holds a part of every tensor that AdamW steps
    copies = 1  # Complete copies of those tensors that the ranks hold together, where it does
    _recorded: RecordedPasses | None = None

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
            stages=self._stages(),
            rounded=self._rounded(),
        )
        module.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        loss_sum = self._step_passes(micro_batches, target_tokens=target_tokens)
        self._collect_gradients()
        result = self._optimizer.step(loss_sum / target_tokens, learning_rate=learning_rate)
        self._publish()
        return result

    def passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        factor = self._optimizer.loss_scale / target_tokens
        loss_sum = torch.zeros((), device=self.world.device)
        with placed(self._recorded):
            for index, micro_batch in enumerate(micro_batches):
                self._begin(last=index == len(micro_batches) - 1)
                loss = self._loss(micro_batch)
                loss_sum += loss.detach()
                (loss * factor).backward()
        return loss_sum

    @contextmanager
    def apart(self) -> Iterator[nn.Module]:
        with placed(self._recorded):
            yield self.module

    def evaluate(self, micro_batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        with placed(self._recorded):
            return evaluated(self.module, micro_batch, at)

    def config(self) -> dict[str, Any]:
        strategy, optimizer = self._strategy, self._settings.model_dump()
        common = {"engine": strategy.engine, "precision": strategy.precision}
        return {**common, "clip_norm": strategy.clip_norm, "optimizer": optimizer}

    def named_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
        return {**self._optimizer.state(), **self._private()}, self._parts()

    def save(self, directory: Path) -> None:
        save_state(directory, self.world, *self.named_state())

    def load(self, directory: Path) -> None:
        private = load_state(directory, self.world, self._optimizer.state(), self._parts())
        self._load_private(private)
        self._optimizer.round()
        self._publish()

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        """Fill the module, and return the fp32 tensors to step.

        And the names of those whose gradient another rank counts into the norm.
        """
        raise NotImplementedError

    def _stages(self) -> Sequence[Stage]:
        """The order in which AdamW steps; empty: all at once."""
        return ()

    def _rounded(self) -> Mapping[str, torch.Tensor]:
        """Weights that AdamW writes when it steps their fp32 tensors, by the name of these."""
        return {}

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.module(micro_batch)
        return loss

    def _step_passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        """`passes`, or a faster way to the same, which may call no module."""
        if self._recorded is None:
            return self.passes(micro_batches, target_tokens=target_tokens)
        return self._recorded.run(micro_batches, self._optimizer.loss_scale / target_tokens)

    def _record(
        self, objective: Objective, sums: Sequence[torch.Tensor], stay: Sequence[torch.Tensor]
    ) -> None:
        """Have the passes recorded; they leave the gradients of `sums`, in `stay` if there are any."""
        device = self.world.device
        separates = objective.separates(device)
        self._recorded = RecordedPasses(
            self._loss, sums, device, stay, separates=separates, end=self._end_passes
        )

    def _end_passes(self) -> None:
        """After a backward pass that is recorded."""

    def _adapters(self) -> bool:
        return any(not weight.requires_grad for weight in self.module.parameters())

    def _begin(self, *, last: bool) -> None:
        """Prepare for a micro-batch."""

    def _collect_gradients(self) -> None:
        """Set `.grad` of the tensors that AdamW steps."""

    def _publish(self) -> None:
        """Give the weights what AdamW stepped elsewhere."""

    def _parts(self) -> dict[str, Part]:
        """Which elements of each parameter AdamW steps on this rank."""
        return parts_of(self._optimizer.parameters)

    def _private(self) -> dict[str, torch.Tensor]:
        """What only this engine has, and only in this layout can use."""
        return {}

    def _load_private(self, saved: dict[str, torch.Tensor]) -> None:
        """Take back what `_private` gave; empty where the layout is another."""
