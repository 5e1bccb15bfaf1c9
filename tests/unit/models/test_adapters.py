"""Which layers of a mixture get an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packed_rows import packed, samples
from shardwise.errors import JobError
from shardwise.job.schema import Lora, Model
from shardwise.models.build import BuiltModel, build_model
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

WITH_LINEAR_ROUTERS = ("afmoe", "dbrx", "hunyuan_v1_moe", "jetmoe", "llama4_text", "phimoe")


def build(folder: Path, name: str, lora: Lora) -> BuiltModel:
    """From a folder with nothing but a config.json."""
    tiny_model(name).config.save_pretrained(folder)
    spec = Model(source=str(folder), weights="random", lora=lora)
    return build_model(spec, dtype=torch.float32, seed=0)


@pytest.mark.parametrize("name", WITH_LINEAR_ROUTERS)
def test_routers_get_no_adapter_and_the_others_a_gradient(tmp_path: Path, name: str) -> None:
    built = build(tmp_path, name, Lora(rank=2))
    built.weights.fill(built.model, torch.device("cpu"))
    pairs = samples()
    batch = packed(pairs, rows=tuple((i,) for i in range(len(pairs))))
    CausalLM(built.model, packed=False)(batch).backward()
    trained = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    assert trained
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert [name for name in trained if {"router", "gate"} & {*name.split(".")}] == []


def test_a_router_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="router"):
        build(tmp_path, "phimoe", Lora(rank=2, targets=["router"]))


def test_a_config_with_infinite_numbers_is_read(tmp_path: Path) -> None:
    """transformers writes them as objects, here for the time steps of Mamba-2's layers."""
    built = build(tmp_path, "granitemoehybrid", Lora(rank=2, targets=["q_proj", "o_proj"]))
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    assert built.trainable > 0
