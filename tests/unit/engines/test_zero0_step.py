"""ZeRO-0 steps some weights at a time, with one norm of all gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.runtime.step import StepOnGpu, step_in_parts

CLIP = 0.5


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """DeepSpeed's own of three weights, of which two are stepped at once; the last has no gradient."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    monkeypatch.setattr(policy, "SUB_GROUP", 7)
    torch.manual_seed(0)
    low = [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in (4, 3, 5)]
    high = [torch.nn.Parameter(weight.detach().float()) for weight in low]
    made: Any = object.__new__(FP16_UnfusedOptimizer)
    adamw = torch.optim.AdamW(high, lr=0.1, weight_decay=0.01, fused=True)
    groups = {"fp16_groups": [low[:2], low[2:]], "fp32_groups": [high[:2], high[2:]]}
    made.__dict__.update(groups, optimizer=adamw, clip_grad=CLIP, overflow=False)
    made.loss_scale_config = SimpleNamespace(cur_scale=1.0, dynamic_loss_scale=False, cur_iter=0)
    for weight in low[:2]:
        weight.grad = torch.randn_like(weight)
    step_in_parts(made)
    return made


def weights(optimizer: Any, kind: str) -> list[torch.Tensor]:
    return [weight for group in getattr(optimizer, kind) for weight in group]


def expected(optimizer: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and first moments by torch, all at once: gradients in fp32, clipped; zeros where none are."""
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights(optimizer, "fp32_groups")]
    for copy, low in zip(copies, weights(optimizer, "fp16_groups"), strict=True):
        copy.grad = torch.zeros_like(copy) if low.grad is None else low.grad.float()
    torch.nn.utils.clip_grad_norm_(copies, CLIP)
    adamw = torch.optim.AdamW(copies, lr=0.1, weight_decay=0.01)
    adamw.step()
    return [(copy.detach(), adamw.state[copy]["exp_avg"]) for copy in copies]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["the host decides", "the kernel decides"])
def test_parts_are_stepped_as_all_at_once_with_one_norm(optimizer: Any, on_gpu: bool) -> None:
    gradients = [weight.grad.float() for weight in weights(optimizer, "fp16_groups")[:2]]
    norm = torch.cat(gradients).norm().item()
    assert norm > CLIP
    wanted = expected(optimizer)
    if on_gpu:
        StepOnGpu(optimizer, clip_norm=CLIP, device=torch.device("cpu"), wait=lambda: None)
    assert optimizer.step() is False
    assert optimizer._global_grad_norm.item() == pytest.approx(norm, rel=1e-6)
    pairs = zip(weights(optimizer, "fp32_groups"), weights(optimizer, "fp16_groups"), wanted, strict=True)
    for high, low, (value, moment) in pairs:
        torch.testing.assert_close(high.detach(), value)
        torch.testing.assert_close(optimizer.optimizer.state[high]["exp_avg"], moment)
        assert torch.equal(low.detach(), high.detach().bfloat16())
        assert high.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("on_gpu", [False, True], ids=["the host decides", "the kernel decides"])
def test_a_gradient_that_is_not_finite_reaches_no_weight(optimizer: Any, value: float, on_gpu: bool) -> None:
    before = [weight.detach().clone() for weight in weights(optimizer, "fp32_groups")]
    weights(optimizer, "fp16_groups")[1].grad[0] = value
    ours = None
    if on_gpu:
        ours = StepOnGpu(optimizer, clip_norm=CLIP, device=torch.device("cpu"), wait=lambda: None)
    optimizer.step()
    assert (ours.stopped.item() == 1.0) if ours else optimizer.overflow
    assert not math.isfinite(optimizer._global_grad_norm), "by which the run ends"
    for weight, value_before in zip(weights(optimizer, "fp32_groups"), before, strict=True):
        assert torch.equal(weight.detach(), value_before)
