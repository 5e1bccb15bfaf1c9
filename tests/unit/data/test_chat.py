"""Which tokens are trained: for every style of template exactly the answers with their end tokens."""

from __future__ import annotations

import copy
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.data.chat import (
    DEFAULT_TEMPLATE,
    Encoder,
    Renderer,
    end_tokens,
    template_for,
    trained_mask,
    unknown_markers,
)
from shardwise.data.formats import Conversation
from shardwise.data.render import RenderError, Template, render_conversation
from shardwise.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITHOUT_INVITATION = CHATML.partition("{% if")[0]
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Like Qwen3: reasoning is shown only in the last turn, which gets an empty one if it has none.
THINKING_LAST_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like DeepSeek-R1: the invitation opens a reasoning that finished answers do not show.
THINKING_INVITED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% else %}<|im_end|>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|><think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
# Like Phi-3: a rendering without an invitation is closed with the end token, wherever it ends.
CLOSED = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
NO_END = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"

TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
    {"role": "user", "content": "Thank you: It is Paris."},  # an answer's words in a question
    {"role": "assistant", "content": "  Hello!\n\nHow can I help?\n"},
]


def trained_runs(
    tokenizer: PreTrainedTokenizerFast,
    source: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    answers_only: bool = True,
    asked: int = 0,
) -> list[list[str]]:
    """For each sample that the conversation becomes, the decoded runs of trained tokens."""
    template = Template(
        source, {"bos_token": "<s>", "eos_token": "</s>"}, tuple(end_tokens(tokenizer)), answers_only
    )
    before = copy.deepcopy(messages)
    samples = render_conversation(template, messages, tools, asked)
    assert messages == before
    encoder = Encoder(tokenizer, vocab_size=len(tokenizer))
    found = []
    for sample in encoder.conversations([("x:1", sample) for sample in samples]):
        pairs = zip(sample.tokens.tolist(), sample.trained.tolist(), strict=True)
        runs = [(flag, [token for token, _ in run]) for flag, run in groupby(pairs, key=lambda p: p[1])]
        found.append([tokenizer.decode(ids) for flag, ids in runs if flag])
    return found


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        (CHATML, ["It is Paris.<|im_end|>", "  Hello!\n\nHow can I help?\n<|im_end|>"]),
        (CHATML_WITHOUT_INVITATION, ["It is Paris.<|im_end|>", "  Hello!\n\nHow can I help?\n<|im_end|>"]),
        (LLAMA3, ["It is Paris.<|eot_id|>", "Hello!\n\nHow can I help?<|eot_id|>"]),
        (MISTRAL, [" It is Paris.</s>", "   Hello!\n\nHow can I help?\n</s>"]),
        (DEFAULT_TEMPLATE, ["It is Paris.</s>", "Hello!\n\nHow can I help?</s>"]),
        (THINKING_INVITED, ["It is Paris.</s>", "  Hello!\n\nHow can I help?\n</s>"]),
        (CLOSED, ["It is Paris.<|im_end|>", "  Hello!\n\nHow can I help?\n<|im_end|>\n</s>"]),
        (MARKED, ["It is Paris.<|im_end|>", "  Hello!\n\nHow can I help?\n<|im_end|>"]),
    ],
    ids=["chatml", "chatml-bare", "llama3", "mistral", "default", "thinking-invited", "closed", "marked"],
)
def test_the_answers_with_their_end_tokens_are_trained_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast, source: str, answers: list[str]
) -> None:
    assert trained_runs(tokenizer, source, TALK) == [answers]
    for asked in (2, 3):  # the first answer is the prompt's
        assert trained_runs(tokenizer, source, TALK, asked=asked) == [answers[1:]]
    everything = trained_runs(tokenizer, source, TALK, asked=3, answers_only=False)
    assert everything == trained_runs(tokenizer, source, TALK, answers_only=False)


def test_turns_that_the_template_rewrites_later_become_samples_of_their_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    runs = trained_runs(tokenizer, THINKING_LAST_TURN, TALK)
    assert runs == [
        ["<think>\n\n</think>\n\nIt is Paris.<|im_end|>"],
        ["<think>\n\n</think>\n\n  Hello!\n\nHow can I help?\n<|im_end|>"],
    ]
    assert trained_runs(tokenizer, THINKING_LAST_TURN, TALK, asked=3) == runs[1:]


def test_an_end_token_is_added_where_the_template_has_none(tokenizer: PreTrainedTokenizerFast) -> None:
    # "ASSISTANT: It": the tokenizer joins the space before the answer with its first word.
    assert trained_runs(tokenizer, NO_END, TALK[:2]) == [[" It is Paris.</s>"]]


def test_the_longest_end_token_ends_an_answer() -> None:
    source = MARKED.replace("<|im_end|>\n{% else", "<end>! {% else")
    (sample,) = render_conversation(Template(source, {}, ("<end>", "<end>!", "!")), TALK[:2], None)
    assert [sample.text[start:end] for start, end in sample.spans] == ["It is Paris.<end>!"]


def test_all_tokens_are_trained_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    (runs,) = trained_runs(tokenizer, CHATML, TALK[:2], answers_only=False)
    assert runs == [
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nIt is Paris.<|im_end|>\n"
    ]


def test_calls_are_trained_and_their_results_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is 2."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    (runs,) = trained_runs(tokenizer, DEFAULT_TEMPLATE, messages, tools=tools)
    assert runs == ['{"name": "add", "arguments": {"a": 1}}</s>', "It is 2.</s>"]


@pytest.mark.parametrize(
    "text", ["ünïcödé 😀 答えは四です", "a\u00a0b\u2003c", "   \n\n\t indented\r\n", "x" * 300]
)
def test_the_mask_is_exact_for_any_characters(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text + "."}]
    assert trained_runs(tokenizer, CHATML, messages) == [[text + ".<|im_end|>"]]


def test_a_gap_between_offsets_belongs_to_the_token_after_it() -> None:
    # "ab cd|ef" where the tokenizer leaves white space out of its ranges; the answer is " cd".
    offsets = np.array([[0, 2], [3, 5], [5, 7]])
    assert trained_mask(offsets, [(2, 5)]).tolist() == [0, 1, 0]
    # The white space is a token of its own with an empty range.
    assert trained_mask(np.array([[0, 2], [3, 3], [3, 5]]), [(2, 5)]).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (MISTRAL, [{"role": "system", "content": "Be kind."}, *TALK[:2]], "only user and assistant"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", TALK[:2],
         r"leaves out message 2 \(role assistant\)"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", TALK[:2],
         "rewrites the earlier messages"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_render_is_said(
    tokenizer: PreTrainedTokenizerFast, source: str, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        trained_runs(tokenizer, source, messages)


def test_a_template_that_drops_calls_or_tools_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    for source in (CHATML, MARKED):
        with pytest.raises(RenderError, match="leaves out tool_calls"):
            trained_runs(tokenizer, source, messages)
    with pytest.raises(RenderError, match="leaves out the tools"):
        trained_runs(tokenizer, CHATML, TALK[:2], tools=[{"function": {"name": "add"}}])


# Like Qwen3: reasoning of answers before the last question is left out on purpose.
REASONING = (
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.asked %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("reasoned", [(1,), (3,), (1, 3)])
def test_a_template_that_drops_all_reasoning_is_refused(
    tokenizer: PreTrainedTokenizerFast, reasoned: tuple[int, ...]
) -> None:
    messages = copy.deepcopy(TALK[:4])
    for number in reasoned:
        messages[number]["reasoning_content"] = "Let me see."
    for source in (CHATML, MARKED, DEFAULT_TEMPLATE):
        for answers_only in (True, False):
            template = Template(source, {"eos_token": "</s>"}, ("</s>", "<|im_end|>"), answers_only)
            with pytest.raises(RenderError, match=r"leaves out reasoning_content; data\.chat_template can"):
                render_conversation(template, messages, None)
            render_conversation(Template(source, {"eos_token": "</s>"}, (), invite=True), messages, None)
    samples = render_conversation(Template(REASONING, {}, ("<|im_end|>",)), messages, None)
    trained = [
        text[start:end] for text, spans in [(s.text, s.spans) for s in samples] for start, end in spans
    ]
    assert sum("Let me see." in answer for answer in trained) == len(reasoned)


def test_which_template_is_used(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert template_for(tokenizer) == DEFAULT_TEMPLATE
    tokenizer.chat_template = CHATML
    assert template_for(tokenizer) == CHATML
    file = tmp_path / "template.jinja"
    file.write_text(LLAMA3)
    assert template_for(tokenizer, str(file)) == LLAMA3
    with pytest.raises(DataError, match="cannot be read"):
        template_for(tokenizer, str(tmp_path / "none.jinja"))


def test_the_default_template_asks_as_it_trains(tokenizer: PreTrainedTokenizerFast) -> None:
    """The rendering a generation uses, through transformers itself, is the prefix that was trained."""
    tokenizer.chat_template = template_for(tokenizer)
    asked = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "### User:\nWhat is the capital of France?\n\n### Assistant:\n"
    whole = tokenizer.apply_chat_template(TALK[:2], tokenize=False)
    assert whole == asked + "It is Paris.</s>\n\n"


def render_one(tokenizer: PreTrainedTokenizerFast, source: str) -> Any:
    with Renderer(tokenizer, source, answers_only=True) as renderer:
        ((_, result),) = renderer.render([Conversation("data.json:7", copy.deepcopy(TALK[:2]))])
    return result


def test_the_renderer_process_gives_text_and_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    (sample,) = render_one(tokenizer, CHATML)
    ((start, end),) = sample.spans
    assert sample.text[start:end] == "It is Paris.<|im_end|>"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('touch CANARY') }}",
    "{{ namespace.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% set f = 'x{0.__class__.__mro__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}'] | map('format', messages) | list }}{{ self.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
]


def test_templates_cannot_leave_the_sandbox(tokenizer: PreTrainedTokenizerFast, canary: Path) -> None:
    template_end = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for attack in ESCAPES:
        source = attack.replace("CANARY", str(canary)) + template_end
        template = Template(source, {}, ("</s>",))
        try:
            text = render_conversation(template, copy.deepcopy(TALK[:2]), None)[0].text
        except Exception:  # noqa: BLE001 (refused in whatever way)
            text = ""
        assert not canary.exists(), attack
        assert "class '" not in text, attack
        assert "root:" not in text, attack


def test_a_template_cannot_change_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match=r"append|immutable|unsafe"):
        trained_runs(tokenizer, "{{ messages.append(1) }}" + CHATML, TALK[:2])


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'ab' * 10**7 }}", "characters"),
    ],
)
def test_templates_that_want_too_much_are_refused(
    tokenizer: PreTrainedTokenizerFast, attack: str, message: str
) -> None:
    result = render_one(tokenizer, attack + CHATML)
    assert isinstance(result, str)
    assert message in result


@pytest.mark.parametrize(
    "attack",
    [
        # Each loop is within Jinja's limit; together they are ten billion rounds.
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (messages[0].content | length) ** 100000000 }}",  # native code that Python cannot interrupt
    ],
)
def test_templates_that_do_not_end_are_stopped(tokenizer: PreTrainedTokenizerFast, attack: str) -> None:
    start = time.process_time()
    with pytest.raises(DataError, match="took more than 2 s") as caught:
        # Only for a real conversation, not for the probe that comes first.
        render_one(tokenizer, CHATML + "{% if messages[0].content | length > 1 %}" + attack + "{% endif %}")
    assert caught.value.problems[0].where == "data.json:7"
    assert time.process_time() - start < 1  # nothing of it runs in this process


def test_the_conversation_that_does_not_end_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = "messages[0].content"
    attack = f"{{% if 'endless' in {asked} %}}{{{{ ({asked} | length) ** 100000000 }}}}{{% endif %}}"
    talks = [
        Conversation(f"x:{line}", [{"role": "user", "content": text}, TALK[1]])
        for line, text in enumerate(("one", "two", "endless", "four"), 1)
    ]
    limit = pytest.raises(DataError, match="took more than 2 s")
    with limit as caught, Renderer(tokenizer, attack + CHATML, answers_only=True) as renderer:
        list(renderer.render(talks))
    assert caught.value.problems[0].where == "x:3"


def test_the_renderer_process_sees_no_secrets(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Renderer(tokenizer, CHATML, answers_only=True) as renderer:
        list(renderer.render([Conversation("x:1", copy.deepcopy(TALK[:2]))]))
        assert renderer._process is not None
        environment = Path(f"/proc/{renderer._process.pid}/environ").read_bytes()
    assert b"hf_secret" not in environment


def test_files_of_the_working_directory_stand_in_for_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    (sample,) = render_one(tokenizer, CHATML)
    assert len(sample.spans) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHow can I help?<|im_end|>"),
        (
            "llama-3",
            "<s><|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHow can I help?<|eot_id|>",
        ),
        ("alpaca", "### Instruction:\nHello!\n\n### Response:\nHow can I help?</s>"),
    ],
)
def test_templates_with_a_name(tokenizer: PreTrainedTokenizerFast, name: str, text: str) -> None:
    """The answer and the token that ends it are trained, the question is not; asked, it ends as it begins."""
    source = template_for(tokenizer, name)
    assert unknown_markers(tokenizer, source) == []
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "How can I help?"}]
    with Renderer(tokenizer, source, answers_only=True) as renderer:
        [(_, [rendered])] = renderer.render([Conversation("x", messages)])  # type: ignore[misc]
    assert rendered.text.rstrip() == text
    [(start, end)] = rendered.spans
    assert text[start:end].rstrip() in (
        "How can I help?" + stop for stop in ("<|im_end|>", "<|eot_id|>", "</s>")
    )
    with Renderer(tokenizer, source, answers_only=False, invite=True) as renderer:
        [(_, [asked])] = renderer.render([Conversation("x", messages[:1])])  # type: ignore[misc]
    assert text.startswith(asked.text)
    assert text[len(asked.text) :].startswith("How can I help?")
