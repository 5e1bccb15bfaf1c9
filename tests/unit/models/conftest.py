"""Tiny models of every architecture the catalog knows, written as transformers writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from shardwise.job.schema import Model

_LLAMA = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_LLAMA, "head_dim": 8}),
    "llama-tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 16}),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 8}),
    "phi3": ("phi3", {**_LLAMA, **_IDS}),
    "gemma2": ("gemma2", {**_LLAMA, **_IDS, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {**_LLAMA, **_IDS, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "gpt2": ("gpt2", {"vocab_size": 320, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **_IDS}),
    "gpt_neo": (
        "gpt_neo",
        {
            "vocab_size": 320,
            "max_position_embeddings": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            **_IDS,
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            "vocab_size": 320,
            "max_position_embeddings": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **_IDS,
        },
    ),
    "opt": (
        "opt",
        {
            "vocab_size": 320,
            "max_position_embeddings": 64,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            **_IDS,
        },
    ),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # its first block is dense, in its second an expert of all tokens has the names of the dense one's layers
    "glm4_moe": (
        "glm4_moe",
        {
            **_LLAMA,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
        },
    ),
}


def make(name: str) -> PreTrainedModel:
    """A tiny model that transformers initialised, with norms and biases moved off their round values."""
    kind, values = TINY[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(dict(values)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Model]:
    """Writes a tiny model with save_pretrained and gives the job's `model` section for it."""

    def save(name: str, **changes: Any) -> Model:
        folder = tmp_path / name
        make(name).save_pretrained(folder)
        return Model(source=str(folder), **changes)

    return save


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[[str], str]:
    """Writes only the config of a tiny model; gives the folder."""

    def write(name: str) -> str:
        kind, values = TINY[name]
        folder = tmp_path / f"{name}-config"
        CONFIG_MAPPING[kind].from_dict(dict(values)).save_pretrained(folder)
        return str(folder)

    return write
