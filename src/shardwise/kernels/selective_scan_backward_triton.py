"""The CUDA side of `selective_scan_backward`: a warp goes back through a chunk of tokens for 64 channels.

Tile by tile, and within a tile state by state: the tile's states are computed again from the one that
`selective_scan_replay` wrote down, then the adjoints from the tile after it. A thread holds all tokens of the
tile for two channels, so neither scan crosses threads. What sums over channels (the gradients of B and C)
goes through the tensor cores as a product with ones, and from there to a buffer of its own for each block of
channels: no atomics, the same bits every time.
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.mamba_work import COLUMNS, TILE
from shardwise.kernels.selective_scan_triton import LOG2E, RESET, Run, softplus


@triton.jit
def _states(a_earlier, b_earlier, _decay, _own, a_later, b_later, decay, own):
    """Composes h -> a h + b; the other two pass through.

    They leave the scan in a layout that the compiler cannot trade for computing them anew in another one.
    """
    return a_later * a_earlier, a_later * b_earlier + b_later, decay, own


@triton.jit
def _rows(v, block: tl.constexpr):
    """The 8 rows of a tile, [8, block] to [block] each; within a thread, so that nothing moves."""
    even, odd = tl.split(tl.permute(tl.reshape(v, [2, 2, 2, block]), (3, 0, 1, 2)))
    row_04, row_26 = tl.split(even)
    row_15, row_37 = tl.split(odd)
    row_0, row_4 = tl.split(row_04)
    row_2, row_6 = tl.split(row_26)
    row_1, row_5 = tl.split(row_15)
    row_3, row_7 = tl.split(row_37)
    return row_0, row_1, row_2, row_3, row_4, row_5, row_6, row_7


@triton.jit
def _tile(r0, r1, r2, r3, r4, r5, r6, r7, block: tl.constexpr):
    """The inverse of `_rows`."""
    even = tl.join(tl.join(r0, r4), tl.join(r2, r6))
    odd = tl.join(tl.join(r1, r5), tl.join(r3, r7))
    return tl.reshape(tl.permute(tl.join(even, odd), (1, 2, 3, 0)), [8, block])


@triton.jit
def _adjoints(decay, own, reaching, block: tl.constexpr):
    """g_t = own_t + decay_{t+1} g_{t+1} of a tile, `reaching` it from later ones; and what leaves it.

    Row by row: Triton scans backwards by turning whole warps around, shuffle by shuffle (3.6).
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = _rows(decay, block)
    g0, g1, g2, g3, g4, g5, g6, g7 = _rows(own, block)
    g7 += reaching
    g6 += a7 * g7
    g5 += a6 * g6
    g4 += a5 * g5
    g3 += a4 * g4
    g2 += a3 * g3
    g1 += a2 * g2
    g0 += a1 * g1
    return _tile(g0, g1, g2, g3, g4, g5, g6, g7, block), a0 * g0


@triton.jit(do_not_specialize=["tokens", "width", "chunk"])
def _back(
    x, delta, a, bc, d, bias, positions, fine, adjoints, dy, da, dbc, dd, dbias,
    tokens, width, chunk,
    n_state: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of channels. `a` is [N, W] here; `dbc` is [blocks, tokens, 2 N]."""
    tl.static_assert(tile == 8, "rows are taken apart by hand")
    column = tl.program_id(0) * block + tl.arange(0, block)
    chosen = tl.program_id(1).to(tl.int64)
    inside = column < width
    offset = tl.load(bias + column, mask=inside, other=0.0)
    skip = tl.load(d + column, mask=inside, other=0.0)
    size = n_state * width
    adjoints += chosen * size
    da += chosen * size
    dbc += tl.program_id(0).to(tl.int64) * tokens * (2 * n_state)
    row = tl.arange(0, tile)
    first = (row == 0)[:, None]
    pair = tl.arange(0, 2)
    ones = tl.full([block, 16], 1.0, tl.float32)
    end = tl.minimum((chosen + 1) * chunk, tokens)
    tiles = tl.cdiv(chunk, tile)
    sum_d = tl.zeros([block], tl.float32)
    sum_bias = tl.zeros([block], tl.float32)

    for back in range(tiles):
        number = tiles - 1 - back
        t = chosen * chunk + number * tile + row
        real = t < end
        valid = real[:, None] & inside[None, :]
        place = t[:, None] * width + column[None, :]
        xs = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
        v = tl.load(delta + place, mask=valid, other=0.0).to(tl.float32) + offset[None, :]
        g_out = tl.load(dy + place, mask=valid, other=0.0).to(tl.float32)
        dt = tl.where(valid, softplus(v), 0.0)
        begins = tl.load(positions + t, mask=real, other=1) == 0
        reset = tl.where(begins, RESET, 0.0)[:, None]
        sum_gb = tl.zeros([tile, block], tl.float32)
        sum_wa = tl.zeros([tile, block], tl.float32)
        tile_states = fine + (chosen * tiles + number) * size
        for n in range(n_state):
            at = n * width + column
            a_n = tl.load(a + at, mask=inside, other=0.0)
            before = tl.load(tile_states + at, mask=inside, other=0.0).to(tl.float32)
            after = tl.load(adjoints + at, mask=inside, other=0.0)
            at_b = bc + t * (2 * n_state) + n
            b = tl.load(at_b, mask=real, other=0.0)[:, None]
            c = tl.load(at_b + n_state, mask=real, other=0.0)[:, None]
            decay = tl.exp2(dt * (a_n * LOG2E)[None, :] + reset)
            dt_x = dt * xs
            added = dt_x * b
            start = tl.where(first, added + decay * before[None, :], added)
            _, h, kept, own = tl.associative_scan((decay, start, decay, g_out * c), 0, _states)
            g, leaving = _adjoints(kept, own, after, block)
            tl.store(adjoints + at, leaving, mask=inside)
            sum_gb += g * b
            w = g * (h - added)
            sum_wa += w * a_n[None, :]
            so_far = tl.load(da + at, mask=inside, other=0.0)
            tl.store(da + at, so_far + tl.sum(w * dt, axis=0), mask=inside)
            # [2 tile, block] times ones: row 2 t is dB of token t, row 2 t + 1 its dC
            both = tl.permute(tl.join(g * dt_x, h * g_out), (0, 2, 1))
            sums = tl.dot(tl.reshape(both, [2 * tile, block]), ones, input_precision=precision)
            one_column = tl.arange(0, 16)[None, :] == 0
            sums = tl.reshape(tl.sum(tl.where(one_column, sums, 0.0), axis=1), [tile, 2])
            at_dbc = dbc + t[:, None] * (2 * n_state) + n + pair[None, :] * n_state
            tl.store(at_dbc, sums, mask=real[:, None] & (pair[None, :] >= 0))
        tl.store(dy + place, (skip[None, :] * g_out + dt * sum_gb).to(dy.dtype.element_ty), mask=valid)
        dv = tl.where(valid, (xs * sum_gb + sum_wa) * tl.sigmoid(v), 0.0)
        tl.store(delta + place, dv.to(delta.dtype.element_ty), mask=valid)
        sum_d += tl.sum(g_out * xs, axis=0)
        sum_bias += tl.sum(dv, axis=0)
        tl.debug_barrier()  # the next tile reads what other threads may have written to `adjoints` and `da`
    tl.store(dd + chosen * width + column, sum_d, mask=inside)
    tl.store(dbias + chosen * width + column, sum_bias, mask=inside)


def backward(
    x, delta, a, bc, d, bias, positions, fine, adjoints, dy, *, chunk=None, block=COLUMNS
):  # fmt: skip
    """`selective_scan_backward` on the current stream. `chunk` and `block` are for tests and tuning.

    `adjoints` is used up.
    """
    run = Run(x, a, chunk)
    blocks = triton.cdiv(run.width, block)
    fp32 = {"dtype": torch.float32}
    da = x.new_zeros(run.chunks, run.n_state, run.width, **fp32)
    dbc = x.new_empty(blocks, *bc.shape, **fp32)
    dd, dbias = (x.new_empty(run.chunks, run.width, **fp32) for _ in range(2))
    _back[(blocks, run.chunks)](
        x, delta, a.t().contiguous(), bc, d, bias, positions, fine, adjoints, dy, da, dbc, dd, dbias,
        run.tokens, run.width, run.chunk,
        n_state=run.n_state, tile=TILE, block=block,
        # three products of tf32 make up for its 10 bits where the inputs have more
        precision="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=max(block // 64, 1),
    )  # fmt: skip
    return da.sum(0).t().contiguous(), dbc.sum(0), dd.sum(0), dbias.sum(0)
