"""The CUDA side of `cross_entropy_`: one program per row, two passes over the vocabulary, in place."""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

import torch
import triton
import triton.language as tl

BLOCK = 8192  # Vocabulary entries held in registers at a time: 16 per thread of 16 warps


@triton.jit
def _transform(x, scale, softcap, has_cap: tl.constexpr):
    z = x.to(tl.float32) * scale
    if has_cap:
        # tanh(u) = 2 sigmoid(2u) - 1, which every Triton version has
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return z


@triton.jit
def _cross_entropy_row(
    logits, row_stride, labels, losses, vocabulary, scale, softcap, ignore_index, has_cap: tl.constexpr,
    with_gradient: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row * row_stride passes 2^31 for long chunks
    logits += row * row_stride
    label = tl.load(labels + row)
    columns = tl.arange(0, block)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if with_gradient:
            for start in range(0, vocabulary, block):
                tl.store(logits + start + columns, 0.0, mask=start + columns < vocabulary)
        return

    # read before the first reduction's barrier: afterwards another warp may have overwritten it
    target = _transform(tl.load(logits + label), scale, softcap, has_cap)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, block):
        x = tl.load(logits + start + columns, mask=start + columns < vocabulary, other=0.0)
        z = tl.where(start + columns < vocabulary, _transform(x, scale, softcap, has_cap), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(z))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest))
        largest = new_largest
    log_total = largest + tl.log(total)
    tl.store(losses + row, log_total - target)

    if with_gradient:
        for start in range(0, vocabulary, block):
            inside = start + columns < vocabulary
            x = tl.load(logits + start + columns, mask=inside, other=0.0)
            z = _transform(x, scale, softcap, has_cap)
            gradient = tl.exp(z - log_total) - tl.where(start + columns == label, 1.0, 0.0)
            if has_cap:
                gradient *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(logits + start + columns, (gradient * scale).to(logits.dtype.element_ty), mask=inside)


def launch(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, softcap: float | None, scale: float,
    ignore_index: int, with_gradient: bool,
) -> None:  # fmt: skip
    """Runs the kernel on the current stream; shapes as in `cross_entropy_`."""
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    tensors = (logits, logits.stride(0), labels, losses)
    numbers = (vocabulary, float(scale), float(softcap or 1.0), ignore_index)
    flags = {"has_cap": softcap is not None, "with_gradient": with_gradient}
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _cross_entropy_row[(rows,)](*tensors, *numbers, **flags, block=block, num_warps=16)
