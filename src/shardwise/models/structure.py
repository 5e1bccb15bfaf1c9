"""What a Hugging Face model consists of: tensors, blocks, modules in order of initialisation, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import JobError
from shardwise.models.seeding import seeded


def count_parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Parameters, tied ones once; `trainable`: only those that get a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks in order: the list of modules that holds most of the parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise JobError(
            f"{model.config.model_type!r} models have no list of blocks",
            where="model.source",
            fix="use a decoder made of repeated blocks",
        )
    largest = max(lists, key=count_parameters)
    return list(largest)


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """(dictionary, name, tensor) of every parameter and persistent buffer that `module` itself holds."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield module._parameters, name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield module._buffers, name, buffer


def tensor_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and persistent buffer, several for a tied one, by its first name."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for _, name, tensor in own_tensors(module):
            names.setdefault(id(tensor), []).append(join(prefix, name))
    return {all_names[0]: all_names for all_names in names.values()}


def children_first(
    module: nn.Module, initialiser: PreTrainedModel
) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    """Every module below, children before parents, with the model whose `_init_weights` is for it."""
    for child in module.children():
        yield from children_first(child, child if isinstance(child, PreTrainedModel) else initialiser)
    yield module, initialiser


def join(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` at the top."""
    return f"{prefix}.{name}" if prefix else name


@torch.no_grad()
def build_buffers(model: PreTrainedModel) -> None:
    """Computes on the CPU, in place, the buffers that no file holds: rotary frequencies, causal masks.

    `_init_weights` sets them; transformers goes the same way when it loads a model.
    """
    owners = [
        (module, initialiser)
        for module, initialiser in children_first(model, model)
        if any(module._buffers[name] is not None for name in module._non_persistent_buffers_set)
    ]
    with seeded(torch.device("cpu")):
        for module, initialiser in owners:
            for name, buffer in _computed(module):
                module._buffers[name] = _unset(torch.empty_like(buffer, device="cpu"))
            initialiser._init_weights(module)
            for name, buffer in _computed(module):
                if buffer.is_floating_point() and bool(buffer.isnan().any()):
                    raise JobError(
                        f"the model's code does not compute {name} of {type(module).__name__}",
                        where="model.source",
                        fix="use a model that transformers itself implements",
                    )


def _computed(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None
    ]


def _unset(buffer: torch.Tensor) -> torch.Tensor:
    """NaN everywhere, to notice a buffer that nothing computes."""
    return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer.zero_()
