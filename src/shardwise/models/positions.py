"""How long a row may be: models that learned a vector for each position have no more of them."""

from __future__ import annotations

from torch import nn

from shardwise.errors import JobError
from shardwise.models.build import BuiltModel

_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""What transformers calls the learned ones."""

_FIXED = frozenset({"codegen", "gptj"})
"""Model types with a table of sines of that length."""


def check_length(built: BuiltModel, sequence_length: int) -> None:
    """JobError where a row has more tokens than the model has positions; rotary embeddings go on for ever."""
    config = built.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    learned = any(
        isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
        for name, module in built.skeleton.named_modules()
    )
    if limit is not None and sequence_length > limit and (learned or config.model_type in _FIXED):
        raise JobError(
            f"rows of {sequence_length} tokens, and the model has {limit} positions",
            where="data.sequence_length",
            fix=f"{limit} or less, or a model with rotary embeddings",
        )
