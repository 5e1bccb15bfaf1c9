"""A model as one rank of a tensor-parallel group holds it: split like DeepSpeed's AutoTP, without DeepSpeed.

Follows deepspeed/module_inject/{tp_plan_converter,auto_tp,layers}.py, 0.19.8, for the plan that
`engines/deepspeed/runtime/tensor_parallel.py` passes to it; tests compare both (decision 0025). The first
rank of a group has the largest parts, and is the one that is built. Its collectives are operators of kind
`collective`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.models.build import BuiltModel
from shardwise.models.structure import copied, find_blocks
from shardwise.models.tensor_plan import planned
from shardwise.simulate.step_trace import Op
from shardwise.trace.recorder import record_kernel


def cut(built: BuiltModel, degree: int) -> BuiltModel:
    """Copy a model with a rank's parts of the linear layers in the plan; everything else stays complete."""
    model = copied(built.model, {})
    for name, layer, style in planned(model):
        if style in _SPLIT:
            assert isinstance(layer, nn.Linear), name
            model.set_submodule(name, _Part(layer, degree, columns=style == "colwise"))
    return replace(built, model=model, blocks=find_blocks(model))


def sum_gradients(model: PreTrainedModel) -> None:
    """Sum the gradients of replicated weights that act on a rank's own heads, as soon as they are complete.

    As DeepSpeed's register_replicated_grad_hooks.
    """
    for _, layer, style in planned(model):
        weight = layer._parameters["weight"]
        if style == "replicated_with_grad_allreduce" and weight is not None and weight.requires_grad:
            weight.register_hook(_summed)


_SPLIT = ("colwise", "rowwise")
"""Other styles do not split a layer; `space/candidates.py: predictable` accepts no further ones."""


class _Part(nn.Module):
    """A rank's `columns`, outputs of a linear layer (LinearLayer): the gradient of the input is summed.

    Or its rows, inputs of the layer (LinearAllreduce): outputs are summed before the bias is added.
    """

    def __init__(self, layer: nn.Linear, degree: int, *, columns: bool) -> None:
        super().__init__()
        self.columns = columns
        self.weight = _part(layer.weight, degree, dim=0 if columns else 1)
        bias: Any = layer.bias
        self.bias = _part(bias, degree, dim=0) if columns and bias is not None else bias

    def forward(self, x: Tensor) -> Tensor:
        x = _Sum.apply(x, False) if self.columns else x
        out: Tensor = torch.matmul(x, self.weight.transpose(-1, -2))
        out = out if self.columns else _Sum.apply(out, True)
        return out if self.bias is None else out + self.bias


def _part(parameter: Tensor, degree: int, *, dim: int) -> nn.Parameter:
    """The first rank's part: a remainder goes to the first ranks (get_shard_size)."""
    shape = list(parameter.shape)
    shape[dim] = -(-shape[dim] // degree)
    return nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)


class _Sum(torch.autograd.Function):
    """An in-place all-reduce, in the forward pass (RowParallel) or in the backward pass (ColumnParallel)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: bool) -> Tensor:  # type: ignore[override]
        ctx.in_forward = in_forward
        return _summed(x) if in_forward else x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx if ctx.in_forward else _summed(dx), None


def _summed(tensor: Tensor) -> Tensor:
    """Record the all-reduce of a tensor over the group, in its own format and memory."""
    size = tensor.numel() * tensor.element_size()
    sizes: dict[str, Any] = {"read_bytes": size, "written_bytes": size, "item_bytes": tensor.element_size()}
    record_kernel(Op(kind="collective", flops=0.0, name="all_reduce", **sizes))
    return tensor
