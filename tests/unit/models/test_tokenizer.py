"""The tokenizer: learned from the data, or the model's own; never with tokens the embedding does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwise.errors import JobError, MachineError
from shardwise.job.schema import Model
from shardwise.models.tokenizer import (
    END,
    PAD,
    expected_rows,
    load_tokenizer,
    misread_as,
    rows_for,
    train_bpe,
)

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 20, "naïve café — 東京 🙂 \n\tdone", "the end"]


class Corpus:
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.reads = 0

    def __call__(self) -> Iterator[str]:
        self.reads += 1
        return iter(self.texts)


def trained(cache: Path, texts: list[str] = TEXTS, vocabulary: int = 300) -> PreTrainedTokenizerBase:
    model = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=vocabulary)
    return load_tokenizer(model, corpus=Corpus(texts), cache=cache)


def test_every_text_comes_back_as_it_was(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path)
    for text in [*TEXTS, "never seen: ßøđ 𝔘 \x00 \r\n", "  two  spaces ."]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_vocabulary_is_learned_and_has_the_size_asked_for(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path)
    assert len(tokenizer) == 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    text = TEXTS[0]
    assert len(tokenizer(text)["input_ids"]) < 0.5 * len(text)


def test_learning_is_deterministic(tmp_path: Path) -> None:
    assert trained(tmp_path / "a").get_vocab() == trained(tmp_path / "b").get_vocab()


def test_it_is_learned_once_for_the_same_text_and_size(tmp_path: Path) -> None:
    model = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=300)
    first, again = Corpus(TEXTS), Corpus(TEXTS)
    load_tokenizer(model, corpus=first, cache=tmp_path)
    load_tokenizer(model, corpus=again, cache=tmp_path)
    assert (first.reads, again.reads) == (2, 1)
    assert len(trained(tmp_path, vocabulary=280)) == 280
    changed = trained(tmp_path, texts=[*TEXTS, "zyx zyx zyx zyx zyx zyx zyx zyx " * 20])
    assert changed.get_vocab() != trained(tmp_path).get_vocab()


def test_the_embedding_is_a_multiple_of_64_rows(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path)
    model = Model(source="tiny-llama", weights="random", tokenizer="train")
    assert rows_for(model, len(tokenizer)) == 320
    assert rows_for(Model(source="tiny-llama", weights="random"), len(tokenizer)) is None
    assert rows_for(Model(source="tiny-llama", tokenizer="folder"), len(tokenizer)) is None


def test_rows_are_known_before_the_data_are_read(tmp_path: Path) -> None:
    learned = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=300)
    assert expected_rows(learned) == 320
    save_plain(tmp_path)
    assert expected_rows(Model(source="tiny-llama", weights="random", tokenizer=str(tmp_path))) == 64
    assert expected_rows(Model(source="tiny-llama", tokenizer=str(tmp_path))) is None
    assert expected_rows(Model(source="tiny-llama", weights="random")) is None


def save_plain(folder: Path, **tokens: str) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "<pad>": 2, "a": 3, "b": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **tokens).save_pretrained(folder)


def nothing() -> Iterator[str]:
    raise AssertionError("the corpus is only for learning a tokenizer")


@pytest.mark.parametrize(
    ("tokens", "pad"),
    [({"eos_token": "</s>"}, 1), ({"eos_token": "</s>", "pad_token": "<pad>"}, 2), ({}, None)],
)
def test_padding_reuses_the_end_token_instead_of_growing_the_vocabulary(
    tmp_path: Path, tokens: dict[str, str], pad: int | None
) -> None:
    save_plain(tmp_path, **tokens)
    tokenizer = load_tokenizer(Model(source="tiny-llama", tokenizer=str(tmp_path)), corpus=nothing)
    assert tokenizer.pad_token_id == pad
    assert len(tokenizer) == 5


def test_a_shape_without_a_tokenizer_says_what_to_do() -> None:
    with pytest.raises(JobError) as caught:
        load_tokenizer(Model(source="gpt3-125m", weights="random"), corpus=nothing)
    assert "train" in caught.value.problems[0].fix


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError) as caught:
        load_tokenizer(Model(source="openai-community/gpt2", weights="random"), corpus=nothing)
    assert "train" in caught.value.problems[0].fix


def test_a_folder_without_or_with_a_broken_tokenizer(tmp_path: Path) -> None:
    model = Model(source="tiny-llama", tokenizer=str(tmp_path))
    with pytest.raises(JobError, match="has no tokenizer files"):
        load_tokenizer(model, corpus=nothing)
    save_plain(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(JobError, match="cannot be loaded"):
        load_tokenizer(model, corpus=nothing)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be saved"):
        trained(tmp_path / "file")


def test_the_default_cache_is_the_environment_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[..., Model]
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    model = Model(source="tiny-llama", weights="random", tokenizer="train", tokenizer_vocab=300)
    load_tokenizer(model, corpus=Corpus(TEXTS))
    assert len([path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]) == 1


def test_a_learned_tokenizer_stays_the_same_next_to_the_config_of_a_qwen2_model(tmp_path: Path) -> None:
    """AutoTokenizer would take Qwen2's class there, which splits numbers and spaces in its own way."""
    text = "In 1234 words,  it's x1 = y+1.\n\n    so they don't " * 50
    learned = train_bpe(iter([text]), 300)
    kept = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token=END, pad_token=PAD)
    kept.save_pretrained(tmp_path)
    assert misread_as(tmp_path) == ""
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids != kept(text).input_ids
    found = load_tokenizer(Model(source=str(tmp_path), weights="random"), corpus=lambda: iter(()))
    assert found(text).input_ids == kept(text).input_ids
    assert misread_as(tmp_path) == "Qwen2Tokenizer"
