"""Weights that were loaded are compared with their files, as the engine holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardwise.engines.runtime.protocol import World, build_engine
from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.models.tokenizer import train_bpe
from shardwise.objective.causal_lm import CausalLM
from shardwise.training.ready import Ready, get_ready
from shardwise.training.run import check_weights

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)


@pytest.fixture
def ready(tmp_path: Path, request: pytest.FixtureRequest) -> Ready:
    """A small pretrained model and data, ready to train; LoRA where the test asks for it."""
    texts = [
        "the quick brown fox jumps over the lazy dog " * 4,
        "what is loaded must be what is trained " * 4,
    ]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(iter(texts), 300), eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": text}) for text in texts * 4]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    job = Job.model_validate(
        {
            "name": "check",
            "model": {"source": str(tmp_path / "model"), "lora": request.param},
            "data": {"train": str(tmp_path / "data.jsonl"), "sequence_length": 32},
            "train": {"steps": 1, "global_batch": 2, "precision": "fp32"},
            "strategy": "single",
        }
    )
    return get_ready(job, processes=1)


@pytest.mark.parametrize("ready", [None, {"rank": 2}], ids=["full", "lora"], indirect=True)
def test_the_files_weights_pass_and_others_do_not(ready: Ready) -> None:
    built = ready.built
    module = CausalLM(built.model)
    engine = build_engine(
        ready.strategy, module, built.blocks, built.weights.fill, ready.job.optimizer, WORLD
    )
    check_weights(ready, engine)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1e-6)
    with pytest.raises(CheckpointError, match="differs from the one that was loaded"):
        check_weights(ready, engine)
