"""What is said before training, about a job made ready for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.training.announce import announce
from shardwise.training.ready import Ready, get_ready

SAMPLES = Path(__file__).parents[3] / "src" / "shardwise" / "job" / "samples"


def ready(sequence_length: int, *, model: dict[str, Any] | None = None, **data: Any) -> Ready:
    job = Job.model_validate(
        {
            "name": "t",
            "model": {
                "source": "HuggingFaceTB/SmolLM2-135M",
                "weights": "random",
                "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
                | {"num_attention_heads": 2, "num_key_value_heads": 1},
                "tokenizer": "train",
                "tokenizer_vocab": 400,
            }
            | (model or {}),
            "data": {"train": str(SAMPLES / "qa.jsonl"), "loss_on": "all", **data}
            | {"sequence_length": sequence_length},
            "train": {"precision": "fp32"},
        }
    )
    return get_ready(job, processes=1)


def tokens(made: Ready) -> int:
    parts = [made.data.train] if made.data.eval is None else [made.data.train, made.data.eval]
    return sum(int(part.lengths.sum()) for part in parts)


def said(made: Ready, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was told, by its label."""
    announce(made, total_steps=3, json_plan=False)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines()]
    return {words[0]: words[1] for words in lines if len(words) == 2}


def test_what_is_cut_off_is_a_warning_with_the_length_that_keeps_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full, short = ready(1024, eval_fraction=0.2), ready(48, eval_fraction=0.2)
    everything = tokens(full)
    lengths = sorted(int(n) for part in (full.data.train, full.data.eval) if part for n in part.lengths)
    longer = sum(n > 48 for n in lengths)
    assert 0 < longer <= len(lengths)
    told = said(short, capsys)
    enough = next(n for n in range(1, 2000) if sum(min(n, length) for length in lengths) >= 0.95 * everything)
    assert told["warning"] == (
        f"{1 - tokens(short) / everything:.1%} of the conversations' tokens are lost; {longer} of "
        f"{len(lengths)} conversations are cut at the end: they are longer than data.sequence_length 48. "
        f"{-enough // 64 * -64} would keep 95 %"
    )
    assert "truncated" not in told["data"]
    assert told["strategy"].startswith("single on 1 process, fp32")


def test_a_length_that_loses_little_is_not_answered_with_a_shorter_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    longest = max(int(n) for n in ready(1024, eval_fraction=0.0).data.train.lengths)
    told = said(ready(longest - 1, eval_fraction=0.0), capsys)
    advised = int(told["cut"].split(f"data.sequence_length {longest - 1}. ")[1].split()[0])
    assert advised >= longest
    assert told["cut"].endswith(f"{advised} would keep all")


def test_an_epoch_of_weighted_sets_is_said_by_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = []
    for number in range(8):
        sets.append(str(tmp_path / f"{number}.jsonl"))
        Path(sets[-1]).write_text('{"text": "A horse."}\n' * (number + 1))
    made = ready(1024, train=sets, weights=[2.0] * 8, format="text", eval_fraction=0.0, loss_on="all")
    told = said(made, capsys)
    assert f"an epoch draws 2 of {sets[0]}, 4 of {sets[1]}, " in told["data"]
    assert f"12 of {sets[5]}, and of 2 more" in told["data"]
    assert "draws" not in said(ready(1024), capsys)["data"]


def test_conversations_whose_answer_is_cut_off_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = said(ready(48, loss_on="answers", eval_fraction=0.0), capsys)
    assert " are left out, because all of the answer was cut off: " in told["warning"]
    assert "left out" not in told["data"]


def test_no_conversation_is_counted_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose answer was cut off were also said to be cut."""
    made = ready(48, loss_on="answers", eval_fraction=0.0)
    cut, left = (made.data.summary[name] for name in ("truncated", "without_target"))
    assert cut + left <= made.data.summary["read"]
    assert cut == sum(int(n) == 48 for n in made.data.train.lengths)
    assert f"{cut} of {made.data.summary['read']} conversations are cut at the end; {left} are left" in str(
        said(made, capsys)
    )


@pytest.mark.parametrize(
    ("sequence_length", "advice"), [(32, ". 48, the model's positions, would keep more"), (48, "")]
)
def test_no_row_longer_than_the_models_positions_is_advised(
    sequence_length: int, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**shape, "num_key_value_heads": 1, "max_position_embeddings": 48}
    told = said(ready(sequence_length, model={"config": config}, eval_fraction=0.0), capsys)["warning"]
    assert told.endswith(f"longer than data.sequence_length {sequence_length}{advice}")


def test_nothing_is_said_where_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert "warning" not in said(ready(1024), capsys)


def test_markers_of_a_template_that_the_tokenizer_cuts_are_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = said(ready(1024, chat_template="chatml"), capsys)
    assert told["warning"].startswith(
        "the tokenizer has no <|im_start|>, <|im_end|>, which data.chat_template"
    )


def test_the_format_of_a_quantised_base_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = {"lora": {"rank": 4}}
    told = said(ready(1024, model=adapters | {"quantization": "nf4"}), capsys)["model"]
    assert told.endswith(" trained, base in nf4")
    assert said(ready(1024, model=adapters), capsys)["model"].endswith(" trained")


def test_the_sample_ends_with_a_complete_character(tmp_path: Path) -> None:
    """A row of 32 tokens, most of them bytes, ends within one of three bytes."""
    file = tmp_path / "zh.txt"
    file.write_text("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳", encoding="utf-8")
    for length in (31, 32, 33):
        made = ready(length, model={"tokenizer_vocab": 270}, train=str(file), format="text", eval_fraction=0)
        assert made.data.sample.runs[0][0].startswith("天地玄黄")
        assert "\ufffd" not in "".join(text for text, _ in made.data.sample.runs)
