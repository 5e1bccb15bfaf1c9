"""Rows and sets of the ledger that are beyond their bound, and why."""

from __future__ import annotations

_RELEASE = (
    "measured with transformers 5.17, predicted with 5.23, whose rotary embedding uses no matrix product: "
    "0.0 % with 5.17"
)
_BUCKETS = (
    "before decision 0112 one to three buckets of 5e8 elements were on their way to the host: the four ranks "
    "reserve {} GiB for the same tensors"
)
_PACE = "the GPU waits for the host, which follows the measured call of torch only in part"
_TOO_SLOW = "the GPU waits for the host, which the pace makes too slow here; cause not established"
MISSED: dict[str, dict[str, str]] = {
    "reserved": {
        "gpt-neo-2.7b.4gpu.zero3-offload.full.s2048.b1x1.ck1": _BUCKETS.format("9.1 to 9.7"),
        "llama-2-7b.4gpu.autotp2-zero1.full.s4096.b2x1.ck1": _RELEASE,
        "llama-2-7b.4gpu.autotp4-zero1.full.s4096.b4x1.ck1": _RELEASE,
        "llama-3.2-3b.4gpu.zero3-offload-optimizer.full.s2048.b2x1.ck1": _BUCKETS.format("10.8 to 11.8"),
    },
    "step": {
        "llama-3.2-3b.4gpu.zero3-noreshard.full.s2048.b2x1.ck1": _TOO_SLOW,
        "gpt-neo-2.7b.4gpu.zero1.lora16.s2048.b4x1.ck1.cap16": _PACE,
        "gpt-neo-2.7b.4gpu.zero3-noreshard.lora16.s2048.b4x1.ck1.cap16": _TOO_SLOW,
        "llama-2-7b.4gpu.zero3.lora16.s2048.b2x1.ck1.nf4": _TOO_SLOW,
        "gpt-neo-2.7b.4gpu.zero2.lora16.s2048.b2x1.ck1.int8.cap16": _PACE,
        "llama-2-7b.4gpu.zero3-offload.lora16.s2048.b1x1.ck1.cap16": _TOO_SLOW,
        "llama-2-7b.4gpu.fsdp2.lora16.s2048.b2x2.ck2.cap16": _PACE,
    },
}
"""Rows beyond their bound, and why. They count in every number, the means included. A test fails if a row is
missing here, or if a named row is within its bound."""

MISSED_MEANS: dict[str, dict[str, str]] = {"reserved": {}, "step": {}}
"""Sets whose mean is beyond the bound, and why: expected failures of a test, which fails if one is met."""
