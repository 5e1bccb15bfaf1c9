"""Text to tokens, and from the answers' character ranges to the tokens that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardwise.data.chat import end_token, end_tokens, starts_with_bos
from shardwise.data.render import Rendered, Span
from shardwise.data.sources import Text
from shardwise.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: Tokens
    trained: Mask  # 1 where the token is an answer's; same shape as `tokens`


class Encoder:
    """A tokenizer with the checks that its output needs before a model may see it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's embedding."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
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
            raise DataError(
                "the tokenizer does not give the characters of a token, so no answer can be marked",
                where="model.tokenizer",
                fix="use a tokenizer with a tokenizer.json (a fast one)",
            )
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
        fix = Problem(
            what=f"the tokenizer has {len(self.tokenizer)} tokens, the model's embedding {self.vocab_size}",
            where="model.tokenizer",
            fix="use the tokenizer that belongs to the model, or a model with a larger vocabulary",
        )
        headline = f"{len(positions)} tokens are outside the model's vocabulary:"
        raise DataError(headline, problems=[*listed, fix])


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
