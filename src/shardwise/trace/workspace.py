"""Scratch memory that CUDA's kernels allocate from the caching allocator and free before they return.

From recorded allocations of torch 2.11 on an H200; where the size has a formula, its source is named.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.causal_conv import CONVOLVED
from shardwise.kernels.selective_scan import BLOCK, TILE, chunks_of, tiles_of
from shardwise.kernels.target import Target


def workspace(function: Any, args: Sequence[Any], outputs: Sequence[Tensor], target: Target) -> list[int]:
    """Return the bytes of each scratch buffer of one call; mostly none."""
    rule = _RULES.get(function._schema.name.partition("::")[2])
    return rule(args, outputs, target) if rule else []


def _cudnn_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """Dq in fp32, the row sums of dO * O, and, with fewer key than query heads, dk and dv of every head."""
    _, q, k = args[:3]
    batch, heads, length, size = q.shape
    scratch = 4 * q.numel() + 4 * batch * heads * length
    if k.shape[1] != heads:
        scratch += 2 * batch * heads * k.shape[2] * size * k.element_size()
    return [scratch]


def _flash_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """mha_varlen_bwd of flash attention 2: row sums and dq in fp32, padded; dk and dv of every head."""
    q, k = args[1], args[2]
    tokens, heads, size = q.shape
    sequences = next(a for a in args if isinstance(a, Tensor) and a.dtype == torch.int32).shape[0] - 1
    padded = tokens + 128 * sequences
    wide = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    scratch = [4 * heads * padded, 4 * heads * padded * wide]
    if k.shape[1] != heads:
        scratch += [k.shape[0] * heads * size * k.element_size()] * 2
    return scratch


def _flash4_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """_flash_attn_bwd of flash-attn-4 4.0.0b36 on Hopper: dq, row sums, and shared keys' gradients, in fp32.

    Each segment is padded to blocks of queries and of keys, whose sizes `_tile_size_bwd_sm90` chooses.
    """
    q, k, borders = args[1], args[2], args[6].shape[0]
    tokens, heads, size = q.shape
    block, keys, multiple = next(tile[1:] for tile in FLASH4_TILES if size <= tile[0])
    wide = -(-size // multiple) * multiple
    padded = (tokens + borders * block - 1) // block * block
    scratch = [4 * heads * padded * wide, 4 * heads * padded, 4 * heads * padded]
    if k.shape[1] != heads:
        padded = (tokens + borders * keys - 1) // keys * keys
        scratch += [4 * k.shape[1] * padded * wide] * 2
    return scratch


def _sum(args: Sequence[Any], outputs: Sequence[Tensor], target: Target) -> list[int]:
    """Sums over the rows of a matrix (the gradient of a bias): one partial sum for each thread block.

    setReduceConfig and global_memory_size in aten/src/ATen/native/cuda/Reduce.cuh, for a reduction along the
    slow dimension.
    """
    matrix, (total,) = args[0], outputs
    dims = args[1] if len(args) > 1 else None
    if matrix.dim() != 2 or list(dims or ()) != [0] or not matrix.is_contiguous():
        return []
    rows, columns = matrix.shape
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    threads = MAX_THREADS // vector
    width = min(WARP, _power_below(max(columns // vector, 1)), threads)
    height = min(_power_below(rows), threads // width)
    values = rows
    if values < height * 16 and values < MOST_VALUES:
        return []
    values = -(-values // height)
    grid = -(-(columns // vector) // width)
    wanted = target.multiprocessors * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if values < MOST_VALUES or grid > wanted:
        return []
    blocks = max(min(-(-wanted // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks <= 1:
        return []
    accumulator = max(4, total.element_size())
    return [accumulator * columns * blocks * width * vector, 4 * grid]


def _embedding_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """Tokens sorted by their id, and partial sums of parts of equal ids (EmbeddingBackwardKernel.cu).

    Up to 3072 tokens need none (Embedding.cu). The sort's five buffers come from recordings.
    """
    gradient, tokens, vocabulary = args[:3]
    count = tokens.numel()
    if count <= UNSORTED_TOKENS:
        return []
    parts = count // TOKENS_IN_A_PART + min(count, vocabulary)
    return [8 * count] * 5 + [8 * parts, 4 * parts * gradient.shape[-1]]


def _scan(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """`selective_scan_triton`: the decay of a state over each chunk, and A by states."""
    rows, length, width = args[0].shape
    return [4 * width * chunks_of(rows, length, width), 4 * args[2].numel()]


def _scan_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """`selective_scan_backward_triton`: da, dd and dbias by chunk, bc by tiles, dbc by block of channels."""
    x, a, bc = args[0], args[2], args[3]
    rows, length, width = x.shape
    by_chunk = 4 * chunks_of(rows, length, width) * width * (a.shape[1] + 2)
    in_tiles = tiles_of(rows, length, width) * TILE * bc.shape[-1]
    return [4 * a.numel() + by_chunk + (4 + x.element_size() * -(-width // BLOCK)) * in_tiles]


def _convolution_backward(args: Sequence[Any], _: Sequence[Tensor], __: Target) -> list[int]:
    """`causal_conv_triton`: sums of the weight's and the bias's gradient by block of tokens."""
    x, weight = args[:2]
    return [4 * -(-(x.shape[0] * x.shape[1]) // CONVOLVED) * (weight.numel() + weight.shape[0])]


FLASH4_TILES = ((64, 128, 128, 32), (128, 64, 128, 32), (192, 64, 96, 64), (256, 64, 48, 64))
"""Largest head size, tokens of a block of queries and of keys, and what head sizes are rounded up to."""

UNSORTED_TOKENS = 3072
TOKENS_IN_A_PART = 10

# Reduce.cuh
MAX_THREADS = 512
WARP = 32
LEAST_VALUES, MOST_VALUES = 16, 256
THREADS_PER_MULTIPROCESSOR = 2048


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


_RULES: dict[str, Callable[[Sequence[Any], Sequence[Tensor], Target], list[int]]] = {
    "_scaled_dot_product_cudnn_attention": lambda *_: [256],
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    # the product of gradient and output (softmax_backward_cuda_out in SoftMax.cu)
    "_softmax_backward_data": lambda args, *_: [args[0].numel() * args[0].element_size()],
    "_varlen_attn_backward": _flash_backward,
    "causal_conv_backward": _convolution_backward,
    "selective_scan": _scan,
    "selective_scan_replay": _scan,
    "selective_scan_backward": _scan_backward,
    "dequantize_nf4": lambda args, *_: [4 * args[1].numel()],  # the scales in fp32
    "embedding_dense_backward": _embedding_backward,
    "flash4_attention_backward": _flash4_backward,
    "sum": _sum,
}
