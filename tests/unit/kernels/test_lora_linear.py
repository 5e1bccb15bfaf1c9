"""The fused LoRA layer is PEFT's layer: same outputs and gradients, and PEFT's own where it is not plain."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lora_layers import assert_trained_alike_without_gradient_of_the_input, outcome
from shardwise.kernels.lora_linear import Parts, fuse_lora, outputs, plain


def layers(*, bias=False, **config):
    """Two LoRA layers in a row, as PEFT builds them, with random A and B, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 10, bias=bias), nn.Tanh(), nn.Linear(10, 6, bias=bias)).double()
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["0", "2"], "init_lora_weights": False} | config
    return inject_adapter_in_model(LoraConfig(**settings), model).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (2, 4, 7)])
def test_outputs_and_gradients_are_pefts(bias, shape):
    peft = layers(bias=bias)
    fused = copy.deepcopy(peft)
    assert fuse_lora(fused) == 2
    x = torch.randn(shape, dtype=torch.float64)
    expected, measured = outcome(peft, x), outcome(fused, x)
    assert torch.allclose(measured[0], expected[0], rtol=1e-13, atol=1e-13)
    assert len(measured) == 6
    for left, right in zip(measured, expected, strict=True):
        assert left.shape == right.shape
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-13)


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    x, w, b, a, up = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((4, 7), (6, 7), (6,), (3, 7), (6, 3))
    )
    assert torch.autograd.gradcheck(
        lambda x, a, up: outputs(x, [Parts(bias=b, a=a, b=up, scaling=1.7, unpack=plain, stored=(w,))])[0],
        (x.requires_grad_(), a.requires_grad_(), up.requires_grad_()),
    )


def test_an_input_without_gradient_still_trains_the_adapter():
    peft = layers()
    fused = copy.deepcopy(peft)
    fuse_lora(fused)
    x = torch.randn(5, 7, dtype=torch.float64)
    assert_trained_alike_without_gradient_of_the_input(fused, peft, x)


@pytest.mark.parametrize("config", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_layers_that_are_not_plain_keep_pefts_forward(config):
    assert fuse_lora(layers(bias=True, **config)) == 0


def test_a_trained_base_keeps_pefts_forward():
    model = layers()
    model[0].base_layer.weight.requires_grad_(True)
    assert fuse_lora(model) == 1


def test_a_merged_or_disabled_adapter_is_honoured():
    model = layers()
    x = torch.randn(5, 7, dtype=torch.float64)
    fuse_lora(model)
    with_adapter = model(x)
    model[0].merge()
    model[2].merge()
    assert torch.allclose(model(x), with_adapter, rtol=1e-12)
    for layer in (model[0], model[2]):
        layer.unmerge()
        layer.enable_adapters(False)
    base = model[2].base_layer(torch.tanh(model[0].base_layer(x)))
    assert torch.allclose(model(x), base, rtol=1e-12)
    assert not torch.allclose(with_adapter, base)


def test_adapters_of_another_dtype_are_computed_as_peft_does():
    peft = layers().bfloat16()
    for name, parameter in peft.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    fused = copy.deepcopy(peft)
    fuse_lora(fused)
    x = torch.randn(5, 7).bfloat16()
    assert torch.equal(fused(x), peft(x))


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_base_layer_replaced_afterwards_is_called():
    """As tensor parallelism does."""
    model = layers()
    fuse_lora(model)
    x = torch.randn(5, 7, dtype=torch.float64)
    layer = model[0]
    before = layer(x)
    base = layer.base_layer(x)
    layer.base_layer.__class__ = Doubling
    assert torch.allclose(layer(x), before + base)


def test_outputs_may_be_changed_in_place():
    """As Falcon's block does, with the sum of attention and MLP."""
    peft = layers()
    fused = copy.deepcopy(peft)
    assert fuse_lora(fused) == 2
    x = torch.randn(2, 4, 7, dtype=torch.float64)
    for model in (peft, fused):
        y = model(x)
        y += 1.0
        (y * y).sum().backward()
    for left, right in zip(fused.parameters(), peft.parameters(), strict=True):
        assert left.grad is None or torch.allclose(left.grad, right.grad, rtol=1e-12)
