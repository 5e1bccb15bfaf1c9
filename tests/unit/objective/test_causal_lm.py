"""Packed rows give Hugging Face's own loss and gradients of the samples taken one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from packed_rows import VOCABULARY, one_by_one, packed, samples
from shardwise.errors import JobError
from shardwise.kernels import attention
from shardwise.models.families import FAMILIES
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}

ARCHITECTURES = {
    "llama": ("varlen", GROUPED),
    "llama-tied": ("varlen", {**GROUPED, "tie_word_embeddings": True}),
    "mistral-window": ("varlen", {**GROUPED, "sliding_window": 5}),
    "mixtral": ("varlen", {**GROUPED, "num_local_experts": 4}),
    "mixtral-window": ("varlen", {**GROUPED, "num_local_experts": 4, "sliding_window": 5}),
    "qwen2": ("varlen", GROUPED),
    "qwen2-window": ("varlen", {**GROUPED, **WINDOW, "max_window_layers": 1}),
    "qwen3": ("varlen", GROUPED),
    "qwen3-window": ("varlen", {**GROUPED, **WINDOW, "max_window_layers": 1}),
    "qwen3_moe": ("varlen", {**GROUPED, **MIXTURE}),
    "qwen3_moe-window": ("varlen", {**GROUPED, **MIXTURE, **WINDOW}),
    "qwen2_moe": ("varlen", {**GROUPED, **MIXTURE, "shared_expert_intermediate_size": 16}),
    "qwen2_moe-window": (
        "varlen",
        {**GROUPED, **MIXTURE, **WINDOW, "shared_expert_intermediate_size": 16, "max_window_layers": 2},
    ),
    "phi": ("varlen", SIZES),
    "phi3": ("varlen", GROUPED),
    "phi3-window": ("varlen", {**GROUPED, "sliding_window": 5}),
    "gemma": ("varlen", GROUPED),
    "gemma3_text": (
        "varlen",
        {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo": ("varlen", GROUPED),
    "olmo2": ("varlen", GROUPED),
    "cohere": ("varlen", {**GROUPED, "logit_scale": 0.25}),
    "cohere2": (
        "varlen",
        {**GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("varlen", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "granite": ("varlen", {**GROUPED, "logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "smollm3": ("varlen", {**GROUPED, "no_rope_layers": [1, 0]}),
    "smollm3-window": ("varlen", {**GROUPED, **WINDOW, "no_rope_layers": [1, 0]}),
    "starcoder2-window": (
        "varlen",
        {**GROUPED, "sliding_window": 5, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "starcoder2": ("varlen", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gpt_neox": ("varlen", {**SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "gpt2": ("varlen", {**GPT2_SIZES, **NO_DROPOUT, "scale_attn_by_inverse_layer_idx": True}),
    "opt": ("varlen", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "gpt2-mask": ("mask", {**GPT2_SIZES, **NO_DROPOUT, "attn_pdrop": 1e-9}),
    "opt-mask": (
        "mask",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 1e-9},
    ),
    "gemma2": (
        "mask",
        {
            **GROUPED,
            "sliding_window": 5,
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 1,
        },
    ),
    "gpt_neo": (
        "varlen",
        {
            **SIZES,
            "attention_types": [[["global", "local"], 1]],
            "num_layers": 2,
            "window_size": 5,
            "attention_dropout": 0.0,
        },
    ),
    "gptj": ("varlen", {**GPT2_SIZES, **NO_DROPOUT, "rotary_dim": 4}),
    "codegen": ("varlen", {**GPT2_SIZES, **NO_DROPOUT, "rotary_dim": 4}),
    "stablelm": ("mask", GROUPED),
    "falcon": ("varlen", {**SIZES, "alibi": False}),
}


def tiny(model_type, sizes, attention=None):
    """A seeded model whose weights are large enough for attention to matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_equal_samples_one_by_one(name):
    packing, sizes = ARCHITECTURES[name]
    reference, pairs = tiny(name.partition("-")[0], sizes, "eager"), samples()
    expected = one_by_one(reference, pairs)
    expected.backward()
    right = gradients(reference)

    loss = CausalLM(tiny(name.partition("-")[0], sizes))
    assert loss.packing == packing
    assert loss.fused
    check(loss, packed(pairs), expected.item(), right)


def test_every_architecture_with_a_window_is_among_them():
    """Without a mask only the attention's own argument, or its module, says how far it sees."""
    can = {
        k
        for k, f in FAMILIES.items()
        if "varlen" in f.packing and hasattr(AutoConfig.for_model(k), "sliding_window")
    }
    assert can == {
        name.partition("-")[0]
        for name, (packing, sizes) in ARCHITECTURES.items()
        if packing == "varlen" and "sliding_window" in sizes
    }


def check(loss, batch, expected, right):
    """The loss and all its gradients are those expected."""
    measured = loss(batch)
    measured.backward()
    assert measured.dtype == torch.float32
    assert measured.item() == pytest.approx(expected, rel=1e-5)
    left = gradients(loss.model)
    assert left.keys() == right.keys()
    norm = torch.stack([g.norm() for g in right.values()]).norm()
    for key, gradient in left.items():
        assert (gradient - right[key]).norm() <= 1e-5 * norm, key


@pytest.mark.parametrize("name", [name for name, value in ARCHITECTURES.items() if value[0] == "varlen"])
@pytest.mark.parametrize("rows", [((2,), (0, 1), (4, 3)), ((2,),)], ids=["mixed", "all"])
def test_rows_of_one_sample_may_go_to_another_kernel(monkeypatch, name, rows):
    _, sizes = ARCHITECTURES[name]
    pairs = samples()
    reference = tiny(name.partition("-")[0], sizes, "eager")
    expected = one_by_one(reference, [pairs[index] for row in rows for index in row])
    expected.backward()

    loss = CausalLM(tiny(name.partition("-")[0], sizes))
    other, calls = attention._single_segments, []
    monkeypatch.setattr(attention, "single_segments_are_faster", lambda device, head: True)
    monkeypatch.setattr(attention, "_single_segments", lambda *given: calls.append(given[3]) or other(*given))
    check(loss, packed(pairs, rows=rows, length=12), expected.item(), gradients(reference))
    assert set(calls) == (set() if {"sliding_window", "window_size"} & {*sizes} else {1})


def test_no_mask_is_made_where_the_kernel_needs_none(monkeypatch):
    """Looking for packed samples in the position ids would make the host wait for the GPU."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)
    assert torch.isfinite(CausalLM(tiny("llama", GROUPED))(packed(samples())))


BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}


def test_an_architecture_that_cannot_keep_samples_apart_is_refused():
    with pytest.raises(JobError, match="bloom") as caught:
        CausalLM(tiny("bloom", BLOOM))
    assert caught.value.problems[0].where == "data.packing"
    assert "packing: false" in caught.value.problems[0].fix


def test_the_same_architecture_trains_on_unpacked_rows():
    model, pairs = tiny("bloom", BLOOM), samples()
    expected = one_by_one(model, pairs)
    rows = packed(pairs, rows=tuple((index,) for index in range(len(pairs))))
    assert CausalLM(model, packed=False)(rows).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_head_with_an_adapter_goes_through_the_models_own_logits():
    model, pairs = tiny("llama", GROUPED), samples()
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model = inject_adapter_in_model(config, model)
    expected = one_by_one(model, pairs)
    loss = CausalLM(model)
    assert not loss.fused
    assert loss(packed(pairs)).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["falcon", "gpt_neo", "gptj", "codegen", "llama"])
def test_logits_at_a_token_are_the_models_own(name):
    """Samples are generated by them; these heads do not hand the borders on to their model."""
    model, pairs = tiny_model(name), samples()
    ids = [torch.as_tensor(ids) for ids, _ in pairs]
    expected = model(input_ids=ids[1][None]).logits[0, -1]
    at = torch.tensor([len(ids[0]) + len(ids[1]) - 1])
    loss = CausalLM(model)
    assert torch.allclose(loss(packed(pairs), at=at)[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="borders"):
        model(input_ids=ids[0][None])


def test_the_head_still_gives_logits_to_those_who_ask_for_them():
    model = tiny("llama", GROUPED)
    ids = samples()[0][0][None]
    before = model(input_ids=ids).logits
    CausalLM(model)
    model.set_attn_implementation("sdpa")
    assert torch.allclose(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-6)


def test_a_call_without_borders_is_refused_rather_than_attending_everywhere():
    model = tiny("llama", GROUPED)
    CausalLM(model)
    with pytest.raises(RuntimeError, match="borders"):
        model(input_ids=samples()[0][0][None])


def test_recomputing_activations_changes_nothing():
    pairs = samples()
    losses = [CausalLM(tiny("llama", GROUPED)) for _ in range(2)]
    for layer in losses[1].model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for loss in losses:
        loss.train()
        loss(packed(pairs)).backward()
    plain, recomputed = (gradients(loss.model) for loss in losses)
    assert all(torch.equal(plain[key], recomputed[key]) for key in plain)
