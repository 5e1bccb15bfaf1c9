"""Pipeline parallelism behind the engine protocol: torch.distributed.pipelining runs the stages' passes.

Ranks are counted stage by stage, within a stage by rows, and those that share rows come after each other. All
ranks of one index of rows load the same micro-batches, so that each stage has the positions, the borders of
samples and the labels from its own copy, and only hidden states are sent. Within a stage: ZeRO-1 (zero1.py),
and layers split over the ranks that share rows (tensor_parallel.py).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from shardwise.data.batch import MicroBatch
from shardwise.engines.pipeline.runtime.model import CutModel
from shardwise.engines.pipeline.runtime.tensor_parallel import TensorParallel
from shardwise.engines.pipeline.runtime.zero1 import Zero1
from shardwise.engines.pipeline.stages import stage_count
from shardwise.engines.runtime.base import TorchEngine
from shardwise.engines.runtime.parameters import Fill, chosen, trainable
from shardwise.engines.runtime.state import Part
from shardwise.models.structure import DTYPES
from shardwise.objective import Objective

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""torch's names of the strategy's schedules."""


class _Stage(nn.Module):
    """A stage as torch calls it: what it has received, and the number of the micro-batch."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, received: torch.Tensor, *, micro_batch: torch.Tensor) -> torch.Tensor:
        return self._run(received, micro_batch=micro_batch)


class PipelineEngine(TorchEngine):
    """Trains the stages of a module that are on this rank."""

    module: Objective
    sharded = True

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        strategy, device = self._strategy, self.world.device
        shape = (strategy.pipeline, strategy.data_parallel, strategy.tensor_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("stages", "rows", "parts"))
        place = mesh.get_coordinate()
        assert place is not None
        self._place: Sequence[int] = place  # stage, rows, part of a layer
        self._stage_group = mesh.get_group("stages")
        rank, ranks = self._place[0], strategy.pipeline
        self._own = [s for s in range(stage_count(strategy)) if s % ranks == rank]
        self._cut = CutModel(self.module, blocks, stages=stage_count(strategy), own=set(self._own))
        self._split = TensorParallel(self.module.model, mesh.get_group("parts"), prefix="model.")
        for part in self._cut.parts:
            fill(part, device)
            self._split.split(part)
        names = {id(p): name for name, p in trainable(self.module).items()}
        learned = ([p for p in part.parameters() if p.requires_grad] for part in self._cut.parts)
        parts = [{names[id(p)]: p for p in part} for part in learned]
        self._zero1 = Zero1(parts, mesh.get_group("rows"))
        self._tied = sorted(self._cut.tied & self._zero1.shards.keys())
        self._ends = self._group_of_ends(mesh.mesh)
        self._batches: list[MicroBatch] = []
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        # The first rank of those that share rows counts what they all have, the first stage what is tied.
        shared = self._zero1.shards.keys() - self._split.dims.keys() if self._place[2] else set[str]()
        return self._zero1.shards, shared | set(self._tied if rank else ())

    def _group_of_ends(self, ranks: torch.Tensor) -> dist.ProcessGroup | None:
        """This rank's pair of first and last stage, which both have tied embeddings. Collective."""
        mine = None
        for pair in ranks[[0, -1]].flatten(1).T.tolist():
            group = dist.new_group(pair)
            if self.world.rank in pair:
                mine = group
        return mine

    def passes(self, micro_batches: Sequence[MicroBatch], *, target_tokens: int) -> torch.Tensor:
        self._batches, self._factor = list(micro_batches), self._optimizer.loss_scale / target_tokens
        self._loss_sum = torch.zeros((), device=self.world.device)
        count = len(micro_batches)
        key = count, self.module.tokens_shape(micro_batches[0])
        if key not in self._schedules:
            self._schedules = {key: self._schedule(*key)}
        schedule, numbers = self._schedules[key], torch.arange(count)
        try:
            arguments = (numbers,) if self._own[0] == 0 else ()
            schedule.step(*arguments, micro_batch=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch puts pages about tensors around each error
        self._batches.clear()
        return self._loss_sum

    def _schedule(self, count: int, tokens: torch.Size) -> Any:
        """Torch's schedule of one step, whose micro-batches have `tokens` (a shape)."""
        total, hidden = stage_count(self._strategy), self._hidden(tokens, "meta").requires_grad_()
        number, loss = torch.zeros(1, dtype=torch.int64), torch.zeros((), requires_grad=True)
        stages = [
            PipelineStage(
                _Stage(partial(self._forward, stage)),
                stage,
                total,
                self.world.device,
                input_args=hidden if stage else number,
                output_args=hidden if stage < total - 1 else loss,
                group=self._stage_group,
            )
            for stage in self._own
        ]
        kind = get_schedule_class(SCHEDULES[self._strategy.pipeline_schedule])
        mine: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        # The loss is divided by the number of targets of all ranks: gradients add up as they are.
        return kind(mine, count, loss_fn=lambda loss, _: loss * self._factor, scale_grads=False)

    def _forward(self, stage: int, received: torch.Tensor, *, micro_batch: torch.Tensor) -> torch.Tensor:
        """A stage's forward pass over one of the step's micro-batches."""
        batch = self._batches[int(micro_batch.item())]
        out = self._cut.run(stage, batch, received if stage else None)
        if stage < self._cut.last:
            return out.contiguous()
        if self._place[2] == 0:  # the ranks of a tensor-parallel group have the same loss
            self._loss_sum += out.detach()
        return out

    def _collect_gradients(self) -> None:
        self._zero1.reduce()
        self._split.add_up((name, shard.grad) for name, shard in self._zero1.shards.items())
        for name in self._tied:
            gradient = self._zero1.shards[name].grad
            if gradient is not None:
                dist.all_reduce(gradient, group=self._ends)

    def _publish(self) -> None:
        self._zero1.publish()

    def _parts(self) -> dict[str, Part]:
        places = {name: self._zero1.place(name) for name in self._optimizer.parameters}
        return {name: self._split.part(name, shape, begin) for name, (shape, begin) in places.items()}

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        """On ranks without the last stage 0."""
        group, rank, ranks = self._stage_group, self._place[0], self._strategy.pipeline
        loss = torch.zeros((), device=self.world.device)
        self.module.eval()
        for stage in self._own:
            received = None
            if stage:
                received = self._hidden(self.module.tokens_shape(micro_batch), self.world.device)
                dist.recv(received, group=group, group_src=(rank - 1) % ranks)
            out = self._cut.run(stage, micro_batch, received)
            if stage == self._cut.last:
                loss = out
            else:
                dist.send(out.contiguous(), group=group, group_dst=(rank + 1) % ranks)
        self.module.train()
        return loss

    def _hidden(self, tokens: torch.Size, device: torch.device | str) -> torch.Tensor:
        """Memory for what a stage sends to the next."""
        config: Any = self.module.model.config
        size = config.get_text_config().hidden_size
        return torch.empty(*tokens, size, dtype=DTYPES[self._strategy.precision], device=device)

    @torch.no_grad()
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        stage, *others = self._place
        for full_name, p in self.module.named_parameters():
            for name in chosen([(full_name, p)], names):
                holder = self._cut.stage_of[full_name] % self._strategy.pipeline
                tensor = p.detach()
                if stage == holder and others[0] == 0:
                    tensor = self._split.full(full_name, tensor)
                if holder != 0 and not any(others):  # the first rank of each stage
                    if stage == 0:
                        tensor = torch.empty(p.shape, dtype=p.dtype, device=self.world.device)
                        dist.recv(tensor, group=self._stage_group, group_src=holder)
                    elif stage == holder:
                        dist.send(tensor.contiguous(), group=self._stage_group, group_dst=0)
                yield name, torch.empty(0) if self.world.rank else tensor.cpu()

    def config(self) -> dict[str, Any]:
        strategy = self._strategy
        return {
            **super().config(),
            "schedule": SCHEDULES[strategy.pipeline_schedule],
            "blocks_of_stages": [len(blocks) for blocks in self._cut.ranges],
            "micro_batches": strategy.accumulation,
            "data_parallel": strategy.data_parallel,
            "tensor_parallel": strategy.tensor_parallel,
        }
