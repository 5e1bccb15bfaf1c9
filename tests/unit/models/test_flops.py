"""FLOPs of a trained token, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from shardwise.job.schema import Lora, Model
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.flops import attention_flops_per_token, matmul_parameters, train_flops_per_token
from tiny_models import tiny_model


def build(name: str, **options: object) -> BuiltModel:
    model = Model.model_validate({"source": name, "weights": "random", **options})
    return build_model(model, dtype=torch.bfloat16, seed=0)


def test_llama_2_7b_at_2048() -> None:
    built = build("llama-2-7b")
    norms = 65 * 4096
    embedding = 32000 * 4096
    matrices = 6_738_415_616 - norms - embedding
    attention = 12 * 32 * 4096 * (2048 + 1) / 2
    flops = train_flops_per_token(built, sequence_length=2048)
    assert flops == 6 * matrices + attention
    assert flops == pytest.approx(6 * 6.74e9, rel=0.03)  # what everybody's rule of thumb says


def test_a_tied_head_is_a_matrix_too_and_a_looked_up_embedding_is_not() -> None:
    built = build("gpt2")
    blocks = 12 * 12 * 768**2
    assert matmul_parameters(built.skeleton) == blocks + 50257 * 768
    untied = build("tiny-llama")
    tied = build("tiny-llama-tied")
    assert matmul_parameters(untied.skeleton) == matmul_parameters(tied.skeleton)


def test_frozen_matrices_cost_two_thirds() -> None:
    full = build("llama-3.1-8b")
    lora = build("llama-3.1-8b", lora=Lora(rank=16))
    base = matmul_parameters(full.skeleton)
    attention = attention_flops_per_token(full.config, 4096)
    assert train_flops_per_token(full, sequence_length=4096) == 6 * base + attention
    assert train_flops_per_token(lora, sequence_length=4096) == 4 * base + 6 * 41_943_040 + attention


def test_what_was_announced_does_not_change_when_an_engine_cuts_the_parameters() -> None:
    built = build("tiny-llama", lora=Lora(rank=4))
    before = train_flops_per_token(built, sequence_length=64)
    built.weights.fill(built.model, torch.device("cpu"))
    for parameter in built.model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert train_flops_per_token(built, sequence_length=64) == before


def keys_seen(length: int, window: int) -> float:
    return sum(min(position, window) for position in range(1, length + 1)) / length


@pytest.mark.parametrize(
    ("kind", "values", "windows"),
    [
        ("mistral", {"num_hidden_layers": 2, "sliding_window": 10}, [10, 10]),
        ("mistral", {"num_hidden_layers": 2, "sliding_window": None}, [100, 100]),
        (
            "gemma2",
            {"num_hidden_layers": 2, "sliding_window": 10, "head_dim": 64, "num_attention_heads": 64},
            [10, 100],
        ),
        (
            "gpt_neo",
            {
                "num_layers": 2,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 10,
                "hidden_size": 4096,
                "num_heads": 16,
            },
            [100, 10],
        ),
    ],
)
def test_a_window_bounds_the_keys(kind: str, values: dict[str, object], windows: list[int]) -> None:
    config = CONFIG_MAPPING[kind].from_dict(dict(values))
    expected = sum(12 * 4096 * keys_seen(100, window) for window in windows)
    assert attention_flops_per_token(config, 100) == pytest.approx(expected)


def test_only_the_experts_a_token_is_sent_to_count() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    values = {**config, "num_key_value_heads": 4, "vocab_size": 320, "num_local_experts": 8}
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING["mixtral"].from_dict({**values, "num_experts_per_tok": 2})
        )
    attention = 4 * 64 * 64
    expert = 3 * 64 * 128
    router = 64 * 8
    assert matmul_parameters(model) == attention + 2 * expert + router + 320 * 64


MIXTURES = {
    "mixtral": {"sliding_window": None},
    "dbrx": {},
    "jetmoe": {},
    "gpt_oss": {"sliding_window": 64},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
    "olmoe": {},
    "granitemoe": {},
    "phimoe": {"sliding_window": None},
    "ernie4_5_moe": {},
    "glm4_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "hunyuan_v1_moe": {},
    "llama": {},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_flops_of_a_forward_pass_are_those_torch_counts(kind: str) -> None:
    """Two a parameter, and four a unit of attention width and key: eager attention multiplies with all."""
    model, tokens = tiny_model(kind, **MIXTURES[kind]), 16
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False)
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    attention = attention_flops_per_token(model.config, tokens) / 3 * 2 * tokens / (tokens + 1)
    assert attention == pytest.approx(counted.pop("aten.bmm") / tokens)
    assert matmul_parameters(model) == sum(counted.values()) / 2 / tokens


def test_a_model_without_attention_heads_has_no_attention() -> None:
    model = tiny_model("rwkv")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    assert attention_flops_per_token(model.config, 16) == 0.0
    assert matmul_parameters(model) == counter.get_total_flops() / 2 / 16
