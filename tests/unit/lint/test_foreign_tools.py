# ruff: noqa: E501 - the files are text
"""What each tool's own words and defaults mean in a job: files in, values of the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TOKENIZED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o", per_device_train_batch_size=1)).train()
"""
CASES: dict[str, Case] = {
    "ms-swift's model_name is no model": (
        {"run.sh": "swift sft --model a/b --model_name bot --model_author me --dataset d.jsonl\n"},
        {"model.source": "a/b"},
        ("swift.model_name (line 1)", "self-cognition"),
        ("conflict",),
    ),
    "other tools' model_name is the model": (
        {"run.sh": "accelerate launch sft.py --model_name a/b --dataset_name c/d\n"},
        {"model.source": "a/b"},
        (),
        (),
    ),
    "TRL's tokenizer": (
        {"a.yaml": "model_name_or_path: a/b\ntokenizer_name_or_path: a/chat\nper_device_train_batch_size: 1\n"},
        {"model.source": "a/b", "model.tokenizer": "a/chat"},
        (),
        (),
    ),
    "a script's tokenizer": (
        {"train.py": TOKENIZED.format(tokenizer='"a/chat"')},
        {"model.source": "a/b", "model.tokenizer": "a/chat"},
        (),
        (),
    ),
    "the model's own tokenizer": (
        {"train.py": TOKENIZED.format(tokenizer='"a/b"')},
        {"model.source": "a/b", "model.tokenizer": None},
        (),
        (),
    ),
    "a tokenizer that only a run knows": (
        {"train.py": TOKENIZED.format(tokenizer="pick()")},
        {"model.tokenizer": None},
        (),
        ("model.tokenizer",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tools(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
