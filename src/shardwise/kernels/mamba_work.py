"""How Mamba's kernels cut their work into programs: known without Triton, which the tracer has not.

Numbers of the scan, but for the last, of the convolution.
"""

from __future__ import annotations

TILE = 8
"""Tokens whose states a thread holds at once in the backward pass; the state before each is written down."""

BLOCK = 32
"""Channels of a program: one for each thread of a warp, so that nothing along the tokens crosses threads."""

WARPS = 8192
"""Warps that keep a GPU busy: several times the 2100 to 3200 that 132 multiprocessors hold at once."""

SHORTEST = 64
"""Tokens of the shortest chunk: its state, in fp32, takes 64 bytes a channel, as half a bf16 activation."""


CONVOLVED = 64
"""Tokens of a convolution's program, each with its own sums of the gradients of weight and bias."""


def chunk_tokens(rows: int, length: int, width: int) -> int:
    """Tokens that one program goes through: as many as leave WARPS of work, at least SHORTEST.

    The state before each chunk is kept for the backward pass, which has three such tensors at a time: 3 bytes
    a channel and token where chunks are shortest. To halve that, half of WARPS is enough. A chunk is a whole
    row where the rows alone are enough work: no state is carried from one to the next then.
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
    """Tiles of all chunks, each chunk's last one filled up where it is short."""
    return chunks_of(rows, length, width) * -(-chunk_tokens(rows, length, width) // TILE)
