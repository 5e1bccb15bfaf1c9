"""Each family's model, cut into stages and run one stage after the other, is the uncut model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.facts import Architecture
from shardwise.engines.pipeline.runtime.model import CutModel
from shardwise.errors import JobError
from shardwise.models.families import FAMILIES
from shardwise.models.structure import checkpoint_blocks, find_blocks
from shardwise.objective.causal_lm import CausalLM

CUT = sorted(kind for kind, family in FAMILIES.items() if family.stages)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}


def loss_module(kind: str, **changes: Any) -> CausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {**(GPT2 if kind == "gpt2" else SHAPE), **changes}
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    return CausalLM(model).eval()


def packed_batch() -> MicroBatch:
    """Two rows of two samples each, which end at different places."""
    ids = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (5, 11, 9, 7)]).reshape(2, 16)
    labels = ids.roll(-1, 1)
    labels[:, -1] = labels[0, 4] = labels[1, 8] = IGNORED
    borders = torch.tensor([0, 5, 16, 25, 32], dtype=torch.int32)
    return MicroBatch(input_ids=ids, labels=labels, position_ids=positions, cu_seqlens=borders, max_seqlen=11)


def backward_through(cut: CutModel, batch: MicroBatch) -> float:
    """One pass through all stages, each with inputs of its own as it would have received them."""
    ends: list[torch.Tensor] = []
    received: list[torch.Tensor] = []
    hidden = None
    for stage in range(len(cut.ranges)):
        if hidden is not None:
            hidden = hidden.detach().requires_grad_()
            received.append(hidden)
        hidden = cut.run(stage, batch, hidden)
        ends.append(hidden)
    gradient = None
    for stage in reversed(range(len(cut.ranges))):
        ends[stage].backward(gradient)
        gradient = received[stage - 1].grad if stage else None
    return float(ends[-1].detach())


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", CUT)
def test_the_stages_of_a_family_compute_the_uncut_model(kind: str, stages: int) -> None:
    uncut, batch = loss_module(kind), packed_batch()
    module = copy.deepcopy(uncut)
    expected = uncut(batch)
    expected.backward()
    cut = CutModel(module, find_blocks(module.model), stages=stages, own=set(range(stages)))
    assert backward_through(cut, batch) == pytest.approx(float(expected.detach()), rel=1e-6)
    ours, theirs = gradients(module), gradients(uncut)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)


def test_blocks_may_be_computed_again() -> None:
    uncut, batch = loss_module("llama").train(), packed_batch()
    module = copy.deepcopy(uncut)
    uncut(batch).backward()
    blocks = find_blocks(module.model)
    checkpoint_blocks(blocks, every=1)
    backward_through(CutModel(module, blocks, stages=3, own={0, 1, 2}), batch)
    ours, theirs = gradients(module), gradients(uncut)
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs)


def test_a_rank_fills_its_own_part_and_knows_who_has_the_rest() -> None:
    module = loss_module("llama", tie_word_embeddings=True, num_hidden_layers=4)
    other = copy.deepcopy(module)
    first = CutModel(other, find_blocks(other.model), stages=2, own={0})
    embeddings = "model.model.embed_tokens.weight"
    assert first.tied == {embeddings}
    assert first.stage_of[embeddings] == 0
    assert first.stage_of["model.model.norm.weight"] == 1
    assert first.stage_of["model.model.layers.0.self_attn.q_proj.weight"] == 0
    assert first.stage_of["model.model.layers.3.self_attn.q_proj.weight"] == 1
    last = CutModel(module, find_blocks(module.model), stages=2, own={1})
    assert module.model.lm_head in last.parts
    assert module.model.model.embed_tokens not in last.parts


def test_a_stage_needs_no_weights_of_the_others() -> None:
    """They stay on the meta device, embeddings and first blocks included."""
    module, batch = loss_module("llama"), packed_batch()
    expected = module(batch)
    other = copy.deepcopy(module)
    first = CutModel(other, find_blocks(other.model), stages=3, own={0})
    hidden = first.run(0, batch, None)
    blocks = find_blocks(module.model)
    cut = CutModel(module, blocks, stages=3, own={1, 2})
    for part in (module.model.model.embed_tokens, *(blocks[index] for index in cut.ranges[0])):
        part.to("meta")
    assert torch.equal(cut.run(2, batch, cut.run(1, batch, hidden)), expected)


def test_a_router_loss_over_all_blocks_is_refused() -> None:
    """A stage would know the routers of its own blocks only."""
    module = loss_module("mixtral", output_router_logits=True)
    assert not Architecture.of(module.model.config).stages
    with pytest.raises(JobError, match="its router loss needs all blocks"):
        CutModel(module, find_blocks(module.model), stages=2, own={0})


def test_blocks_that_return_tuples_are_refused_at_the_first_pass() -> None:
    shape = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4}
    module = CausalLM(AutoModelForCausalLM.from_config(AutoConfig.for_model("gptj", **shape)))
    cut = CutModel(module, find_blocks(module.model), stages=2, own={0, 1})
    with pytest.raises(JobError, match="blocks return more than hidden states"):
        cut.run(0, packed_batch(), None)
