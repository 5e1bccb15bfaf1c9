"""Rotary frequencies fixed for a job, where transformers would choose them by the longest row of each call.

With `longrope` and `dynamic` the frequencies depend on how long a text is. transformers looks at the largest
position of a whole micro-batch, and `dynamic` also at earlier ones: a sample's loss would change with its
neighbours, packed or not, and with what came before. Here a job has one set, that which transformers chooses
for a row of `data.sequence_length` tokens, in every row and for short samples too. vLLM does the same with
the longest text that it accepts. Up to the length that the model was first trained with nothing changes: no
row is longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError

FIXED = "fixed"
"""The rope type of a module whose frequencies stay: transformers recomputes those of its own types only."""


@torch.no_grad()
def fix_frequencies(model: PreTrainedModel, sequence_length: int) -> list[str]:
    """Fixes them in place, for rows of at most `sequence_length` tokens; returns what people should know.

    The rotary embeddings' buffers are computed and on the CPU. Raises JobError where a row may be longer than
    what the model was first trained with, and its code would go on looking at lengths.
    """
    config = model.config.get_text_config()
    limits = _limits(config)
    if not limits:
        return []
    kind = min(limits, key=lambda kind: limits[kind])
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    for module in rotary:
        _fix(module, sequence_length)
    if sequence_length <= limits[kind]:
        return []
    if not rotary or any(_looks_at_lengths(module, sequence_length) for module in rotary):
        raise JobError(
            f"above {limits[kind]} tokens {config.model_type!r} models turn a sample's positions by how long "
            "the samples beside it are",
            where="data.sequence_length",
            fix=f"{limits[kind]} or less",
        )
    return [
        f"rotary frequencies ({kind}) are those for {sequence_length} tokens in all rows: transformers takes "
        f"others for texts of up to {limits[kind]}"
    ]


def _limits(config: PretrainedConfig) -> dict[str, int]:
    """Rope types of the model that depend on the length, each with the tokens up to which it does not."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [value for value in given.values() if isinstance(value, Mapping)]
    limits: dict[str, int] = {}
    for parameters in of_layers or [given]:
        kind = parameters.get("rope_type") or parameters.get("type") or ""
        if _depends(kind):
            first = "max_position_embeddings" if "dynamic" in kind else "original_max_position_embeddings"
            limit = parameters.get(first) or getattr(config, first, None) or config.max_position_embeddings
            limits[kind] = min(limit, limits.get(kind, limit))
    return limits


def _depends(kind: str) -> bool:
    """As transformers asks, in modeling_rope_utils.dynamic_rope_update; `su` is longrope's first name."""
    return kind in ("longrope", "su") or "dynamic" in kind


def _sets(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """(rope type, what to call it with) of each set of frequencies: types of layers may have their own."""
    kinds: Any = module.rope_type
    if isinstance(kinds, Mapping):
        return [(kind, {"layer_type": layer}) for layer, kind in kinds.items()]
    return [(kinds, {})]


def _fix(module: nn.Module, length: int) -> None:
    for kind, options in _sets(module):
        if _depends(kind):
            _call(module, [length - 1], options)  # transformers puts the frequencies of this length in place
    kinds: Any = module.rope_type
    if isinstance(kinds, Mapping):
        fixed: Any = {layer: FIXED if _depends(kind) else kind for layer, kind in kinds.items()}
    else:
        fixed = FIXED if _depends(kinds) else kinds
    module.rope_type = fixed


def _looks_at_lengths(module: nn.Module, length: int) -> bool:
    """Whether a position still gives something else beside a late one; Phi-MoE's code chooses by itself."""
    for _, options in _sets(module):
        alone, beside = (_call(module, positions, options) for positions in ([1], [1, length - 1]))
        if any(not torch.equal(a, b[:, :1]) for a, b in zip(alone, beside, strict=True)):
            return True
    return False


def _call(module: nn.Module, positions: list[int], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What it makes of positions, each tensor [1, positions, width]."""
    made = module(torch.zeros(1), torch.tensor([positions]), **options)
    return made if isinstance(made, tuple) else (made,)
