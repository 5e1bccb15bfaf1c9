"""Rows of the embedding, where the tokenizer and not the shape decides them."""

from __future__ import annotations

from shardwise.job.schema import Model
from shardwise.models.tokenizer import load_tokenizer

VOCABULARY_MULTIPLE = 64
"""Rows of a new embedding are rounded up to it, as tensor cores like them."""


def rows_for(model: Model, tokens: int) -> int | None:
    """Embedding rows for a tokenizer of `tokens` tokens; None keeps the shape's.

    Only random weights follow a tokenizer of another origin: trained ones have learned their rows.
    """
    if model.weights != "random" or model.tokenizer is None:
        return None
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def expected_rows(model: Model) -> int | None:
    """`rows_for` before the data are read: as many as a tokenizer that is to be learned may have.

    Raises what loading another tokenizer raises.
    """
    if model.weights != "random" or model.tokenizer is None:
        return None
    if model.tokenizer == "train":
        return rows_for(model, model.tokenizer_vocab)
    return rows_for(model, len(load_tokenizer(model, corpus=lambda: iter(()))))
