"""bitsandbytes: quantises to NF4 and back, on the GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.doctor.probes.torch_build import error


def quantize(stage: Callable[[str], None]) -> dict[str, Any]:
    """The error of 64 blocks of normal numbers: NF4 has 16 values, about 10 % off."""
    stage("importing bitsandbytes")
    import bitsandbytes
    from bitsandbytes import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    stage("quantising")
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    return {"version": bitsandbytes.__version__, "device": device, "error": error(back, values)}
