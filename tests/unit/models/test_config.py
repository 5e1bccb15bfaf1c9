"""Rows longer than a model's learned positions are refused before anything runs."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.build import build_model, check_length


@pytest.mark.parametrize(
    ("source", "limit"),
    [("tiny-gpt2", 512), ("gpt-neo-125m", 2048), ("tiny-llama", None), ("pythia-160m", None)],
)
def test_only_learned_positions_have_an_end(source: str, limit: int | None) -> None:
    built = build_model(Model(source=source, weights="random"), dtype=torch.float32, seed=0)
    if limit is None:
        check_length(built, positions := built.config.max_position_embeddings)
        assert not built.notes
        check_length(built, 1_000_000)
        assert f"rows of 1000000 tokens exceed the model's {positions} positions" in built.notes[0]
        return
    check_length(built, limit)
    with pytest.raises(JobError) as caught:
        check_length(built, limit + 1)
    assert caught.value.problems[0].where == "data.sequence_length"
    assert f"exceed the model's {limit} positions" in caught.value.problems[0].what
