"""Experts published in mxfp4, as gpt-oss is, are read as transformers unpacks them, and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwise.errors import CheckpointError
from shardwise.job.schema import Model
from shardwise.models import mxfp4
from shardwise.models.build import BuiltModel, build_model

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def parts(experts: int, rows: int, groups: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and scales from 2**-9 to 2**2."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 130, (experts, rows, groups), generator=generator, dtype=torch.uint8)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder as gpt-oss is published: bf16, but for the experts' products."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [key for key in tensors if key.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = parts(experts, outputs, inputs // 32, len(tensors))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def built_from(folder: Path) -> BuiltModel:
    built = build_model(Model(source=str(folder)), dtype=torch.bfloat16, seed=0)
    built.weights.fill(built.model, torch.device("cpu"))
    return built


def test_values_are_transformers_own() -> None:
    blocks, scales = parts(3, 40, 5, 0)
    found = mxfp4.unpack(blocks, scales)
    assert found.shape == (3, 160, 40)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))
    assert len(found.unique()) > 50


def test_a_published_model_is_read_and_has_a_plain_config(published: Path) -> None:
    built = built_from(published)
    assert "published in mxfp4" in "".join(built.notes)
    assert not hasattr(built.skeleton.config, "quantization_config")
    stored, found = load_file(published / "model.safetensors"), built.model.state_dict()
    packed = [key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")]
    assert len(packed) == 4
    for key in packed:
        assert torch.equal(
            found[key], convert_moe_packed_tensors(stored[f"{key}_blocks"], stored[f"{key}_scales"])
        )
    others = stored.keys() - {f"{key}{part}" for key in packed for part in ("_blocks", "_scales")}
    assert all(torch.equal(found[key], stored[key]) for key in others)
    tokens = torch.arange(20).view(2, 10)
    built.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


NAME = "model.layers.1.mlp.experts.down_proj"
SHAPES = f"{NAME}_scales has the shape {{}}, and {NAME}_blocks has [4, 64, 3, 16]"


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("scales", lambda tensor: tensor[:2], SHAPES.format([2, 64, 3])),
        ("scales", lambda tensor: tensor[:, :, :0], SHAPES.format([4, 64, 0])),
        ("scales", lambda tensor: None, f"{NAME}_scales is missing"),
        ("scales", lambda tensor: tensor.float(), f"{NAME}_scales has the dtype F32, mxfp4 needs U8"),
        ("blocks", lambda tensor: tensor.float(), f"{NAME}_blocks has the dtype F32, mxfp4 needs U8"),
        ("blocks", lambda tensor: tensor.to(torch.int16), f"{NAME}_blocks has the dtype I16, mxfp4 needs U8"),
        ("blocks", lambda tensor: None, f"{NAME}_blocks is missing"),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    published: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor | None], said: str
) -> None:
    tensors = load_file(published / "model.safetensors")
    made = change(tensors.pop(f"{NAME}_{part}"))
    if made is not None:
        tensors[f"{NAME}_{part}"] = made.contiguous()
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as failure:
        built_from(published)
    assert said in str(failure.value)
    assert "config.json" not in str(failure.value)
