"""Batches as the data hands them to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

IGNORED = -100  # label of a position that predicts nothing


class Layout(NamedTuple):
    """What a CUDA graph of packed rows depends on, in addition to their shape."""

    borders: int  # Of segments, the first and the last included
    longest: int  # Tokens of the longest segment
    single_segment_rows: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows of S tokens for one rank.

    A row holds one or more samples, then padding; each is a segment that attends only within itself.
    `labels` are shifted: `labels[b, t]` is the token that position t has to predict. It is IGNORED at a
    segment's last token, outside the answers and in the padding.
    """

    input_ids: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S]
    position_ids: torch.Tensor  # int64 [B, S]; restarts at 0 in every segment
    cu_seqlens: torch.Tensor
    """int32 [segments + 1]; borders of the segments in the flattened B*S tokens, from 0 to B*S"""
    max_seqlen: int  # tokens in the longest segment
    single_segment_rows: int = 0
    """Number of rows, from the first on, that are known to be one segment without padding."""
    common: Layout | None = None
    """One for all ranks, of what they compute at the same time; None: of this alone."""

    @property
    def layout(self) -> Layout:
        return Layout(len(self.cu_seqlens), self.max_seqlen, self.single_segment_rows)

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to a device, asynchronously where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> MicroBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    @classmethod
    def on_meta(cls, rows: int, length: int, *, single_segment_rows: int) -> MicroBatch:
        """Make a batch without values, each row one segment of `length` tokens, for the tracer."""
        names, empty = ("input_ids", "labels", "position_ids"), partial(torch.empty, device="meta")
        tensors: dict[str, Any] = {name: empty(rows, length, dtype=torch.int64) for name in names}
        return cls(
            **tensors,
            cu_seqlens=empty(rows + 1, dtype=torch.int32),
            max_seqlen=length,
            single_segment_rows=single_segment_rows,
        )


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The rows of one optimizer step: this rank's micro-batches, and counts over all ranks."""

    micro_batches: Sequence[MicroBatch]
    target_tokens: int  # predicted tokens over all ranks and micro-batches: the loss's denominator
    tokens: int  # tokens without padding over all ranks and micro-batches
    epoch: int  # epoch of the step's first row, from 0
