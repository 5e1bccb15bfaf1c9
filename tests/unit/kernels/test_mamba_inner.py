"""The scan, the convolution and the mixer around them: gradients, samples that share rows, memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shardwise.kernels.causal_conv import causal_conv, causal_conv_reference
from shardwise.kernels.mamba_inner import mamba_inner
from shardwise.kernels.selective_scan import chunk_tokens, selective_scan, selective_scan_reference

ROWS, LENGTH, WIDTH, STATES, RANK, TAPS, HIDDEN = 2, 9, 5, 3, 2, 4, 4
NAMES = ("xz", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "a_log", "d", "out_proj")


def positions(*borders, rows=ROWS, length=LENGTH):
    """Rows whose last one has samples that begin at `borders` as well."""
    found = torch.arange(length).repeat(rows, 1)
    for border in borders:
        found[-1, border:] = torch.arange(length - border)
    return found.int()


def inputs(dtype=torch.float64, rows=ROWS, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "xz": (rows, length, 2 * WIDTH),
        "conv_weight": (WIDTH, TAPS),
        "conv_bias": (WIDTH,),
        "x_proj": (RANK + 2 * STATES, WIDTH),
        "dt_proj": (WIDTH, RANK),
        "dt_bias": (WIDTH,),
        "a_log": (WIDTH, STATES),
        "d": (WIDTH,),
        "out_proj": (HIDDEN, WIDTH),
    }
    return {
        name: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for name, s in shapes.items()
    }


def plain(values, where):
    """The mixer from its two references and nothing else: autograd differentiates it."""
    x, z = values["xz"].chunk(2, dim=-1)
    u = causal_conv_reference(x, values["conv_weight"], values["conv_bias"], where)
    small = u @ values["x_proj"].t()
    y = selective_scan_reference(
        u, small[..., :RANK] @ values["dt_proj"].t(), -torch.exp(values["a_log"]), small[..., RANK:],
        values["d"], values["dt_bias"], where,
    )  # fmt: skip
    return (y * torch.nn.functional.silu(z)) @ values["out_proj"].t()


def mixer(values, where):
    others = {name: value for name, value in values.items() if name != "xz"}
    return mamba_inner(values["xz"], where, **others)


def by_hand(x, delta, a, bc, d, bias, where):
    """The recurrence as the paper writes it, one number after the other."""
    b, c = bc.chunk(2, dim=-1)
    y = torch.empty_like(x)
    for row in range(x.shape[0]):
        for channel in range(x.shape[2]):
            h = torch.zeros(a.shape[1], dtype=x.dtype)
            for t in range(x.shape[1]):
                dt = torch.log1p(torch.exp(delta[row, t, channel] + bias[channel]))
                kept = torch.zeros_like(h) if where[row, t] == 0 else h
                h = torch.exp(dt * a[channel]) * kept + dt * b[row, t] * x[row, t, channel]
                y[row, t, channel] = c[row, t] @ h + d[channel] * x[row, t, channel]
    return y


@pytest.mark.parametrize("borders", [(), (1, 4, 7)], ids=["whole", "packed"])
def test_the_reference_is_the_papers_recurrence(borders):
    values, where = inputs(), positions(*borders)
    x, delta = values["xz"].chunk(2, dim=-1)
    bc = torch.randn(
        ROWS, LENGTH, 2 * STATES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    arguments = (x, delta, -torch.exp(values["a_log"]), bc, values["d"], values["dt_bias"], where)
    assert torch.allclose(selective_scan_reference(*arguments), by_hand(*arguments), rtol=1e-12, atol=1e-12)


def test_gradients_of_the_reference_are_right():
    values, where = inputs(), positions(2, 3)
    x, delta = (t.contiguous() for t in values["xz"].chunk(2, dim=-1))
    bc = torch.randn(ROWS, LENGTH, 2 * STATES, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (x, delta, values["a_log"], bc, values["d"], values["dt_bias"])]
    assert torch.autograd.gradcheck(
        lambda x, delta, a_log, *rest: selective_scan_reference(x, delta, -torch.exp(a_log), *rest, where),
        tensors,
    )


@pytest.mark.parametrize("borders", [(), (1, 4, 7)], ids=["whole", "packed"])
def test_gradients_of_the_mixer_are_right(borders):
    values, where = inputs(), positions(*borders)
    tensors = [value.requires_grad_() for value in values.values()]
    assert torch.autograd.gradcheck(lambda *t: mixer(dict(zip(NAMES, t, strict=True)), where), tensors)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_mixer_is_its_references(dtype, bound):
    values, where = inputs(dtype), positions(4)
    exact = {name: value.double().requires_grad_() for name, value in values.items()}
    found = {name: value.requires_grad_() for name, value in values.items()}
    out, expected = mixer(found, where), plain(exact, where)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    left = torch.autograd.grad(out, found.values(), upstream.to(dtype))
    right = torch.autograd.grad(expected, exact.values(), upstream)
    for one, other in zip((out, *left), (expected, *right), strict=True):
        assert one.dtype == dtype
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < bound


def test_no_bias_of_the_convolution_is_a_bias_of_zero():
    values, where = inputs(), positions(4)
    x = values["xz"].chunk(2, dim=-1)[0]
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    assert torch.equal(
        causal_conv(x, values["conv_weight"], None, where), causal_conv(x, values["conv_weight"], zero, where)
    )
    values["conv_bias"] = None
    tensors = {name: value.requires_grad_() for name, value in values.items() if value is not None}
    mixer({**tensors, "conv_bias": None}, where).sum().backward()
    assert all(value.grad is not None for value in tensors.values())


def test_samples_that_share_a_row_do_not_meet():
    """Outputs and gradients of a packed row are those of its samples one by one."""
    values = inputs(rows=1)
    borders = [0, 1, 4, LENGTH]  # the first is shorter than the filter
    where = positions(*borders[1:-1], rows=1)
    packed = {name: value.clone().requires_grad_() for name, value in values.items()}
    alone = {name: value.clone().requires_grad_() for name, value in values.items()}
    out = mixer(packed, where)
    parts = [
        mixer({**alone, "xz": alone["xz"][:, a:b].contiguous()}, positions(rows=1, length=b - a))
        for a, b in pairwise(borders)
    ]
    expected = torch.cat(parts, dim=1)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    left = torch.autograd.grad(out, packed.values(), upstream)
    right = torch.autograd.grad(expected, alone.values(), upstream)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(left, right, strict=True))


def test_a_log_dt_bias_and_d_are_used_in_fp32_beside_bf16_weights():
    """In fp32 they give the output they give in fp64; rounded to bf16 they do not."""
    values, where = inputs(torch.bfloat16), positions()
    small = {name: values.pop(name).float() * 1.01 for name in ("a_log", "dt_bias", "d")}
    out = mixer({**values, **small}, where)
    assert out.dtype == torch.bfloat16
    wide = mixer({**values, **{name: value.double() for name, value in small.items()}}, where)
    rounded = mixer({**values, **{name: value.bfloat16() for name, value in small.items()}}, where)
    assert torch.equal(out, wide)
    assert not torch.equal(out, rounded)


def test_the_backward_pass_leaves_what_was_kept_alone():
    values, where = inputs(torch.float32), positions(4)
    found = {name: value.requires_grad_() for name, value in values.items()}
    out = mixer(found, where)
    first = torch.autograd.grad(out.sum(), found.values(), retain_graph=True)
    second = torch.autograd.grad(out.sum(), found.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("rows", "length", "width", "expected"),
    [
        (1, 4096, 9728, 128),  # 7B: 304 blocks of channels, 32 chunks
        (8, 4096, 9728, 1024),
        (32, 4096, 9728, 4096),  # the rows are enough work
        (1, 2048, 1536, 64),  # 130M: never shorter
        (1, 16384, 4096, 256),
        (4, 48, 1536, 48),
    ],
)
def test_chunks_are_as_long_as_leaves_work_for_the_gpu(rows, length, width, expected):
    assert chunk_tokens(rows, length, width) == expected


def test_kept_between_the_passes_are_xz_the_small_product_and_a_state_for_each_chunk():
    """mamba_ssm keeps 6.14 bytes a channel and token at this shape: it keeps the scan's output too."""
    width, rank, states, length, hidden = 9728, 304, 16, 4096, 4864
    meta = {"device": "meta", "dtype": torch.bfloat16}
    weights = {
        "conv_weight": torch.empty(width, 4, **meta),
        "conv_bias": torch.empty(width, **meta),
        "x_proj": torch.empty(rank + 2 * states, width, **meta),
        "dt_proj": torch.empty(width, rank, **meta),
        "dt_bias": torch.empty(width, device="meta"),
        "a_log": torch.empty(width, states, device="meta"),
        "d": torch.empty(width, device="meta"),
        "out_proj": torch.empty(hidden, width, **meta),
    }
    for weight in weights.values():
        weight.requires_grad_()
    xz = torch.empty(1, length, 2 * width, **meta).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = mamba_inner(xz, torch.empty(1, length, dtype=torch.int32, device="meta"), **weights)
    assert out.shape == (1, length, hidden)
    of_weights = {w.untyped_storage()._cdata for w in weights.values()}
    per_token = sum(size for key, size in kept.items() if key not in of_weights) / length
    expected = 2 * 2 * width + 2 * (rank + 2 * states) + 4 * states * width / 128 + 4
    assert per_token == pytest.approx(expected, rel=1e-2)  # A, and fp32 copies of vectors, are the rest
    assert per_token < 0.76 * 6.14 * width


def test_both_sides_agree_on_what_comes_out():
    x = torch.empty(2, 100, 64, device="meta", dtype=torch.bfloat16)
    fp32 = {"device": "meta", "dtype": torch.float32}
    where = torch.empty(2, 100, dtype=torch.int32, device="meta")
    out, states = selective_scan(
        x, x, torch.empty(64, 16, **fp32), torch.empty(2, 100, 32, **fp32), torch.empty(64, **fp32), x,
        torch.empty(64, **fp32), where,
    )  # fmt: skip
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert states.shape == (4, 16, 64)  # 200 tokens in chunks of 64
    assert states.dtype == torch.float32
