"""A tiny Llama as if published, with a byte-level tokenizer: every text can be asked and answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shardwise.inference.load import load_model
from shardwise.inference.model import LoadedModel
from shardwise.models.tokenizer import END, PAD, train_bpe

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ '<|turn|>' if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a model with a chat template (or without: None); `only` are the tokens it may write."""

    def made(name: str = "base", *, template: str | None = TEMPLATE, only: list[str] | None = None) -> Path:
        folder = tmp_path / name
        learned = train_bpe(iter(["hello world, how are you today? " * 30]), 320)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token=END, pad_token=PAD)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
        tokenizer.chat_template = template
        torch.manual_seed(0)
        shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = LlamaConfig(
            vocab_size=len(tokenizer), initializer_range=0.3, bos_token_id=None, **shape, **ids
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if only is not None:
            allowed = set(tokenizer.convert_tokens_to_ids(only))
            silent = [token for token in range(len(tokenizer)) if token not in allowed]
            values = {"eos_token_id": tokenizer.eos_token_id, "suppress_tokens": silent}
            (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    return made


@pytest.fixture
def load() -> Iterator[Callable[[Path], LoadedModel]]:
    """Loads a model, and ends its processes after the test."""
    loaded: list[LoadedModel] = []

    def one(folder: Path) -> LoadedModel:
        loaded.append(load_model(str(folder)))
        return loaded[-1]

    yield one
    for model in loaded:
        model.close()
