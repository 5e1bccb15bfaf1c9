"""What torch was built for, which GPUs it sees, and which number formats it multiplies and quantises in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

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
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator).to(device) for _ in range(2))
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
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    stage("quantising")
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    return {"version": bitsandbytes.__version__, "device": device, "error": error(back, values)}


def error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected, in float64 on the CPU."""
    measured, expected = (t.detach().double().cpu() for t in (measured, expected))
    return float((measured - expected).norm() / expected.norm())
