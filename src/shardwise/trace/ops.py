"""The cost of an operator: kind, FLOPs and bytes, from its name and the shapes of its tensors."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from shardwise.models.flops import SCAN_FLOPS, attended_pairs
from shardwise.simulate.step_trace import Op

Tensors = Sequence[Tensor]

_NO_KERNEL = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
    "lift_fresh", "_unsafe_view", "promote_types"
})  # fmt: skip
_MATMUL = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_"})
_ATTENTION = "attention", "_varlen_attn"
_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "argmax", "norm", "linalg_vector_norm", "logsumexp", "var_mean",
    "any", "all"
})  # fmt: skip
_COPIES = frozenset({
    "copy_", "clone", "_to_copy", "cat", "stack", "constant_pad_nd", "slice_backward", "fill_"
})  # fmt: skip


def describe(function: Any, args: Sequence[Any], inputs: Tensors, outputs: Tensors) -> Op | None:
    """Describe the kernel behind an operator; None for views and bare allocations."""
    name = function._schema.name.partition("::")[2]
    if name in _NO_KERNEL or is_view(function):
        return None
    if name in _MATMUL:
        return _matmul(name, inputs, outputs)
    if name == "_grouped_mm":
        return _grouped(inputs, outputs)
    if name in SCANS:
        return _scan(name, inputs, outputs)
    if any(part in name for part in _ATTENTION):
        return _attention(name, args, inputs, outputs)
    read, written = sum(map(_bytes, inputs)), sum(map(_bytes, outputs))
    if name == "causal_conv_backward":
        read, written = read - _bytes(inputs[-1]), written + _bytes(inputs[-1])  # dx
    if name == "cross_entropy_":
        written += _bytes(inputs[0])  # the gradient replaces the logits
    if name == "lora_gated_backward":
        written += sum(map(_bytes, inputs[:3]))
    kind = _kind(name)
    if name == "embedding":
        read = written
    flops = float(max((t.numel() for t in (*inputs, *outputs)), default=0))
    item = max((t.element_size() for t in (*inputs, *outputs)), default=2)
    if name == "cat" and not all(tensor.is_contiguous() for tensor in inputs):
        name = "cat_strided"  # another kernel (aten/src/ATen/native/cuda/Shape.cu)
    return Op(kind=kind, flops=flops, read_bytes=read, written_bytes=written, item_bytes=item, name=name)


def is_view(function: Any) -> bool:
    """Whether the operator returns a view of its input."""
    schema = function._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


SCANS = {
    "selective_scan": SCAN_FLOPS,
    "selective_scan_replay": SCAN_FLOPS,  # the forward pass again
    "selective_scan_backward": 2 * SCAN_FLOPS,
}
"""FLOPs per channel, state and token."""


def _scan(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Op:
    x, _, a = inputs[:3]
    width, states = a.shape
    tokens = x.numel() // width
    rewritten = {"selective_scan_replay": inputs[-2:], "selective_scan_backward": (inputs[1], inputs[-1])}
    outputs = (*outputs, *rewritten.get(name, ()))
    flops, shape = SCANS[name] * tokens * width * states, (tokens, width, states)
    return one_pass("scan", name, flops, inputs, outputs, shape=shape, item_bytes=x.element_size())


def _kind(name: str) -> str:
    if "embedding" in name:
        return "embedding"
    if "norm" in name and ("layer_norm" in name or "rms_norm" in name):
        return "normalization"
    if name == "cross_entropy_" or "softmax" in name or "nll_loss" in name:
        return "loss" if name == "cross_entropy_" or "nll" in name else "reduction"
    if name in _REDUCTIONS or name.startswith("_foreach_norm"):
        return "reduction"
    return "copy" if name in _COPIES else "elementwise"


def one_pass(kind: str, name: str, flops: float, read: Tensors, written: Tensors, **others: Any) -> Op:
    """A kernel that reads and writes these tensors once."""
    sizes: dict[str, Any] = {"read_bytes": sum(map(_bytes, read)), "written_bytes": sum(map(_bytes, written))}
    return Op(kind=kind, flops=flops, name=name, **sizes, **others)


def _matmul(name: str, inputs: Tensors, outputs: Tensors) -> Op:
    left, right = [t for t in inputs if t.dim() >= 2][:2] if name.startswith("mm") else _factors(inputs)
    batch = left.shape[0] if left.dim() == 3 else 1
    return _products(name, inputs, outputs, (batch, left.shape[-2], right.shape[-1], left.shape[-1]), left)


def _products(
    name: str, inputs: Tensors, outputs: Tensors, shape: tuple[int, int, int, int], factor: Tensor
) -> Op:
    """`shape`: (products, m, n, k) for products of [m, k] and [k, n]."""
    item, flops = factor.element_size(), 2.0 * math.prod(shape)
    return one_pass("matmul", name, flops, inputs, outputs, shape=shape, item_bytes=item)


def _grouped(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Op:
    """Products of the experts of a mixture, of shape (experts, tokens of one, n, k).

    How many tokens each expert gets is not known in advance: equal shares.
    """
    left, right = inputs[:2]
    batch = next(t.shape[0] for t in (left, right, outputs[0]) if t.dim() == 3)
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == right.dim() == 2:  # a weight's gradient sums over tokens
        m, k = k, m
    elif right.dim() == 2:
        m, n = n, m
    return _products("_grouped_mm", inputs, outputs, (batch, -(-m // batch), n, k), left)


def _factors(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The factors of a product: `addmm` has the summand before them, `out` arguments come after them."""
    for left, right in pairwise(inputs):
        if left.dim() == right.dim() >= 2 and left.shape[-1] == right.shape[-2]:
            found = left, right
            if inputs[0] is not left or len(inputs) == 2 or inputs[0].dim() != left.dim():
                return found
    return found


def _attention(name: str, args: Sequence[Any], inputs: Tensors, outputs: Tensors) -> Op:
    backward = "backward" in name
    q, k = (inputs[1], inputs[2]) if backward else (inputs[0], inputs[1])
    if q.dim() == 3:
        # packed, [tokens, heads, head size]; of the segments only the longest one's length is known
        batch, (length, heads, size), kv_heads = 1, q.shape, k.shape[1]
        keys = next(int(a) for a in args if isinstance(a, int) and not isinstance(a, bool))
    else:
        batch, heads, length, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
    # two products forward, five backward (Dao 2023, FlashAttention-2)
    window = next((int(a[0]) + 1 for a in args if isinstance(a, (list, tuple)) and len(a) == 2), 0)
    pairs = attended_pairs(length, keys, window)
    if 0 < window < keys:
        keys = window
    flops = (10.0 if backward else 4.0) * batch * heads * pairs * size
    shape = (batch, heads, kv_heads, length, keys, size)
    return one_pass("attention", name, flops, inputs, outputs, shape=shape, item_bytes=q.element_size())


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that a kernel accesses, with those between its elements; at most its storage."""
    item = tensor.element_size()
    apart = min((s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s), default=1)
    accessed = math.prod(tensor.shape) * item * min(apart, SECTOR // item)
    return min(accessed, tensor.untyped_storage().nbytes())


SECTOR = 32
"""Bytes that a GPU's memory reads at once."""
