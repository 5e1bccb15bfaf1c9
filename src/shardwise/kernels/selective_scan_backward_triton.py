"""The CUDA side of `selective_scan_backward`: a warp goes back through a chunk of tokens for 32 channels.

Tile by tile, and within a tile state by state: the tile's states are computed again from the one that
`selective_scan_replay` wrote down, then the adjoints from the tile after it. A thread holds all tokens of the
tile for one channel, so neither scan crosses threads. What sums over channels (the gradients of B and C) goes
through the tensor cores, and from there to a buffer of its own for each block of channels: no atomics, the
same bits every time.
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

import torch
import triton
import triton.language as tl
from torch.nn import functional

from shardwise.kernels.causal_conv_triton import LOG2E, sigmoid
from shardwise.kernels.selective_scan import BLOCK, TILE
from shardwise.kernels.selective_scan_triton import RESET, Run, channels, softplus

REGISTERS = 128
"""Of a thread: 16 warps on a multiprocessor at once, which hide each other's loads."""


@triton.jit
def _states(a_earlier, b_earlier, _decay, _own, a_later, b_later, decay, own):
    """Composes h -> a h + b; the other two pass through.

    They leave the scan in a layout that the compiler cannot replace by recomputing them in another one.
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
def _adjoints(decay, own, h, before, reaching, block: tl.constexpr):
    """A tile's adjoints g_t = own_t + e_{t+1} with e_t = decay_t g_t, `reaching` it from later ones.

    And e_t h_{t-1}, which gives the gradient of the decay, and e_0, which leaves the tile. Row by row:
    Triton 3.6 scans backwards by reversing entire warps, shuffle by shuffle.
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = _rows(decay, block)
    o0, o1, o2, o3, o4, o5, o6, o7 = _rows(own, block)
    h0, h1, h2, h3, h4, h5, h6, _ = _rows(h, block)
    g7 = o7 + reaching
    e7 = a7 * g7
    g6 = o6 + e7
    e6 = a6 * g6
    g5 = o5 + e6
    e5 = a5 * g5
    g4 = o4 + e5
    e4 = a4 * g4
    g3 = o3 + e4
    e3 = a3 * g3
    g2 = o2 + e3
    e2 = a2 * g2
    g1 = o1 + e2
    e1 = a1 * g1
    g0 = o0 + e1
    e0 = a0 * g0
    g = _tile(g0, g1, g2, g3, g4, g5, g6, g7, block)
    w = _tile(e0 * before, e1 * h0, e2 * h1, e3 * h2, e4 * h3, e5 * h4, e6 * h5, e7 * h6, block)
    return g, w, e0


@triton.jit(do_not_specialize=["tokens", "chunk"])
def _back(
    x, delta, a, bc, d, bias, positions, fine, adjoints, dy, da, dbc, dd, dbias, tokens, chunk,
    width: tl.constexpr, n_state: tl.constexpr, complete: tl.constexpr, tile: tl.constexpr,
    block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of channels. `a` is [N, W] here; `bc` and `dbc` of each block as in `_tiled`.

    `complete`: all chunks are full, and a multiple of the tile.
    """
    tl.static_assert(tile == 8, "rows are taken apart by hand")
    column, inside = channels(block, width)
    chosen = tl.program_id(1).to(tl.int64)
    size: tl.constexpr = n_state * width
    pair: tl.constexpr = 2 * tile
    offset = tl.load(bias + column, mask=inside, other=0.0)
    skip = tl.load(d + column, mask=inside, other=0.0)
    row = tl.arange(0, tile)
    flat = tl.arange(0, pair)
    tiles = tl.cdiv(chunk, tile)
    left = tl.minimum(tokens - chosen * chunk, chunk).to(tl.int32)
    begin = chosen * chunk + (tiles - 1) * tile
    x += begin * width
    delta += begin * width
    dy += begin * width
    positions += begin
    last = chosen * tiles + tiles - 1
    bc += last * n_state * pair
    dbc += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) * tiles + last) * n_state * pair
    fine += last * size
    adjoints += chosen * size
    da += chosen * size
    here = row[:, None].to(tl.int64) * width + column[None, :]
    diagonal = flat[:, None] == flat[None, :]
    sum_d = tl.zeros([block], tl.float32)
    sum_bias = tl.zeros([block], tl.float32)

    for back in range(tiles):
        real = row >= 0 if complete else row < left - (tiles - 1 - back) * tile
        valid = real[:, None] & inside[None, :]
        xs = tl.load(x + here, mask=valid, other=0.0).to(tl.float32)
        v = tl.load(delta + here, mask=valid, other=0.0).to(tl.float32) + offset[None, :]
        g_out = tl.load(dy + here, mask=valid, other=0.0).to(tl.float32)
        dt = tl.where(valid, softplus(v), 0.0)
        begins = tl.load(positions + row, mask=real, other=1) == 0
        reset = tl.where(begins, RESET, 0.0)[:, None]
        dt_x = dt * xs
        # column 2 t is what dB of token t sums with g, column 2 t + 1 what its dC sums with h
        factors = tl.reshape(tl.permute(tl.join(dt_x, g_out), (1, 0, 2)), [block, pair])
        factors = factors.to(dbc.dtype.element_ty)
        sum_gb = tl.zeros([tile, block], tl.float32)
        sum_wa = tl.zeros([tile, block], tl.float32)
        for n in range(n_state):
            at = n * width + column
            a_n = tl.load(a + at, mask=inside, other=0.0)
            before = tl.load(fine + at, mask=inside, other=0.0).to(tl.float32)
            after = tl.load(adjoints + at, mask=inside, other=0.0)
            so_far = tl.load(da + at, mask=inside, other=0.0)
            b, c = tl.split(tl.reshape(tl.load(bc + n * pair + flat), [tile, 2]))
            decay = tl.exp2(dt * (a_n * LOG2E)[None, :] + reset)
            added = dt_x * b[:, None]
            start = tl.where((row == 0)[:, None], added + decay * before[None, :], added)
            _, h, kept, own = tl.associative_scan((decay, start, decay, g_out * c[:, None]), 0, _states)
            g, w, leaving = _adjoints(kept, own, h, before, after, block)
            tl.store(adjoints + at, leaving, mask=inside)
            sum_gb += g * b[:, None]
            sum_wa += w * a_n[None, :]
            tl.store(da + at, so_far + tl.sum(w * dt, axis=0), mask=inside)
            # all tokens' states with all tokens' factors; those of the same token are on the diagonal
            both = tl.reshape(tl.permute(tl.join(g, h), (0, 2, 1)), [pair, block])
            sums = tl.dot(both.to(dbc.dtype.element_ty), factors, input_precision=precision)
            sums = tl.sum(tl.where(diagonal, sums, 0.0), axis=1)
            tl.store(dbc + n * pair + flat, sums.to(dbc.dtype.element_ty))
        tl.store(dy + here, (skip[None, :] * g_out + dt * sum_gb).to(dy.dtype.element_ty), mask=valid)
        dv = tl.where(valid, (xs * sum_gb + sum_wa) * sigmoid(v), 0.0)
        tl.store(delta + here, dv.to(delta.dtype.element_ty), mask=valid)
        sum_d += tl.sum(g_out * xs, axis=0)
        sum_bias += tl.sum(dv, axis=0)
        tl.debug_barrier()  # the next tile reads what other threads may have written to `adjoints` and `da`
        x -= tile * width
        delta -= tile * width
        dy -= tile * width
        positions -= tile
        bc -= n_state * pair
        dbc -= n_state * pair
        fine -= size
    tl.store(dd + chosen * width + column, sum_d, mask=inside)
    tl.store(dbias + chosen * width + column, sum_bias, mask=inside)


def _tiled(bc, run):
    """[.., 2 N] to [tiles of all chunks, N, TILE, 2]: a thread loads four values at once."""
    bc = bc.view(-1, 2 * run.n_state)
    if not run.complete:
        bc = functional.pad(bc, (0, 0, 0, run.chunks * run.chunk - run.tokens))
        bc = functional.pad(bc.view(run.chunks, run.chunk, -1), (0, 0, 0, run.tiles * TILE - run.chunk))
    return bc.view(run.chunks * run.tiles, TILE, 2, run.n_state).permute(0, 3, 1, 2).contiguous()


def _by_token(bc, run, shape):
    """The inverse of `_tiled`."""
    bc = bc.permute(0, 2, 3, 1).reshape(run.chunks, run.tiles * TILE, 2 * run.n_state)
    return bc[:, : run.chunk].reshape(-1, 2 * run.n_state)[: run.tokens].reshape(shape).contiguous()


def backward(
    x, delta, a, bc, d, bias, positions, fine, adjoints, dy, *, chunk=None, block=BLOCK
):  # fmt: skip
    """`selective_scan_backward` on the current stream. `chunk` and `block` are for tests and tuning.

    `adjoints` is used up. A block's dB and dC have x's format: what they add up to gets it anyway.
    """
    run = Run(x, a, chunk)
    blocks = triton.cdiv(run.width, block)
    fp32 = {"dtype": torch.float32}
    tiled = _tiled(bc, run)
    da = x.new_zeros(run.chunks, run.n_state, run.width, **fp32)
    dbc = x.new_empty(blocks, *tiled.shape)
    dd, dbias = (x.new_empty(run.chunks, run.width, **fp32) for _ in range(2))
    _back[blocks, run.chunks](
        x, delta, a.t().contiguous(), tiled, d, bias, positions, fine, adjoints, dy, da, dbc, dd, dbias,
        run.tokens, run.chunk, width=run.width, n_state=run.n_state, complete=run.complete, tile=TILE,
        block=block,
        # three products of tf32 make up for its 10 bits where the inputs have more
        precision="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=1, num_stages=1, maxnreg=REGISTERS,
    )  # fmt: skip
    dbc = _by_token(dbc.sum(0, **fp32), run, bc.shape)
    return da.sum(0).t().contiguous(), dbc, dd.sum(0), dbias.sum(0)
