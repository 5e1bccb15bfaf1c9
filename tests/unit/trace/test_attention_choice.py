"""Which kernel torch takes for SDPA, by GPU, heads, sizes, mask and dtype (sdp_utils.cpp)."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.target import HOPPER, Target, meta_stands_for
from shardwise.trace.functions import cuda_functions, sdpa_kernel_of

A100, RTX4090, V100, RTX5090 = (8, 0), (8, 9), (7, 0), (12, 0)
H200 = HOPPER.capability
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "heads", "gqa", "sizes", "mask", "dtype", "kernel"),
    [
        (H200, (8, 8), False, (64, 64), False, BF16, "cudnn"),
        (H200, (8, 2), True, (128, 128), True, BF16, "cudnn"),
        (H200, (8, 8), False, (192, 128), True, BF16, "cudnn"),
        (H200, (16, 16), False, (256, 256), True, BF16, "cudnn"),
        (H200, (16, 16), False, (264, 264), True, BF16, "efficient"),
        (H200, (71, 1), False, (64, 64), True, BF16, "math"),
        (H200, (8, 8), False, (64, 64), False, FP32, "efficient"),
        (H200, (8, 2), True, (64, 64), False, FP32, "math"),
        (H200, (8, 8), False, (100, 100), False, BF16, "flash"),
        (H200, (8, 8), False, (100, 100), True, BF16, "math"),
        (A100, (8, 8), False, (64, 64), False, BF16, "flash"),
        (A100, (8, 8), False, (64, 64), True, BF16, "efficient"),
        (A100, (8, 2), True, (64, 64), True, BF16, "math"),
        (A100, (8, 8), False, (256, 256), False, BF16, "flash"),
        (RTX4090, (8, 8), False, (256, 256), False, BF16, "flash"),
        (RTX4090, (8, 8), False, (208, 208), False, BF16, "efficient"),
        (RTX5090, (8, 8), False, (64, 64), False, BF16, "flash"),
        (V100, (8, 8), False, (64, 64), False, torch.float16, "efficient"),
        (V100, (8, 8), False, (64, 64), False, BF16, "math"),
    ],
)
def test_the_kernel(capability, heads, gqa, sizes, mask, dtype, kernel):
    q, k, v = (
        torch.empty(1, n, 16, size, dtype=dtype, device="meta")
        for n, size in ((heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]))
    )
    given = torch.empty(1, 1, 16, 16, dtype=dtype, device="meta") if mask else None
    with meta_stands_for(Target(capability=capability, multiprocessors=100)):
        assert sdpa_kernel_of(q, k, v, given, 0.0, gqa) == kernel
        with cuda_functions():
            sdpa = torch.nn.functional.scaled_dot_product_attention
            assert sdpa(q, k, v, given, enable_gqa=gqa).shape == (1, heads[0], 16, sizes[1])
