"""Activation checkpointing: blocks drop their activations and recompute them in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_blocks(blocks: Sequence[nn.Module], *, every: int) -> None:
    """Checkpoint blocks 0, n, 2n, … of `blocks`, in place, in training mode; with `every` = 0 none.

    Random states are restored for the second pass, so dropout repeats. Call it once, before the engine is
    built.
    """
    if every == 0:
        return
    for block in blocks[::every]:
        block.forward = _recomputed(block, block.forward)  # type: ignore[method-assign]


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed
