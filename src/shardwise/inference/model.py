"""A model in memory that answers messages or continues text, piece by piece."""

import queue
import threading
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from shardwise.data.chat import Renderer, end_tokens
from shardwise.data.formats import Conversation
from shardwise.errors import DoesNotFitError, JobError
from shardwise.inference.sampling import Sampling

Message = Mapping[str, str]
"""`role` (system, user, assistant, tool) and `content`."""

COLDEST = 1e-4  # Temperature below which sampling is greedy: logits divided by less would overflow fp32

_PROBE = "answer-probe"


class Answer(Iterator[str]):
    """The pieces of one answer; `close` ends it early. What it is about is known when it has ended."""

    tokens = 0
    finish = "length"
    """`stop`: the model or a stop text ended it; `length`: it reached its most tokens."""

    def __init__(self, pieces: "queue.Queue[str | BaseException | None]", text: "_Text") -> None:
        self._pieces, self._text = pieces, text
        self.thread: threading.Thread | None = None

    def __next__(self) -> str:
        piece = self._pieces.get()
        self.tokens, self.finish = len(self._text.ids), self._text.finish
        if piece is None:
            self.close()
            raise StopIteration
        if isinstance(piece, torch.OutOfMemoryError):
            fix = "a shorter conversation, fewer new tokens, or a smaller model"
            raise DoesNotFitError("the GPU's memory is not enough for this answer", fix=fix)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def close(self) -> None:
        """Let the model stop after the token that it computes now, and wait until it has."""
        self._text.ended = True
        if self.thread is not None:
            self.thread.join()


class LoadedModel:
    """A model with its tokenizer, in evaluation mode on its device. It gives one answer at a time."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        peft: Any = None,
        system: str | None = None,
    ) -> None:
        """`peft` is PEFT's wrapper around `model`; `system` is the message that it was trained with."""
        self.name, self.model, self.tokenizer, self.peft = name, model, tokenizer, peft
        self.system = system if tokenizer.chat_template else None
        config = model.config.get_text_config()
        self.length: int | None = getattr(config, "max_position_embeddings", None)
        ends = model.generation_config.eos_token_id if model.generation_config else None
        listed = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        self._ends = {token for token in listed if token is not None}
        self._lock = threading.Lock()
        self._renderer: Renderer | None = None
        self._knows_end_of_turn = False

    @property
    def has_template(self) -> bool:
        """Whether it answers messages; otherwise it continues text."""
        return bool(self.tokenizer.chat_template)

    def prompt(self, asked: Sequence[Message] | str) -> list[int]:
        """Tokens of messages that invite an answer, for a model with a template, or of a text to continue.

        Raises JobError where a message is not text or has control characters, the template refuses the
        conversation, or there is no room for an answer.
        """
        if isinstance(asked, str):
            _check_text(asked)
            ids = self.tokenizer(asked)["input_ids"]
        else:
            for message in asked:
                if message["role"] != "assistant":  # its own words may be any bytes
                    _check_text(message["content"])
            with self._lock:
                self._add_end_of_turn()
                text = self._render(asked)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            fix = "give the model a text to continue"
            raise JobError("the prompt is empty", where="the prompt", fix=fix)
        if self.length is not None and len(ids) >= self.length:
            what = f"{len(ids)} tokens leave no room for an answer: the model has {self.length} positions"
            raise TooLongError(what, where="the conversation", fix="shorten it, or start a new one")
        if max(ids) >= (rows := self.model.get_input_embeddings().weight.shape[0]):
            what = f"the tokenizer gives token {max(ids)}, the model's embedding has {rows} rows"
            raise JobError(what, where=self.name, fix="use the tokenizer that belongs to the model")
        return ids

    def stream(self, ids: Sequence[int], sampling: Sampling, *, base: bool = False) -> Answer:
        """Answer the tokens of `prompt`; `base` switches the adapter off."""
        if base and self.peft is None:
            what = f"{self.name} has no adapter to switch off"
            fix = "start `shardwise chat` with the base model's own name to talk to it"
            raise JobError(what, where="--base", fix=fix)
        pieces: queue.Queue[str | BaseException | None] = queue.Queue()
        text = _Text(self.tokenizer, sampling.stop, self._ends, pieces)
        answer = Answer(pieces, text)
        arguments = (ids, sampling, text, base)
        answer.thread = threading.Thread(target=self._generate, args=arguments, daemon=True)
        answer.thread.start()
        return answer

    def close(self) -> None:
        """End the process that runs the chat template; the next prompt would start another one."""
        renderer, self._renderer = self._renderer, None  # first, as a second Ctrl-C may end the rest
        if renderer is not None:
            renderer.__exit__()

    def _generate(self, ids: Sequence[int], sampling: Sampling, text: "_Text", base: bool) -> None:
        room = sampling.max_new_tokens
        if self.length is not None:
            room = min(room, self.length - len(ids))
        hot = sampling.temperature > COLDEST
        chosen: dict[str, Any] = {"do_sample": hot, "temperature": None, "top_p": None, "top_k": None}
        if hot:
            chosen |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        pad = self.tokenizer.pad_token_id
        try:
            with self.peft.disable_adapter() if base else nullcontext():
                torch.seed() if sampling.seed is None else torch.manual_seed(sampling.seed)
                tokens = torch.tensor([ids], device=self.model.device)
                self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=room,
                    repetition_penalty=sampling.repetition_penalty,
                    eos_token_id=sorted(self._ends) or None,
                    pad_token_id=min(self._ends, default=0) if pad is None else pad,
                    streamer=text,
                    stopping_criteria=[text.has_ended],
                    **chosen,
                )
        except BaseException as error:  # noqa: BLE001  (the reader of the pieces raises it)
            text.pieces.put(error)
        text.pieces.put(None)

    def _render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, by the template in its limited process (decision 0038)."""
        if self._renderer is None:
            template = str(self.tokenizer.get_chat_template())
            self._renderer = Renderer(self.tokenizer, template, answers_only=True, invite=True)
        conversation = Conversation("the conversation", [dict(m) for m in messages])
        try:
            [(_, samples)] = self._renderer.render([conversation])
        except BaseException:  # Ctrl-C, too: a reply that nobody has read would be the next one's
            self.close()
            raise
        if isinstance(samples, str):
            raise JobError(samples, where="the conversation", fix="leave out what it refuses")
        return samples[0].text

    def _add_end_of_turn(self) -> None:
        """A template may end an answer with another token than the end of a text: it ends this one, too."""
        if self._knows_end_of_turn:
            return
        self._knows_end_of_turn = True
        try:
            text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}])
        except JobError:  # a template that refuses the probe; it will say so of the conversation
            return
        tail = text.rpartition(_PROBE)[2].lstrip()
        found = [token for token in end_tokens(self.tokenizer) if tail.startswith(token)]
        if found:
            self._ends.add(self.tokenizer.convert_tokens_to_ids(max(found, key=len)))


class TooLongError(JobError):
    """The messages leave no room for an answer."""


class _Text(BaseStreamer):  # type: ignore[misc]
    """Puts what transformers generates into a queue: text that later tokens can no longer change.

    All tokens are decoded each time. Decoding them one by one would lose spaces at the beginning of lines
    and break characters of several tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        ends: set[int],
        pieces: "queue.Queue[Any]",
    ) -> None:
        self.pieces, self.ids, self.finish, self.ended = pieces, list[int](), "length", False
        self._tokenizer, self._stop, self._ends = tokenizer, [text for text in stop if text], ends
        self._prompt, self._sent = True, 0

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # transformers gives it first
            self._prompt = False
            return
        self.ids += value.flatten().tolist()
        if self.ids[-1] in self._ends:
            self.finish = "stop"
        text = self._decoded()
        cuts = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if cuts:
            self.ended, self.finish = True, "stop"
            self._send(text[: min(cuts)])
            self._sent = len(text)
        elif not text.endswith("\ufffd"):
            self._send(text[: len(text) - _open_end(text, self._stop)])

    def end(self) -> None:
        self._send(self._decoded().rstrip("\ufffd"))  # a character that the last token cut off

    def has_ended(self, ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """Transformers asks this after every token."""
        return torch.full((ids.shape[0],), self.ended, device=ids.device)

    def _decoded(self) -> str:
        return self._tokenizer.decode(self.ids, skip_special_tokens=True)

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self.pieces.put(text[self._sent :])
            self._sent = len(text)


def _open_end(text: str, stops: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a stop text."""
    sizes = (size for stop in stops for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
    return max(sizes, default=0)


def _check_text(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):  # undecodable bytes in Python
        raise JobError("the prompt is not UTF-8", where="the prompt", fix="see the terminal's locale")
    if any(unicodedata.category(character) == "Cc" for character in text if character not in "\t\n\r"):
        what = "the prompt has control characters"
        raise JobError(what, where="the prompt", fix="use text; line breaks and tabs are allowed")
