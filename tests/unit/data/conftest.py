"""Small real parts for the data tests: a byte-level BPE tokenizer, jobs, datasets of random tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shardwise.data.cache import TokenDataset
from shardwise.job.schema import Job

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
]  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris.",
    "Hello! How can I help you today? Please tell me what you have: 1, 2, 3 or 4.\n\nThank you.",
    '### User:\n### Assistant:\n### System:\nuser assistant system tool name arguments {} ""',
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), bos_token="<s>", eos_token="</s>")


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """A job whose data section is given by key; `seed` is the training seed."""

    def make(*, seed: int = 42, **data: Any) -> Job:
        return Job.model_validate(
            {"name": "t", "model": {"source": "none"}, "data": data, "train": {"seed": seed}}
        )

    return make


@pytest.fixture
def json_lines(tmp_path: Path) -> Callable[..., str]:
    """Writes records to a jsonl file and gives its path."""

    def write(records: Sequence[Any], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def numbered_dataset() -> Callable[[Sequence[int]], TokenDataset]:
    return _numbered_dataset


def _numbered_dataset(lengths: Sequence[int]) -> TokenDataset:
    """Samples of these lengths. All tokens are different, so a token tells its sample and place."""
    sizes = np.asarray(lengths, dtype=np.int32)
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    trained = (np.random.default_rng(0).random(int(sizes.sum())) < 0.5).astype(np.uint8)
    ends = starts + sizes
    targets = [int(trained[a + 1 : b].sum()) for a, b in zip(starts, ends, strict=True)]
    return TokenDataset(
        tokens=np.arange(int(sizes.sum()), dtype=np.uint32) + 1,
        trained=trained,
        starts=starts,
        lengths=sizes,
        targets=np.array(targets, dtype=np.int32),
        groups=np.arange(len(sizes), dtype=np.int64),
    )
