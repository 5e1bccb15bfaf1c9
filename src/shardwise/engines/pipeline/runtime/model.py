"""A loss module cut into stages at its blocks, without changing it: the model's own code runs in each stage.

What a stage does not have stays on the meta device, so that names, tied weights and the structure are those
of the uncut model. A block outside the stage passes its input on, an embedding outside it gives zeros, the
stage's first block gets what the stage before has sent, and the forward pass ends after its last block.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from shardwise.engines.pipeline.stages import cut
from shardwise.errors import JobError
from shardwise.kernels.quantized_linear import QuantizedLinear


class _Left(Exception):  # noqa: N818 - not an error
    """The stage's last block has computed `hidden`: what follows in the model is other stages' work."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class CutModel:
    """The stages of a loss module that are on this rank."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], *, stages: int, own: set[int]) -> None:
        """`own`: stages of this rank. Changes the forward functions of `module` in place."""
        if getattr(module, "router_loss", None) is not None:
            raise _cannot_be_cut("its router loss needs all blocks")
        self.module, self.blocks, self.last = module, blocks, stages - 1
        before, after = _outside(module, blocks)
        sizes, head = [_multiplied(block) for block in blocks], sum(_multiplied(part) for part in after)
        self.ranges = cut(sizes, head, stages)
        inside = [blocks[i] for stage in sorted(own) for i in self.ranges[stage]]
        self.parts = [*inside, *(before if 0 in own else []), *(after if self.last in own else [])]
        """What this rank fills: its blocks, then modules outside the blocks."""
        self.stage_of, self.tied = self._stages_by_name(before, after)
        self._running = 0
        self._received: torch.Tensor | None = None
        for index, block in enumerate(blocks):
            block.forward = self._bounded(index, block.forward)  # type: ignore[method-assign]
        for part in before:
            part.forward = self._only_in_the_first(part, part.forward)  # type: ignore[method-assign]

    def _stages_by_name(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> tuple[dict[str, int], set[str]]:
        """The first stage of each parameter, and the names of those that the last stage has, too."""
        stages: dict[int, set[int]] = {}
        blocks = ((stage, self.blocks[index]) for stage, own in enumerate(self.ranges) for index in own)
        for stage, part in (*((0, part) for part in before), *blocks, *((self.last, part) for part in after)):
            for p in part.parameters():
                stages.setdefault(id(p), set()).add(stage)
        names = {name: stages[id(p)] for name, p in self.module.named_parameters()}
        if any(len(found) > 1 and found != {0, self.last} for found in names.values()):
            raise _cannot_be_cut("blocks of several stages share weights")
        tied = {name for name, found in names.items() if len(found) > 1}
        return {name: min(found) for name, found in names.items()}, tied

    def run(self, stage: int, batch: Any, received: torch.Tensor | None) -> torch.Tensor:
        """A stage's forward pass: hidden states for the next stage, or of the last stage the summed loss."""
        self._running, self._received = stage, received
        try:
            loss: torch.Tensor = self.module(batch)
        except _Left as left:
            return left.hidden
        finally:
            self._received = None
        if stage != self.last:
            raise _cannot_be_cut("its forward pass does not end after the stage's blocks")
        return loss

    def _bounded(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward pass: within the running stage; otherwise its input is its output."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            blocks = self.ranges[self._running]
            if index not in blocks:
                return args[0] if args else kwargs["hidden_states"]
            if index == blocks[0] and self._received is not None:
                if args:
                    args = (self._received, *args[1:])
                else:
                    kwargs["hidden_states"] = self._received
            hidden = forward(*args, **kwargs)
            if not isinstance(hidden, torch.Tensor):
                raise _cannot_be_cut("its blocks return more than hidden states")
            if index == blocks[-1] and self._running != self.last:
                raise _Left(hidden)
            return hidden

        return run

    def _only_in_the_first(self, part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Of a module in front of the blocks: in later stages zeros, which their first block replaces."""

        @wraps(forward)
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._running == 0:
                return forward(x, *args, **kwargs)
            if isinstance(part, nn.Embedding):
                return torch.zeros(*x.shape, part.embedding_dim, dtype=part.weight.dtype, device=x.device)
            return x

        return run


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules with parameters of their own, before the blocks and after them, as the model lists them."""
    inside = {id(part) for block in blocks for part in block.modules()}
    places = {id(part): place for place, part in enumerate(module.modules())}
    owners = [
        part
        for part in module.modules()
        if id(part) not in inside and next(part.parameters(recurse=False), None) is not None
    ]
    if any(part in blocks for owner in owners for part in owner.modules()):
        raise _cannot_be_cut("weights belong to the model as such, and to no part of it")
    first = places[id(blocks[0])]
    before = [part for part in owners if places[id(part)] < first]
    return before, [part for part in owners if places[id(part)] > first]


def _multiplied(part: nn.Module) -> float:
    """Elements of matrices, what a token is multiplied by; norms and biases do not count."""
    layers = [layer for layer in part.modules() if isinstance(layer, QuantizedLinear)]
    packed = {id(layer.weight) for layer in layers}
    plain = sum(p.numel() for p in part.parameters() if p.ndim > 1 and id(p) not in packed)
    return float(plain + sum(layer.in_features * layer.out_features for layer in layers))


def _cannot_be_cut(reason: str) -> JobError:
    fix = "strategy: fsdp2 or zero3, which need no cut"
    return JobError(f"this model cannot be cut into stages: {reason}", where="strategy.pipeline", fix=fix)
