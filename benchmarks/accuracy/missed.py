"""Rows and sets of the ledger that are beyond their bound, and why."""

from __future__ import annotations

_RELEASE = (
    "measured with transformers 5.17, predicted with 5.23, whose rotary embedding uses no matrix product: "
    "0.0 % with 5.17"
)
_BUCKETS = (
    "one to three buckets of 5e8 elements may be on their way to the host: the four ranks reserve {} GiB for "
    "the same tensors"
)
_UNKNOWN = "measured once; cause unknown"
_HOST = "the GPU waits for the host: the host's calls differ by half between measurements of one row"
_SLOW_HOST = (
    "likely the host: a call of torch took 6.3 us on it, and it is predicted to issue at least 63 % "
    "of the step"
)
_SLOW = "likely the host, see below"
_REFITTED = "within 15 % with the earlier constant of ZeRO-3, before it was fitted again; cause unknown"
_REFITTED_HOST = "12 % off with the earlier constant of ZeRO-3; measured five times, 0.57 to 0.89 s"
_WAITS = "on two GPUs, profiled, the GPU waits for the host, see below"
_BUSY = "cause unknown: on two GPUs, profiled, the GPU is busy, see below"
_FLUSHES = "in the replay the allocator returns its cache twice a step; the time of that is not predicted"
_ONCE = "measured once; cause not established: on one GPU the same layers are predicted within 11 %"
_UPDATE = (
    "the optimizer's step on the host alone is predicted to take longer than the entire step did; cause "
    "unknown: FSDP2's, on the same host, is predicted within 2 %"
)
MISSED: dict[str, dict[str, str]] = {
    "reserved": {
        "gpt-neo-2.7b.4gpu.zero3-offload.full.s2048.b1x1.ck1": _BUCKETS.format("9.1 to 9.7"),
        "llama-2-7b.4gpu.autotp2-zero1.full.s4096.b2x1.ck1": _RELEASE,
        "llama-2-7b.4gpu.autotp4-zero1.full.s4096.b4x1.ck1": _RELEASE,
        "llama-3.2-3b.4gpu.zero3-offload-optimizer.full.s2048.b2x1.ck1": _BUCKETS.format("10.8 to 11.8"),
        "gpt-neo-2.7b.4gpu.zero2.lora16.s2048.b2x1.ck1.int8.cap16": _UNKNOWN,
    },
    "step": {
        "llama-3.2-3b.4gpu.zero3-noreshard.full.s2048.b2x1.ck1": _HOST,
        "gpt2-xl.1gpu.single.full.s1024.b4x2.ck1": _HOST,
        "gemma-3-1b.1gpu.single.full.s512.b8x2.ck0": _HOST,
        "pythia-410m.2gpu.zero0.full.s2048.b4x1.ck0": _HOST,
        "gemma-3-1b.2gpu.zero2.full.s2048.b4x1.ck0": _HOST,
        "llama-3.2-3b.2gpu.zero3.full.s4096.b1x2.ck1": _REFITTED_HOST,
        "llama-2-7b.4gpu.zero3.lora16.s2048.b2x1.ck1.nf4": _REFITTED,
        "llama-2-7b.4gpu.zero3-offload.lora16.s2048.b1x1.ck1.cap16": _REFITTED,
        "llama-3.1-8b.2gpu.zero3.lora16.s4096.b1x1.ck1": _HOST,
        "llama-2-7b.4gpu.zero2.lora16.s2048.b2x1.ck1.int8": _ONCE,
        "gpt-neo-2.7b.4gpu.zero3-noreshard.lora16.s2048.b4x1.ck1.cap16": _FLUSHES,
        "gemma-2-2b.4gpu.zero1.full.s2048.b1x1.ck1": _WAITS,
        "qwen3-8b.4gpu.fsdp2.full.s2048.b1x2.ck1": _WAITS,
        "pythia-6.9b.4gpu.zero2.full.s2048.b1x1.ck1": _BUSY,
        "7b_mamba.2gpu.zero3-offload.full.s2048.b1x1.ck1.cap24": _UPDATE,
        **dict.fromkeys(
            (
                "phi-3-mini.4gpu.fsdp2-noreshard.full.s2048.b2x1.ck2",
                "1b_mamba.4gpu.zero3.full.s2048.b4x1.ck1",
                "1b_mamba.4gpu.fsdp2.full.s2048.b4x1.ck0",
                "llama-2-13b.4gpu.zero3.full.s2048.b1x1.ck1",
                "llama-2-7b.4gpu.fsdp2.lora16.s2048.b2x2.ck4.cap24",
                "3b_mamba.4gpu.fsdp2.full.s2048.b2x1.ck1",
                "llama-2-7b.4gpu.zero2.lora16.s2048.b2x1.ck1.nf4",
                "llama-2-7b.4gpu.fsdp2.lora16.s2048.b2x1.ck1.nf4",
                "qwen3-1.7b.4gpu.autotp2-zero2.full.s2048.b2x2.ck0",
            ),
            _SLOW,
        ),
        **dict.fromkeys(
            (
                "tinyllama-1.1b.2gpu.zero2.full.s2048.b4x1.ck0",
                "tinyllama-1.1b.2gpu.zero3.full.s2048.b4x1.ck0",
                "tinyllama-1.1b.2gpu.fsdp2.full.s2048.b4x1.ck0",
                "tinyllama-1.1b.2gpu.fsdp2.full.s2048.b4x4.ck0",
                "tinyllama-1.1b.2gpu.autotp2-zero1.full.s2048.b4x8.ck0",
            ),
            _SLOW_HOST,
        ),
    },
}
"""Rows beyond their bound, and why. They count in every number, the means included. A test fails if a row is
missing here, or if a named row is within its bound."""

MISSED_MEANS: dict[str, dict[str, str]] = {
    "reserved": {},
    "step": {"held-out": "its rows on four GPUs, above", "families": "its rows on four GPUs, above"},
}
"""Sets whose mean is beyond the bound, and why: expected failures of a test, which fails if one is met."""
