"""What one operator costs: seconds and joules of the GPU, and seconds in which the host issues it.

The roofline model (Williams, Waterman, Patterson 2009) takes the computation or the bytes, whichever is
longer, at the shares of the GPU's peaks that kernels really reach (`efficiency.toml`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from shardwise.folders import packaged
from shardwise.hardware.catalog import Gpu
from shardwise.simulate.step_trace import Op

ALIGNED_BYTES = 16
"""A row's bytes must be a multiple of this for the tensor memory accelerator."""

MULTIPROCESSORS = 132
"""The H200's, on which kernels were measured, and assumed for every GPU: the catalog has no such number."""

COMPUTING = frozenset({"matmul", "attention", "scan"})
"""Operators whose arithmetic may take longer than reading their operands."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts of its inner dimension that a product with few tiles may be cut into."""


table = partial(packaged, "simulate/time/efficiency.toml")


class Roofline:
    """Times operators of one precision on one GPU, at the clock it runs at when power does not limit it."""

    def __init__(self, gpu: Gpu, precision: str, *, rows: int = 0, sizes: Iterable[int] = ()) -> None:
        """For one trace.

        `precision`: of the weights, `bf16`, `fp16` or `fp32`. `rows`: of the hidden state, tokens. `sizes`:
        dimensions of the weights; along one that is odd, rows begin at unaligned addresses.
        """
        self._rows = rows
        self._sizes = frozenset(sizes)
        half = gpu.flops.get(precision if precision != "fp32" else "bf16") or gpu.flops.get("fp16")
        self.fp32_flops: float = gpu.flops["fp32"]
        self.half_flops: float = half or self.fp32_flops
        self.bytes_per_second = gpu.memory_bytes_per_second
        self._flash = "ampere" if (8, 0) <= gpu.capability < (9, 0) else "flash"
        self._kernel_seconds: float = table()["kernel"]["seconds"]
        self._shares: dict[str, float] = table()["bandwidth"]
        self._byte_flops: dict[str, float] = table()["byte_flops"]

    def seconds(self, op: Op) -> float:
        """Seconds that the GPU is busy with `op`, with the pause before the next kernel."""
        if op.kind in COMPUTING:
            pause, computing = self._computing(op)
            return pause + max(computing, self._operands(op))
        by_row: float = table()["row_seconds"].get(op.name, 0.0) * self._rows
        return by_row + self.moving(op.read_bytes + op.written_bytes, bandwidth_key(op))

    def moving(self, num_bytes: float, key: str = "elementwise") -> float:
        """Seconds of one kernel that reads and writes `num_bytes`, at the share `key` of the bandwidth."""
        moving = num_bytes / (self.bytes_per_second * self._shares[key])
        return self._kernel_seconds + moving + num_bytes * self._byte_flops.get(key, 0.0) / self.fp32_flops

    def clocked(self, op: Op) -> float:
        """The seconds of `op` that grow when the clock falls: those of a product, an attention or a scan.

        Nothing of what waits for memory, whose clock stays.
        """
        if op.kind not in COMPUTING:
            return 0.0
        pause, computing = self._computing(op)
        return pause + computing if computing >= self._operands(op) else 0.0

    def _computing(self, op: Op) -> tuple[float, float]:
        """Seconds before the next kernel, and seconds of arithmetic."""
        return {"matmul": self._matmul, "attention": self._attention, "scan": self._scan}[op.kind](op)

    def _matmul(self, op: Op) -> tuple[float, float]:
        rules = table()["matmul"]
        if op.item_bytes == 4:
            computing: float = op.flops / (self.fp32_flops * rules["fp32_share"])
        elif op.name == "_grouped_mm":
            share = rules["grouped_share"] / (1 + rules["grouped_rows"] / op.shape[1])
            computing = op.flops / (self.half_flops * share)
        else:
            computing = self._tiled(op.shape, rules)
            if any(size * op.item_bytes % ALIGNED_BYTES for size in self._sizes.intersection(op.shape[1:])):
                computing = max(computing, op.flops / (self.half_flops * rules["unaligned_share"]))
        return self._kernel_seconds + float(rules["seconds"]), computing

    def _tiled(self, shape: tuple[int, ...], rules: Mapping[str, Any]) -> float:
        """Seconds with the fastest of the library's tile shapes, which it chooses, too."""
        batch, m, n, k = shape
        units = MULTIPROCESSORS
        best = math.inf
        for tile in rules["tiles"]:
            rows, columns = tile["rows"], tile["columns"]
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            one = 2.0 * rows * columns * k * units / (self.half_flops * tile["share"])
            best = min(best, math.ceil(tiles / units) * one)
            if tiles < units:
                best = min(best, self._split(tiles, one, units, 4.0 * batch * m * n))
        return best

    def _split(self, tiles: int, one: float, units: int, fp32_bytes: float) -> float:
        """Seconds with the inner dimension in parts; a second kernel adds up their fp32 results."""
        return min(
            math.ceil(tiles * parts / units) * one / parts
            + (0.0 if parts == 1 else self.moving(2 * parts * fp32_bytes))
            for parts in SPLITS
        )

    def _attention(self, op: Op) -> tuple[float, float]:
        rules = table()["attention"]
        kernel = rules[attention_kernel(op, self._flash)]
        shares = {int(size): share for size, share in kernel[direction(op)].items()}
        keys, head = op.shape[4:6]
        share = shares[min((size for size in shares if size >= head), default=max(shares))]
        share *= keys / (keys + kernel.get("half_keys", rules["half_keys"]))
        peak = self.half_flops if op.item_bytes == 2 else self.fp32_flops
        computing: float = op.flops * filled(head, kernel["heads"]) / (peak * share)
        return self._kernel_seconds, computing

    def _scan(self, op: Op) -> tuple[float, float]:
        """Instructions of the kernels' loops; the fp32 peak counts two a lane and clock."""
        rules = table()["scan"]
        computing: float = instructions(op) / (rules["issued"] * self.fp32_flops / 2)
        launching: float = rules["kernels"] * self._kernel_seconds
        return launching, computing

    def _operands(self, op: Op) -> float:
        """Seconds to read and write all of a product's or an attention's matrices once."""
        return (op.read_bytes + op.written_bytes) / (self.bytes_per_second * self._shares["elementwise"])


def held(link: str) -> float:
    """Share of the multiprocessors that a collective over the links of this name holds."""
    kind = "fabric" if link.startswith(("nvlink", "infinity-fabric")) else "other"
    return float(table()["communication"][kind])


def attention_kernel(op: Op, flash: str = "flash") -> str:
    """The rows of `[attention]` for this operator; `flash`: those for torch's flash attention."""
    return next((kernel for kernel in ("cudnn", "flash4") if kernel in op.name), flash)


def instructions(op: Op) -> float:
    """Of all threads, in a scan."""
    per_element: float = table()["scan"]["instructions"][op.name]
    return math.prod(op.shape) * per_element


def direction(op: Op) -> str:
    """`forward` or `backward`: the pass of an attention operator."""
    return "backward" if "backward" in op.name else "forward"


def filled(head: int, sizes: Sequence[int]) -> float:
    """By how much a head is enlarged: kernels exist for some sizes only."""
    return min((size for size in sizes if size >= head), default=head) / head


def bandwidth_key(op: Op) -> str:
    """The row of `[bandwidth]` that an operator's kernel belongs to."""
    if op.name in table()["bandwidth"]:
        return op.name
    if op.kind == "copy" and op.item_bytes == 4 and op.written_bytes >= 2 * op.read_bytes > 0:
        return "mixed"
    if op.kind == "elementwise" and op.read_bytes > op.written_bytes and op.read_bytes % op.written_bytes:
        if op.item_bytes == 2 and op.name in ("add", "mul"):
            return "broadcast_half"
        return "mask" if op.name == "add" and op.item_bytes == 4 else "broadcast"
    return op.kind if op.kind in table()["bandwidth"] else "elementwise"


class Host:
    """Seconds in which the host issues a call (`[host]` of `efficiency.toml`): Python and torch's dispatcher.

    They bind a small model. `pace`: how long a call takes on this host, as a multiple of those of the table.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._rules: dict[str, float] = {name: seconds * pace for name, seconds in table()["host"].items()}

    def forward(self, op: Op) -> float:
        """An operator called from Python, through modules and the dispatcher, recorded by autograd."""
        return self._rules[_own(op) or "forward"]

    def backward(self, op: Op) -> float:
        """An operator called by autograd's thread; what is Python in the forward pass is Python here, too."""
        return self._rules[_own(op) or "backward"]

    def seconds(self, what: str) -> float:
        """A row of `[host]`."""
        return self._rules[what]


def _own(op: Op) -> str:
    """The row of `[host]` for this operator alone, if any."""
    if op.name.startswith(_TRITON):
        return "triton"
    if op.name.startswith("dequantize_"):
        return op.name
    return "cudnn" if op.name.startswith("_scaled_dot_product_cudnn") else ""


_TRITON = ("liger_", "causal_conv", "selective_scan")
"""Prefixes of operators that are Triton kernels, Liger's or our own."""
