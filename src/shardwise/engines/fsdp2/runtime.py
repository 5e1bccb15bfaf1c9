"""PyTorch FSDP2 (`fully_shard`) behind the engine protocol.

Trainable parameters are fp32 shards, gathered in the computation's format; gradients are summed over the
ranks in fp32. The optimizer steps this rank's shards as plain tensors, with the same code as the single
engine. Frozen parameters (the base of LoRA) are shards in the computation's format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwise.data.batch import MicroBatch
from shardwise.engines.runtime.adamw import MOMENTS, AdamW
from shardwise.engines.runtime.fp32_params import WholeParameters
from shardwise.engines.runtime.parameters import (
    Fill,
    chosen,
    decay_by_name,
    move_buffers,
    public_name,
    trainable,
)
from shardwise.engines.runtime.protocol import StepResult, World
from shardwise.engines.runtime.state import Part, load_state, save_state
from shardwise.job import schema
from shardwise.models.structure import DTYPES
from shardwise.strategy import Strategy


class FsdpEngine:
    """A module sharded block by block."""

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
        self._root: FSDPModule = module  # type: ignore[assignment]  # what fully_shard makes of it
        self._strategy = strategy
        self._settings = optimizer
        decay = decay_by_name(module, optimizer.weight_decay)
        move_buffers(module, world.device)
        self._whole = WholeParameters(module, precision=strategy.precision)
        _shard(strategy, module, blocks, fill, world, self._whole)
        self._sharded: dict[str, DTensor] = trainable(module)  # type: ignore[assignment]
        self._shards = {name: p.to_local().detach() for name, p in self._sharded.items()}
        self._optimizer = AdamW(
            {**self._shards, **self._whole.trainable},
            decay,
            optimizer,
            clip_norm=strategy.clip_norm,
            fp16=strategy.precision == "fp16",
            sharded=True,
            device=world.device,
            replicated=self._whole.trainable,
        )
        module.train()

    def step(
        self, micro_batches: Sequence[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        factor = self._optimizer.guard.loss_scale / target_tokens
        loss_sum = torch.zeros((), device=self.world.device)
        for index, micro_batch in enumerate(micro_batches):
            if not self._strategy.reshard:
                # Gathered parameters serve all micro-batches, and go before the optimizer changes them.
                self._root.set_reshard_after_backward(index == len(micro_batches) - 1)
            loss = self.module(micro_batch)
            loss_sum += loss.detach()
            (loss * factor).backward()
        for name, p in self._sharded.items():
            if isinstance(p.grad, DTensor):
                self._shards[name].grad = p.grad.to_local()
            p.grad = None
        self._whole.reduce()
        return self._optimizer.step(loss_sum / target_tokens, learning_rate=learning_rate)

    @torch.no_grad()
    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        self.module.eval()
        try:
            return self.module(micro_batch)
        finally:
            self.module.train()

    def save(self, directory: Path) -> None:
        keys = ("parameter", *MOMENTS)
        parts = {f"{key}/{name}": self._part(name) for name in self._sharded for key in keys}
        save_state(directory, self.world, self._optimizer.state(), parts)

    def load(self, directory: Path) -> None:
        self._optimizer.restore(load_state(directory, self.world))
        self._reshard()

    @torch.no_grad()
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = DTYPES[self._strategy.precision]
        self._reshard()
        for name, p in chosen(self.module, names).items():
            assert isinstance(p, DTensor)
            shard = p.to_local().to(self.world.device, dtype)
            full = DTensor.from_local(
                shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            ).full_tensor()
            yield public_name(name), full.cpu() if self.world.rank == 0 else torch.empty(0)
        for name, tensor in self._whole.chosen(names):
            yield public_name(name), tensor.detach().cpu() if self.world.rank == 0 else torch.empty(0)

    def _reshard(self) -> None:
        """Drop what an evaluation may have left gathered; the parameters are shards again."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def config(self) -> dict[str, Any]:
        return {
            "engine": "fsdp2",
            "param_dtype": self._strategy.precision,
            "reduce_dtype": "fp32",
            "reshard_after_forward": self._strategy.reshard,
            "cpu_offload": self._strategy.offload_parameters == "cpu",
            "shard_group_size": self.world.size,
            "clip_norm": self._strategy.clip_norm,
            "optimizer": self._settings.model_dump(),
        }

    def _part(self, name: str) -> Part:
        """Which rows this rank holds: as torch.chunk deals them out."""
        shape = self._sharded[name].shape
        per_rank = -(-shape[0] // self.world.size)
        return Part(
            shape=tuple(shape),
            start=min(self.world.rank * per_rank, shape[0]),
            length=self._shards[name].shape[0],
        )


def _shard(
    strategy: Strategy,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    fill: Fill,
    world: World,
    whole: WholeParameters,
) -> None:
    """Fills and shards one block after the other, then what is outside the blocks."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[strategy.precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    }
    if strategy.offload_parameters == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for part in (*blocks, module):
        fill(part, world.device)
        whole.take(part)
        for p in part.parameters():
            if p.requires_grad and not isinstance(p, DTensor):
                p.data = p.data.float()
        # The root's own parameters (embeddings, head) are needed again as soon as the forward pass ends.
        reshard = strategy.reshard and part is not module
        sharded = fully_shard(part, reshard_after_forward=reshard, **options)
        # The loss is divided by the number of targets of all ranks: gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    _gather_ahead(blocks)


def _gather_ahead(blocks: Sequence[nn.Module]) -> None:
    """Lets each block ask for the next one's parameters before it computes, not after it has returned."""
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
