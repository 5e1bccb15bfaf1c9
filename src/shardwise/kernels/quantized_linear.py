"""Linear layers with a frozen weight in 8 or 4 bits, computed in the format of the job.

    y = x W^T + b,  W = codes * scale          int8: one fp32 scale for each row (LLM.int8's weights)
                    W = nf4[codes] * scale     nf4: one scale for 64 values, itself in 8 bits (QLoRA's)

bitsandbytes' kernels quantise and unpack, in layers of our own (decision 0021): its int8 layer saves its
input where activation checkpointing does not see it, and its weights are no plain parameters to an engine
that shards. Here autograd saves only the stored weight, and the full one exists while a product needs it.
Codes are stored as if they were numbers of the computation's format, which every engine shards.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.target import run_on_cuda

Unpack = Callable[..., Tensor]
"""Computes the weight [O, I] from what a layer stores."""

NF4_BLOCK = 64
"""Values of a weight that share a scale (QLoRA, Dettmers et al. 2023; bitsandbytes' default)."""
SCALE_BLOCK = 256
"""Scales that share a second scale: double quantisation."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a quantised weight; PEFT injects its adapters around it as an nn.Linear.

    `weight` is a plain parameter that is never stepped. The scales are buffers outside every checkpoint: they
    are computed again from the base model.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, *, dtype: torch.dtype,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        """On the meta device, with the replaced layer's `bias`, frozen too, computing in `dtype`.

        `transposed`: whether the replaced layer's weight is [I, O] (transformers' Conv1D).
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.dtype, self.transposed = dtype, transposed
        packed = self.packed_shape(in_features, out_features, dtype)
        assert packed is not None, "asked before"
        self.weight = nn.Parameter(torch.empty(packed, dtype=dtype, device="meta"), requires_grad=False)
        self.register_parameter("bias", bias)

    @staticmethod
    def packed_shape(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Shape of the stored weight in numbers of `dtype`; None where the codes do not fill them."""
        raise NotImplementedError

    def stored(self) -> tuple[Tensor, ...]:
        """The arguments of `unpack`: the stored weight, and the scales in the order of their buffers."""
        return self.weight, *self.buffers(recurse=False)

    @property
    def unpack(self) -> Unpack:
        raise NotImplementedError

    def quantize(self, weight: Tensor) -> None:
        """Store a weight, [O, I] (or [I, O] where transposed), on its device."""
        raise NotImplementedError

    def tolerance(self, weight: Tensor) -> Tensor:
        """Largest rounding error of each value of `weight`, [O, I]; fp32 [O, I]."""
        raise NotImplementedError

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """The weight used in the computation: [O, I] in `dtype`."""
        return self.unpack(*self.stored())

    dequantize = dequantized  # by this and `W_q` PEFT's DoRA knows a layer that unpacks its own weight
    W_q = property(lambda self: self.weight)

    @torch.no_grad()
    def holds(self, weight: Tensor, packed: Tensor) -> bool:
        """Whether `packed`, this layer's weight as an engine returns it, was quantised from `weight`."""
        expected = self._upright(weight)
        _, *scales = self.stored()
        found = self.unpack(packed, *(scale.to(packed.device) for scale in scales))
        return bool(((found.float() - expected.float()).abs() <= self.tolerance(expected)).all())

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenLinear.apply(x, self.bias, self.unpack, *self.stored())  # type: ignore[no-any-return]

    def _upright(self, weight: Tensor) -> Tensor:
        return (weight.t() if self.transposed else weight).to(self.dtype).contiguous()

    def _store(self, packed: Tensor) -> None:
        old = self.weight
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.__dict__.update(old.__dict__)


class Int8Linear(QuantizedLinear):
    """int8 [O, I] and fp32 [O]: the largest code of a row is 127."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.empty(self.out_features, device="meta"), persistent=False)
        self.scale: Tensor

    @staticmethod
    def packed_shape(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[int, int] | None:
        numbers, rest = divmod(in_features, dtype.itemsize)
        return None if rest else (out_features, numbers)

    @property
    def unpack(self) -> Unpack:
        return partial(dequantize_int8, dtype=self.dtype)

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        import bitsandbytes  # noqa: F401  (it registers its kernels)

        # its kernel takes fp16, which LLM.int8 quantises
        half = self._upright(weight).half()
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(half)
        self._store(codes.view(self.dtype))
        self.scale = largest * (1.0 / INT8_LARGEST)

    def tolerance(self, weight: Tensor) -> Tensor:
        """Half a step, and the roundings to fp16 and to the computation's format."""
        size = weight.float().abs()
        return size.amax(1, keepdim=True) * (0.5 / INT8_LARGEST) + size * 2**-7


class Nf4Linear(QuantizedLinear):
    """4 bits a value; uint8 scales, which have an fp32 scale for 256 of them and their mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        values = self.in_features * self.out_features
        blocks = -(-values // NF4_BLOCK)
        shapes = {"scales": (blocks,), "scale": (-(-blocks // SCALE_BLOCK),), "mean": ()}
        for name, shape in shapes.items():
            dtype = torch.uint8 if name == "scales" else torch.float32
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)
        self.scales: Tensor
        self.scale: Tensor
        self.mean: Tensor

    @staticmethod
    def packed_shape(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[int, int] | None:
        numbers, rest = divmod(in_features * out_features, 2 * dtype.itemsize)
        return None if rest else (numbers, 1)

    @property
    def unpack(self) -> Unpack:
        return partial(dequantize_nf4, shape=[self.out_features, self.in_features], dtype=self.dtype)

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        from bitsandbytes.functional import quantize_4bit

        how: dict[str, Any] = {"blocksize": NF4_BLOCK, "compress_statistics": True, "quant_type": "nf4"}
        packed, state = quantize_4bit(self._upright(weight), quant_storage=self.dtype, **how)
        self._store(packed)
        self.scales, self.scale, self.mean = state.absmax, state.state2.absmax, state.offset

    def tolerance(self, weight: Tensor) -> Tensor:
        """Half the widest gap between NF4's values, -1 and -0.696, and 5 % for the scale's 8 bits."""
        size = weight.float().abs().flatten()
        padded = nn.functional.pad(size, (0, -size.numel() % NF4_BLOCK))
        largest = padded.view(-1, NF4_BLOCK).amax(1)
        return (0.2 * largest).repeat_interleave(NF4_BLOCK)[: size.numel()].view(weight.shape)


LAYERS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}
"""By the job's `model.quantization`."""

INT8_LARGEST = 127.0


@torch.library.custom_op("shardwise::dequantize_int8", mutates_args=())
def dequantize_int8(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] in `dtype`: int8 codes, stored as any format, times fp32 [O]; rounded once."""
    codes = packed.view(torch.int8)
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    return torch.mul(codes, scale.unsqueeze(1), out=weight)


@torch.library.custom_op("shardwise::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    packed: Tensor, scales: Tensor, scale: Tensor, mean: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """The weight of `shape` [O, I] in `dtype` (bf16, fp16 or fp32).

    `packed` has two codes a byte, stored as any format; `scales`, uint8, are one for NF4_BLOCK values;
    `scale`, fp32, one for SCALE_BLOCK scales; `mean`, fp32, was subtracted from the scales.
    """
    import bitsandbytes  # noqa: F401

    kernels, codes = torch.ops.bitsandbytes, _scale_values(scales.device)
    full_scales = kernels.dequantize_blockwise(scales, scale, codes, SCALE_BLOCK, torch.float32)
    full_scales += mean
    # A block per row: where blocks span rows, bitsandbytes 0.50 computes wrong weights on AVX-512.
    values = math.prod(shape)
    rows = [values // NF4_BLOCK, NF4_BLOCK] if values % NF4_BLOCK == 0 else [1, values]
    return kernels.dequantize_4bit(packed, full_scales, NF4_BLOCK, "nf4", rows, dtype).view(shape)  # type: ignore[no-any-return]


@dequantize_int8.register_fake
def _int8_fake(packed: Tensor, _: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(packed.shape[0], packed.shape[1] * packed.element_size(), dtype=dtype)


run_on_cuda(dequantize_int8, "quantized_linear_triton", "launch")
dequantize_nf4.register_fake(lambda packed, *others: packed.new_empty(others[-2], dtype=others[-1]))


@cache
def _scale_values(device: torch.device) -> Tensor:
    """Values of the 256 codes of a scale (bitsandbytes.functional.quantize_blockwise), fp32."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


class _FrozenLinear(torch.autograd.Function):
    """(x [..., I], b [O] or None, stored W [O, I]) to y [..., O]; saves only the stored weight."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, bias: Tensor | None, unpack: Unpack, *stored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*stored)
        ctx.unpack = unpack
        return nn.functional.linear(x, unpack(*stored), bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        stored = ctx.saved_tensors
        dx = grad_y @ ctx.unpack(*stored) if ctx.needs_input_grad[0] else None
        return dx, None, None, *(None for _ in stored)
