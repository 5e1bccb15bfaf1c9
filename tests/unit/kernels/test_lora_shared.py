"""LoRA layers with one input are one node: numbers are PEFT's, and layers with several inputs part again."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from lora_layers import (
    assert_gradients_have_memory_of_their_own,
    assert_trained_alike_without_gradient_of_the_input,
    outcome,
    trained,
)
from packed_rows import packed, samples
from shardwise.kernels import lora_linear
from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.lora_shared import TOGETHER, share_inputs
from shardwise.kernels.quantized_linear import LAYERS
from shardwise.models.families import FAMILIES
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

NAMES = ["q_proj", "k_proj", "v_proj"]
ALONE = {
    "bloom", "codegen", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese",
    "jetmoe", "mamba", "persimmon", "phi3",
}  # fmt: skip
"""Families without two layers of one of `TOGETHER`."""


class Heads(nn.Module):
    """As attention calls its layers; `other` is what keys and values are made of, if not of the input."""

    def __init__(self, *, bias=False):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(6, 8, bias=bias), nn.Linear(6, 4, bias=bias)
        self.v_proj = nn.Linear(6, 4, bias=bias)

    def forward(self, x, other=None):
        other = x if other is None else other
        return torch.cat([self.q_proj(x), self.k_proj(other).tanh() * self.v_proj(other)], dim=-1)


def attention(*, bias=False, **lora):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": Heads(bias=bias)}).double()
    settings = {"r": 3, "lora_alpha": 5, "target_modules": NAMES, "init_lora_weights": False}
    return inject_adapter_in_model(LoraConfig(**(settings | lora)), model).double()["attention"]


def shared(model):
    other = copy.deepcopy(model)
    fuse_lora(other)
    share_inputs(other)
    return other


def equal(measured, expected):
    for left, right in zip(measured, expected, strict=True):
        assert left.shape == right.shape
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-13)


@pytest.fixture
def calls(monkeypatch):
    """How many layers each node has computed."""
    found, apply = [], lora_linear.LoraLinear.apply

    def counted(*given):
        found.append(len(given[3]))
        return apply(*given)

    monkeypatch.setattr(lora_linear.LoraLinear, "apply", counted)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (2, 4, 6)])
@pytest.mark.parametrize(
    ("lora", "nodes"),
    [
        ({}, [3]),
        ({"target_modules": ["q_proj", "v_proj"]}, [2]),
        ({"target_modules": ["v_proj"]}, [1]),
        ({"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 10 / 3}}, [3]),
        ({"alpha_pattern": {"k_proj": 2}}, [1, 1, 1]),
    ],
    ids=["all", "query and value", "value", "two ranks", "two scalings"],
)
def test_outputs_and_gradients_are_pefts(bias, shape, lora, nodes, calls):
    peft = attention(bias=bias, **lora)
    x = torch.randn(shape, dtype=torch.float64)
    equal(outcome(shared(peft), x), outcome(peft, x))
    assert calls == nodes


def test_an_input_without_gradient_still_trains_the_adapters():
    peft, x = attention(), torch.randn(5, 6, dtype=torch.float64)
    assert_trained_alike_without_gradient_of_the_input(shared(peft), peft, x)


def test_gradients_have_memory_of_their_own():
    assert_gradients_have_memory_of_their_own(shared(attention()), torch.randn(5, 6, dtype=torch.float64))


def test_the_input_is_kept_once():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        shared(attention()).q_proj(torch.randn(5, 6, dtype=torch.float64))
    assert sorted(tuple(t.shape) for t in kept if t.shape[0] == 5) == [(5, 6), (5, 9)]


def test_layers_with_inputs_of_their_own_part(calls):
    """As cross-attention: the first pass computes two outputs for nothing, later ones none."""
    peft = attention()
    other, x, y = shared(peft), *torch.randn(2, 5, 6, dtype=torch.float64)
    for _ in range(2):
        equal(outcome(other, x, y), outcome(peft, x, y))
    assert calls == [3, 1, 1, 1, 1, 1]


def test_layers_in_another_order_part(calls):
    """What one of them left could be taken in a later step."""
    peft = attention()
    other, x = shared(peft), torch.randn(5, 6, dtype=torch.float64)
    for _ in range(2):
        for name in ("k_proj", "q_proj", "v_proj"):
            assert torch.allclose(other._modules[name](x), peft._modules[name](x), rtol=1e-12)
    assert calls == [1, 3, 1, 1, 1, 1]


def test_outputs_that_nobody_takes_are_made_once(calls):
    other, x = shared(attention()), torch.randn(5, 6, dtype=torch.float64)
    for _ in range(3):
        other.q_proj(x)
    assert calls == [3, 1, 1]


def test_a_call_with_more_arguments_is_pefts(calls):
    other, x = shared(attention()), torch.randn(5, 6, dtype=torch.float64)
    expected = other.k_proj(x)
    other.q_proj(x)
    assert torch.allclose(other.k_proj(x, adapter_names=["__base__"] * 5), other.k_proj.base_layer(x))
    assert torch.allclose(other.k_proj(x), expected)
    assert calls == [1, 3]


def test_a_value_is_taken_once():
    """A second call with the same input computes again: adapters may have changed in between."""
    other, x = shared(attention()), torch.randn(5, 6, dtype=torch.float64)
    other(x)
    before = other.k_proj(x)
    with torch.no_grad():
        other.k_proj.lora_B["default"].weight.mul_(2.0)
    assert not torch.allclose(other.k_proj(x), before)


def test_checkpointing_computes_the_same(calls):
    peft = attention()
    other, x = shared(peft), torch.randn(5, 6, dtype=torch.float64)
    expected = outcome(peft, x)
    forward = other.forward
    other.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    equal(outcome(other, x), expected)
    assert calls == [3, 3]


def test_a_merged_adapter_is_honoured(calls):
    peft = attention()
    other, x = shared(peft), torch.randn(5, 6, dtype=torch.float64)
    with_adapter = other(x)
    other.k_proj.merge()
    assert torch.allclose(other(x), with_adapter, rtol=1e-12)
    other.k_proj.unmerge()
    assert torch.allclose(other(x), with_adapter, rtol=1e-12)
    assert calls == [3, 1, 1, 3]


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_quantized_weights_give_what_each_layer_gives_alone(kind):
    torch.manual_seed(0)
    heads = Heads()
    for name, outputs in zip(NAMES, (120, 60, 60), strict=True):
        layer = LAYERS[kind](128, outputs, None, dtype=torch.float32)
        layer.quantize(0.05 * torch.randn(outputs, 128))
        heads._modules[name] = layer
    settings = LoraConfig(r=3, target_modules=NAMES, init_lora_weights=False)
    alone = inject_adapter_in_model(settings, nn.ModuleDict({"attention": heads}))["attention"].float()
    together, x = shared(alone), torch.randn(5, 128)
    fuse_lora(alone)
    for left, right in zip(outcome(together, x), outcome(alone, x), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-5)


def names_of(model):
    """Of `TOGETHER`, the linear layers that a model has."""
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if type(module) is nn.Linear}
    return [sorted(linear & {*names}) for names in TOGETHER]


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of experts
@pytest.mark.parametrize("name", sorted({*FAMILIES} - ALONE))
def test_every_family_has_the_gradients_of_pefts_layers(name, calls):
    """Those that call query, key and value with one tensor have one node for them, in every step."""
    model = tiny_model(name)
    names = names_of(model)
    torch.manual_seed(1)
    settings = LoraConfig(
        r=3, target_modules=[one for group in names for one in group], init_lora_weights=False
    )
    inject_adapter_in_model(settings, model)
    batch = packed(samples()[:2], rows=((0,), (1,)))
    found, nodes = [], []
    for one in (model, shared(model)):
        for _ in range(2):
            calls.clear()
            one.zero_grad()
            loss = CausalLM(one, packed=False)(batch)
            loss.backward()
            nodes.append([*calls])
        gradients = [p.grad.flatten() for p in trained(one) if p.grad is not None]
        found.append((loss.item(), torch.cat(gradients)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert (found[1][1] - found[0][1]).norm() <= 2e-5 * found[0][1].norm()
    assert nodes[2] == nodes[3]
    assert max(nodes[2]) == max(map(len, names)) > 1


@pytest.mark.parametrize("name", sorted(ALONE))
def test_other_families_have_no_two_such_layers(name):
    assert max(map(len, names_of(tiny_model(name)))) < 2
