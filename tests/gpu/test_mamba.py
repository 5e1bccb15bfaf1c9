"""On a GPU: Mamba's kernels equal float64 arithmetic, repeat to the bit, and never wait for the host."""

from __future__ import annotations

import pytest
import torch

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.job.schema import Model
from shardwise.kernels import mamba_inner as module
from shardwise.kernels.causal_conv import causal_conv_reference
from shardwise.kernels.mamba_inner import mamba_inner
from shardwise.kernels.selective_scan import chunk_tokens, selective_scan_reference
from shardwise.models.build import build_model
from shardwise.objective.causal_lm import CausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # kernels compiled for the first time and third-party code may warn
    pytest.mark.filterwarnings("default"),
]
DEVICE = torch.device("cuda")


def error(measured, expected):
    """Norm of the difference over the norm of the expected, in float64 on the CPU.

    What is exactly nothing in float64 (the gradient of A, where every state before a token is zero) is held
    to bits of fp32 beside the values of size 1 that it is made of.
    """
    measured, expected = measured.detach().double().cpu(), expected.detach().double().cpu()
    return float((measured - expected).norm() / max(expected.norm(), 1e-4))


def positions(rows, length, borders):
    found = torch.arange(length).repeat(rows, 1)
    for border in borders:
        found[-1, border:] = torch.arange(length - border)
    return found.int()


def inputs(rows, length, width, states, rank, dtype):
    generator = torch.Generator().manual_seed(0)

    def values(*shape, scale=1.0):
        return torch.randn(shape, generator=generator) * scale

    found = {
        "xz": values(rows, length, 2 * width).to(dtype),
        "conv_weight": values(width, 4, scale=0.5).to(dtype),
        "conv_bias": values(width, scale=0.5).to(dtype),
        "x_proj": values(rank + 2 * states, width, scale=width**-0.5).to(dtype),
        "dt_proj": values(width, rank, scale=rank**-0.5).to(dtype),
        "dt_bias": values(width) - 3.0,
        "a_log": values(width, states, scale=0.3) + torch.log(torch.arange(1.0, states + 1)),
        "d": values(width),
        "out_proj": values(width // 2, width, scale=width**-0.5).to(dtype),
    }
    return {name: value.to(DEVICE).requires_grad_() for name, value in found.items()}


def in_float64(values, where, rank):
    x, z = values["xz"].chunk(2, dim=-1)
    u = causal_conv_reference(x, values["conv_weight"], values["conv_bias"], where)
    small = u @ values["x_proj"].t()
    delta = small[..., :rank] @ values["dt_proj"].t()
    a = -torch.exp(values["a_log"])
    y = selective_scan_reference(u, delta, a, small[..., rank:], values["d"], values["dt_bias"], where)
    return (y * torch.nn.functional.silu(z)) @ values["out_proj"].t()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("rows", "length", "width", "states", "borders"),
    [
        (1, 1, 96, 16, ()),
        (2, 64, 96, 16, ()),
        (1, 333, 96, 16, ()),  # in chunks of 64, the last one short
        (3, 200, 130, 16, (1, 64, 65, 199)),
        (2, 1029, 256, 16, (500, 512, 1028)),
        (1, 150, 64, 8, (75,)),
        (1, 150, 64, 5, (75,)),
    ],
)
def test_the_mixer_is_float64s(dtype, bound, rows, length, width, states, borders):
    rank = 6
    values, where = inputs(rows, length, width, states, rank, dtype), positions(rows, length, borders)
    exact = {name: value.detach().double().cpu().requires_grad_() for name, value in values.items()}
    others = {name: value for name, value in values.items() if name != "xz"}
    out = mamba_inner(values["xz"], where.to(DEVICE), **others)
    expected = in_float64(exact, where, rank)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    left = torch.autograd.grad(out, values.values(), upstream.to(DEVICE, dtype))
    right = torch.autograd.grad(expected, exact.values(), upstream)
    assert error(out, expected) <= bound
    for name, found, wanted in zip(values, left, right, strict=True):
        assert error(found, wanted) <= bound, name


@pytest.mark.parametrize("rows", [1, 128], ids=["in chunks", "by rows"])
def test_the_same_bits_every_time(rows):
    width, length = 2048, 256
    assert (chunk_tokens(rows, length, width) == length) == (rows == 128)
    values, where = inputs(rows, length, width, 16, 64, torch.bfloat16), positions(rows, length, (100,))
    others = {name: value for name, value in values.items() if name != "xz"}
    found = []
    for _ in range(2):
        out = mamba_inner(values["xz"], where.to(DEVICE), **others)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), values.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_operators_call_the_same_kernels(monkeypatch):
    values, where = inputs(1, 150, 64, 16, 6, torch.bfloat16), positions(1, 150, (75,)).to(DEVICE)
    others = {name: value for name, value in values.items() if name != "xz"}
    found = []
    for calls in (module._calls, lambda _: module._OPERATORS):
        monkeypatch.setattr(module, "_calls", calls)
        out = mamba_inner(values["xz"], where, **others)
        found.append([out, *torch.autograd.grad(out.sum(), values.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def batch(rows=2, length=96, vocabulary=512):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, [39, length - 1]] = IGNORED
    starts = torch.cat([torch.arange(40), torch.arange(length - 40)]).repeat(rows, 1)
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        position_ids=starts,
        cu_seqlens=torch.tensor([0, *torch.tensor([40, length - 40] * rows).cumsum(0)], dtype=torch.int32),
        max_seqlen=length - 40,
    )


def built(dtype, device):
    found = build_model(Model(source="tiny-mamba", weights="random"), dtype=dtype, seed=0)
    found.weights.fill(found.model, torch.device("cpu"))
    return CausalLM(found.model.to(device))


def test_a_step_in_bf16_is_that_of_fp32_but_for_rounding():
    exact, found = built(torch.float32, torch.device("cpu")), built(torch.bfloat16, DEVICE)
    expected, loss = exact(batch()), found(batch().to(DEVICE))
    expected.backward()
    loss.backward()
    assert error(loss, expected) <= 2e-3
    right = torch.cat([p.grad.flatten() for p in exact.parameters()])
    assert error(torch.cat([p.grad.flatten().float() for p in found.parameters()]), right) <= 5e-2


def test_a_step_never_waits_for_the_gpu():
    loss, rows = built(torch.bfloat16, DEVICE), batch().to(DEVICE)
    loss(rows).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(rows).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_the_trace_says_is_kept_is_kept():
    """Memory between the passes of one mixer, as the fake implementation has it."""
    width, length, rank = 2048, 1024, 64
    values, where = inputs(1, length, width, 16, rank, torch.bfloat16), positions(1, length, ()).to(DEVICE)
    others = {name: value for name, value in values.items() if name != "xz"}
    mamba_inner(values["xz"], where, **others)
    before = torch.cuda.memory_allocated()
    out = mamba_inner(values["xz"], where, **others)
    kept = torch.cuda.memory_allocated() - before - out.numel() * 2
    chunk = chunk_tokens(1, length, width)
    small, states, decay = 2 * length * (rank + 32), 4 * 16 * width * length // chunk, 2 * 4 * 16 * width
    assert kept == pytest.approx(small + states + decay, abs=8 * 512)
