"""Which layers of a mixture get an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packed_rows import packed, samples
from shardwise.errors import JobError
from shardwise.job.schema import Lora, Model
from shardwise.models.build import BuiltModel, build_model
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

WITH_LINEAR_ROUTERS = ("afmoe", "dbrx", "hunyuan_v1_moe", "jetmoe", "llama4_text", "phimoe")


_LATENT = {"head_dim": None, "num_key_value_heads": 4}
_COMPRESSED = {
    "compress_rates": dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), 2)
}
LEFT_OUT: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "axk2": (_LATENT, "wq_b", "indexer", "only chooses tokens"),
    "bart": (
        {"decoder_attention_heads": 4, "decoder_layers": 2},
        "encoder_attn.q_proj",
        "encoder_attn",
        "encoder",
    ),
    "deepseek_v32": (_LATENT, "wq_b", "indexer", "only chooses tokens"),
    "deepseek_v4": (_COMPRESSED, "o_a_proj", "o_a_proj", "is no plain product"),
    "glm_moe_dsa": (_LATENT, "wq_b", "indexer", "only chooses tokens"),
    "granitemoehybrid": ({}, "out_proj", "out_proj", "is read by a kernel"),
    "hy_v4": ({}, "wq_b", "indexer", "only chooses tokens"),
    "nemotron_h": ({}, "out_proj", "out_proj", "is read by a kernel"),
}
"""Changes, a layer that can have no adapter, what the note calls it, and why."""


def build(folder: Path, name: str, lora: Lora, **changes: Any) -> BuiltModel:
    """From a folder with nothing but a config.json."""
    tiny_model(name, **changes).config.save_pretrained(folder)
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


@pytest.mark.parametrize("name", LEFT_OUT)
def test_layers_that_an_adapter_cannot_train_get_none_and_the_others_a_gradient(
    tmp_path: Path, name: str
) -> None:
    changes, _, part, why = LEFT_OUT[name]
    built = build(tmp_path, name, Lora(rank=2), **changes)
    built.weights.fill(built.model, torch.device("cpu"))
    pairs = samples()
    CausalLM(built.model, packed=False)(packed(pairs, rows=tuple((i,) for i in range(len(pairs))))).backward()
    trained = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    assert len(trained) >= 18
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert [name for name in trained if part in name.split(".")] == []
    note = built.notes[-1]
    assert note.startswith(f"no adapter for {part}: it ")
    assert why in note


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_layer_that_an_adapter_cannot_train_is_no_target(tmp_path: Path, name: str) -> None:
    changes, target, _, why = LEFT_OUT[name]
    with pytest.raises(JobError, match=f"{target} can have no adapter: it .*{why}") as caught:
        build(tmp_path, name, Lora(rank=2, targets=[target]), **changes)
    assert caught.value.problems[0].where == "model.lora.targets"
    fix = caught.value.problems[0].fix
    assert fix.startswith("choose from ")
    assert f"{target}," not in fix


def test_a_target_of_two_meanings_is_adapted_where_it_trains(tmp_path: Path) -> None:
    changes = LEFT_OUT["bart"][0]
    built = build(tmp_path, "bart", Lora(rank=2, targets=["q_proj"]), **changes)
    adapted = {name.partition(".lora_")[0] for name in built.trainable_shapes}
    assert adapted == {f"model.decoder.layers.{layer}.self_attn.q_proj" for layer in (0, 1)}


@pytest.mark.parametrize("name", ["deepseek_v4", "nemotron_h", "glm_moe_dsa", "bart"])
def test_adapters_that_leave_layers_out_start_at_transformers_loss(tmp_path: Path, name: str) -> None:
    model, pairs = tiny_model(name, **LEFT_OUT[name][0]), samples()
    model.save_pretrained(tmp_path)
    logits = [model.eval()(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in pairs]
    targets = torch.cat([labels for _, labels in pairs])
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), targets, reduction="sum")
    built = build_model(Model(source=str(tmp_path), lora=Lora(rank=2)), dtype=torch.float32, seed=0)
    built.weights.fill(built.model, torch.device("cpu"))
    rows = packed(pairs, rows=tuple((i,) for i in range(len(pairs))))
    found = CausalLM(built.model, packed=False)(rows)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_router_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="router"):
        build(tmp_path, "phimoe", Lora(rank=2, targets=["router"]))


def test_a_config_with_infinite_numbers_is_read(tmp_path: Path) -> None:
    """transformers writes them as objects, here for the time steps of Mamba-2's layers."""
    built = build(tmp_path, "granitemoehybrid", Lora(rank=2, targets=["q_proj", "o_proj"]))
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    assert built.trainable > 0
