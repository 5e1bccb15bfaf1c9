"""What torch was built for, and whether its number formats and training's kernels compute right.

On a GPU the kernels are our Triton kernels, flash attention and Liger; on a CPU the reference sides of ours.
They run forward and backward and are compared with plain float64.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

SIDE = 256  # of the square matrices


def build(stage: Callable[[str], None]) -> dict[str, Any]:
    """Versions, the GPUs that CUDA shows, and CUDA's message where it shows none."""
    said: list[str] = []
    stage("asking CUDA for its GPUs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count()
        try:
            if torch.version.cuda is not None:
                torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            said.append(" ".join(str(error).split()))
        said += [" ".join(str(one.message).split()) for one in caught]
    works, cuda = torch.cuda.is_initialized(), torch.cuda
    gpus = range(count if works else 0)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": len(gpus),
        "said": said[0][:400] if said else "",
        "capabilities": [list(cuda.get_device_capability(i)) for i in gpus],
        "compiled_for": cuda.get_arch_list() if works else [],
        "nccl": ".".join(map(str, cuda.nccl.version())) if works else None,
        "peers": [[i == j or cuda.can_device_access_peer(i, j) for j in gpus] for i in gpus],
        "threads": torch.get_num_threads(),
    }


def formats(stage: Callable[[str], None]) -> dict[str, Any]:
    """Matrix products in bf16, fp16 and fp8, compared with fp32; by format an error or why there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = (values.to(device) for values in _values((SIDE, SIDE), (SIDE, SIDE)))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    found: dict[str, Any] = {"device": device.type, "capability": capability}
    for name, multiply in (
        ("bf16", lambda: a.bfloat16() @ b.bfloat16()),
        ("fp16", lambda: a.half() @ b.half()),
        ("fp8", lambda: _fp8(a, b)),
    ):
        stage(f"multiplying in {name}")
        try:
            found[name] = {"error": error(multiply(), a @ b)}
        except (RuntimeError, ValueError, NotImplementedError) as failed:
            found[name] = {"failed": " ".join(str(failed).split())[:200]}
    return found


def _fp8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """With scales of 1: the values are about 1, and e4m3 represents up to 448."""
    one = torch.ones((), device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def quantize(stage: Callable[[str], None]) -> dict[str, Any]:
    """The error of 64 blocks of normal numbers in bitsandbytes' NF4; it has 16 values, about 10 % off."""
    stage("importing bitsandbytes")
    import bitsandbytes
    from bitsandbytes import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = _values((64, 64))[0].to(device)
    stage("quantising")
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    return {"version": bitsandbytes.__version__, "device": device, "error": error(back, values)}


def error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected, in float64 on the CPU."""
    measured, expected = (t.detach().double().cpu() for t in (measured, expected))
    return float((measured - expected).norm() / expected.norm())


def cross_entropy(stage: Callable[[str], None]) -> dict[str, Any]:
    """The output head with its loss: 64 tokens of a vocabulary of 1000."""
    from shardwise.kernels.linear_cross_entropy import linear_cross_entropy

    hidden, weight = _values((64, 128), (1000, 128))
    labels = torch.arange(64) * 15
    return _compared(
        stage,
        lambda hidden, weight: linear_cross_entropy(hidden, weight, labels.to(hidden.device)),
        lambda hidden, weight: functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum"),
        (hidden, weight * 0.1),
    )


def attention(stage: Callable[[str], None]) -> dict[str, Any]:
    """Two samples in a row of 128 tokens, 4 heads of 64, in bf16 on a GPU; and by which kernel."""
    from shardwise.kernels import flash4
    from shardwise.kernels.attention import varlen_attention
    from shardwise.kernels.target import HOPPER, capability

    borders = torch.tensor([0, 48, 128], dtype=torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        module, ends = torch.nn.Module(), borders.to(q.device)
        return varlen_attention(module, q, k, v, None, cu_seq_lens_q=ends, max_length_q=80)[0]

    device, kernel = torch.device("cuda" if torch.cuda.is_available() else "cpu"), ""
    if flash4.serves(device, 64):
        kernel = "flash attention 4"
    elif capability(device)[0] == HOPPER.capability[0]:
        kernel = "flash attention 2; pip install 'shardwise[hopper]' would halve its time"
    values = _values(*[(1, 4, 128, 64)] * 3)
    return {**_compared(stage, attend, attend, values, on_gpu=torch.bfloat16), "kernel": kernel}


def mamba(stage: Callable[[str], None]) -> dict[str, Any]:
    """Mamba's mixer: convolution, selective scan and gate, on rows of two samples."""
    from shardwise.kernels.mamba_inner import mamba_inner

    names = ("xz", "conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "a_log", "d", "out_proj")
    shapes = ((2, 64, 192), (96, 4), (96,), (34, 96), (96, 2), (96,), (96, 16), (96,), (48, 96))
    positions = torch.cat([torch.arange(40), torch.arange(24)]).repeat(2, 1).int()

    def mix(*tensors: torch.Tensor) -> torch.Tensor:
        values = dict(zip(names, tensors, strict=True))
        return mamba_inner(values.pop("xz"), positions.to(tensors[0].device), **values)

    return _compared(stage, mix, mix, [t * 0.3 for t in _values(*shapes)])


def liger(stage: Callable[[str], None]) -> dict[str, Any]:
    """Liger's RMS norm and gated activation; for GPUs only."""
    if not torch.cuda.is_available():
        return {"device": "cpu"}
    from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction

    def fused(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
        return LigerSiLUMulFunction.apply(gate, normed)

    def plain(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    return _compared(stage, fused, plain, _values((32, 256), (256,), (32, 256)))


def _values(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _compared(
    stage: Callable[[str], None],
    measured: Callable[..., torch.Tensor],
    expected: Callable[..., torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    on_gpu: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """The largest error of the result and of the gradients; `on_gpu`: what a GPU computes in."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = on_gpu if device.type == "cuda" else torch.float32
    mine = [t.to(device, dtype).requires_grad_() for t in values]
    exact = [t.detach().double().cpu().requires_grad_() for t in mine]
    right = expected(*exact)
    upstream = torch.randn(right.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stage("compiling and running")
    start = time.perf_counter()
    found = measured(*mine)
    gradients = torch.autograd.grad(found, mine, upstream.to(device, found.dtype))
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    errors = [error(found, right), *map(error, gradients, torch.autograd.grad(right, exact, upstream))]
    # fp32 on a GPU may multiply in TF32 (Triton's dot), with 10 bits; bf16 has 7
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-3 if device.type == "cuda" else 1e-4
    return {"device": device.type, "error": max(errors), "bound": bound, "seconds": seconds}
