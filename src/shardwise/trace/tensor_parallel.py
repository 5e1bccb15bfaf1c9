"""A model as one rank of a tensor-parallel group holds it: split like DeepSpeed's AutoTP, without DeepSpeed.

Follows deepspeed/module_inject/{tp_plan_converter,auto_tp,layers}.py, 0.19.8, for the plan that
`engines/deepspeed/runtime/tensor_parallel.py` passes to it; tests compare both (decision 0025). The first
rank of a group has the largest parts, and is the one that is built. Its collectives are operators of kind
`collective`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.models.build import BuiltModel
from shardwise.models.structure import find_blocks
from shardwise.simulate.step_trace import Op
from shardwise.trace.recorder import record_kernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cut(built: BuiltModel, degree: int) -> BuiltModel:
    """Copy a model with a rank's parts of the linear layers in the plan; everything else stays complete."""
    model = copy.deepcopy(built.model)
    for name, owner, attribute, style in _planned(model):
        layer = owner._modules[attribute]
        if style in _LAYERS:
            assert isinstance(layer, nn.Linear), name
            owner._modules[attribute] = _LAYERS[style](layer, degree)
    return replace(built, model=model, blocks=find_blocks(model))


def sum_gradients(model: PreTrainedModel) -> None:
    """Sum the gradients of replicated weights that act on a rank's own heads, as soon as they are complete.

    As DeepSpeed's register_replicated_grad_hooks.
    """
    for _, owner, attribute, style in _planned(model):
        if style == "replicated_with_grad_allreduce":
            weight = owner._modules[attribute]._parameters["weight"]  # type: ignore[union-attr]
            if weight is not None and weight.requires_grad:
                weight.register_hook(_summed)


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, str]]:
    """(name, owner, attribute, style) of each layer in the plan; the first matching pattern counts."""
    plan: dict[str, str] = model.config.get_text_config().base_model_tp_plan or {}
    patterns = {".*" + p.replace(".", r"\.").replace("*", ".*"): way.lower() for p, way in plan.items()}
    for name, module in list(model.named_modules()):
        style = next((way for pattern, way in patterns.items() if re.fullmatch(pattern, name)), None)
        if style is not None and "weight" in module._parameters:
            parent, _, attribute = name.rpartition(".")
            yield name, model.get_submodule(parent), attribute, style


class _Columns(nn.Module):
    """A rank's outputs of a linear layer (LinearLayer); the gradient of the input is summed."""

    def __init__(self, layer: nn.Linear, degree: int) -> None:
        super().__init__()
        self.weight = _part(layer.weight, degree, dim=0)
        bias: Tensor | None = layer.bias
        self.bias = None if bias is None else _part(bias, degree, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.matmul(_SumBackward.apply(x), self.weight.transpose(-1, -2))
        return out if self.bias is None else out + self.bias


class _Rows(nn.Module):
    """A rank's inputs of a linear layer (LinearAllreduce); outputs are summed before the bias is added."""

    def __init__(self, layer: nn.Linear, degree: int) -> None:
        super().__init__()
        self.weight = _part(layer.weight, degree, dim=1)
        self.bias: Tensor | None = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _SumForward.apply(torch.matmul(x, self.weight.transpose(-1, -2)))
        return out if self.bias is None else out + self.bias


_LAYERS = {"colwise": _Columns, "rowwise": _Rows}
"""Other styles do not split a layer; `space/candidates.py: predictable` accepts no further ones."""


def _part(parameter: Tensor, degree: int, *, dim: int) -> nn.Parameter:
    """The first rank's part: a remainder goes to the first ranks (get_shard_size)."""
    shape = list(parameter.shape)
    shape[dim] = -(-shape[dim] // degree)
    return nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)


class _SumForward(torch.autograd.Function):
    """RowParallel: an in-place all-reduce in the forward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return _summed(x)

    @staticmethod
    def backward(_: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return dx


class _SumBackward(torch.autograd.Function):
    """ColumnParallel: an in-place all-reduce in the backward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x

    @staticmethod
    def backward(_: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return _summed(dx)


def _summed(tensor: Tensor) -> Tensor:
    """Record the all-reduce of a tensor over the group, in its own format and memory."""
    size = tensor.numel() * tensor.element_size()
    sizes: dict[str, Any] = {"read_bytes": size, "written_bytes": size, "item_bytes": tensor.element_size()}
    record_kernel(Op(kind="collective", flops=0.0, name="all_reduce", **sizes))
    return tensor
