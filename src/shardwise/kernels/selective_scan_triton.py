"""The CUDA side of `selective_scan`, forward in time: a warp goes through a chunk of tokens for 32 channels.

All N states of a channel are in the registers of one thread, token after token, so nothing crosses threads.
Rows are joined end to end. Three passes: the state that each chunk adds, the state before each chunk
(`_carry`, one after the other), and the output. The first two are skipped where a chunk is a row.
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types
# ruff: noqa: RUF005, which would unpack tuples: Triton only adds them

import torch
import triton
import triton.language as tl

from shardwise.kernels.causal_conv_triton import LOG2E, sigmoid
from shardwise.kernels.selective_scan import BLOCK, TILE, chunk_tokens

RESET: tl.constexpr = tl.constexpr(-1e30)
"""Added to an exponent of two: the state is forgotten."""

ENDS: tl.constexpr = tl.constexpr(0)
OUTPUT: tl.constexpr = tl.constexpr(1)
REPLAY: tl.constexpr = tl.constexpr(2)

UNROLLED = {ENDS.value: 4, OUTPUT.value: 4, REPLAY.value: 2}
"""Tokens that the compiler unrolls."""


@triton.jit
def softplus(v):
    """log(1 + e^v) = max(v, 0) + w P(w) with w = e^-|v|, to 2e-7 of itself.

    P, of degree 8, goes through log(1 + w) / w at the Chebyshev nodes of [0, 1]: a third of the instructions
    of a logarithm and a division.
    """
    w = tl.exp2(tl.abs(v) * -LOG2E)
    p = 0.0051261018961668015 * w - 0.029074065387248993
    p = p * w + 0.0775160863995552
    p = p * w - 0.13602247834205627
    p = p * w + 0.19076880812644958
    p = p * w - 0.2483539879322052
    p = p * w + 0.3331812024116516
    p = p * w - 0.4999944567680359
    p = p * w + 0.9999999403953552
    return tl.maximum(v, 0.0) + p * w


@triton.jit
def channels(block: tl.constexpr, width: tl.constexpr):
    """A program's channels, and which of them there are.

    Their alignment is hidden: else Triton loads several channels per thread, and spreads the states over
    threads. In 64 bits, so that the constant part of an offset is part of the instruction.
    """
    column = tl.multiple_of(tl.program_id(0) * block + tl.arange(0, block), 1).to(tl.int64)
    inside = tl.full([block], True, tl.int1) if width % block == 0 else column < width
    return column, inside


@triton.jit(do_not_specialize=["tokens", "chunk"])
def _sweep(  # noqa: C901, one loop for three passes
    x, delta, a, bc, d, z, bias, positions, states, decays, out, dout, dz, fine, adjoints, tokens, chunk,
    width: tl.constexpr, z_stride: tl.constexpr, dz_stride: tl.constexpr, n_state: tl.constexpr,
    mode: tl.constexpr, carried: tl.constexpr, complete: tl.constexpr, n_block: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, unrolled: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of channels; `mode` says which results are stored. `a` is [N, W] here.

    `complete`: all chunks are full, and a multiple of the tile.
    """
    column, inside = channels(block, width)
    chosen = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, n_block)
    state = tl.full([n_block], True, tl.int1) if n_state == n_block else n < n_state
    held = inside[None, :] & state[:, None]
    square = n[:, None].to(tl.int64) * width + column[None, :]
    a2 = tl.load(a + square, mask=held, other=0.0) * LOG2E
    offset = tl.load(bias + column, mask=inside, other=0.0)
    begin = chosen * chunk
    left = tl.minimum(tokens - begin, chunk).to(tl.int32)
    x += begin * width
    delta += begin * width
    bc += begin * (2 * n_state)
    positions += begin
    if mode == ENDS:
        h = tl.zeros([n_block, block], tl.float32)
    else:
        skip = tl.load(d + column, mask=inside, other=0.0)
        h = tl.load(states + chosen * n_state * width + square, mask=held, other=0.0)
        out += begin * width
        z += begin * z_stride
    if mode == REPLAY:
        dout += begin * width
        dz += begin * dz_stride
        fine += chosen * tl.cdiv(chunk, tile) * n_state * width
        product = tl.full([n_block, block], 1.0, tl.float32)
        adjoint = tl.zeros([n_block, block], tl.float32)
    total = tl.zeros([block], tl.float32)
    cut = 0
    row = tl.zeros([block], tl.int32)
    row_of_b = tl.zeros([n_block], tl.int32)

    next_x = tl.load(x + column, mask=inside, other=0.0)
    next_v = tl.load(delta + column, mask=inside, other=0.0)
    if mode != ENDS:
        next_z = tl.load(z + column, mask=inside, other=0.0)
    if mode == REPLAY:
        next_g = tl.load(dout + column, mask=inside, other=0.0)
    for start in range(0, chunk, tile):
        if mode == REPLAY:
            tl.store(fine + square, h.to(fine.dtype.element_ty), mask=held)
            fine += n_state * width
        for i in tl.range(0, tile, loop_unroll_factor=unrolled):
            if complete:
                real = inside
                with_b = state
                begins = tl.load(positions) == 0
            else:
                real = inside & (row < left)
                with_b = state & (row_of_b < left)
                begins = tl.load(positions, mask=start + i < left, other=1) == 0
            b = tl.load(bc + n, mask=with_b, other=0.0)[:, None]
            xs = next_x.to(tl.float32)
            v = next_v.to(tl.float32) + offset
            # the next token's values are loaded before this one's are used
            row += 1
            row_of_b += 1
            more = inside & (row < left)
            x += width
            delta += width
            positions += 1
            next_x = tl.load(x + column, mask=more, other=0.0)
            next_v = tl.load(delta + column, mask=more, other=0.0)
            if mode != ENDS:
                c = tl.load(bc + n_state + n, mask=with_b, other=0.0)[:, None]
                gate = next_z.to(tl.float32)
                z += z_stride
                next_z = tl.load(z + column, mask=more, other=0.0)
            if mode == REPLAY:
                g = next_g.to(tl.float32)
                next_g = tl.load(dout + width + column, mask=more, other=0.0)
            bc += 2 * n_state
            dt = softplus(v)
            if not complete:
                dt = tl.where(real, dt, 0.0)  # past the end: the state stays as it is
            decay = tl.exp2(dt[None, :] * a2 + tl.where(begins, RESET, 0.0))
            h = decay * h + (dt * xs)[None, :] * b
            if mode != OUTPUT:
                total += dt
                cut = tl.maximum(cut, begins.to(tl.int32))
            if mode != ENDS:
                y = tl.sum(h * c, axis=0) + skip * xs
                s = sigmoid(gate)
                silu = gate * s
                tl.store(out + column, (y * silu).to(out.dtype.element_ty), mask=real)
                out += width
            if mode == REPLAY:
                dy = (g * silu).to(dout.dtype.element_ty)
                slope = s + silu * (1.0 - s)
                tl.store(dz + column, (g * y * slope).to(dz.dtype.element_ty), mask=real)
                tl.store(dout + column, dy, mask=real)
                dz += dz_stride
                dout += width
                if carried:
                    # gradient of the state before the chunk: C dy of every token, decayed back to the start
                    product *= decay
                    adjoint += product * (c * dy.to(tl.float32)[None, :])

    if mode == ENDS or (mode == REPLAY and carried):
        target = states if mode == ENDS else adjoints
        tl.store(target + chosen * n_state * width + square, h if mode == ENDS else adjoint, mask=held)
        # the sum of dt says how much of a state survives the chunk; negative: nothing, a sample begins in it
        survives = tl.where(cut > 0, -1.0, total)
        tl.store(decays + chosen * width + column, survives, mask=inside)


@triton.jit
def _carry(
    states, decays, a, chunks, width,
    n_state: tl.constexpr, reverse: tl.constexpr, block: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """In place: from what each chunk adds to the state to the state that reaches it. `a` is [N, W] here."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    n = tl.program_id(1)
    inside = column < width
    a2 = tl.load(a + n * width + column, mask=inside, other=0.0) * LOG2E
    size = n_state * width
    step = -1 if reverse else 1
    first = chunks - 1 if reverse else 0
    at = states + first.to(tl.int64) * size + n * width + column
    at_decay = decays + first.to(tl.int64) * width + column
    carried = tl.zeros([block], tl.float32)
    for i in range(0, chunks, ahead):
        # many chunks' values are loaded before the first is used
        added = ()
        survives = ()
        for j in tl.static_range(ahead):
            here = inside & (column * 0 + i + j < chunks)
            added = added + (tl.load(at + j * step * size, mask=here, other=0.0),)
            survives = survives + (tl.load(at_decay + j * step * width, mask=here, other=0.0),)
        for j in tl.static_range(ahead):
            here = inside & (column * 0 + i + j < chunks)
            tl.store(at + j * step * size, carried, mask=here)
            carried = tl.where(survives[j] < 0.0, 0.0, tl.exp2(survives[j] * a2)) * carried + added[j]
        at += ahead * step * size
        at_decay += ahead * step * width


def forward(x, delta, a, bc, d, z, bias, positions, *, chunk=None, block=BLOCK):
    """`selective_scan` on the current stream. `chunk` and `block` are for tests and tuning."""
    run = Run(x, a, chunk)
    states = x.new_empty(run.chunks, run.n_state, run.width, dtype=torch.float32)
    out = torch.empty_like(x)
    by_state = a.t().contiguous()
    inputs = (x, delta, by_state, bc, d, z, bias, positions)
    if run.carried:
        decays = x.new_empty(run.chunks, run.width, dtype=torch.float32)
        _launch_sweep(run, ENDS, *inputs, states, decays, x, x, x, x, x, block=block)
        _launch_carry(run, states, decays, by_state, reverse=False)
    else:
        states.zero_()
    _launch_sweep(run, OUTPUT, *inputs, states, states, out, x, x, x, x, block=block)
    return out, states


def replay(
    x, delta, a, bc, d, z, bias, positions, states, dout, dz, *, chunk=None, block=BLOCK
):  # fmt: skip
    """`selective_scan_replay` on the current stream."""
    run = Run(x, a, chunk)
    out = torch.empty_like(x)
    fine = x.new_empty(run.chunks * run.tiles, run.n_state, run.width)
    adjoints = torch.empty_like(states) if run.carried else torch.zeros_like(states)
    decays = x.new_empty(run.chunks, run.width, dtype=torch.float32)
    by_state = a.t().contiguous()
    _launch_sweep(
        run, REPLAY, x, delta, by_state, bc, d, z, bias, positions, states, decays, out, dout, dz, fine,
        adjoints, block=block,
    )  # fmt: skip
    if run.carried:
        _launch_carry(run, adjoints, decays, by_state, reverse=True)
    return out, fine, adjoints


class Run:
    """The extent of one call: tokens and chunks of all rows laid end to end."""

    def __init__(self, x, a, chunk):
        rows, length, self.width = x.shape
        self.tokens = rows * length
        self.n_state = a.shape[1]
        self.chunk = chunk or chunk_tokens(rows, length, self.width)
        self.chunks = -(-self.tokens // self.chunk)
        self.tiles = -(-self.chunk // TILE)  # of a chunk
        self.carried = self.chunk != length
        self.complete = self.tokens % self.chunk == 0 and self.chunk % TILE == 0


def _launch_sweep(run, mode, *tensors, block):
    z, dz = tensors[5], tensors[12]
    strides = {"width": run.width, "z_stride": z.stride(-2), "dz_stride": dz.stride(-2)}
    states = {"n_state": run.n_state, "n_block": triton.next_power_of_2(run.n_state)}
    flags = {"mode": mode, "carried": run.carried, "complete": run.complete}
    blocks = {"tile": TILE, "block": block, "unrolled": UNROLLED[mode.value]}
    _sweep[(triton.cdiv(run.width, block), run.chunks)](
        *tensors, run.tokens, run.chunk, **strides, **states, **flags, **blocks, num_warps=max(block // 32, 1)
    )


def _launch_carry(run, states, decays, by_state, *, reverse):
    _carry[(triton.cdiv(run.width, 64), run.n_state)](
        states, decays, by_state, run.chunks, run.width,
        n_state=run.n_state, reverse=reverse, block=64, ahead=16, num_warps=2,
    )  # fmt: skip
