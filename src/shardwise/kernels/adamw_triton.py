"""AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) of many tensors with few launches.

Each value is read and written once: gradients in the format they have, weights and moments in fp32, and the
weights also in the computation's format. torch's kernel wants fp32 gradients and writes fp32 weights alone
(decision 0111).
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

from math import inf, log

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

CHUNK, BLOCK, WARPS = 1 << 16, 2048, 8
"""Elements of an entry of the list that says which programs step which tensor, and of a program."""
COLUMNS = 6  # Of the table: addresses of a row's five tensors (`Tensors`), and the number of elements
FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}
VECTOR = 16  # Bytes that a thread can read at once, where an address is a multiple of them


@triton.jit
def _at(address, kind: tl.constexpr, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(kind))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _adamw(
    table, gradients, chunks, divisor, skipped, rate, decay, fresh1, fresh2, epsilon, log1, log2,
    gradient: tl.constexpr, rounded: tl.constexpr, aligned: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`decay` and `rate`: what is taken of a weight, and of its normalized moment. `fresh1`: 1 - beta1."""
    if tl.load(skipped) != 0.0:
        return
    entry = chunks + 2 * (tl.program_id(0) // (chunk // block))
    row = table + columns * tl.load(entry)
    begin = tl.load(entry + 1).to(tl.int64) * chunk + tl.program_id(0) % (chunk // block) * block
    at = begin + tl.arange(0, block)
    count = tl.load(row + 5)
    inside = at < (tl.multiple_of(count, 16) if aligned else count)
    given = _at(tl.load(gradients + tl.load(entry)), gradient, aligned)
    weights = _at(tl.load(row), tl.float32, aligned)
    means = _at(tl.load(row + 1), tl.float32, aligned)
    squares = _at(tl.load(row + 2), tl.float32, aligned)
    g = tl.load(given + at, mask=inside).to(tl.float32) / tl.load(divisor)
    weight = tl.load(weights + at, mask=inside)
    mean = tl.load(means + at, mask=inside)
    square = tl.load(squares + at, mask=inside)
    steps = tl.load(_at(tl.load(row + 3), tl.float32, False))
    # 1 - beta ** steps, of which a difference in fp32 would leave few digits
    rate = rate / -libdevice.expm1(steps * log1)
    root = tl.sqrt(-libdevice.expm1(steps * log2))
    mean += fresh1 * (g - mean)
    square += fresh2 * (g * g - square)
    weight = weight - decay * weight - rate * mean / (tl.sqrt(square) / root + epsilon)
    tl.store(weights + at, weight, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
    if rounded is not None:
        tl.store(_at(tl.load(row + 4), rounded, aligned) + at, weight.to(rounded), mask=inside)


class Launch:
    """Those of some tensors whose gradients are of one kind: (format, rounded format, aligned)."""

    def __init__(self, rows, kind, members) -> None:
        self.members, self._kind = members, kind
        self._device, own = rows[0][0].device, [rows[index] for index in members]
        counts = [-(-row[0].numel() // CHUNK) for row in own]
        table = [
            [0 if tensor is None else tensor.data_ptr() for tensor in row] + [row[0].numel()] for row in own
        ]
        tensors = torch.arange(len(own), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        within = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
        self._grid = (len(within) * (CHUNK // BLOCK),)
        self._chunks = self._moved(torch.stack([tensors, within], dim=1))
        self._table = self._moved(torch.tensor(table))
        self._addresses: list[int] = []

    def _moved(self, tensor):
        return tensor.to(self._device, non_blocking=True)  # without a wait for the GPU

    def __call__(self, addresses, divisor, skipped, settings) -> None:
        if addresses != self._addresses:  # those of recorded passes stay
            self._addresses, self._gradients = addresses, self._moved(torch.tensor(addresses))
        form, rounded, aligned = self._kind
        _adamw[self._grid](
            self._table,
            self._gradients,
            self._chunks,
            divisor,
            skipped,
            *settings,
            FORMATS[form],
            FORMATS[rounded],
            aligned,
            COLUMNS,
            CHUNK,
            BLOCK,
            num_warps=WARPS,
        )


class Tensors:
    """fp32 weights on one GPU that are stepped alike."""

    def __init__(self, rows) -> None:
        """A row: weight, its two moments and step count, all fp32, and the same weight rounded, or None."""
        self._rows, self._kinds, self._launches = rows, (), []

    def step(self, divisor, skipped, *, rate, weight_decay, betas, epsilon) -> None:
        """Step those that have a gradient, divided by `divisor`, unless `skipped` is 1.0 (fp32 scalars)."""
        gradients = [row[0].grad for row in self._rows]
        kinds = tuple(self._kind(*pair) for pair in zip(self._rows, gradients, strict=True))
        if kinds != self._kinds:
            found = dict.fromkeys(kind for kind in kinds if kind is not None)
            members = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in found}
            self._kinds = kinds
            self._launches = [Launch(self._rows, kind, own) for kind, own in members.items()]
        logs = [log(beta) if beta else -inf for beta in betas]
        settings = (rate, rate * weight_decay, *(1.0 - beta for beta in betas), epsilon, *logs)
        for launch in self._launches:
            steps = [self._rows[index][3] for index in launch.members]
            torch._foreach_add_(steps, [1.0 - skipped] * len(steps))  # which reads no tensor on the host
            launch([gradients[index].data_ptr() for index in launch.members], divisor, skipped, settings)

    @staticmethod
    def _kind(row, gradient):
        if gradient is None:
            return None
        weight, mean, square, _, rounded = row
        all_of_them = (weight, mean, square, gradient, *([] if rounded is None else [rounded]))
        aligned = all(tensor.data_ptr() % VECTOR == 0 for tensor in all_of_them)
        aligned = aligned and weight.numel() % VECTOR == 0  # so that a mask is the same for all of a vector
        return gradient.dtype, None if rounded is None else rounded.dtype, aligned
