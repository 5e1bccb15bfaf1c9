"""Rotary frequencies fixed for a job, where transformers would choose them by the longest row of each call.

With `longrope` and `dynamic` the frequencies depend on the length of a text. transformers looks at the
largest position of a micro-batch, and `dynamic` also at earlier ones: a sample's loss would change with its
neighbours, packed or not, and with earlier batches. Here a job uses one set, which transformers chooses for a
row of `data.sequence_length` tokens, in every row and for short samples too. vLLM does the same with the
longest text it accepts. Up to the length that the model was first trained with nothing changes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError

FIXED = "fixed"
"""A rope type that transformers does not know, and so never recomputes."""


def in_parameters(changes: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A job's changes of a config's `values`, those of rotary positions in `rope_parameters` if it has them.

    transformers ignores a `rope_theta` next to them, and takes a `rope_scaling` for all of them, so that the
    model's own base is lost. Raises JobError for a base that is no number.
    """
    base = changes.get("rope_theta", 1.0)
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0.0 < base < float("inf"):
        what = f"rope_theta, the base of rotary positions, cannot be {base!r}"
        raise JobError(what, where="model.config.rope_theta", fix="a number above 0, such as 500000.0")
    given = changes.get("rope_parameters", values.get("rope_parameters"))
    named = {"rope_theta", "rope_scaling"} & changes.keys()
    if not named or not isinstance(given, dict) or any(isinstance(part, dict) for part in given.values()):
        return changes
    rope = dict(given)
    if "rope_scaling" in named:
        rope = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
        rope |= changes["rope_scaling"] or {}
    if "rope_theta" in named:
        rope["rope_theta"] = base
    return {**{k: v for k, v in changes.items() if k != "rope_scaling"}, "rope_parameters": rope}


def check_rotary(changes: Mapping[str, Any], before: PretrainedConfig, after: PretrainedConfig) -> None:
    """Raise JobError where the job's `rope_theta` or `rope_scaling` has no effect on its config."""
    named = " and ".join(key for key in ("rope_theta", "rope_scaling") if key in changes)
    old, new = (getattr(config, "rope_parameters", None) or {} for config in (before, after))
    why, fix = f"{after.model_type} models do not read it", "remove it"
    ignored = new.get("rope_theta") != changes.get("rope_theta", new.get("rope_theta"))
    if any(isinstance(part, Mapping) for part in new.values()):
        why = f"each kind of layer of {after.model_type} models has its own values"
        ignored, fix = old == new, "set rope_parameters, as the model's config.json has them"
    if named and ignored:
        where = f"model.config.{named.partition(' ')[0]}"
        raise JobError(f"{named} changes nothing: {why}", where=where, fix=fix)


@torch.no_grad()
def fix_frequencies(model: PreTrainedModel, sequence_length: int) -> list[str]:
    """Fix them in place, for rows of at most `sequence_length` tokens, and return notes for people.

    The rotary embeddings' buffers are computed and on the CPU. Raises JobError where rows may be longer than
    the model was first trained with, and its code would still depend on lengths.
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
    if not rotary or any(_depends_on_length(module, sequence_length) for module in rotary):
        by = "rotate a sample's positions by the length of its neighbours"
        what = f"above {limits[kind]} tokens {config.model_type!r} models {by}"
        raise JobError(what, where="data.sequence_length", fix=f"{limits[kind]} or less")
    note = f"rotary frequencies ({kind}) are those for {sequence_length} tokens in all rows"
    return [f"{note}: transformers takes others for texts of up to {limits[kind]}"]


def _limits(config: PretrainedConfig) -> dict[str, int]:
    """The model's length-dependent rope types, each with the length up to which it is constant."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits: dict[str, int] = {}
    for parameters in [value for value in given.values() if isinstance(value, Mapping)] or [given]:
        kind = parameters.get("rope_type") or parameters.get("type") or ""
        if _depends(kind):
            first = "max_position_embeddings" if "dynamic" in kind else "original_max_position_embeddings"
            limit = parameters.get(first) or getattr(config, first, None) or config.max_position_embeddings
            limits[kind] = min(limit, limits.get(kind, limit))
    return limits


def _depends(kind: str) -> bool:
    """As in transformers' modeling_rope_utils.dynamic_rope_update; `su` is longrope's first name."""
    return kind in ("longrope", "su") or "dynamic" in kind


def _sets(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """(rope type, arguments) of each set of frequencies; layer types may have their own."""
    kinds: Any = module.rope_type
    if isinstance(kinds, Mapping):
        return [(kind, {"layer_type": layer}) for layer, kind in kinds.items()]
    return [(kinds, {})]


def _fix(module: nn.Module, length: int) -> None:
    for kind, options in _sets(module):
        if _depends(kind):
            _call(module, [length - 1], options)  # transformers stores the frequencies of this length
    fixed = {options.get("layer_type"): FIXED if _depends(kind) else kind for kind, options in _sets(module)}
    rope_type: Any = fixed.get(None, fixed)  # one for all layers, or one for each type
    module.rope_type = rope_type


def _depends_on_length(module: nn.Module, length: int) -> bool:
    """Whether a late position changes an early one's result; Phi-MoE's code chooses frequencies itself."""
    for _, options in _sets(module):
        alone, together = (_call(module, positions, options) for positions in ([1], [1, length - 1]))
        if any(not torch.equal(a, b[:, :1]) for a, b in zip(alone, together, strict=True)):
            return True
    return False


def _call(module: nn.Module, positions: list[int], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Embed positions: tensors [1, positions, width]."""
    made = module(torch.zeros(1), torch.tensor([positions]), **options)
    return made if isinstance(made, tuple) else (made,)
