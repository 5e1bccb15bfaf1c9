"""A mixture's router loss is transformers' own, weighted so that the micro-batches of a step add up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.errors import JobError
from shardwise.job.schema import Model
from shardwise.models.build import build_model
from shardwise.models.router_loss import router_note
from shardwise.objective.causal_lm import CausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.1,
}
FFN = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, **LOCAL},
    "qwen2_moe": {**SIZES, **MIXTURE, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**SIZES, **MIXTURE},
    "olmoe": {**SIZES, **MIXTURE},
    "granitemoe": {**SIZES, **LOCAL},
    "gpt_oss": {**SIZES, **LOCAL},
    "phimoe": {**SIZES, **LOCAL, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "jetmoe": {**SIZES, **LOCAL, "kv_channels": 8, "num_key_value_heads": 2, "aux_loss_coef": 0.1},
    "dbrx": {
        "vocab_size": 61,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": FFN,
    },
}
ASKED = {"output_router_logits": True}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """In fp64, which grouped products lack: in fp32 transformers' gpt-oss is 9e-7 off by itself."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation("eager")
    return model.double().train()


def row(lengths: Sequence[int], width: int, seed: int = 3) -> MicroBatch:
    """One row of samples, then padding; the first third of a sample is no target."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.full((width,), 5), torch.full((width,), IGNORED)
    positions, borders = torch.zeros(width, dtype=torch.long), [0]
    for length in (*lengths, width - sum(lengths)):
        start, stop = borders[-1], borders[-1] + length
        positions[start:stop] = torch.arange(length)
        if len(borders) <= len(lengths):
            ids[start:stop] = torch.randint(3, 61, (length,), generator=generator)
            labels[start + length // 3 : stop - 1] = ids[start + length // 3 + 1 : stop]
        borders.append(stop)
    return MicroBatch(
        input_ids=ids[None],
        labels=labels[None],
        position_ids=positions[None],
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=int(torch.tensor(borders).diff().max()),
    )


def targets(batch: MicroBatch) -> int:
    return int((batch.labels != IGNORED).sum())


def published(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """transformers' own loss of a row of one sample, whose padding it is told."""
    used = int(batch.cu_seqlens[1])
    unshifted = torch.cat([torch.full((1, 1), IGNORED), batch.labels[:, :-1]], dim=1)
    mask = (torch.arange(batch.labels.numel()) < used)[None].long()
    out = model(input_ids=batch.input_ids, attention_mask=mask, labels=unshifted, use_cache=False)
    assert isinstance(out.loss, torch.Tensor)
    return out.loss


def norm(model: PreTrainedModel) -> float:
    return float(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("used", [14, 9], ids=["full", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_loss_of_a_micro_batch_is_transformers(kind: str, used: int) -> None:
    batch = row([used], 14)
    reference = tiny(kind, **ASKED)
    expected = published(reference, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    plain = published(tiny(kind), batch)
    assert abs(expected.item() - plain.item()) > 0.05, "the router loss is a part of it"

    loss = CausalLM(tiny(kind, **ASKED), packed=False)
    measured = loss(batch) / targets(batch)
    measured.backward()
    assert measured.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm(loss.model) == pytest.approx(norm(reference), rel=1e-6)


def test_the_micro_batches_of_a_step_count_by_their_targets() -> None:
    """Each adds its own balance, times its targets: whatever ranks they are on, the sum needs no exchange."""
    model = tiny("mixtral", **ASKED)
    batches = [row([14], 14, seed=1), row([6], 14, seed=2)]
    total = sum(map(targets, batches))
    expected = sum(published(model, batch).item() * targets(batch) for batch in batches) / total
    loss = CausalLM(model)
    assert sum(loss(batch).item() for batch in batches) / total == pytest.approx(expected, rel=1e-6)


def test_samples_that_share_a_row_share_one_balance() -> None:
    """The same loss as of their tokens in rows of their own, in one micro-batch: padding counts nowhere."""
    packed, apart = row([5, 7], 14), tiny("mixtral", **ASKED)
    loss = CausalLM(tiny("mixtral", **ASKED))
    logits = CausalLM(apart).model.base_model(**loss.inputs(packed)).router_logits
    kept = torch.arange(14) < 12
    assert loss.router_loss is not None
    plain = CausalLM(tiny("mixtral"))(packed)
    balance = loss.router_loss.balance(tuple(layer[kept] for layer in logits), 4, 2)
    expected = plain + targets(packed) * 0.1 * balance
    assert loss(packed).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    """Evaluation hands such rows to ranks that have none left."""
    assert CausalLM(tiny("mixtral", **ASKED))(row([], 14)).item() == 0.0


def test_without_the_configs_word_the_loss_is_the_cross_entropy() -> None:
    model, batch = tiny("mixtral"), row([14], 14)
    loss = CausalLM(model)
    assert loss.router_loss is None
    assert loss(batch).item() / targets(batch) == pytest.approx(
        published(tiny("mixtral"), batch).item(), rel=1e-6
    )
    assert router_note(model) == []


def test_recomputing_activations_changes_nothing() -> None:
    losses = [CausalLM(tiny("mixtral", **ASKED)) for _ in range(2)]
    for layer in losses[1].model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for loss in losses:
        loss(row([5, 7], 14)).backward()
    assert norm(losses[0].model) == norm(losses[1].model)


def test_the_run_says_that_the_router_loss_is_in_it(tmp_path: Any) -> None:
    tiny("mixtral", **ASKED).config.save_pretrained(tmp_path)
    job = Model(source=str(tmp_path), weights="random")
    notes = build_model(job, dtype=torch.float32, seed=0).notes
    assert "the loss includes the routers' load-balancing loss, times 0.1" in notes


def test_a_router_loss_of_another_kind_is_refused() -> None:
    values = {**SIZES, "is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, **ASKED}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", **values))
    with pytest.raises(JobError, match="router loss of 'doge'"):
        CausalLM(model, packed=False)


def test_a_router_that_mixes_the_rows_of_a_micro_batch_is_refused(tmp_path: Any) -> None:
    """Doge's: each sample's loss would depend on its neighbours, packed or not."""
    values = {**SIZES, "is_moe": True, "num_experts": 4, "num_experts_per_tok": 2}
    AutoConfig.for_model("doge", **values).save_pretrained(tmp_path)
    job = Model(source=str(tmp_path), weights="random")
    with pytest.raises(JobError, match="'doge' models depend on other rows") as caught:
        build_model(job, dtype=torch.float32, seed=0)
    assert "is_moe: false" in caught.value.problems[0].fix
    dense = job.model_copy(update={"config": {"is_moe": False}})
    assert build_model(dense, dtype=torch.float32, seed=0).total > 0


def test_a_model_without_a_router_loss_says_so() -> None:
    values = {**SIZES, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **ASKED}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **values))
    assert router_note(model) == ["output_router_logits adds nothing: 'glm4_moe' models have no router loss"]
