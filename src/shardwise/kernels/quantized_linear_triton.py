"""The CUDA side of `dequantize_int8`. torch multiplies int8 by fp32 far below the memory's rate."""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

import torch
import triton
import triton.language as tl

BLOCK = 4096  # values of a row: 16 for each thread of 8 warps, which loads 16 bytes at once


@triton.jit
def _dequantize(codes, scale, weight, columns, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < columns
    code = tl.load(codes + row * columns + column, mask=here)
    value = code.to(tl.float32) * tl.load(scale + row)
    tl.store(weight + row * columns + column, value, mask=here)


def launch(packed, scale, dtype):
    """The weight [O, I] in `dtype`, one program for BLOCK values of a row."""
    codes = packed.view(torch.int8)
    rows, columns = codes.shape
    weight = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    _dequantize[rows, triton.cdiv(columns, BLOCK)](codes, scale, weight, columns, BLOCK, num_warps=8)
    return weight
