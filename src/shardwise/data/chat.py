"""Conversations to text, by a chat template that runs in another process; text to tokens, trained or not."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from shardwise.data.formats import Conversation
from shardwise.data.render import Rendered, Span, time_limit
from shardwise.data.sources import Text
from shardwise.errors import DataError, MachineError, Problem
from shardwise.job.paths import TEMPLATES

Tokens = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.uint8]

TEMPLATE_FOLDER = Path(__file__).with_name("templates")
DEFAULT_TEMPLATE = (TEMPLATE_FOLDER / "default.jinja").read_text(encoding="utf-8").removesuffix("\n")
"""For tokenizers without a chat template. It needs no special token but the end token. Roles are headings,
`### User:`; tools come first as JSON, and calls are JSON in the answer."""


def template_for(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> str:
    """Return the Jinja text of `file` (`data.chat_template`), else the tokenizer's, else the default."""
    if file in TEMPLATES:
        file = str(TEMPLATE_FOLDER / f"{file}.jinja")
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = f"the chat template cannot be read: {error}"
            raise DataError(what, where="data.chat_template", fix="name a Jinja file") from None
    if tokenizer.chat_template:
        return str(tokenizer.get_chat_template())
    return ("{{ bos_token }}" if starts_with_bos(tokenizer) else "") + DEFAULT_TEMPLATE


def starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this tokenizer puts a begin token before every text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def end_token(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return text and id of the token that ends a document. DataError where there is none."""
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no end token, so the model could never learn to stop"
        fix = "use a tokenizer with an eos_token (tokenizer_config.json)"
        raise DataError(what, where="model.tokenizer", fix=fix)
    return str(tokenizer.eos_token), int(tokenizer.eos_token_id)


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of all special tokens; one of them ends an answer."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(text for text in special | {end_token(tokenizer)[0]} if text.strip())


def unknown_markers(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """Markers such as <|im_end|> that a template writes and this tokenizer cuts into pieces."""
    found = dict.fromkeys(re.findall(r"<\|\w+\|>", template))
    return [text for text in found if len(tokenizer(text, add_special_tokens=False)["input_ids"]) > 1]


class Renderer:
    """Runs a chat template in the process of `shardwise.data.render`; a context manager.

    That process gets only the environment variables that Python needs: a template that escaped from Jinja's
    sandbox would find no keys there.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, *, answers_only: bool, invite: bool = False
    ) -> None:
        """`invite`: one sample a conversation, which invites an answer where none is the last message."""
        tokens = tokenizer.special_tokens_map.items()
        variables = {name: value for name, value in tokens if isinstance(value, str)}
        self._setup = (template, variables, end_tokens(tokenizer), answers_only, invite)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def render(self, batch: Sequence[Conversation]) -> Iterator[tuple[Conversation, list[Rendered] | str]]:
        """Yield each conversation with its samples, or with the sentence that says why there are none."""
        process = self._process = self._process or self._start()
        assert process.stdout is not None
        request = json.dumps([[c.messages, c.tools, c.asked] for c in batch])
        with suppress(BrokenPipeError):  # then there is no answer, which is reported below
            print(request, file=process.stdin, flush=True)
        for conversation in batch:
            line = process.stdout.readline()
            if not line.endswith("\n"):
                raise _died(process.wait(), conversation)
            reply = json.loads(line)
            samples = reply if isinstance(reply, str) else [Rendered(text, spans) for text, spans in reply]
            yield conversation, samples

    def _start(self) -> subprocess.Popen[str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shardwise.data.render"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"},
            encoding="utf-8",
            process_group=0,  # Ctrl-C in a terminal is for the conversation
        )
        print(json.dumps(self._setup), file=process.stdin)
        return process


def _died(code: int, conversation: Conversation) -> Exception:
    if code == -signal.SIGPROF:
        limit = time_limit(conversation.messages)
        what = f"the chat template took more than {limit:.0f} s for one conversation"
        return DataError(what, where=conversation.where, fix="use another template: data.chat_template")
    what = f"the process that renders chat templates ended with code {code}"
    fix = f"run `{sys.executable} -m shardwise.data.render </dev/null` to see why"
    return MachineError(what, where=conversation.where, fix=fix)


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: Tokens
    trained: Mask  # 1 where the token is an answer's; same shape as `tokens`


class Encoder:
    """A tokenizer with the checks that its output needs before a model may see it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.end_text, end_id = end_token(tokenizer)
        self._ends = tuple(end_tokens(tokenizer))
        self._begin = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
        self._end = [end_id]

    def documents(self, texts: Sequence[Text]) -> Iterator[tuple[Text, Tokens]]:
        """Tokens of documents or parts of them; begin and end token stand at a document's ends."""
        batch = self._tokenize([text.text for text in texts])["input_ids"]
        for text, ids in zip(texts, batch, strict=True):
            begin, end = self._begin if text.begins else [], self._end if text.ends else []
            tokens = np.concatenate([np.asarray(part, dtype=np.uint32) for part in (begin, ids, end)])
            self._check_vocabulary(tokens, text.where)
            yield text, tokens

    def conversations(self, rendered: Sequence[tuple[str, Rendered]]) -> Iterator[Encoded]:
        """Tokens of conversations `(where, rendered)`, with the answers marked.

        The end token is appended where the template does not end the last answer with a special token:
        without it the model would never learn to stop.
        """
        if not self.tokenizer.is_fast:
            what = "the tokenizer does not give the characters of a token, so no answer can be marked"
            fix = "use a tokenizer with a tokenizer.json (a fast one)"
            raise DataError(what, where="model.tokenizer", fix=fix)
        samples = [self._ended(sample) for _, sample in rendered]
        batch = self._tokenize([sample.text for sample in samples], return_offsets_mapping=True)
        columns = (rendered, samples, batch["input_ids"], batch["offset_mapping"])
        for (where, _), sample, ids, offsets in zip(*columns, strict=True):
            tokens = np.asarray(ids, dtype=np.uint32)
            self._check_vocabulary(tokens, where)
            yield Encoded(tokens, trained_mask(np.asarray(offsets, dtype=np.int64), sample.spans))

    def _ended(self, sample: Rendered) -> Rendered:
        stripped = sample.text.rstrip()
        start, end = sample.spans[-1] if sample.spans else (0, 0)
        if end < len(stripped) or stripped.endswith(self._ends):
            return sample
        text = stripped + self.end_text
        return Rendered(text, [*sample.spans[:-1], (start, len(text))])

    def _tokenize(self, texts: list[str], **options: bool) -> dict[str, Any]:
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about the model's maximum: long samples are cut or dropped later
            **options,
        )

    def _check_vocabulary(self, tokens: Tokens, where: str) -> None:
        positions = np.flatnonzero(tokens >= self.vocab_size)
        if not len(positions):
            return
        names = self.tokenizer.convert_ids_to_tokens(tokens[positions[:4]].tolist())
        listed = [
            Problem(what=f"id {tokens[position]} ({name!r}) at token {position}", where=where)
            for position, name in zip(positions, names, strict=False)
        ]
        what = f"the tokenizer has {len(self.tokenizer)} tokens, the model's embedding {self.vocab_size}"
        fix = "use the tokenizer that belongs to the model, or a model with a larger vocabulary"
        last = Problem(what=what, where="model.tokenizer", fix=fix)
        headline = f"{len(positions)} tokens are outside the model's vocabulary:"
        raise DataError(headline, problems=[*listed, last])


def trained_mask(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """Mark with 1 each token that holds any character of a span.

    `offsets` [tokens, 2] are character ranges, in order. Some tokenizers leave white space out of them; a
    gap belongs to the token after it, which stands for it.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    if len(offsets):
        end = np.maximum.accumulate(offsets[:, 1])
        begin = np.minimum(offsets[:, 0], np.concatenate([[0], end[:-1]]))
        for first, last in spans:
            mask[(end > first) & (begin < last)] = 1
    return mask
