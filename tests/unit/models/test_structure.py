"""Buffers that no file holds have transformers' values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from packed_rows import one_by_one, packed, samples
from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.build import build_model
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model


def falcon_h1(folder: Path) -> PreTrainedModel:
    """Saved: its decoder sets buffers of its layers, which no file holds."""
    model = tiny_model("falcon_h1", ssm_multipliers=[0.5, 0.25, 2.0, 3.0, 4.0])
    model.save_pretrained(folder)
    return model


def test_buffers_that_a_parent_computes_are_those_of_transformers(tmp_path: Path) -> None:
    model, pairs = falcon_h1(tmp_path), samples()
    built = build_model(Model(source=str(tmp_path)), dtype=torch.float32, seed=0)
    built.weights.fill(built.model, torch.device("cpu"))
    expected = dict(model.named_buffers())
    assert sum(name.endswith("mup_vector") for name in expected) == 2
    assert all(torch.equal(buffer, expected[name]) for name, buffer in built.model.named_buffers())
    loss = one_by_one(model.train(), pairs)
    rows = packed(pairs, rows=tuple((i,) for i in range(len(pairs))))
    found = CausalLM(built.model, packed=False).train()(rows)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_buffer_that_no_initialisation_sets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = falcon_h1(tmp_path)
    monkeypatch.setattr(type(model), "_init_weights", lambda *_: None)
    monkeypatch.setattr(type(model.model), "_init_weights", lambda *_: None)
    with pytest.raises(JobError) as caught:
        build_model(Model(source=str(tmp_path)), dtype=torch.float32, seed=0)
    what = caught.value.problems[0].what
    assert what.startswith("the model's code sets ")
    assert what.endswith(" only when it is built in memory")
