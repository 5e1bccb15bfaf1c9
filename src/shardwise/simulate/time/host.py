"""Seconds the host needs to issue a step: Python and torch's dispatcher before the GPU hears of a kernel.

A small model is bound by them: its step lasts as long as its process needs to ask for it. They depend on the
processor far less than on the number of calls, so no processor is told from another here (`[host]` of
`efficiency.toml`, where they were measured).
"""

from __future__ import annotations

from shardwise.simulate.step_trace import Op
from shardwise.simulate.time.roofline import table


class Host:
    """What each call costs."""

    def __init__(self) -> None:
        self._rules: dict[str, float] = table()["host"]

    def forward(self, op: Op) -> float:
        """Python calls it, through modules and the dispatcher, and autograd keeps a record."""
        return self._rules[_own(op) or "forward"]

    def backward(self, op: Op) -> float:
        """Autograd's own thread calls it; what is Python in the forward pass is Python there, too."""
        return self._rules[_own(op) or "backward"]

    def seconds(self, what: str) -> float:
        """A row of `[host]`."""
        return self._rules[what]


def _own(op: Op) -> str:
    """The row of `[host]` that an operator has for itself."""
    if op.name.startswith(_TRITON):
        return "triton"
    if op.name.startswith("dequantize_"):
        return op.name
    return "cudnn" if op.name.startswith("_scaled_dot_product_cudnn") else ""


_TRITON = ("liger_", "causal_conv", "selective_scan")
"""Names of operators that are Triton's kernels, Liger's or our own."""
