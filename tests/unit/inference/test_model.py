"""What a loaded model says is what its weights say, in pieces that no later token changes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.errors import CheckpointError, JobError, MachineError, ShardwiseError, printable, render
from shardwise.inference.conversation import Conversation
from shardwise.inference.load import load_model
from shardwise.inference.model import LoadedModel, TooLongError, _Text
from shardwise.inference.sampling import Sampling
from shardwise.models.adapters import quiet_peft

Make = Callable[..., Path]
Load = Callable[[Path], LoadedModel]
ASKED = [{"role": "user", "content": "hello world"}]


def said(model: LoadedModel, asked: Any = ASKED, *, base: bool = False, **options: Any) -> str:
    return "".join(model.stream(model.prompt(asked), Sampling(**{"max_new_tokens": 8, **options}), base=base))


def greedy(model: torch.nn.Module, ids: list[int], count: int, *, penalty: float = 1.0) -> list[int]:
    """The likeliest tokens, by the definition; `penalty` divides what speaks for a token that was seen."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            logits = model.eval()(tokens).logits[0, -1]
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill(0, tokens[0], value=True)
            punished = torch.where(logits > 0, logits / penalty, logits * penalty)
            best = torch.where(seen, punished, logits).argmax()
            tokens = torch.cat([tokens, best.view(1, 1)], dim=1)
    return tokens[0, len(ids) :].tolist()


def test_the_answer_is_that_of_the_weights(make: Make, load: Load) -> None:
    folder = make()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<user>hello world<assistant>"
    reference = AutoModelForCausalLM.from_pretrained(folder)
    best = greedy(reference, tokenizer(text)["input_ids"], 8)
    model = load(folder)
    assert model.prompt(ASKED) == tokenizer(text)["input_ids"]
    assert said(model) == tokenizer.decode(best) == said(model, temperature=1e-320)
    assert said(model, temperature=5.0, top_k=1) == said(model, temperature=5.0, top_p=1e-6) == said(model)
    penalised = greedy(reference, model.prompt(ASKED), 8, penalty=1.5)
    assert penalised != best
    assert said(model, repetition_penalty=1.5) == tokenizer.decode(penalised)
    one, again, other = (said(model, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert said(model, temperature=1.0) != said(model, temperature=1.0), "another seed each time"


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(make: Make, load: Load) -> None:
    model = load(make())
    entire = said(model, max_new_tokens=30)
    stop = entire[12:16]
    answer = model.stream(model.prompt(ASKED), Sampling(max_new_tokens=30, stop=("never", stop)))
    assert "".join(answer) == entire[: entire.index(stop)]
    assert answer.finish == "stop"
    assert answer.tokens < 30
    long = model.stream(model.prompt(ASKED), Sampling(max_new_tokens=5))
    list(long)
    assert (long.tokens, long.finish) == (5, "length")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("你好，世界 🌍!", (), "你好，世界 🌍!"),
        ("  indented\n    code\n", (), "  indented\n    code\n"),
        ("say END of it", ("END",), "say "),
        ("an E, an EN, the end", ("END",), "an E, an EN, the end"),
    ],
)
def test_pieces_never_change(make: Make, text: str, stop: tuple[str, ...], expected: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make())
    pieces: queue.Queue[Any] = queue.Queue()
    streamer = _Text(tokenizer, stop, set(), pieces)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokenizer(text)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    got = list(pieces.queue)
    assert "".join(got) == expected
    assert not any("\ufffd" in piece for piece in got)
    assert len(got) > 2 or stop, "it comes in pieces"


def test_a_character_that_was_cut_off_is_left_out(make: Make) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make())
    pieces: queue.Queue[Any] = queue.Queue()
    streamer = _Text(tokenizer, (), set(), pieces)
    streamer.put(torch.tensor([[1]]))
    for token in tokenizer("a世")["input_ids"][:-1]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert list(pieces.queue) == ["a"]


def test_the_templates_end_of_a_turn_ends_the_answer(make: Make, load: Load) -> None:
    """It is another token than the end of a text, which the generation config names."""
    model = load(make(only=["<|turn|>"]))
    answer = model.stream(model.prompt(ASKED), Sampling(max_new_tokens=8))
    assert (list(answer), answer.tokens, answer.finish) == ([], 1, "stop")


def test_an_answer_can_be_ended(make: Make, load: Load) -> None:
    model = load(make(only=["a"]))
    answer = model.stream(model.prompt(ASKED), Sampling(max_new_tokens=100))
    assert next(answer) == "a"
    answer.close()
    assert answer._text.pieces.qsize() < 99
    assert said(model) == "a" * 8


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a\x1b[2Jb", "control characters"),
        ("a\x00b", "control characters"),
        ("a\x9bb", "control characters"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "not UTF-8"),
        ("word " * 200, "leave no room for an answer: the model has 128 positions"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused(make: Make, load: Load, content: str, says: str) -> None:
    model = load(make())
    for asked in (content, [{"role": "user", "content": content}]):
        with pytest.raises(JobError, match=says):
            model.prompt(asked)
    assert model.prompt("lines\r\n\tand tabs, \u2067\u05d0\u2069 is Hebrew")
    with pytest.raises(JobError, match="the prompt is empty"):
        model.prompt("")


def test_an_answer_ends_where_the_model_does(make: Make, load: Load) -> None:
    model = load(make(only=["a"]))
    ids = model.prompt("hello " * 20)
    answer = model.stream(ids, Sampling(max_new_tokens=1000))
    assert len("".join(answer)) == 128 - len(ids)
    assert answer.finish == "length"


def test_a_template_has_limits_and_ends_nothing_but_itself(make: Make, load: Load) -> None:
    endless = "{% if messages[-1].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    endless += (
        "{% endfor %}{% endfor %}{% endif %}" + "{{ raise_exception('\x1b[2Jno') if messages|length > 2 }}"
    )
    model = load(make(template=endless + "{{ messages[-1].content }}"))
    with pytest.raises(JobError, match="took more than 2 s"):
        model.prompt([{"role": "user", "content": "hang"}])
    with pytest.raises(JobError, match="the chat template failed") as caught:
        model.prompt([*ASKED, {"role": "assistant", "content": "b"}, *ASKED])
    assert "\x1b" not in str(caught.value)
    assert model.prompt(ASKED) == model.tokenizer("hello world")["input_ids"]


def test_the_oldest_turns_are_left_out_with_a_word(make: Make, load: Load) -> None:
    model, notes = load(make()), list[str]()
    talk = Conversation(model, Sampling(max_new_tokens=40), system="be", compare=False, note=notes.append)
    for word in ("first", "second", "third"):
        [(_, answer)] = talk.answers(f"{word} question here")
        talk.remember(f"{word} question here", "an answer")
        answer.close()
    asked = model.tokenizer.decode(talk._ids("fourth"))
    assert asked.startswith("<system>be<user>")
    assert "first" not in asked
    assert "third question here<assistant>an answer" in asked
    assert len(model.prompt(asked)) + 40 <= 128
    assert notes
    assert notes[0] == "note: the model's length is 128 tokens: it no longer hears the oldest turn"
    with pytest.raises(TooLongError):
        talk._ids("word " * 200)
    assert talk.command("/reset") == "forgotten"
    assert model.tokenizer.decode(talk._ids("a")) == "<system>be<user>a<assistant>"
    assert talk.command("/system  be \x1b brief ") == "system message: be \\x1b brief"
    for line, says in (("/base", "no adapter"), ("/nothing", "no command /nothing")):
        with pytest.raises(JobError, match=says):
            talk.command(line)


def test_more_new_tokens_than_the_model_s_length_do_not_forget_what_was_said(make: Make, load: Load) -> None:
    model, notes = load(make()), list[str]()
    talk = Conversation(model, Sampling(max_new_tokens=512), system=None, compare=False, note=notes.append)
    talk.remember("first", "answer")
    assert "first<assistant>answer" in model.tokenizer.decode(talk._ids("second"))
    assert notes == []


def test_without_a_template_text_is_continued(make: Make, load: Load) -> None:
    model = load(make(template=None))
    talk = Conversation(model, Sampling(), system=None, compare=False, note=print)
    talk.remember("before", "answer")
    assert talk._ids("hello") == model.tokenizer("hello")["input_ids"]
    with pytest.raises(JobError, match="hears no system message"):
        talk.command("/system be brief")


def adapter_on(base: Path, out: Path) -> torch.nn.Module:
    """PEFT's own adapter, with values that matter, saved as PEFT does."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    with quiet_peft():
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    peft.save_pretrained(out)
    return peft


def test_an_adapter_of_peft_answers_and_its_base_does_too(make: Make, load: Load, tmp_path: Path) -> None:
    base = make()
    peft = adapter_on(base, tmp_path / "adapter")
    model, plain = load(tmp_path / "adapter"), load(base)
    ids = model.prompt(ASKED)
    assert said(model) == model.tokenizer.decode(greedy(peft, ids, 8))
    assert said(model, base=True) == said(plain) != said(model)
    assert said(model) != said(plain), "the adapter is on again"
    with pytest.raises(JobError, match="base has no adapter"):
        said(plain, base=True)
    talk = Conversation(model, Sampling(max_new_tokens=8), system=None, compare=True, note=print)
    answers = {label: "".join(answer) for label, answer in talk.answers("hello world")}
    assert answers == {"base: ": said(plain), "tuned: ": said(model)}


def break_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "mlp.up_proj" not in n}, file, {"format": "pt"})


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "new"}')


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (break_weights, CheckpointError, "2 of the model's weights are not in the files"),
        (only_pickles, JobError, "can run code when it is read"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"no"),
            CheckpointError,
            r"cannot be read(.|\n)*model\.safetensors",
        ),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "new"}'),
            JobError,
            "cannot load the model",
        ),
        (lambda f: (f / "config.json").unlink(), JobError, "is not a run folder"),
        (lambda f: (f / "tokenizer.json").unlink(), JobError, "tokenizer"),
    ],
)
def test_a_model_is_loaded_entirely_or_not_at_all(
    make: Make, change: Any, kind: type[ShardwiseError], says: str
) -> None:
    folder = make()
    change(folder)
    with pytest.raises(kind, match=says):
        load_model(str(folder))


def test_a_name_is_a_path_where_it_looks_like_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make().parent)
    for name in ("base/nothing", "./nothing"):
        with pytest.raises(JobError, match="there is no folder"):
            load_model(name)
    with pytest.raises(MachineError, match="the hub cannot be reached"):
        load_model("org/nothing")
    with pytest.raises(JobError, match="there is no folder and no known shape 'nothing'"):
        load_model("nothing")


def test_an_adapter_without_its_base_is_refused(make: Make, tmp_path: Path) -> None:
    base = make()
    adapter_on(base, tmp_path / "adapter")
    base.rename(tmp_path / "moved")
    with pytest.raises(JobError):
        load_model(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names no base"):
        load_model(str(tmp_path / "adapter"))


def test_foreign_text_cannot_steer_a_terminal() -> None:
    hostile = "a\x1b[2J\x07\x9b31m\x7f\r\nb\tc é 世 🌍"
    assert printable(hostile) == "a\\x1b[2J\\x07\\x9b31m\\x7f\\r\nb\tc é 世 🌍"
    assert "\x1b" not in render(JobError(hostile, where=hostile, fix=hostile))
