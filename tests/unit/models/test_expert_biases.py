"""Biases of experts looked up as embeddings give the same loss and the same gradients."""

from __future__ import annotations

import copy

import pytest
import torch

from shardwise.models.expert_biases import sum_in_parallel
from tiny_models import tiny_model


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_gradients_are_those_of_transformers(experts: str) -> None:
    plain = tiny_model("gpt_oss")
    plain.set_experts_implementation(experts)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_()
    ours = copy.deepcopy(plain)
    sum_in_parallel(ours)
    routed = [module for module in ours.modules() if "forward" in vars(module)]
    assert len(routed) == len(plain.model.layers)
    tokens = torch.arange(24).view(2, 12) % plain.config.vocab_size
    for model in (plain, ours, copy.deepcopy(ours)):
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found = [loss, *(p.grad for p in model.parameters())]
        if model is plain:
            expected = found
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-8)
    biases = {name for name, p in ours.named_parameters() if name.endswith("_bias") and p.grad.norm() > 0}
    assert len(biases) == 2 * len(routed)
