"""Parameters that a model wants in fp32 leave the module, keep their names, and are still trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.engines.runtime.parameters import Fp32Parameters, chosen


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).bfloat16()
    module[0].bias.data = module[0].bias.data.float()
    module[1].scale = nn.Parameter(torch.ones(2))
    return module


def test_only_what_is_fp32_is_taken_and_the_module_still_computes_with_it() -> None:
    module = model()
    fp32 = Fp32Parameters(module, precision="bf16")
    fp32.take(module[0])
    assert set(fp32.tensors) == {"0.bias"}
    fp32.take(module)
    assert set(fp32.tensors) == {"0.bias", "1.scale"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module[0].bias is fp32.tensors["0.bias"]
    (module[0].bias * module[1].scale).sum().backward()
    assert torch.equal(fp32.tensors["1.scale"].grad, module[0].bias)


def test_a_model_in_fp32_and_a_frozen_parameter() -> None:
    module = model()
    exact = Fp32Parameters(module, precision="fp32")
    exact.take(module)
    assert exact.tensors == {}
    module[1].scale.requires_grad_(False)
    fp32 = Fp32Parameters(module, precision="bf16")
    fp32.take(module)
    assert set(fp32.tensors) == {"0.bias", "1.scale"}
    assert set(fp32.trainable) == {"0.bias"}
    assert list(chosen(fp32.tensors.items(), None)) == ["0.bias"]
    assert list(chosen(fp32.tensors.items(), ["1.scale"])) == ["1.scale"]


def test_the_norm_is_of_all_their_gradients() -> None:
    module = model()
    fp32 = Fp32Parameters(module, precision="bf16")
    fp32.take(module)
    fp32.tensors["0.bias"].grad = torch.tensor([3.0, 0.0])
    fp32.tensors["1.scale"].grad = torch.tensor([0.0, 4.0])
    assert fp32.norm().item() == pytest.approx(5.0)
