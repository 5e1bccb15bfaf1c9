"""The CUDA side of `selective_scan`, forward in time: a warp goes through a chunk of tokens for 32 channels.

All N states of a channel are in the registers of one thread, so that nothing crosses threads. Rows are laid
end to end. Three passes: the state that each chunk adds, the state before each chunk (`_carry`, one after the
other), and the output. The first two fall away where a chunk is a row.
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.mamba_work import BLOCK, SWEEP_TILE, TILE, chunk_tokens

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
RESET: tl.constexpr = tl.constexpr(-1e30)
"""Added to an exponent of two: the state is forgotten."""

ENDS: tl.constexpr = tl.constexpr(0)
OUTPUT: tl.constexpr = tl.constexpr(1)
REPLAY: tl.constexpr = tl.constexpr(2)


@triton.jit
def softplus(v):
    """log(1 + e^v) to fp32's precision: log(u) * e / (u - 1) with u = 1 + e (Kahan) where e is small."""
    e = tl.exp(tl.minimum(v, 20.0))
    u = 1.0 + e
    return tl.where(v > 20.0, v, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def later_after_earlier(a_earlier, b_earlier, a_later, b_later):
    """Composes h -> a h + b."""
    return a_later * a_earlier, a_later * b_earlier + b_later


@triton.jit(do_not_specialize=["tokens", "width", "z_stride", "dz_stride", "chunk"])
def _sweep(
    x, delta, a, bc, d, z, bias, positions, states, decays, out, dout, dz, fine, adjoints,
    tokens, width, z_stride, dz_stride, chunk,
    n_state: tl.constexpr, mode: tl.constexpr, carried: tl.constexpr,
    n_block: tl.constexpr, fine_tile: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of channels; `mode` says what of it is written down.

    Sizes are not specialised: with a known alignment Triton would load along the channels in vectors, and
    spread the tokens of a tile over threads to do so; scans would then cross threads.
    """
    column = tl.program_id(0) * block + tl.arange(0, block)
    chosen = tl.program_id(1).to(tl.int64)
    inside = column < width
    n = tl.arange(0, n_block)
    square = n[:, None] * width + column[None, :]
    held = inside[None, :] & (n[:, None] < n_state)
    a2 = tl.load(a + column[None, :] * n_state + n[:, None], mask=held, other=0.0) * LOG2E
    offset = tl.load(bias + column, mask=inside, other=0.0)
    row = tl.arange(0, tile)
    end = tl.minimum((chosen + 1) * chunk, tokens)
    if mode == ENDS:
        h = tl.zeros([n_block, block], tl.float32)
    else:
        skip = tl.load(d + column, mask=inside, other=0.0)
        h = tl.load(states + chosen * n_state * width + square, mask=held, other=0.0)
    if mode == REPLAY:
        product = tl.full([n_block, block], 1.0, tl.float32)
        adjoint = tl.zeros([n_block, block], tl.float32)
    total = tl.zeros([block], tl.float32)
    cut = tl.zeros([tile], tl.int32)

    for start in range(0, chunk, tile):
        t = chosen * chunk + start + row
        real = t < end
        valid = real[:, None] & inside[None, :]
        place = t[:, None] * width + column[None, :]
        if mode == REPLAY:
            number = chosen * tl.cdiv(chunk, fine_tile) + start // fine_tile
            wanted = held & (start % fine_tile == 0)
            at_fine = fine + number * n_state * width + square
            tl.store(at_fine, h.to(fine.dtype.element_ty), mask=wanted)
        xs = tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
        dt = softplus(tl.load(delta + place, mask=valid, other=0.0).to(tl.float32) + offset[None, :])
        dt = tl.where(valid, dt, 0.0)  # past the end: the state stays as it is
        begins = tl.load(positions + t, mask=real, other=1) == 0
        in_b = real[:, None] & (n[None, :] < n_state)
        at_b = bc + t[:, None] * (2 * n_state) + n[None, :]
        b = tl.load(at_b, mask=in_b, other=0.0)
        decay = tl.exp2(dt[:, None, :] * a2[None, :, :] + tl.where(begins, RESET, 0.0)[:, None, None])
        added = (dt * xs)[:, None, :] * b[:, :, None]
        added = tl.where(row[:, None, None] == 0, added + decay * h[None, :, :], added)
        so_far, hs = tl.associative_scan((decay, added), 0, later_after_earlier)
        last = row[:, None, None] == tile - 1
        h = tl.sum(tl.where(last, hs, 0.0), axis=0)
        if mode != OUTPUT:
            total += tl.sum(dt, axis=0)
            cut = tl.maximum(cut, begins.to(tl.int32))
        if mode != ENDS:
            c = tl.load(at_b + n_state, mask=in_b, other=0.0)
            y = tl.sum(hs * c[:, :, None], axis=1) + skip[None, :] * xs
            gate = tl.load(z + t[:, None] * z_stride + column[None, :], mask=valid, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            tl.store(out + place, (y * silu).to(out.dtype.element_ty), mask=valid)
        if mode == REPLAY:
            g = tl.load(dout + place, mask=valid, other=0.0).to(tl.float32)
            dy = (g * silu).to(dout.dtype.element_ty)
            slope = sigmoid + silu * (1.0 - sigmoid)
            at_dz = dz + t[:, None] * dz_stride + column[None, :]
            tl.store(at_dz, (g * y * slope).to(dz.dtype.element_ty), mask=valid)
            tl.store(dout + place, dy, mask=valid)
            if carried:
                # gradient of the state before the chunk: C dy of every token, decayed back to the start
                from_here = c[:, :, None] * dy.to(tl.float32)[:, None, :]
                adjoint += product * tl.sum(so_far * from_here, axis=0)
                product *= tl.sum(tl.where(last, so_far, 0.0), axis=0)

    if mode == ENDS or (mode == REPLAY and carried):
        target = states if mode == ENDS else adjoints
        tl.store(target + chosen * n_state * width + square, h if mode == ENDS else adjoint, mask=held)
        # the sum of dt says how much of a state survives the chunk; negative: nothing, a sample begins in it
        survives = tl.where(tl.max(cut) > 0, -1.0, total)
        tl.store(decays + chosen * width + column, survives, mask=inside)


@triton.jit
def _carry(
    states, decays, a, chunks, width,
    n_state: tl.constexpr, reverse: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """In place: from what each chunk adds to the state to the state that reaches it."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    n = tl.program_id(1)
    inside = column < width
    a2 = tl.load(a + column * n_state + n, mask=inside, other=0.0) * LOG2E
    size = n_state * width
    step = -1 if reverse else 1
    first = chunks - 1 if reverse else 0
    at = states + first.to(tl.int64) * size + n * width + column
    at_decay = decays + first.to(tl.int64) * width + column
    carried = tl.zeros([block], tl.float32)
    added = tl.load(at, mask=inside, other=0.0)
    survives = tl.load(at_decay, mask=inside, other=0.0)
    for i in range(chunks):
        # the next chunk's values are asked for before this one's are written
        more = inside & (column * 0 + i + 1 < chunks)
        next_added = tl.load(at + step * size, mask=more, other=0.0)
        next_survives = tl.load(at_decay + step * width, mask=more, other=0.0)
        tl.store(at, carried, mask=inside)
        carried = tl.where(survives < 0.0, 0.0, tl.exp2(survives * a2)) * carried + added
        added, survives = next_added, next_survives
        at += step * size
        at_decay += step * width


def forward(x, delta, a, bc, d, z, bias, positions, *, chunk=None, block=BLOCK, tile=SWEEP_TILE):
    """`selective_scan` on the current stream. `chunk`, `block` and `tile` are for tests and tuning."""
    run = Run(x, a, chunk)
    states = x.new_empty(run.chunks, run.n_state, run.width, dtype=torch.float32)
    out = torch.empty_like(x)
    inputs = (x, delta, a, bc, d, z, bias, positions)
    blocks = {"block": block, "tile": tile}
    if run.carried:
        decays = x.new_empty(run.chunks, run.width, dtype=torch.float32)
        _launch_sweep(run, ENDS, *inputs, states, decays, x, x, x, x, x, z_stride=0, dz_stride=0, **blocks)
        _launch_carry(run, states, decays, a, reverse=False)
    else:
        states.zero_()
    _launch_sweep(
        run, OUTPUT, *inputs, states, states, out, x, x, x, x, z_stride=z.stride(-2), dz_stride=0, **blocks
    )
    return out, states


def replay(
    x, delta, a, bc, d, z, bias, positions, states, dout, dz,
    *, chunk=None, block=BLOCK, tile=SWEEP_TILE,
):  # fmt: skip
    """`selective_scan_replay` on the current stream."""
    run = Run(x, a, chunk)
    out = torch.empty_like(x)
    fine = x.new_empty(run.chunks * -(-run.chunk // TILE), run.n_state, run.width)
    adjoints = torch.empty_like(states) if run.carried else torch.zeros_like(states)
    decays = x.new_empty(run.chunks, run.width, dtype=torch.float32)
    _launch_sweep(
        run, REPLAY, x, delta, a, bc, d, z, bias, positions, states, decays, out, dout, dz, fine, adjoints,
        z_stride=z.stride(-2), dz_stride=dz.stride(-2), block=block, tile=tile,
    )  # fmt: skip
    if run.carried:
        _launch_carry(run, adjoints, decays, a, reverse=True)
    return out, fine, adjoints


class Run:
    """The extent of one call: tokens and chunks of all rows laid end to end."""

    def __init__(self, x, a, chunk):
        rows, length, self.width = x.shape
        self.tokens = rows * length
        self.n_state = a.shape[1]
        self.chunk = chunk or chunk_tokens(rows, length, self.width)
        self.chunks = -(-self.tokens // self.chunk)
        self.carried = self.chunk != length


def _launch_sweep(run, mode, *tensors, z_stride, dz_stride, block, tile):
    _sweep[(triton.cdiv(run.width, block), run.chunks)](
        *tensors,
        run.tokens,
        run.width,
        z_stride,
        dz_stride,
        run.chunk,
        n_state=run.n_state,
        mode=mode,
        carried=run.carried,
        n_block=triton.next_power_of_2(run.n_state),
        fine_tile=TILE,
        tile=tile,
        block=block,
        num_warps=max(block // 32, 1),
    )


def _launch_carry(run, states, decays, a, *, reverse):
    _carry[(triton.cdiv(run.width, 128), run.n_state)](
        states, decays, a, run.chunks, run.width,
        n_state=run.n_state, reverse=reverse, block=128, num_warps=4,
    )  # fmt: skip
