"""Seconds in which the host issues a step: Python and torch's dispatcher, before a kernel reaches the GPU.

They bind a small model: its step lasts as long as its process needs to issue it. They depend on the processor
far less than on the number of calls, so all processors are alike here (`[host]` of `efficiency.toml`, which
says where they were measured).
"""

from __future__ import annotations

from shardwise.simulate.step_trace import Op
from shardwise.simulate.time.roofline import table


class Host:
    """Seconds of each call."""

    def __init__(self) -> None:
        self._rules: dict[str, float] = table()["host"]

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
