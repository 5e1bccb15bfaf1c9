"""From a job to tokens: counts at each stage, held-out share, cache keys, the sample that is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.data.loader import BatchStream
from shardwise.data.prepare import Prepared, documents, prepare
from shardwise.errors import DataError
from shardwise.job.schema import Job

ALPACA = [
    {"instruction": f"Say {number} twice.", "input": "", "output": f"{number} and {number}."}
    for number in range(40)
]
TEXTS = [{"text": f"Say {number} twice."} for number in range(40)]  # needs no process for templates: faster
Make = Callable[..., Job]


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., Prepared]:
    def run(job: Job, *, vocab_size: int | None = None, cache: str = "cache") -> Prepared:
        return prepare(job, tokenizer, vocab_size=vocab_size or len(tokenizer), cache_root=tmp_path / cache)

    return run


def texts(dataset: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(dataset.sample(index)[0].tolist()) for index in range(len(dataset))]


def entries(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir() if path.is_dir()}


PROMPTS = [{"prompt": one["instruction"], "completion": one["output"]} for one in ALPACA]
TURNS = [
    {
        "prompt": [{"role": "user", "content": one["prompt"]}],
        "completion": [{"role": "assistant", "content": one["completion"]}],
    }
    for one in PROMPTS
]


LATER = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("samples", [PROMPTS, TURNS])
def test_a_prompt_is_left_out_of_the_loss_and_its_completion_is_not(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast, samples: Any
) -> None:
    found = run(make_job(train=json_lines(samples), eval_fraction=0.0))
    same = run(make_job(train=json_lines(ALPACA), eval_fraction=0.0))
    assert found.summary["format"] == "prompt-completion"
    assert found.summary["target_tokens"] == same.summary["target_tokens"]
    for index in (0, 39):
        tokens, trained = found.train.sample(index)
        assert tokenizer.decode(tokens[trained == 1].tolist()) == f"{index} and {index}.</s>"
        assert trained.tolist() == same.train.sample(index)[1].tolist()


def test_answers_in_a_prompt_are_trained_with_the_loss_on_all_alone(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Beside answers that are trained: ShareGPT's in a prompt were."""
    turns = [{"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in LATER]
    data = json_lines(
        [{**one, "prompt": prompt + one["prompt"]} for one in TURNS for prompt in (LATER, turns)]
    )
    found = run(make_job(train=data, eval_fraction=0.0))
    for index in (0, 1, 79):
        tokens, trained = found.train.sample(index)
        assert tokenizer.decode(tokens[trained == 1].tolist()) == f"{index // 2} and {index // 2}.</s>"
    everything = run(make_job(train=data, eval_fraction=0.0, loss_on="all")).train
    assert everything.trained.all()


def test_conversations_become_samples_with_answers_marked(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    prepared = run(make_job(train=json_lines(ALPACA), eval_fraction=0.0))
    assert prepared.eval is None
    assert (
        texts(prepared.train, tokenizer)[3] == "### User:\nSay 3 twice.\n\n### Assistant:\n3 and 3.</s>\n\n"
    )
    assert prepared.sample.runs == [
        ("### User:\nSay 0 twice.\n\n### Assistant:\n", False),
        ("0 and 0.</s>", True),
        ("\n\n", False),
    ]
    for index in range(40):
        tokens, trained = prepared.train.sample(index)
        assert tokenizer.decode(tokens[trained == 1].tolist()) == f"{index} and {index}.</s>"
        assert prepared.train.targets[index] == trained.sum()
    summary = prepared.summary
    assert (summary["format"], summary["read"], summary["samples"]) == ("alpaca", 40, 40)
    assert summary["tokens"] == len(prepared.train.tokens)
    assert summary["target_tokens"] == prepared.train.trained.sum()
    assert prepared.chat_template is not None


def test_text_is_cut_into_rows_and_each_document_ends(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    documents_ = ["The quick brown fox jumps over the lazy dog. " * repeat for repeat in (1, 7, 3)]
    job = make_job(
        train=json_lines([{"text": text} for text in documents_]), eval_fraction=0.0, sequence_length=16
    )
    prepared = run(job)
    assert "".join(texts(prepared.train, tokenizer)) == "".join(text + "</s>" for text in documents_)
    assert prepared.train.lengths.max() == 16
    assert prepared.train.trained.all()
    assert prepared.train.targets.tolist() == (prepared.train.lengths - 1).tolist()
    assert prepared.chat_template is None
    assert list(documents(job)) == documents_


def test_a_long_document_gives_the_same_tokens_in_parts_as_at_once(
    run: Any, make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("What is the capital of France?\n\n  It is Paris.\nThank you.\n" * 200)
    job = make_job(train=str(path), eval_fraction=0.0, sequence_length=32)
    whole = run(job)
    monkeypatch.setattr("shardwise.data.sources.PART_CHARS", 700)
    parts = run(job, cache="other")
    assert parts.train.tokens.tolist() == whole.train.tokens.tolist()
    assert parts.train.lengths.tolist() == whole.train.lengths.tolist()


def test_a_begin_token_is_put_where_the_tokenizer_does(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    text = run(make_job(train=json_lines([{"text": "Hello!"}, {"text": "Paris"}]), eval_fraction=0.0))
    assert texts(text.train, tokenizer) == ["<s>Hello!</s>", "<s>Paris</s>"]
    chat = run(make_job(train=json_lines(ALPACA), eval_fraction=0.0))
    assert texts(chat.train, tokenizer)[0].startswith("<s>### User:")
    assert (chat.train.tokens == tokenizer.bos_token_id).sum() == 40


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, 1), (0.1, 4), (0.999, 39)])
def test_the_held_out_share_is_disjoint_and_the_same_for_a_seed(
    run: Any, make_job: Make, json_lines: Any, fraction: float, held_out: int
) -> None:
    path = json_lines(TEXTS)
    first = run(make_job(train=path, eval_fraction=fraction))
    again = run(make_job(train=path, eval_fraction=fraction))
    assert first.eval is not None
    assert again.eval is not None
    assert len(first.eval) == held_out
    starts = first.train.starts.tolist() + first.eval.starts.tolist()
    assert len(set(starts)) == len(starts) == 40
    assert again.eval.starts.tolist() == first.eval.starts.tolist()
    other = run(make_job(train=path, eval_fraction=fraction, seed=7))
    assert fraction == 0.001 or other.eval.starts.tolist() != first.eval.starts.tolist()


def test_samples_of_one_conversation_are_held_out_together(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}!{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prepared = run(make_job(train=json_lines([{"messages": turns * 3}] * 20), eval_fraction=0.3))
    assert prepared.summary["split"] == 20
    assert (prepared.summary["train_samples"], prepared.summary["eval_samples"]) == (42, 18)
    assert not set(prepared.train.groups) & set(prepared.eval.groups)


def test_own_evaluation_data(run: Any, make_job: Make, json_lines: Any) -> None:
    job = make_job(train=json_lines(TEXTS, "a.jsonl"), eval=json_lines(TEXTS[:3], "b.jsonl"))
    prepared = run(job)
    assert (len(prepared.train), len(prepared.eval)) == (40, 3)


@pytest.mark.parametrize(
    ("too_long", "kept", "counts"),
    [("truncate", 41, {"truncated": 1}), ("drop", 40, {"too_long": 1})],
)
def test_long_conversations_are_counted(
    run: Any, make_job: Make, json_lines: Any, too_long: str, kept: int, counts: dict[str, int]
) -> None:
    long = {"instruction": "Go.", "output": "on and " * 100}
    job = make_job(
        train=json_lines([*ALPACA, long]), eval_fraction=0.0, sequence_length=64, too_long=too_long
    )
    prepared = run(job)
    assert len(prepared.train) == kept
    assert counts.items() <= prepared.summary.items()
    longest = run(make_job(train=job.data.train, eval_fraction=0.0)).train.lengths.max()
    assert prepared.summary["lost_tokens"] == (longest - 64 if too_long == "truncate" else longest)
    everything = sorted(int(n) for n in run(make_job(train=job.data.train, eval_fraction=0.0)).train.lengths)
    whole = too_long == "drop"
    sums = {
        row: sum((n if n <= row else 0) if whole else min(n, row) for n in everything)
        for row in range(64, 2048, 64)
    }
    share = prepared.summary["longer_row_keeps"]
    enough = next(row for row, kept in sums.items() if kept >= share * sum(everything))
    assert prepared.summary["longer_row"] == enough
    assert 1 - sums[enough] / sum(everything) <= prepared.summary["lost_tokens"] / sum(everything) / 2
    assert prepared.train.lengths.max() <= 64


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
@pytest.mark.parametrize(("longest", "others"), [(300, 1), (60, 5), (30, 30)])
def test_the_length_that_is_advised_is_above_the_present_one(
    run: Any, make_job: Make, json_lines: Any, too_long: str, longest: int, others: int
) -> None:
    """Where little is lost, a length that keeps 95 % is below it."""
    long = {"instruction": "Go.", "output": "on and " * longest}
    path = json_lines([*ALPACA * others, long])
    whole = run(make_job(train=path, eval_fraction=0.0)).train.lengths
    room = int(np.sort(whole)[-2])  # of all but one
    prepared = run(make_job(train=path, eval_fraction=0.0, sequence_length=room, too_long=too_long))
    assert prepared.summary["longer_row"] > room
    lost = prepared.summary["lost_tokens"] / whole.sum()
    assert 0 < lost < (0.9 if others == 1 else 0.15)
    enough = [one for one in (0.95, 0.99, 0.999, 1.0) if one == 1 or 1 - one <= lost / 2]
    assert prepared.summary["longer_row_keeps"] == enough[0]


def test_long_conversations_are_an_error_on_request(run: Any, make_job: Make, json_lines: Any) -> None:
    long = {"instruction": "Go.", "output": "on and " * 100}
    path = json_lines([ALPACA[0], long, ALPACA[1], long])
    with pytest.raises(DataError, match="2 conversations are longer than") as caught:
        run(make_job(train=path, sequence_length=64, too_long="error"))
    assert [p.where for p in caught.value.problems] == [f"{path}:2", f"{path}:4"]
    assert "tokens" in caught.value.problems[0].what


def test_a_question_that_fills_the_row_leaves_nothing_to_train(
    run: Any, make_job: Make, json_lines: Any
) -> None:
    path = json_lines([{"instruction": "Tell me. " * 100, "output": "No."}] * 3)
    with pytest.raises(DataError, match="no token of the data would be trained: 3 read") as caught:
        run(make_job(train=path, sequence_length=32))
    assert "data.sequence_length" in caught.value.problems[0].fix


def test_a_template_that_marks_no_answer_is_an_error_not_a_loss_of_zero(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(DataError, match="no token of the data would be trained"):
        run(make_job(train=json_lines(ALPACA)))


def test_tokens_outside_the_model_are_named(run: Any, make_job: Make, json_lines: Any) -> None:
    path = json_lines([{"text": "Hello 😀"}])
    with pytest.raises(DataError, match="outside the model's vocabulary") as caught:
        run(make_job(train=path), vocab_size=200)
    assert caught.value.problems[0].where == f"{path}:1"
    assert "at token" in caught.value.problems[0].what


def test_a_tokenizer_without_an_end_token_is_refused(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end token"):
        run(make_job(train=json_lines([{"text": "a"}])))


@pytest.mark.parametrize("records", [[], [{"text": ""}, {"text": None}]])
def test_nothing_left_is_an_error_with_counts(
    run: Any, make_job: Make, json_lines: Any, records: list[Any]
) -> None:
    job = make_job(train=json_lines(records), format="text", skip_bad=True)
    with pytest.raises(
        DataError, match=f"no sample is left to train on: {len(records)} read, {len(records)} bad"
    ):
        run(job)


def test_a_single_sample_cannot_be_shared_out(run: Any, make_job: Make, json_lines: Any) -> None:
    with pytest.raises(DataError, match="single sample") as caught:
        run(make_job(train=json_lines(TEXTS[:1])))
    assert caught.value.problems[0].where == "data.eval_fraction"


def test_template_failures_are_bad_samples(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if '7' in m.content %}{{ raise_exception('no sevens') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    path = json_lines(ALPACA)
    with pytest.raises(DataError, match="4 samples cannot be used") as caught:
        run(make_job(train=path))
    assert [p.where.rpartition(":")[2] for p in caught.value.problems] == ["8", "18", "28", "38"]
    assert "no sevens" in caught.value.problems[0].what
    prepared = run(make_job(train=path, skip_bad=True))
    assert (prepared.summary["bad"], prepared.summary["samples"]) == (4, 36)


def test_the_cache_is_used_again_and_every_change_of_content_is_noticed(
    run: Any, make_job: Make, json_lines: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = json_lines(TEXTS)
    first = run(make_job(train=path)).summary["key"]
    before = entries(tmp_path)
    again = run(make_job(train=path, seed=9, packing=False)).summary["key"]  # decided after tokenising
    assert (again, entries(tmp_path)) == (first, before)

    content = Path(path).read_bytes()
    Path(path).write_bytes(content.replace(b"Say 39", b"Say 38"))
    keys = [run(make_job(train=path)).summary["key"]]
    Path(path).write_bytes(content)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    for change in (
        {"sequence_length": 900},
        {"loss_on": "all"},
        {"system": "Be kind."},
        {"max_samples": 39},
        {"chat_template": str(template)},
    ):
        keys.append(run(make_job(train=path, **change)).summary["key"])
    tokenizer.add_tokens(["twice"])
    keys.append(run(make_job(train=path)).summary["key"])
    assert len({first, *keys}) == len(keys) + 1
    assert len(entries(tmp_path)) == len(keys) + 1


def test_a_cache_of_another_version_is_not_used(
    run: Any, make_job: Make, json_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`data.format` took its place in the key, so that what was cached wrongly stayed."""
    job = make_job(train=json_lines(TEXTS), eval_fraction=0.0)
    before = run(job).summary["key"]
    monkeypatch.setattr("shardwise.data.prepare.FORMAT", 0)
    assert run(job).summary["key"] != before


def test_a_template_that_tells_the_time_gives_other_content_under_the_same_key(
    run: Any, make_job: Make, json_lines: Any, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template.write_text("{{ strftime_now('%f') }}" + turns)  # microseconds: each build has its own
    job = make_job(train=json_lines(ALPACA), chat_template=str(template), loss_on="all")
    first, warm, cold = run(job), run(job), run(job, cache="cold")
    assert first.summary["key"] == warm.summary["key"] == cold.summary["key"]
    assert first.content == warm.content != cold.content

    template.write_text(turns)
    plain = run(job)
    assert plain.content == run(job, cache="cold").content
    held_out = job.model_copy(update={"data": job.data.model_copy(update={"eval_fraction": 0.5})})
    assert run(held_out).content != plain.content, "other samples are trained on"


def test_a_tokenizer_that_was_used_with_padding_is_still_the_same(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = json_lines(TEXTS)
    first = run(make_job(train=path)).summary["key"]
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.enable_truncation(5)
    prepared = run(make_job(train=path))
    assert prepared.summary["key"] == first
    assert np.all(prepared.train.lengths > 5)


def test_columns_give_a_file_the_formats_names(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    named = [{"question": one["prompt"], "answer": one["completion"]} for one in PROMPTS]
    path, columns = json_lines(named), {"prompt": "question", "completion": "answer"}
    found = run(make_job(train=path, format=columns, eval_fraction=0.0))
    own = run(make_job(train=json_lines(PROMPTS, "own.jsonl"), eval_fraction=0.0))
    assert (found.content, found.summary["format"]) == (own.content, "prompt-completion")
    both = make_job(
        train=[path, json_lines(ALPACA, "a.jsonl")], format=columns, eval=json_lines(PROMPTS, "e.jsonl")
    )
    mixed = run(both)
    assert mixed.summary["format"] == "prompt-completion and alpaca", "each row has what it has"
    assert len(mixed.eval) == 40, "which has our names"
    assert next(documents(both)) == PROMPTS[0]["prompt"]
    other = run(make_job(train=path, format={"text": "answer"}, eval_fraction=0.0))
    assert other.summary["key"] != found.summary["key"], "the cache knows them"
    assert other.summary["format"] == "text"


def test_data_sets_are_mixed_by_their_weights(
    run: Any, make_job: Make, json_lines: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A folder of two files, and a file; weights follow the samples that are not held out."""
    pairs = [{"instruction": f"what is {n}?", "output": f"it is {n}"} for n in range(8)]
    folder = Path(json_lines(pairs[:1])).with_name("both")
    folder.mkdir()
    json_lines(pairs[:3], "both/one.jsonl"), json_lines(pairs[3:5], "both/two.jsonl")
    rare = json_lines(pairs[5:], "rare.jsonl")
    once = run(make_job(train=[str(folder), rare], eval_fraction=0.0))
    mixed = run(make_job(train=[str(folder), rare], weights=[3, 0.5], eval_fraction=0.0))
    assert once.train.weights is None
    assert mixed.train.weights.tolist() == [3.0] * 5 + [0.5] * 3
    assert mixed.content == once.content, "the tokens are the same, and come from the same cache"
    lengths = mixed.train.lengths
    assert mixed.summary["tokens"] == round(3 * lengths[:5].sum() + 0.5 * lengths[5:].sum())
    assert mixed.summary["drawn"] in ([(str(folder), 15), (rare, n)] for n in (1, 2)), "of 3, every second"
    held = run(make_job(train=[str(folder), rare], weights=[3, 0.5], eval_fraction=0.25))
    left = [sum(held.train.weights == weight) for weight in (3, 0.5)]
    (_, often), (_, seldom) = held.summary["drawn"]
    assert (often, seldom in {left[1] // 2, -(-left[1] // 2)}) == (3 * left[0], True)
    assert "drawn" not in once.summary
    assert len(held.train) + len(held.eval) == 8
    texts_of = {n: held.train.weights[n] for n in range(len(held.train))}
    for index, weight in texts_of.items():
        number = int(tokenizer.decode(held.train.sample(index)[0].tolist()).split("what is ")[1][0])
        assert weight == (3.0 if number < 5 else 0.5)
    stream = BatchStream(
        mixed.train, sequence_length=64, packing=False, pad_id=0, micro_batch=1, data_rank=0, data_size=1,
        global_batch=1, seed=0, worst_case_first=False,
    )  # fmt: skip
    assert stream.rows_per_epoch(0) in (16, 17)
    stream.close()
