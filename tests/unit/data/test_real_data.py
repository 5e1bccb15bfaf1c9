"""Public instruction and text data, where a checkout has it beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.data.prepare import prepare
from shardwise.job.schema import Job

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("alpaca_en_demo.json", "alpaca"),
        ("alpaca_zh_demo.json", "alpaca"),
        ("glaive_toolcall_en_demo.json", "sharegpt"),
    ],
)
def test_every_answer_of_a_conversation_is_trained(
    name: str, format_: str, make_job: Callable[..., Job], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    records = json.loads((DATA / name).read_text(encoding="utf-8"))
    job = make_job(train=str(DATA / name), eval_fraction=0.0, sequence_length=16384)
    prepared = prepare(job, tokenizer, vocab_size=len(tokenizer), cache_root=tmp_path)
    assert prepared.summary["format"] == format_
    assert prepared.summary["read"] == prepared.summary["samples"] == len(records)
    for index, record in enumerate(records):
        tokens, trained = prepared.train.sample(index)
        spoken = tokenizer.decode(tokens[trained == 1].tolist())
        if format_ == "alpaca":
            assert spoken == record["output"].strip() + "</s>"
        else:
            turns = [turn for turn in record["conversations"] if turn["from"] in ("gpt", "function_call")]
            assert spoken.count("</s>") == len(turns)
            assert all(turn["value"].strip() in spoken for turn in turns if turn["from"] == "gpt")


@pytest.mark.parametrize(("name", "read"), [("c4_demo.jsonl", 300), ("wikitext2-valid.txt", 1)])
def test_every_character_of_a_text_is_trained(
    name: str, read: int, make_job: Callable[..., Job], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    job = make_job(train=str(DATA / name), eval_fraction=0.0)
    prepared = prepare(job, tokenizer, vocab_size=len(tokenizer), cache_root=tmp_path)
    raw = (DATA / name).read_text(encoding="utf-8")
    texts = [json.loads(line)["text"] for line in raw.splitlines()] if name.endswith("l") else [raw]
    assert (prepared.summary["format"], prepared.summary["read"]) == ("text", read)
    assert tokenizer.decode(prepared.train.tokens.tolist()) == "".join(text + "</s>" for text in texts)
    assert prepared.summary["fill"] > 0.95
