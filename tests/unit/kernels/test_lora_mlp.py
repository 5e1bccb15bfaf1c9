"""The fused MLP is that of transformers with PEFT's layers; and where it is not plain, it is theirs."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from lora_layers import (
    assert_gradients_have_memory_of_their_own,
    assert_trained_alike_without_gradient_of_the_input,
    outcome,
)
from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.lora_mlp import LoraMlp, fuse_lora_mlps

SIZES = {"hidden_size": 6, "intermediate_size": 10, "num_attention_heads": 1, "num_key_value_heads": 1}
HERE = Path(__file__).parent


def mlp(kind=LlamaMLP, config=LlamaConfig, *, shape=None, **lora):
    """An MLP with random adapters, in float64, inside a model: PEFT looks at names."""
    torch.manual_seed(0)
    given = {"hidden_act": "silu"} if config is LlamaConfig else {"hidden_activation": "gelu_pytorch_tanh"}
    model = nn.ModuleDict({"mlp": kind(config(**SIZES, **given, **(shape or {})))}).double()
    settings = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "init_lora_weights": False,
    }
    return inject_adapter_in_model(LoraConfig(**(settings | lora)), model).double()["mlp"]


def fused(model, *, gelu=False, expected=1):
    other = copy.deepcopy(model)
    fuse_lora(other)
    assert fuse_lora_mlps(other, gelu=gelu) == expected
    return other


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("shape", [(5, 6), (2, 4, 6)])
def test_outputs_and_gradients_are_pefts(gelu, shape):
    peft = mlp(GemmaMLP, GemmaConfig) if gelu else mlp()
    x = torch.randn(shape, dtype=torch.float64)
    expected, measured = outcome(peft, x), outcome(fused(peft, gelu=gelu), x)
    assert len(measured) == 8
    for left, right in zip(measured, expected, strict=True):
        assert left.shape == right.shape
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-13)


def test_it_keeps_two_widths_a_token_and_no_third():
    """x, gate, up, and the reduced values; `hidden` is computed again."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused(mlp())(torch.randn(4, 6, dtype=torch.float64))
    rows = sorted(tuple(t.shape) for t in kept if t.shape[0] == 4)
    assert rows == [(4, 3), (4, 6), (4, 6), (4, 10), (4, 10)]


def test_an_input_without_gradient_still_trains_the_adapters():
    peft = mlp()
    x = torch.randn(5, 6, dtype=torch.float64)
    assert_trained_alike_without_gradient_of_the_input(fused(peft), peft, x)


def test_outputs_may_be_changed_in_place():
    peft = mlp()
    other, x = fused(peft), torch.randn(2, 5, 6, dtype=torch.float64)
    for model in (peft, other):
        y = model(x)
        y += 1.0
        (y * y).sum().backward()
    for left, right in zip(other.parameters(), peft.parameters(), strict=True):
        assert left.grad is None or torch.allclose(left.grad, right.grad, rtol=1e-12)


def test_gradients_of_gate_and_up_have_memory_of_their_own():
    assert_gradients_have_memory_of_their_own(fused(mlp()), torch.randn(5, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "lora", [{"target_modules": ["gate_proj", "down_proj"]}, {"lora_dropout": 0.1}, {"use_dora": True}]
)
def test_an_mlp_that_is_not_plain_is_left_alone(lora):
    fused(mlp(**lora), expected=0)


@pytest.mark.parametrize(
    "options",
    [{"shape": {"mlp_bias": True}}, {"rank_pattern": {"up_proj": 2}}, {"alpha_pattern": {"up_proj": 2}}],
)
def test_layers_that_do_not_fit_are_computed_one_by_one(options, monkeypatch):
    monkeypatch.setattr(LoraMlp, "apply", None)
    peft = mlp(**options)
    x = torch.randn(5, 6, dtype=torch.float64)
    for left, right in zip(outcome(fused(peft), x), outcome(peft, x), strict=True):
        assert torch.allclose(left, right, rtol=1e-12, atol=1e-13)


def test_a_merged_or_disabled_adapter_is_honoured():
    peft = mlp()
    other, x = fused(peft), torch.randn(5, 6, dtype=torch.float64)
    with_adapter = other(x)
    other.up_proj.merge()
    assert torch.allclose(other(x), with_adapter, rtol=1e-12)
    other.up_proj.unmerge()
    for layer in (other.gate_proj, other.up_proj, other.down_proj):
        layer.enable_adapters(False)
    base = [layer.base_layer for layer in (peft.gate_proj, peft.up_proj, peft.down_proj)]
    assert torch.allclose(other(x), base[2](nn.functional.silu(base[0](x)) * base[1](x)), rtol=1e-12)


@pytest.mark.parametrize("inner", ["base_layer", "lora_A"])
def test_tensor_parallelism_that_replaces_an_inner_forward_is_called(inner):
    """Its layers sum over ranks; reading their weights instead would train wrongly, without a word."""
    other, called = fused(mlp()), []
    part = other.down_proj.base_layer if inner == "base_layer" else other.down_proj.lora_A["default"]
    original = part.forward
    part.forward = lambda x: called.append(1) or original(x)
    x = torch.randn(5, 6, dtype=torch.float64)
    assert torch.allclose(other(x), mlp()(x), rtol=1e-12)
    assert called == [1]


def test_the_gpus_kernels_equal_float64_in_the_interpreter():
    """Ranks and sizes that no block divides, more than one block of a rank, both activations, both passes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "lora_mlp_worker"],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert len(results) == 6
    for case, errors in results.items():
        assert len(errors) == 4
        bound = 1e-2 if "bf16" in case else 1e-6
        assert all(error < bound for error in errors.values()), (case, errors)
