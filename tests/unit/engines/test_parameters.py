from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engines.runtime.parameters import groups_by_name, parameter_groups, trainable
from shardwise.job.schema import Optimizer


def decays(model: nn.Module) -> dict[str, float]:
    groups = groups_by_name(model, Optimizer(weight_decay=0.1))
    return {name: group.weight_decay for name, group in groups.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.a_log = nn.Parameter(torch.zeros(4, 4))
        self.a_log._no_weight_decay = True  # type: ignore[attr-defined]
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_matrices_decay_and_vectors_exempt_and_frozen_ones_do_not() -> None:
    assert decays(Model()) == {
        "a_log": 0.0,
        "embedding.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "linear.weight": 0.1,
        "linear.bias": 0.0,
    }


def test_each_trainable_parameter_is_in_one_group() -> None:
    model = Model()
    groups = parameter_groups(trainable(model), groups_by_name(model, Optimizer(weight_decay=0.1)))
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 2), (0.0, 4)]
    members = [p for group in groups for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters() if p.requires_grad}


def test_without_decay_there_is_one_group() -> None:
    model = Model()
    assert len(parameter_groups(trainable(model), groups_by_name(model, Optimizer()))) == 1


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "sizes", "exempt"),
    [
        ("cohere", {"use_qk_norm": True}, {"q_norm.weight": (4, 8), "k_norm.weight": (2, 8)}),
        (
            "gpt_oss",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            {"gate_up_proj_bias": (4, 96), "down_proj_bias": (4, 32)},
        ),
        ("recurrent_gemma", {}, {"input_gate_bias": (4, 8), "recurrent_gate_bias": (4, 8)}),
    ],
)
def test_biases_and_norms_that_are_matrices_never_decay(
    kind: str, sizes: dict[str, Any], exempt: dict[str, tuple[int, int]]
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes))
    parameters, decay = dict(model.named_parameters()), decays(model)
    matrices = {name for name, parameter in parameters.items() if parameter.ndim >= 2}
    spared = {name for name in matrices if decay[name] == 0.0}
    found = {end: {tuple(parameters[n].shape) for n in spared if n.endswith(end)} for end in exempt}
    assert found == {end: {shape} for end, shape in exempt.items()}
    assert all(name.endswith(tuple(exempt)) for name in spared)
    assert {decay[name] for name in matrices - spared} == {0.1}


class NormedEmbedding(nn.Embedding):
    """Inkling's: an embedding that is normed after the look-up."""


class NormHead(nn.Linear):
    """Baichuan's: an output head whose rows are normed."""


def test_matrices_of_normed_layers_decay_and_so_do_those_below_a_module_called_norm() -> None:
    model = nn.Module()
    model.embed, model.head = NormedEmbedding(5, 4), NormHead(4, 5, bias=False)
    model.layernorm = nn.Sequential(nn.LayerNorm((2, 4)), nn.Linear(4, 4))  # as in AXK2
    assert decays(model) == {
        "embed.weight": 0.1,
        "head.weight": 0.1,
        "layernorm.0.weight": 0.0,
        "layernorm.0.bias": 0.0,
        "layernorm.1.weight": 0.1,
        "layernorm.1.bias": 0.0,
    }
