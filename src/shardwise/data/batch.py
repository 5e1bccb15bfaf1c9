"""What travels from the data to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

IGNORED = -100
"""Label of a position that predicts nothing."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows of S tokens for one rank.

    A row holds one or more samples one after the other, then padding; each is a segment that attends
    only within itself. `labels` are already shifted: `labels[b, t]` is the token that position t has
    to predict, IGNORED at a segment's last token, outside the answers and in the padding.
    """

    input_ids: torch.Tensor
    """int64 [B, S]"""
    labels: torch.Tensor
    """int64 [B, S]"""
    position_ids: torch.Tensor
    """int64 [B, S]; restarts at 0 in every segment"""
    cu_seqlens: torch.Tensor
    """int32 [segments + 1]; borders of the segments in the flattened B*S tokens, from 0 to B*S"""
    max_seqlen: int
    """Tokens in the longest segment."""
    whole_rows: int = 0
    """So many rows from the first on are known to be one segment from end to end."""

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to a device, asynchronously where the memory is pinned."""
        move = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens")
        }
        return replace(self, **move)


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The rows of one optimizer step: this rank's micro-batches, and counts over all ranks."""

    micro_batches: Sequence[MicroBatch]
    target_tokens: int
    """Tokens that are predicted, over all ranks and micro-batches: the loss's denominator."""
    tokens: int
    """Tokens that are not padding, over all ranks and micro-batches."""
    epoch: int
    """Epoch of the step's first row, from 0."""
