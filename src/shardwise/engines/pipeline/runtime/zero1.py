"""ZeRO-1 over a stage's data-parallel ranks: all have its weights, each a part of the optimizer's states.

Gradients add up in fp32 over a step's micro-batches. Then they are summed over the ranks, part of the model
by part, and each rank keeps its rows of each parameter (split as torch.chunk does). After AdamW has stepped
these in fp32, the ranks gather the weights in the computation's format.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from shardwise.engines.runtime.base import all_gather, reduce_scatter


class _Slice(NamedTuple):
    """Where a parameter lies in its part's buffer: `rows` of each rank, the last ones padded."""

    name: str
    rows: int
    begin: int
    end: int


class Zero1:
    """fp32 shards of weights, with their gradients, and the way back to the weights."""

    def __init__(self, parts: Sequence[Mapping[str, torch.Tensor]], group: dist.ProcessGroup) -> None:
        """`parts`: trained weights by name; a part is reduced and gathered at once. Leaves hooks on them."""
        self._group, self._ranks = group, dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._weights = {name: weight for part in parts for name, weight in part.items()}
        self._parts = [self._slices(part) for part in parts if part]
        self._sums: dict[str, torch.Tensor] = {}  # Gradients of 16-bit weights, in fp32
        self.shards: dict[str, torch.Tensor] = {}  # What AdamW steps; empty where a rank has no row
        for piece in (piece for part in self._parts for piece in part):
            weight = self._weights[piece.name]
            rows = weight.detach()[rank * piece.rows : (rank + 1) * piece.rows]
            is_master = self._ranks == 1 and weight.dtype == torch.float32
            self.shards[piece.name] = rows if is_master else rows.to(torch.float32, copy=True)
            if weight.dtype != torch.float32:
                weight.register_post_accumulate_grad_hook(self._add(piece.name))  # type: ignore[attr-defined]

    def _slices(self, part: Mapping[str, torch.Tensor]) -> list[_Slice]:
        slices, begin = list[_Slice](), 0
        for name, weight in part.items():
            rows = -(-weight.shape[0] // self._ranks)
            end = begin + rows * weight[0].numel()
            slices.append(_Slice(name, rows, begin, end))
            begin = end
        return slices

    def place(self, name: str) -> tuple[tuple[int, ...], int]:
        """The shape of a weight, and the first element of its shard."""
        shape = tuple(self._weights[name].shape)
        rank, rows = dist.get_rank(self._group), -(-shape[0] // self._ranks)
        return shape, min(rank * rows, shape[0]) * prod(shape[1:])

    def _add(self, name: str) -> Callable[[torch.Tensor], None]:
        def add(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            if name in self._sums:
                self._sums[name] += weight.grad
            else:
                self._sums[name] = weight.grad.float()
            weight.grad = None

        return add

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the ranks, and give each shard its own. Collective."""
        for part in self._parts:
            gradients = [self._take(piece.name) for piece in part]
            if self._ranks == 1:
                for piece, gradient in zip(part, gradients, strict=True):
                    self.shards[piece.name].grad = gradient
                continue
            device, size = gradients[0].device, part[-1].end
            source = torch.empty(self._ranks, size, dtype=torch.float32, device=device)
            for piece, gradient in zip(part, gradients, strict=True):
                source[:, piece.begin : piece.end] = self._padded(gradient, piece)
            del gradients
            total = torch.empty(size, dtype=torch.float32, device=device)
            reduce_scatter(total, source.view(-1), group=self._group)
            for piece in part:
                shard = self.shards[piece.name]
                shard.grad = total[piece.begin : piece.begin + shard.numel()].view_as(shard)

    def _take(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        if weight.dtype != torch.float32:
            found = self._sums.pop(name, None)
        else:
            found, weight.grad = weight.grad, None
        return torch.zeros_like(weight, dtype=torch.float32) if found is None else found

    def _padded(self, full: torch.Tensor, piece: _Slice) -> torch.Tensor:
        missing = self._ranks * piece.rows - full.shape[0]
        full = pad(full, (*[0, 0] * (full.ndim - 1), 0, missing)) if missing else full
        return full.reshape(self._ranks, -1)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the weights the values of the shards. Collective."""
        for part in self._parts:
            first = self._weights[part[0].name]
            if self._ranks == 1:
                stepped = [piece.name for piece in part if first.dtype != torch.float32]
                if stepped:
                    torch._foreach_copy_(
                        [self._weights[name] for name in stepped], [self.shards[name] for name in stepped]
                    )
                continue
            own = torch.zeros(part[-1].end, dtype=first.dtype, device=first.device)
            for piece in part:
                shard = self.shards[piece.name]
                own[piece.begin : piece.begin + shard.numel()] = shard.flatten()
            gathered = torch.empty(self._ranks, len(own), dtype=own.dtype, device=own.device)
            all_gather(gathered.view(-1), own, group=self._group)
            for piece in part:
                weight = self._weights[piece.name]
                full = gathered[:, piece.begin : piece.end].reshape(-1, *weight.shape[1:])
                weight.copy_(full[: weight.shape[0]])
