"""PyTorch FSDP2 (`fully_shard`) behind the engine protocol.

Trainable parameters are fp32 shards, gathered in the computation's format. Gradients are summed over the
ranks in fp32, or in `reduce_dtype`. The optimizer steps this rank's shards as plain tensors, with the code of
the single engine. Frozen parameters (the base of LoRA) are shards in the computation's format.

Passes are recorded as CUDA graphs, with their collectives, where all micro-batches of a step are alike
(decision 0103).

With `shard_group` (HSDP) each group of ranks shares a copy of its own: gathering stays within a group. Each
micro-batch's gradients are summed within it, and over the groups once a step (decision 0045).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from shardwise.data.batch import MicroBatch
from shardwise.engines.fsdp2.memory import records, released
from shardwise.engines.runtime.base import TorchEngine, recordable
from shardwise.engines.runtime.parameters import Fill, Fp32Parameters, chosen, trainable
from shardwise.engines.runtime.state import Part, parts_of
from shardwise.kernels.quantized_linear import QuantizedLinear
from shardwise.models.structure import DTYPES
from shardwise.patch import Library, patch
from shardwise.simulate.memory.recorded import gradients_stay

RECORDS = TorchVersion("2.11")
"""Since then pinned memory that a graph copies from is not used again (CachingHostAllocator.h): chunk_cat's
lists of addresses."""


@cache
def _gather_bytes() -> None:
    """Have groups gathered as bytes, as torch does it for several formats (decision 0074)."""
    collectives = import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    name, torch_ = "_get_all_gather_input_metadatas", Library("torch", ">=2.10", lost="")
    describe: Any = getattr(collectives, name, None)  # where it is missing, `patch` says so

    def as_bytes(inputs: list[list[torch.Tensor]]) -> tuple[Any, Any, torch.dtype]:
        return *describe(inputs)[:2], torch.uint8

    patch(collectives, name, as_bytes, library=torch_, source_hash=None)


class FsdpEngine(TorchEngine):
    """A module sharded block by block."""

    sharded = True
    _stay = False  # Whether gradients are allocated once

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        sharers = self._strategy.sharers
        self.copies = self.world.size // sharers
        self._fp32 = Fp32Parameters(self.module, precision=self._strategy.precision)
        self._shard(blocks, fill)
        self._root: FSDPModule = self.module  # type: ignore[assignment]  # fully_shard changes its class
        self._sharded: dict[str, DTensor] = trainable(self.module)  # type: ignore[assignment]
        self._shards = {name: p.to_local().detach() for name, p in self._sharded.items()}
        on_every_rank = self._fp32.trainable  # the first rank of each copy counts them
        stepped = {**self._shards, **on_every_rank}
        objective = recordable(self.module, self._strategy, self.world.device)
        if objective is not None and records(self._strategy) and torch.__version__ >= RECORDS:
            self._record(objective, [*stepped.values()], self._that_stay(stepped))
        return stepped, on_every_rank if self.world.rank % sharers else ()

    def _that_stay(self, stepped: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Gradients that recorded passes add to, all or none; FSDP2 knows them, too."""
        self._stay = gradients_stay(self._strategy, adapters=self._adapters())
        stay = {name: torch.zeros_like(tensor) for name, tensor in stepped.items() if self._stay}
        for name, p in self._sharded.items() if self._stay else ():
            p.grad = _like(p, stay[name])
        return [*stay.values()]

    def _begin(self, *, last: bool) -> None:
        if self._strategy.shard_group:
            self._root.set_requires_all_reduce(last)
        if not self._strategy.reshard:
            # Micro-batches use the same gathered parameters, but on one rank, which has nothing to gather.
            self._root.set_reshard_after_backward(released(self._strategy, backward=True, last=last))

    def _end_passes(self) -> None:
        for name, p in () if self._stay else self._sharded.items():
            if isinstance(p.grad, DTensor):
                self._shards[name].grad = p.grad.to_local()
            p.grad = None

    def _collect_gradients(self) -> None:
        if self._recorded is None:
            self._end_passes()
        self._fp32.reduce()

    @contextmanager
    def apart(self) -> Iterator[nn.Module]:
        with super().apart() as module:
            yield module
        if self._recorded is not None:
            self._reshard()

    def evaluate(self, micro_batch: MicroBatch, at: torch.Tensor | None = None) -> torch.Tensor:
        found = super().evaluate(micro_batch, at)
        if self._recorded is not None:
            self._reshard()
        return found

    def load(self, directory: Path) -> None:
        super().load(directory)
        self._reshard()

    def _parts(self) -> dict[str, Part]:
        parts = parts_of(self._fp32.trainable)
        for name in self._shards.keys() & self._optimizer.parameters.keys():
            shape = tuple(self._sharded[name].shape)
            rows = -(-shape[0] // self._strategy.sharers)  # as torch.chunk does
            first = self.world.rank % self._strategy.sharers * rows
            parts[name] = Part(shape, begin=first * prod(shape[1:]))
        return parts

    @torch.no_grad()
    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = DTYPES[self._strategy.precision]
        self._reshard()
        for name, p in chosen(self.module.named_parameters(), names).items():
            assert isinstance(p, DTensor)
            full = _like(p, p.to_local().to(self.world.device, dtype)).full_tensor()
            yield name, full.cpu() if self.world.rank == 0 else torch.empty(0)
        for name, tensor in chosen(self._fp32.tensors.items(), names).items():
            yield name, tensor.detach().cpu() if self.world.rank == 0 else torch.empty(0)

    def _reshard(self) -> None:
        """Free what forward passes alone leave gathered: a recorded pass would not know of it."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "reduce_dtype": self._strategy.reduced_in("fp32"),
            "reshard_after_forward": self._strategy.reshard,
            "cpu_offload": self._strategy.offload_parameters == "cpu",
            "shard_group_size": self._strategy.sharers,
        }

    def _mesh(self) -> DeviceMesh:
        """The ranks; under HSDP as groups, of which the second dimension holds one copy of the weights."""
        kind, size, group = self.world.device.type, self.world.size, self._strategy.shard_group
        if not group:
            return init_device_mesh(kind, (size,))
        return init_device_mesh(kind, (size // group, group), mesh_dim_names=("replicas", "shards"))

    def _shard(self, blocks: Sequence[nn.Module], fill: Fill) -> None:
        """Fill and shard one block after the other, then the rest of the module."""
        device = self.world.device
        if any(isinstance(part, QuantizedLinear) for part in self.module.modules()):
            _gather_bytes()
        options: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[self._strategy.precision],
                reduce_dtype=DTYPES[self._strategy.reduced_in("fp32")],
                cast_forward_inputs=False,
            ),
        }
        if self._strategy.offload_parameters == "cpu":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for part in (*blocks, self.module):
            fill(part, device)
            self._fp32.take(part)
            for p in part.parameters():
                if p.requires_grad and not isinstance(p, DTensor):
                    p.data = p.data.float()
            # The backward pass begins with the root's own parameters (embeddings, head).
            reshard = self._strategy.reshard and part is not self.module
            sharded = fully_shard(part, reshard_after_forward=reshard, **options)
            # The loss is divided by the number of targets of all ranks: gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        for block, following in pairwise(blocks):  # gathered before a block computes, not after it returns
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def _like(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """A tensor of which this rank has `shard`, sharded as a parameter."""
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
