"""The kernel that the tracer believes SDPA takes is the one that torch picks on this GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend

from shardwise.kernels.target import HOPPER
from shardwise.trace.functions import sdpa_kernel_of

pytestmark = pytest.mark.gpu

NAMES = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}
HEADS = [(8, 8, False), (8, 2, True), (8, 1, True), (71, 1, False), (71, 1, True)]
SIZES = [(64, 64), (72, 72), (80, 80), (100, 100), (128, 128), (160, 160), (192, 128), (256, 256), (264, 264)]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER.capability,
    reason="needs a Hopper GPU, which the tracer takes by default",
)
def test_the_choice_is_torchs() -> None:
    wrong = []
    grid = itertools.product(HEADS, SIZES, (torch.bfloat16, torch.float16, torch.float32), (False, True))
    for (heads, key_heads, flag), (size, value_size), dtype, masked in grid:
        q, k, v = (
            torch.empty(2, n, 128, width, dtype=dtype, device="cuda", requires_grad=True)
            for n, width in ((heads, size), (key_heads, size), (key_heads, value_size))
        )
        mask = torch.zeros(2, 1, 128, 128, dtype=dtype, device="cuda") if masked else None
        picked = torch._fused_sdp_choice(q, k, v, mask, 0.0, not masked, scale=None, enable_gqa=flag)
        expected = NAMES[SDPBackend(picked)]
        found = sdpa_kernel_of(q, k, v, mask, 0.0, flag)
        if found != expected:
            case = f"{heads}/{key_heads} {flag} {size}/{value_size} {dtype} mask {masked}"
            wrong.append(f"{case}: {expected}, not {found}")
    assert not wrong, "\n".join(wrong)
