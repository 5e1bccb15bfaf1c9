"""Rotary frequencies that transformers would choose by the longest row of a call depend on the job alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.errors import JobError
from shardwise.job.schema import Job, Model
from shardwise.models.build import BuiltModel, build_model
from shardwise.models.rotary import fix_frequencies
from shardwise.objective.causal_lm import CausalLM
from shardwise.trace.trace import Tracer
from shardwise.training.ready import get_ready

ORIGINAL = 16
"""Tokens up to which each of the models was trained first."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": ORIGINAL,
        # as in Phi-3-mini-128k's config.json
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", **{k: LONGROPE[k] for k in ("short_factor", "long_factor")}},
    },
    "llama": {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC},
    "gemma3_text": {
        "max_position_embeddings": ORIGINAL,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
PHIMOE = {
    "max_position_embeddings": 128,
    "num_local_experts": 2,
    "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.5},
}

Write = Callable[..., Model]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def job_model(kind: str, values: dict[str, Any]) -> Model:
        config = {"model_type": kind, **SIZES, **values}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return Model(source=str(tmp_path), weights="random")

    return job_model


def build(model: Model, sequence_length: int | None) -> BuiltModel:
    return build_model(model, dtype=torch.float32, seed=0, sequence_length=sequence_length)


def ready(model: Model, sequence_length: int | None) -> CausalLM:
    """Its loss, with weights large enough for positions to matter."""
    built = build(model, sequence_length)
    built.weights.fill(built.model, torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in built.model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return CausalLM(built.model)


def sample(length: int) -> torch.Tensor:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(length))


def batch(*samples: torch.Tensor) -> MicroBatch:
    """One row of samples."""
    lengths = [len(ids) for ids in samples]
    labels = [torch.cat([ids[1:], torch.tensor([IGNORED])]) for ids in samples]
    return MicroBatch(
        input_ids=torch.cat(samples)[None],
        labels=torch.cat(labels)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        max_seqlen=max(lengths),
    )


def by_transformers(loss: CausalLM, ids: torch.Tensor) -> float:
    """The summed loss that transformers' own model gives of a sample, from the same weights."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(loss.model.config.model_type, **SIZES, **MODELS[loss.model.config.model_type]),
        attn_implementation="eager",
    )
    model.load_state_dict(loss.model.state_dict())
    mean = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
    return float(mean) * (len(ids) - 1)


@torch.no_grad()
@pytest.mark.parametrize("sequence_length", [ORIGINAL - 4, ORIGINAL, 48], ids=["below", "at", "above"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_sample_has_the_same_loss_alone_and_packed_and_whatever_came_before(
    write: Write, kind: str, sequence_length: int
) -> None:
    loss = ready(write(kind, MODELS[kind]), sequence_length)
    short, middle, long = sample(5), sample(sequence_length * 2 // 3), sample(sequence_length)
    first = [float(loss(batch(ids))) for ids in (short, middle, long)]
    again = [float(loss(batch(ids))) for ids in (long, short, middle)]
    assert again == [first[2], first[0], first[1]]
    assert float(loss(batch(short, long, middle))) == pytest.approx(sum(first), rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_a_full_row_has_transformers_loss_and_below_the_original_length_every_row(
    write: Write, kind: str
) -> None:
    model = write(kind, MODELS[kind])
    for sequence_length, lengths in ((ORIGINAL, (5, 11, ORIGINAL)), (48, (48,))):
        loss = ready(model, sequence_length)
        for ids in map(sample, lengths):
            assert float(loss(batch(ids))) == pytest.approx(by_transformers(loss, ids), rel=1e-5)


@torch.no_grad()
def test_a_short_sample_of_a_job_with_long_rows_gets_the_frequencies_of_the_long_ones(write: Write) -> None:
    model = write("phi3", MODELS["phi3"])
    short = batch(sample(10))
    below, above, longer = (float(ready(model, length)(short)) for length in (ORIGINAL, 17, 48))
    assert above == longer  # of longrope there are two sets
    assert above != pytest.approx(below, rel=1e-3)


def test_notes_tell_of_frequencies_that_transformers_would_not_choose_for_a_short_text(write: Write) -> None:
    model = write("phi3", MODELS["phi3"])
    assert build(model, ORIGINAL).notes == []
    (note,) = build(model, ORIGINAL + 1).notes
    assert "longrope" in note
    assert f"{ORIGINAL + 1} tokens" in note


def test_without_a_sequence_length_transformers_goes_on_choosing(write: Write) -> None:
    """So it does where the model is asked to generate."""
    loss = ready(write("phi3", MODELS["phi3"]), None)
    with torch.no_grad():
        for ids in map(sample, (5, 48, 11)):
            assert float(loss(batch(ids))) == pytest.approx(by_transformers(loss, ids), rel=1e-5)


def test_a_model_that_looks_at_the_length_itself_is_refused_above_the_original_one(write: Write) -> None:
    model = write("phimoe", PHIMOE)
    assert build(model, ORIGINAL).notes == []
    with pytest.raises(JobError) as caught:
        build(model, ORIGINAL + 1)
    (problem,) = caught.value.problems
    assert problem.where == "data.sequence_length"
    assert f"{ORIGINAL} or less" in problem.fix


def test_so_is_one_whose_rotary_embedding_is_not_known(write: Write) -> None:
    model = build(write("llama", MODELS["llama"]), None).model
    model.model.rotary_emb = nn.Identity()  # a repository's own code
    assert fix_frequencies(model, ORIGINAL) == []
    with pytest.raises(JobError, match="llama"):
        fix_frequencies(model, ORIGINAL + 1)


@pytest.mark.parametrize("kind", MODELS)
def test_the_traced_model_goes_the_same_way(write: Write, kind: str) -> None:
    """On tensors without values nothing can be chosen by value."""
    model = write(kind, MODELS[kind])
    tracer = Tracer(model, precision="fp32", sequence_length=48)
    trained, traced = (
        dict(built.model.named_buffers()) for built in (build(model, sequence_length=48), tracer.built)
    )
    assert all(torch.equal(traced[name], buffer) for name, buffer in trained.items())
    trace = tracer.trace(rows=2, checkpoint_every=0)
    default = {"rope_parameters": None, "rope_scaling": None, "original_max_position_embeddings": ORIGINAL}
    plain = Tracer(write(kind, {**MODELS[kind], **default}), precision="fp32", sequence_length=48)
    assert trace.ops == plain.trace(rows=2, checkpoint_every=0).ops


def test_the_rows_of_a_job_decide(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A horse is not a zebra, and a zebra is not a horse.\n\n" * 20)
    write("phi3", MODELS["phi3"])
    job = {
        "name": "run",
        "output": str(tmp_path),
        "model": {"source": str(tmp_path), "weights": "random", "tokenizer": "train", "tokenizer_vocab": 300},
        "data": {"train": str(tmp_path / "text.txt"), "format": "text", "sequence_length": ORIGINAL * 2},
        "train": {"steps": 1, "global_batch": 1},
    }
    built = get_ready(Job.model_validate(job), processes=1).built
    frequencies = built.model.model.rotary_emb.inv_freq * torch.tensor([4.0, 8.0, 16.0, 32.0])
    assert torch.allclose(frequencies, 10000.0 ** -torch.tensor([0.0, 0.25, 0.5, 0.75]))
    assert any("longrope" in note for note in built.notes)
