"""A tiny, seeded model of each architecture, without noise in training, whose attention matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from packed_rows import VOCABULARY

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_channels": 8,
    "rotary_dim": 4,
    "lru_width": 32,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "sliding_window": 5,
    "use_sliding_window": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "state_size": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_NOISE = (
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "emb_pdrop", "attention_dropout", "hidden_dropout", "dropout",
    "residual_dropout", "embedding_dropout", "activation_dropout", "layerdrop", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "router_jitter_noise", "input_jitter_noise",
)  # fmt: skip
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 4, "mamba_n_groups": 1}

EXTRA: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "falcon": {"head_dim": None, "alibi": False},
    "falcon-alibi": {"head_dim": None, "alibi": True},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2},
    "granitemoe": {"logits_scaling": 3.0},
    "granitemoeshared": {"logits_scaling": 3.0, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"moe_topk": [2, 1]},
    "hyperclovax": {"logits_scaling": 0.5},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_hidden_layers": 4, "attention_chunk_size": 5, "floor_scale": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "opt": {"word_embed_proj_dim": 16},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 5},
    "bamba": _MAMBA2,
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16,
    },
    "jamba": {
        "num_hidden_layers": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """Build `name`, an architecture, perhaps with a variant after a dash; `changes` are of its config.

    A size applies where the architecture's config has a value of that name.
    """
    kind = name.partition("-")[0] if name not in CONFIG_MAPPING else name
    given = CONFIG_MAPPING[kind]()
    values = {**_SIZES, **dict.fromkeys(_NOISE, 0.0)}
    values = {key: value for key, value in values.items() if hasattr(given, key)}
    values |= {**EXTRA.get(kind, {}), **EXTRA.get(name, {}), **changes}
    config = CONFIG_MAPPING[kind].from_dict({k: v for k, v in values.items() if v is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model
