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
    trained: Mask
    """1 where the token is an answer's; same shape as `tokens`."""


class Encoder:
    """A tokenizer with the checks its output needs before a model may see it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's embedding."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_text, self.end_id = end_token(tokenizer)
        self._ends = tuple(end_tokens(tokenizer))
        begin = [tokenizer.bos_token_id] if starts_with_bos(tokenizer) else []
        self._begin = np.array(begin, dtype=np.uint32)
        self._end = np.array([self.end_id], dtype=np.uint32)

    def documents(self, texts: Sequence[Text]) -> Iterator[tuple[Text, Tokens]]:
        """The tokens of documents or parts of them; begin and end token stand at a document's ends."""
        batch = self._tokenize([text.text for text in texts])["input_ids"]
        for text, ids in zip(texts, batch, strict=True):
            tokens = np.asarray(ids, dtype=np.uint32)
            parts = (self._begin if text.begins else (), tokens, self._end if text.ends else ())
            tokens = np.concatenate([part for part in parts if len(part)] or [tokens])
            self._check_vocabulary(tokens, text.where)
            yield text, tokens

    def conversations(self, rendered: Sequence[tuple[str, Rendered]]) -> Iterator[Encoded]:
        """The tokens of conversations `(where, rendered)`, with the answers marked.

        Where the template does not end the last answer with a special token, the end token is
        appended: without it the model would never learn to stop.
        """
        if not self.tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not tell which characters a token stands for, so no answer can be marked",
                where="model.tokenizer",
                fix="use a tokenizer with a tokenizer.json (a fast one)",
            )
        texts = [self._ended(sample) for _, sample in rendered]
        batch = self._tokenize([sample.text for sample in texts], return_offsets_mapping=True)
        for (where, _), sample, ids, offsets in zip(
            rendered, texts, batch["input_ids"], batch["offset_mapping"], strict=True
        ):
            tokens = np.asarray(ids, dtype=np.uint32)
            self._check_vocabulary(tokens, where)
            yield Encoded(tokens, trained_mask(np.asarray(offsets, dtype=np.int64), sample.spans))

    def _ended(self, sample: Rendered) -> Rendered:
        stripped = sample.text.rstrip()
        last = sample.spans[-1][1] if sample.spans else 0
        if last < len(stripped) or stripped.endswith(self._ends):
            return sample
        text = stripped + self.end_text
        return Rendered(text, [*sample.spans[:-1], (sample.spans[-1][0], len(text))])

    def _tokenize(self, texts: list[str], *, return_offsets_mapping: bool = False) -> dict[str, Any]:
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=return_offsets_mapping,
            verbose=False,  # lengths are dealt with here, not by a warning about the model's maximum
        )

    def _check_vocabulary(self, tokens: Tokens, where: str) -> None:
        if len(tokens) == 0 or int(tokens.max()) < self.vocab_size:
            return
        positions = np.flatnonzero(tokens >= self.vocab_size)
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
        raise DataError(
            f"{len(positions)} tokens are outside the model's vocabulary:", problems=[*listed, fix]
        )


def trained_mask(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """1 for each token that holds any character of a span.

    `offsets` [tokens, 2] are character ranges, in order. Some tokenizers leave white space out of
    them; a gap is counted to the token after it, which is the one that stands for it.
    """
    mask = np.zeros(len(offsets), dtype=np.uint8)
    if not len(offsets):
        return mask
    end = np.maximum.accumulate(offsets[:, 1])
    begin = np.minimum(offsets[:, 0], np.concatenate([[0], end[:-1]]))
    for first, last in spans:
        mask[(end > first) & (begin < last)] = 1
    return mask
