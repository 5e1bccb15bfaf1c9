"""Conversations to text: which chat template is used, and the process that runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from shardwise.data.formats import Conversation
from shardwise.data.render import Rendered, time_limit
from shardwise.errors import DataError, MachineError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE = """\
{%- if tools %}{{ '### Tools:\\n' + tools | tojson + '\\n\\n' }}{% endif %}
{%- for message in messages %}
    {{- '### ' + message.role | capitalize + ':\\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}{{ call.function | tojson }}
    {%- endfor %}
    {{- eos_token if message.role == 'assistant' }}{{ '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"""
"""For tokenizers without a chat template. It needs no special token but the end token:

    ### User:
    What is 2 + 2?

    ### Assistant:
    4</s>

Other roles are `### System:` and `### Tool:`; tools come first as JSON, calls are JSON in the answer.
"""


def template_for(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> str:
    """The Jinja text of `file` (the job's `data.chat_template`), else the tokenizer's, else the default.

    Saving a trained model wants `tokenizer.chat_template = template_for(…)`, so that it is asked as it
    was trained.
    """
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"the chat template cannot be read: {error}",
                where="data.chat_template",
                fix="name a Jinja file",
            ) from None
    if tokenizer.chat_template:
        return str(tokenizer.get_chat_template())
    return ("{{ bos_token }}" if starts_with_bos(tokenizer) else "") + DEFAULT_TEMPLATE


def starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this tokenizer's models are used to a begin token before every text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def end_token(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Text and id of the token that ends a document."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, so the model could never learn to stop",
            where="model.tokenizer",
            fix="use a tokenizer with an eos_token (tokenizer_config.json)",
        )
    return str(tokenizer.eos_token), int(tokenizer.eos_token_id)


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of all special tokens; one of them ends an answer."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(text for text in special | {end_token(tokenizer)[0]} if text.strip())


class Renderer:
    """Runs the chat template in `shardwise.data.render`'s process; a context manager.

    The process gets no environment variables but the ones Python needs: a template that broke out
    of both sandboxes' first wall would find no keys there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, *, answers_only: bool) -> None:
        self._setup = {
            "source": template,
            "variables": {
                name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
            },
            "end_tokens": end_tokens(tokenizer),
            "answers_only": answers_only,
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                _close(pipe)

    def render(
        self, conversations: Sequence[Conversation]
    ) -> Iterator[tuple[Conversation, list[Rendered] | str]]:
        """Each conversation with its samples, or with the sentence that says why there is none."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        request = [{"messages": c.messages, "tools": c.tools} for c in conversations]
        try:
            _send(process.stdin, request)
        except BrokenPipeError:
            raise self._died(conversations[0]) from None
        for conversation in conversations:
            line = process.stdout.readline()
            if not line.endswith("\n"):
                raise self._died(conversation)
            reply = json.loads(line)
            if "error" in reply:
                yield conversation, reply["error"]
            else:
                samples = reply["samples"]
                yield conversation, [Rendered(text, [(a, b) for a, b in spans]) for text, spans in samples]

    def _start(self) -> subprocess.Popen[str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardwise.data.render"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"},
            encoding="utf-8",
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the first answer that does not come says so
            _send(process.stdin, self._setup)
        return process

    def _died(self, conversation: Conversation) -> Exception:
        assert self._process is not None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            limit = time_limit(conversation.messages)
            return DataError(
                f"the chat template took more than {limit:.0f} s for one conversation",
                where=conversation.where,
                fix="use another template: data.chat_template",
            )
        return MachineError(
            f"the process that renders chat templates ended with code {code}",
            where=conversation.where,
            fix=f"run `{sys.executable} -m shardwise.data.render </dev/null` to see why",
        )


def _send(pipe: IO[str], value: object) -> None:
    pipe.write(json.dumps(value) + "\n")
    pipe.flush()


def _close(pipe: IO[str] | None) -> None:
    with suppress(BrokenPipeError):  # what it still held was for a process that is gone
        if pipe is not None:
            pipe.close()
