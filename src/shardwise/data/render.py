"""The process that runs a chat template: `python -m shardwise.data.render`.

A chat template is a foreign program. Jinja's immutable sandbox keeps it from the machine but limits neither
time nor memory, so it runs in a process that has both limits. The first line on stdin is the template; every
other line is a list of conversations, each answered by one line on stdout. All lines are JSON. A conversation
that takes too much processor time ends the process by SIGPROF, whose default action stops native code, too.

**Which characters are answers.** The messages before an answer, rendered with the header that invites it,
are the prompt P that the model will see; rendered with the answer they are R. Where R begins with P, the rest
of R is the answer with its end-of-turn token. Where R is also the beginning of the entire rendering, the
answer is trained inside it. Some templates render earlier turns differently from the last one, for example
without reasoning: such a conversation becomes several samples, each trained exactly as the model will see it.
Answers among the first `asked` messages, the prompt, are not trained.
"""

import json
import re
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

MEMORY_BYTES = 2 << 30  # address space that rendering may take

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]


class RenderError(Exception):
    """The template cannot render this conversation, or leaves a part of it out."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    spans: list[Span]  # character ranges that are answers, each with its end-of-turn token


@dataclass(frozen=True)
class Template:
    """A chat template, and what it needs to know of the tokenizer."""

    source: str
    variables: dict[str, Any]  # special tokens by name, as templates use them: bos_token, eos_token, …
    end_tokens: tuple[str, ...]  # texts of all special tokens: one of them ends a turn
    answers_only: bool = True
    invite: bool = False  # render for generating: nothing is an answer

    @property
    def marks_answers(self) -> bool:
        return re.search(r"\{%-?\s*generation\b", self.source) is not None

    @cached_property
    def opening(self) -> tuple[str, bool]:
        """The header of an answer, and whether `add_generation_prompt` writes one; from a made-up example."""
        asked: Messages = [{"role": "user", "content": "a"}]
        probe = "answer-probe"
        try:
            bare, invited = self.text(asked, None), self.text(asked, None, prompt=True)
            answered = self.text([*asked, {"role": "assistant", "content": probe}], None)
        except Exception:  # noqa: BLE001 (a template that refuses the probe will report it for a conversation)
            return "", True
        header, found, _ = answered.removeprefix(bare).partition(probe)
        usable = found and answered.startswith(bare) and header.strip()  # blanks alone belong to the answer
        return header if usable else "", bare != invited

    def render(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> Rendered:
        """Render the messages, with the header that invites an answer if `prompt`."""
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.source,
            return_assistant_tokens_mask=self.marks_answers,
            add_generation_prompt=prompt,
            **self.variables,
        )
        return Rendered(texts[0], spans[0] if self.marks_answers else [])

    def text(self, messages: Messages, tools: Tools, *, prompt: bool = False) -> str:
        return self.render(messages, tools, prompt=prompt).text


def render_conversation(
    template: Template, messages: Messages, tools: Tools, asked: int = 0
) -> list[Rendered]:
    """Render the samples of one conversation; several only where the template rewrites earlier turns."""
    invited = template.invite and messages[-1]["role"] != "assistant"
    entire = template.render(messages, tools, prompt=invited)
    _check_complete(template, entire.text, messages, tools)
    if template.invite:
        return [Rendered(entire.text, [])]
    if not template.answers_only:
        return [Rendered(entire.text, [(0, len(entire.text))])]
    if template.marks_answers:
        skipped = len(template.render(messages[:asked], tools).spans) if asked > 1 else 0
        return [_with_ends(entire.text, entire.spans[skipped:], template.end_tokens)]
    answers = [n for n, message in enumerate(messages, 1) if n > asked and message["role"] == "assistant"]
    turns = [_answer(template, messages[:number], tools) for number in answers]
    closing = str(template.variables.get("eos_token", ""))
    samples = []
    while turns:
        text, last = turns.pop()
        inside, others = [last], []
        for prefix, (start, end) in turns:
            # Some templates close every rendering with the end token, wherever it ends.
            open_end = prefix if text.startswith(prefix) else prefix.removesuffix(closing)
            if text.startswith(open_end):
                inside.append((start, min(end, len(open_end))))
            else:
                others.append((prefix, (start, end)))
        turns = others
        samples.append(_with_ends(text, sorted(inside), template.end_tokens))
    return samples[::-1]


def _answer(template: Template, messages: Messages, tools: Tools) -> tuple[str, Span]:
    """Render up to the last message, an answer; return the text and where in it that answer stands."""
    text = template.text(messages, tools)
    prompt = template.text(messages[:-1], tools, prompt=True)
    header, invited = template.opening
    start = len(prompt)
    if not invited or not text.startswith(prompt):
        # The template writes no invitation, or one that holds more than the header of a finished
        # answer (an opened <think>): the answer follows the header that answers have.
        start = len(template.text(messages[:-1], tools))
        if text[:start] != prompt[:start]:
            raise RenderError("the chat template rewrites the earlier messages when an answer follows")
        start += len(header) if text.startswith(header, start) else 0
    if not _contains(text[start:], messages[-1]["content"]):
        raise RenderError("the chat template does not end with the answer")
    return text, (start, len(text))


def _with_ends(text: str, spans: list[Span], end_tokens: tuple[str, ...]) -> Rendered:
    """Let every answer end exactly with its end-of-turn token where it has one."""
    ended = []
    for start, end in spans:
        body = text[start:end].rstrip()
        if body.endswith(end_tokens):
            ended.append((start, start + len(body)))
        else:
            following = (token for token in end_tokens if text.startswith(token, end))
            ended.append((start, end + max(map(len, following), default=0)))
    return Rendered(text, ended)


def _check_complete(template: Template, text: str, messages: Messages, tools: Tools) -> None:
    for number, message in enumerate(messages, 1):
        if not _contains(text, message["content"]):
            raise RenderError(f"the chat template leaves out message {number} (role {message['role']})")
    if not all(_contains(text, str(tool["function"].get("name", ""))) for tool in tools or ()):
        raise RenderError("the chat template leaves out the tools; data.chat_template can name another")
    if template.invite:
        return
    reasoned = [number for number, message in enumerate(messages, 1) if message.get("reasoning_content")]
    upto = messages[: max(reasoned, default=0)]  # templates leave out that of earlier turns on purpose
    for key, part in (("tool_calls", messages), ("reasoning_content", upto)):
        # What is left out may also stand elsewhere, so the text has to change without it.
        silent = [{name: message[name] for name in message if name != key} for message in part]
        same = False
        with suppress(Exception):  # a template that insists on calls does not leave them out
            same = silent != part and template.text(silent, tools) == template.text(part, tools)
        if same:
            fix = "data.chat_template can name another, or remove them from the samples"
            raise RenderError(f"the chat template leaves out {key}; {fix}")


def _contains(text: str, content: str) -> bool:
    """Search a message that the template may trim, strip of its reasoning, or write as a JSON string."""
    core = content.rpartition("</think>")[2].strip()
    written = (core, json.dumps(core, ensure_ascii=False)[1:-1], json.dumps(core)[1:-1])
    return any(form in text for form in written)


def _reply(template: Template, messages: Messages, tools: Tools, asked: int) -> list[list[Any]] | str:
    """Return (text, spans) of each sample, or a sentence that says why there is none."""
    try:
        samples = render_conversation(template, messages, tools, asked)
    except RenderError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (any exception of a foreign template is the template's fault)
        return f"the chat template failed: {type(error).__name__}: {error}"[:1000]
    written = sum(len(sample.text) for sample in samples)
    allowed = len(samples) * (10 * len(json.dumps([messages, tools])) + (1 << 20))
    if written > allowed:
        return f"the chat template wrote {written} characters; {allowed} would be plausible"
    return [[sample.text, sample.spans] for sample in samples]


def time_limit(messages: Messages) -> float:
    """Seconds of processor time: each answer is rendered with all messages before it."""
    return 2.0 + 1e-5 * len(messages) ** 2


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, variables, end_tokens, answers_only, invite = json.loads(sys.stdin.readline())
    template = Template(source, variables, tuple(end_tokens), answers_only, invite)
    if sys.platform == "linux":  # elsewhere the address space cannot be limited; the time still is
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := sys.stdin.readline():
        for messages, tools, asked in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, time_limit(messages))  # starts again with every conversation
            # Flushed, because the next conversation may end the process.
            print(json.dumps(_reply(template, messages, tools, asked)), flush=True)


if __name__ == "__main__":
    main()
