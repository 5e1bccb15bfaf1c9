"""How Mamba's kernels divide their work into programs: without Triton, which the tracer lacks."""

from __future__ import annotations

TILE = 8
"""Tokens whose states a thread holds in the scan's backward pass; the state before each tile is saved."""

BLOCK = 32
"""Channels of a scan's program: one for each thread of a warp, so no data along tokens crosses threads."""

WARPS = 8192
"""Warps that keep a GPU busy: several times the 2100 to 3200 that 132 multiprocessors hold at once."""

SHORTEST = 64
"""Tokens of the shortest chunk: its fp32 state takes 64 bytes a channel, half of its bf16 activation."""

CONVOLVED = 64
"""Tokens of a convolution's program, each with its own sums of the gradients of weight and bias."""


def chunk_tokens(rows: int, length: int, width: int) -> int:
    """Tokens of one program: as many as leave WARPS of work, at least SHORTEST.

    The backward pass holds three tensors of the states before each chunk: 3 bytes a channel and token where
    chunks are shortest. Half of WARPS is enough to halve that. A chunk is an entire row where the rows alone
    are enough work; then no state is carried from one chunk to the next.
    """
    columns = -(-width // BLOCK)
    if rows * columns >= WARPS or length <= SHORTEST:
        return length
    chunk, enough = SHORTEST, WARPS // 2
    while 2 * chunk < length and rows * length // (2 * chunk) * columns >= enough:
        chunk, enough = 2 * chunk, WARPS
    return chunk


def chunks_of(rows: int, length: int, width: int) -> int:
    """Chunks of all rows laid end to end."""
    return -(-rows * length // chunk_tokens(rows, length, width))


def tiles_of(rows: int, length: int, width: int) -> int:
    """Tiles of all chunks; a short last tile of a chunk counts in full."""
    return chunks_of(rows, length, width) * -(-chunk_tokens(rows, length, width) // TILE)
