"""Every architecture trains as plain transformers does sample by sample, packed wherever that is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from packed_rows import one_by_one, packed, samples
from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.errors import JobError
from shardwise.models.families import FAMILIES, attention_of
from shardwise.models.structure import find_blocks
from shardwise.objective.causal_lm import CausalLM
from tiny_models import tiny_model

PACKED = sorted(name for name, family in FAMILIES.items() if family.packing not in ((), ("state",)))
MASKED = [name for name in PACKED if FAMILIES[name].packing == ("mask",)]
LEAKING = (
    "bailing_hybrid", "bamba", "bloom", "falcon-alibi", "falcon_mamba", "jamba", "lfm2", "llama4_text",
    "mamba2", "minimax", "mpt", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xglm",
)  # fmt: skip
"""Architectures whose samples see each other in a row, also where the position ids restart."""


def norm(model: PreTrainedModel) -> float:
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(gradients).norm())


def check(loss: CausalLM, batch: MicroBatch, expected: tuple[float, float]) -> None:
    loss.model.zero_grad()
    measured = loss(batch)
    measured.backward()
    assert (measured.item(), norm(loss.model)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_and_plain_rows_equal_samples_one_by_one(name: str) -> None:
    model, pairs = tiny_model(name), samples()
    total = one_by_one(model, pairs)
    total.backward()
    expected = total.item(), norm(model)
    check(CausalLM(model, packed=False), packed(pairs, rows=tuple((i,) for i in range(len(pairs)))), expected)
    check(CausalLM(model), packed(pairs), expected)


@pytest.mark.parametrize("window", [5, None])
@pytest.mark.parametrize("name", MASKED)
def test_rows_of_one_segment_need_no_mask(name: str, window: int | None) -> None:
    """SDPA's fast kernels take none. A layer with a window does, and Doge, which adds to it."""
    (pair, *_), model = samples(), tiny_model(name, sliding_window=window)
    batch = packed([pair, pair], rows=((0,), (1,)), length=len(pair[0]))
    masked, plain = (replace(batch, single_segment_rows=rows) for rows in (0, 2))
    loss = CausalLM(model)
    total = loss(masked)
    total.backward()
    expected = total.item(), norm(model)
    check(loss, plain, expected)
    assert "attention_mask" in loss.inputs(masked)
    assert "attention_mask" in loss.inputs(replace(batch, single_segment_rows=1))


def test_most_families_with_masks_need_none_for_one_segment() -> None:
    batch = packed([samples()[0]], rows=((0,),), length=len(samples()[0][0]))
    batch = replace(batch, single_segment_rows=1)
    models = {name: CausalLM(tiny_model(name, sliding_window=None)) for name in MASKED}
    bare = {name for name, loss in models.items() if "attention_mask" not in loss.inputs(batch)}
    assert len(bare) == 40
    assert not bare & {"doge", "ministral", "gemma2", "gpt_oss"}
    windowed = CausalLM(tiny_model("phimoe", sliding_window=5))
    assert "attention_mask" in windowed.inputs(batch)
    assert "attention_mask" not in CausalLM(tiny_model("gpt2", attn_pdrop=0.1)).inputs(batch)


def test_sinks_are_kept_where_rows_of_one_segment_have_a_kernel_of_their_own() -> None:
    """On Hopper, which has no kernel with sinks for such rows; also where no layer has a window."""
    config = tiny_model("gpt_oss", sliding_window=None, layer_types=["full_attention"] * 2).config
    assert attention_of(config).windowed
    assert not CausalLM(tiny_model("gpt_oss", sliding_window=None)).separates(torch.device("meta"))
    assert CausalLM(tiny_model("llama")).separates(torch.device("meta"))


@pytest.mark.parametrize("name", LEAKING)
def test_what_is_refused_leaks_and_trains_on_plain_rows(name: str) -> None:
    model, pairs = tiny_model(name), samples()
    total = one_by_one(model, pairs)
    total.backward()
    expected = total.item(), norm(model)
    with pytest.raises(JobError, match="let samples"):
        CausalLM(model)
    plain = CausalLM(model, packed=False)
    assert attention_of(model.config).packing == "rows"
    check(plain, packed(pairs, rows=tuple((i,) for i in range(len(pairs)))), expected)

    batch = packed(pairs)
    labels = batch.labels.flatten()
    for positions in (None, batch.position_ids):
        given = {} if positions is None else {"position_ids": positions}
        logits = model(input_ids=batch.input_ids, use_cache=False, **given).logits.flatten(0, 1).float()
        leaked = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        assert abs(leaked.item() - expected[0]) > 1e-5 * expected[0]


@pytest.mark.parametrize("name", sorted({*PACKED, *LEAKING}))
def test_no_module_hands_a_view_of_its_weights_to_another(name: str) -> None:
    """ZeRO-3 and FSDP2 release weights when a block, or a module outside of blocks, is done."""
    (pair, *_), model, handed = samples(), tiny_model(name), []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    blocks = find_blocks(model)
    within = {part for block in blocks for part in block.modules()} - {*blocks}
    for module in {*model.modules()} - within:
        module.register_forward_hook(lambda *given: handed.extend(tree_leaves(given[-1])))
    CausalLM(model, packed=False)(packed([pair], rows=((0,),), length=len(pair[0])))
    tensors = [one for one in handed if isinstance(one, torch.Tensor)]
    assert len(tensors) > len(blocks)
    assert not weights & {one.untyped_storage().data_ptr() for one in tensors if one.numel()}


def test_most_architectures_are_among_them() -> None:
    assert len(PACKED) + len(LEAKING) >= 90
    assert not {*PACKED} & {*LEAKING}
