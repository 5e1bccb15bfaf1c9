"""What layers with LoRA compute, to compare ours with PEFT's."""

from __future__ import annotations

import torch
from torch import nn


def outcome(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the first input, gradients of the adapters, for a fixed upstream gradient."""
    x = inputs[0].clone().requires_grad_()
    y = model(x, *inputs[1:])
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, [x, *trained(model)], upstream)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_trained_alike_without_gradient_of_the_input(
    ours: nn.Module, theirs: nn.Module, x: torch.Tensor
) -> None:
    """The first block's input comes from a frozen embedding."""
    for model in (ours, theirs):
        model(x).sum().backward()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        assert left.grad is None or torch.allclose(left.grad, right.grad, rtol=1e-12)


def assert_gradients_have_memory_of_their_own(model: nn.Module, x: torch.Tensor) -> None:
    """Engines free and flatten them one by one."""
    model(x).sum().backward()
    owned = {weight.grad.untyped_storage().data_ptr() for weight in trained(model) if weight.grad is not None}
    assert len(owned) == len(trained(model)) > 0
