from __future__ import annotations

import torch
from torch import nn

from shardwise.engine.parameters import decay_by_name, parameter_groups, trainable


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
    assert decay_by_name(Model(), 0.1) == {
        "a_log": 0.0,
        "embedding.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "linear.weight": 0.1,
        "linear.bias": 0.0,
    }


def test_each_trainable_parameter_is_in_one_group() -> None:
    model = Model()
    groups = parameter_groups(trainable(model), decay_by_name(model, 0.1))
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 2), (0.0, 4)]
    members = [p for group in groups for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters() if p.requires_grad}


def test_without_decay_there_is_one_group() -> None:
    model = Model()
    assert len(parameter_groups(trainable(model), decay_by_name(model, 0.0))) == 1
