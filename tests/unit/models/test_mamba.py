"""Mamba for training: transformers' numbers and names, the authors' initialisation, what LoRA may train."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.engines.runtime.parameters import groups_by_name
from shardwise.errors import JobError
from shardwise.job.schema import Lora, Model, Optimizer
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.export import save_weights
from shardwise.models.flops import train_flops_per_token
from shardwise.models.structure import checkpoint_blocks
from shardwise.objective.causal_lm import CausalLM

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*prototype.*")


def build(
    source: str = "tiny-mamba", dtype: torch.dtype = torch.float32, fill: bool = True, **options: object
) -> BuiltModel:
    model = Model.model_validate({"source": source, "weights": "random", **options})
    built = build_model(model, dtype=dtype, seed=0)
    if fill:
        built.weights.fill(built.model, CPU)
    return built


def batch(*samples: int, vocabulary: int = 512) -> MicroBatch:
    """One row of samples of these lengths."""
    generator = torch.Generator().manual_seed(0)
    length = sum(samples)
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, torch.tensor(samples).cumsum(0) - 1] = IGNORED
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.cat([torch.arange(n) for n in samples]).unsqueeze(0),
        cu_seqlens=torch.tensor([0, *torch.tensor(samples).cumsum(0)], dtype=torch.int32),
        max_seqlen=max(samples),
    )


def upstream(built: BuiltModel) -> MambaForCausalLM:
    """transformers' own model with the same weights."""
    model = MambaForCausalLM(MambaConfig.from_dict(built.skeleton.config.to_dict()))
    model.load_state_dict(built.model.state_dict())
    return model.to(built.model.dtype).eval()


def test_hidden_states_are_those_of_transformers():
    built, rows = build(), batch(40)
    with torch.no_grad():
        expected = upstream(built)(input_ids=rows.input_ids, use_cache=False).logits
        hidden = built.model.base_model(
            input_ids=rows.input_ids, position_ids=rows.position_ids
        ).last_hidden_state
        found = built.model.lm_head(hidden)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_loss_and_gradients_are_those_of_transformers():
    built, rows = build(), batch(24)
    other = upstream(built)
    logits = other(input_ids=rows.input_ids, use_cache=False).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, rows.labels.flatten(), reduction="sum")
    expected.backward()
    loss = CausalLM(built.model)(rows)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    right = dict(other.named_parameters())
    for name, p in built.model.named_parameters():
        bound = 1e-4 * float(p.grad.abs().max())
        assert torch.allclose(p.grad, right[name].grad, rtol=1e-3, atol=bound), name


def test_samples_that_share_a_row_do_not_meet():
    loss = CausalLM(build().model)
    packed = batch(9, 3, 20)
    total = loss(packed).item()
    parts = []
    for start, stop in ((0, 9), (9, 12), (12, 32)):
        alone = batch(stop - start)
        parts.append(
            MicroBatch(
                input_ids=packed.input_ids[:, start:stop],
                labels=packed.labels[:, start:stop],
                position_ids=alone.position_ids,
                cu_seqlens=alone.cu_seqlens,
                max_seqlen=stop - start,
            )
        )
    assert total == pytest.approx(sum(loss(part).item() for part in parts), rel=1e-6)


def test_exported_weights_load_in_transformers_and_here_again(tmp_path: Path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    built, rows = build(dtype=torch.bfloat16), batch(16)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<eos>")
    save_weights(built, built.model.named_parameters(), tmp_path, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(loaded) is MambaForCausalLM
    for name, p in built.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.float()), name
    again = build_model(Model(source=str(tmp_path)), dtype=torch.float32, seed=1)
    again.weights.fill(again.model, CPU)
    with torch.no_grad():
        expected = loaded(input_ids=rows.input_ids, use_cache=False).logits
        hidden = again.model.base_model(input_ids=rows.input_ids, position_ids=rows.position_ids)
        found = again.model.lm_head(hidden.last_hidden_state)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_text_is_generated_through_transformers_own_code():
    built = build()
    other = upstream(built)
    tokens = batch(5).input_ids
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    found = built.model.eval().generate(tokens, **options)
    assert torch.equal(found, other.generate(tokens, **options))


def test_the_initialisation_is_the_authors():
    built = build("130m_mamba", config={"num_hidden_layers": 4})
    weights = dict(built.model.named_parameters())
    mixer = "backbone.layers.1.mixer."
    width, inner, rank, states = 768, 1536, 48, 16
    assert weights["backbone.embeddings.weight"].std().item() == pytest.approx(0.02, rel=0.01)
    for name, fan_in, factor in (("in_proj", width, 1.0), ("x_proj", inner, 1.0), ("out_proj", inner, 0.5)):
        # nn.Linear's: uniform up to 1 / sqrt(fan_in); out_proj over the root of the number of layers
        weight = weights[f"{mixer}{name}.weight"]
        bound = factor / math.sqrt(fan_in)
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.01), name
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name
    assert weights[mixer + "dt_proj.weight"].abs().max().item() == pytest.approx(rank**-0.5, rel=0.01)
    dt = torch.nn.functional.softplus(weights[mixer + "dt_proj.bias"])
    assert 1e-3 <= dt.min().item() < dt.max().item() <= 0.1 + 1e-6
    assert torch.allclose(
        weights[mixer + "A_log"].exp(), torch.arange(1.0, states + 1).expand(inner, -1), rtol=1e-6
    )
    assert torch.equal(weights[mixer + "D"], torch.ones(inner))
    assert weights[mixer + "conv1d.weight"].abs().max().item() == pytest.approx(0.5, rel=0.01)
    assert built.model.lm_head.weight is built.model.backbone.embeddings.weight


def test_the_first_loss_of_the_smallest_shape_is_that_of_guessing():
    """ln V, and what logits of standard deviation 0.02 sqrt(d) add: half their variance."""
    loss = CausalLM(build("130m_mamba", config={"num_hidden_layers": 4}).model)
    rows = batch(128, vocabulary=50257)
    with torch.no_grad():
        first = loss(rows).item() / 127
    assert first == pytest.approx(math.log(50257) + 0.5 * 768 * 0.02**2, abs=0.15)


def test_a_log_d_and_dt_bias_stay_in_fp32_and_nothing_but_matrices_decays():
    built = build(dtype=torch.bfloat16)
    whole = {"A_log", "D", "dt_proj.bias"}
    for name, p in built.model.named_parameters():
        short = name.rpartition("mixer.")[2]
        assert p.dtype == (torch.float32 if short in whole else torch.bfloat16), name
    groups = groups_by_name(built.model, Optimizer(weight_decay=0.1))
    decaying = {name.rpartition("mixer.")[2] for name, group in groups.items() if group.weight_decay}
    assert decaying == {
        "backbone.embeddings.weight",
        "conv1d.weight",
        "in_proj.weight",
        "x_proj.weight",
        "dt_proj.weight",
        "out_proj.weight",
    }


def test_fp32_values_are_not_rounded_on_the_way_in():
    exact = dict(build().model.named_parameters())["backbone.layers.0.mixer.dt_proj.bias"]
    kept = dict(build(dtype=torch.bfloat16).model.named_parameters())["backbone.layers.0.mixer.dt_proj.bias"]
    assert torch.equal(exact, kept)
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("every", [1, 2])
def test_recomputed_blocks_give_the_same_gradients(every: int):
    plain, checkpointed = (build(config={"num_hidden_layers": 3}) for _ in range(2))
    checkpoint_blocks(checkpointed.blocks, every=every)
    losses = [CausalLM(built.model).train()(batch(9, 8)) for built in (plain, checkpointed)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    right = dict(plain.model.named_parameters())
    for name, p in checkpointed.model.named_parameters():
        assert torch.equal(p.grad, right[name].grad), name


def test_lora_trains_the_input_projection_and_nothing_else():
    built = build(lora=Lora(rank=4))
    trained = {name.rpartition("mixer.")[2] for name, p in built.model.named_parameters() if p.requires_grad}
    assert trained == {"in_proj.lora_A.default.weight", "in_proj.lora_B.default.weight"}
    CausalLM(built.model)(batch(9, 8)).backward()
    gradients = {name: p.grad for name, p in built.model.named_parameters() if p.requires_grad}
    assert all(gradients[name].abs().max() > 0 for name in gradients if "lora_B" in name)


@pytest.mark.parametrize("target", ["x_proj", "dt_proj", "out_proj", "conv1d"])
def test_lora_on_what_the_kernel_reads_itself_is_refused(target: str):
    with pytest.raises(JobError) as caught:
        build(lora=Lora(targets=["in_proj", target]), fill=False)
    what = f"{target} can have no adapter: it is read by a kernel without being called"
    assert caught.value.problems[0].what == what
    assert caught.value.problems[0].fix == "choose from in_proj, or all-linear"


@pytest.mark.parametrize(
    ("key", "value"),
    [("initializer_range", 0.1), ("rescale_prenorm_residual", True), ("hidden_act", "gelu")],
)
def test_config_values_that_would_not_be_what_is_computed_are_refused(key: str, value: object):
    with pytest.raises(JobError) as caught:
        build(config={key: value}, fill=False)
    assert caught.value.problems[0].where == f"model.config.{key}"


def test_mamba_2_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(JobError) as caught:
        build(str(tmp_path), fill=False)
    assert "Mamba-1" in caught.value.problems[0].what
    assert "130m_mamba" in caught.value.problems[0].fix


def test_flops_of_a_token_at_the_7b_shape():
    """Worked out by hand: 6 for every weight a token is multiplied with, and three times the scan's 9 W N."""
    built = build("7b_mamba", fill=False)
    width, states, layers = 9728, 16, 45
    matrices = 94_633_984 + 47_316_992 + 3_268_608 + 304 * width + 4 * width
    expected = 6 * (layers * matrices + 50257 * 4864) + 3 * 9 * width * states * layers
    assert train_flops_per_token(built, sequence_length=4096) == expected
    assert expected == pytest.approx(41.7e9, rel=0.01)
