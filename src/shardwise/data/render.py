"""The process in which chat templates run: `python -m shardwise.data.render`.

A chat template is a program from somewhere else. It runs in Jinja's immutable sandbox, and the
sandbox in a process of its own with limits on time and memory, because Jinja limits neither. On
stdin comes one line of setup, then lines that each hold a list of conversations; on stdout goes one
line per conversation. All lines are JSON. A conversation that takes too much processor time ends
the process by SIGPROF, whose default action stops native code as well.

**Which characters are answers.** Rendering the messages before an answer, with the header that
invites it, gives the prompt P the model will see; rendering them with the answer gives W. Where W
begins with P, the rest of W is the answer with its end-of-turn token. Where W is also the beginning
of the whole rendering, that answer is trained inside it. Templates exist that render earlier turns
differently from the last one (some leave out reasoning); such a conversation becomes several
samples, each of which the model will see at inference exactly as it is trained.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 << 30
"""Address space that rendering may take."""

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Opening:
    """What a template writes before an answer."""

    header: str
    invited: bool
    """Whether `add_generation_prompt` makes it write something."""


class RenderError(Exception):
    """The template cannot render this conversation, or leaves a part of it out."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    spans: list[Span]
    """Character ranges that are answers, each with its end-of-turn token."""


@dataclass(frozen=True)
class Template:
    """A chat template with what it needs to know of the tokenizer."""

    source: str
    variables: dict[str, Any]
    """Special tokens by name, as templates use them: bos_token, eos_token, …"""
    end_tokens: tuple[str, ...]
    """Texts of all special tokens: one of them ends a turn."""
    answers_only: bool = True

    @property
    def marks_answers(self) -> bool:
        return re.search(r"\{%-?\s*generation\b", self.source) is not None

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool = False
    ) -> Rendered:
        """The text of the messages, with the header that invites an answer if `prompt`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self.source,
            return_assistant_tokens_mask=self.marks_answers,
            add_generation_prompt=prompt,
            **self.variables,
        )
        return Rendered(texts[0], [(start, end) for start, end in spans[0]] if self.marks_answers else [])


def render_conversation(
    template: Template, messages: list[Message], tools: list[dict[str, Any]] | None, opening: Opening
) -> list[Rendered]:
    """The samples of one conversation; several only where the template rewrites earlier turns."""
    whole = template.render(messages, tools)
    _check_complete(whole.text, messages, tools)
    _check_calls(template, whole.text, messages, tools)
    if not template.answers_only:
        return [Rendered(whole.text, [(0, len(whole.text))])]
    if template.marks_answers:
        return [_with_ends(whole.text, whole.spans, template.end_tokens)]
    turns = [
        _answer(template, messages[: index + 1], tools, opening)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    samples = []
    closing = str(template.variables.get("eos_token", ""))
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


def probe_opening(template: Template) -> Opening:
    """How the template opens an answer, seen in a conversation made up for it."""
    asked: list[Message] = [{"role": "user", "content": "a"}]
    probe = "answer-probe"
    try:
        bare, invited = template.render(asked, None).text, template.render(asked, None, prompt=True).text
        answered = template.render([*asked, {"role": "assistant", "content": probe}], None).text
    except Exception:  # noqa: BLE001 (a template that refuses the probe will say why to a conversation)
        return Opening("", invited=True)
    header, found, _ = answered.removeprefix(bare).partition(probe)
    usable = found and answered.startswith(bare) and header.strip()  # white space alone belongs to the answer
    return Opening(header if usable else "", invited=bare != invited)


def _answer(
    template: Template, messages: list[Message], tools: list[dict[str, Any]] | None, opening: Opening
) -> tuple[str, Span]:
    """The rendering up to the last message, an answer, and where in it that answer stands."""
    text = template.render(messages, tools).text
    prompt = template.render(messages[:-1], tools, prompt=True).text
    start = len(prompt)
    if not opening.invited or not text.startswith(prompt):
        # The template writes no invitation, or one that holds more than the header of a finished
        # answer (an opened <think>): the answer follows the header that answers have.
        start = len(template.render(messages[:-1], tools).text)
        if text[:start] != prompt[:start]:
            raise RenderError("the chat template rewrites the earlier messages when an answer follows")
        start += len(opening.header) if text.startswith(opening.header, start) else 0
    _check_answer(text[start:], messages[-1])
    return text, (start, len(text))


def _with_ends(text: str, spans: list[Span], end_tokens: tuple[str, ...]) -> Rendered:
    """Let every answer end with its end-of-turn token where there is one, not after and not before it."""
    settled = []
    for start, end in spans:
        body = text[start:end].rstrip()
        if body.endswith(end_tokens):
            settled.append((start, start + len(body)))
        else:
            following = max(
                (token for token in end_tokens if text.startswith(token, end)), key=len, default=""
            )
            settled.append((start, end + len(following)))
    return Rendered(text, settled)


def _check_complete(text: str, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
    for number, message in enumerate(messages, 1):
        if not _contains(text, message["content"]):
            raise RenderError(f"the chat template leaves out message {number} (role {message['role']})")
    for tool in tools or ():
        if not _contains(text, str(tool["function"].get("name", ""))):
            raise RenderError("the chat template leaves out the tools; data.chat_template can name another")


def _check_answer(text: str, message: Message) -> None:
    if not _contains(text, message["content"]):
        raise RenderError("the chat template does not end with the answer")


def _check_calls(
    template: Template, text: str, messages: list[Message], tools: list[dict[str, Any]] | None
) -> None:
    """Without its calls the conversation has to look different; a name may also stand in the tools."""
    if not any("tool_calls" in message for message in messages):
        return
    silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    try:
        same = template.render(silent, tools).text == text
    except Exception:  # noqa: BLE001 (a template that insists on calls does not leave them out)
        return
    if same:
        raise RenderError("the chat template leaves out calls; data.chat_template can name another")


def _contains(text: str, content: str) -> bool:
    """Templates may trim a message, drop its reasoning, or write it as a JSON string."""
    core = content.rpartition("</think>")[2].strip()
    written = (core, json.dumps(core, ensure_ascii=False)[1:-1], json.dumps(core)[1:-1])
    return any(form in text for form in written)


def _limit_memory() -> None:
    if sys.platform != "linux":  # elsewhere the address space cannot be limited; the time still is
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reply(template: Template, conversation: dict[str, Any], opening: Opening) -> dict[str, Any]:
    try:
        samples = render_conversation(template, conversation["messages"], conversation["tools"], opening)
    except RenderError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 (whatever a foreign template raises is that template's fault)
        return {"error": f"the chat template failed: {type(error).__name__}: {error}"[:1000]}
    written = sum(len(sample.text) for sample in samples)
    allowed = len(samples) * (10 * len(json.dumps(conversation)) + (1 << 20))
    if written > allowed:
        return {"error": f"the chat template wrote {written} characters; {allowed} would be plausible"}
    return {"samples": [[sample.text, sample.spans] for sample in samples]}


def time_limit(messages: list[Message]) -> float:
    """Seconds of processor time: each answer is rendered with all that comes before it."""
    return 2.0 + 1e-5 * len(messages) ** 2


def _start_clock(messages: list[Message]) -> None:
    """Stops this process after that time from now, unless the clock is started again."""
    signal.setitimer(signal.ITIMER_PROF, time_limit(messages))


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    setup = json.loads(sys.stdin.readline())
    template = Template(
        setup["source"], setup["variables"], tuple(setup["end_tokens"]), answers_only=setup["answers_only"]
    )
    import transformers.utils.chat_template_utils  # noqa: F401  (before the limits: importing is slow)

    _limit_memory()
    _start_clock([])
    opening = probe_opening(template)
    while line := sys.stdin.readline():
        for conversation in json.loads(line):
            _start_clock(conversation["messages"])
            reply = _reply(template, conversation, opening)
            sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
