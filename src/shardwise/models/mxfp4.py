"""Weights published in mxfp4 (gpt-oss): values of four bits, 32 of which share a scale of eight.

OCP Microscaling Formats (MX) Specification 1.0: a value is E2M1, a scale E8M0. All are exact in bf16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a tensor's two parts in the files."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_BYTES = 16
"""Of a block: two values a byte, the first in the lower half."""


def unpacked_shape(blocks: Sequence[int]) -> list[int]:
    """[experts, in, out] of blocks of shape [experts, out, groups, 16]."""
    experts, rows, groups, size = blocks
    return [experts, groups * size * 2, rows]


def fits(blocks: Sequence[int], scales: Sequence[int]) -> bool:
    """Whether these are the shapes of the two parts of one tensor."""
    return len(blocks) == 4 and blocks[-1] == _BYTES and list(blocks[:-1]) == list(scales)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The tensor in bf16, [experts, in, out].

    `blocks`: uint8 [experts, out, groups, 16]; `scales`: uint8 [experts, out, groups].
    """
    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], device=blocks.device)
    out = blocks.new_empty(unpacked_shape(blocks.shape), dtype=torch.bfloat16)
    # An expert at a time: indices of its values take eight times the memory of its codes.
    for expert, block, scale in zip(out, blocks, scales, strict=True):
        codes = torch.stack([block & 15, block >> 4], dim=-1).flatten(-2)
        numbers = torch.ldexp(values[codes.int()], scale.int().unsqueeze(-1) - _BIAS)
        expert.copy_(numbers.flatten(-2).t())
    return out
