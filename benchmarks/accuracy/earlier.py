"""What was different when older rows were measured: kernels, DeepSpeed's timer, the text.

Such rows are predicted as they ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from assets import LONGEST, ROWS

from shardwise.kernels import fused, linear_cross_entropy
from shardwise.models import build
from shardwise.models.catalog import lookup
from shardwise.models.families import FAMILIES, Packing

TIMER_OFF = "2026-11-22T21:24"
"""Since then the engine turns off DeepSpeed's throughput timer, which made the process wait for the GPU."""

ROUTED = "2026-11-23T17:30"
"""Since then the models of EARLIER call the packed kernel; before, they computed all scores in fp32."""

EARLIER: dict[str, tuple[Packing, ...]] = {
    "gpt_neo": ("positions",),
    "gptj": ("positions",),
    "falcon": ("mask",),
}

MLP_FUSED = "2026-11-24T06:09:20"
"""Since then gated MLPs with LoRA are one node (`kernels/lora_mlp.py`); before, each layer was."""

FULL_ROWS = "2026-11-25T23:40"
"""Since then Qwen2.5's rows are one document each, too. Before, transformers took a class of its own for the
tokenizer, and a micro-batch had rows of one document and of several."""

GELU_FUSED = "2026-11-26"
"""Since then torch's kernel computes GELU's tanh approximation in models of these types, and the rows of
their logits are aligned."""

UNALIGNED = frozenset({"gpt2", "gpt_neo", "mamba"})
"""Types whose shapes have a vocabulary that is no multiple of 8."""

GELU = frozenset({"bloom", "codegen", "gpt2", "gpt_neo", "gptj", "phi"})


def with_timer(measured: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's throughput timer was on during the measurement."""
    return measured["strategy"]["engine"] == "deepspeed" and str(measured["date"]) < TIMER_OFF


def earlier_kernels(measured: Mapping[str, Any]) -> frozenset[str]:
    """Which kernels were others when the row was measured: of `attention`, `mlp`, `gelu`, `logits`."""
    row, date = measured.get("row", {}), str(measured.get("date"))
    model = lookup(row.get("model", ""))
    routed = model is not None and model.model_type in EARLIER and date < ROUTED
    layered = bool(row.get("lora")) and date < MLP_FUSED
    passes = model is not None and model.model_type in GELU and date < GELU_FUSED
    unaligned = model is not None and model.model_type in UNALIGNED and date < GELU_FUSED
    others = (("attention", routed), ("mlp", layered), ("gelu", passes), ("logits", unaligned))
    return frozenset(name for name, other in others if other)


def mixed(measured: Mapping[str, Any]) -> bool:
    """Whether the documents of a measurement were mixed: some rows had one, others several.

    A run that ended before all of the text was read did not come to such a row.
    """
    model = lookup(measured.get("row", {}).get("model", ""))
    if model is None or model.model_type != "qwen2" or str(measured.get("date")) >= FULL_ROWS:
        return False
    return sum(measured["tokens_all"]) >= ROWS * LONGEST


@contextmanager
def kernels_of(earlier: frozenset[str]) -> Iterator[None]:
    """Within, models are built and traced with the kernels that `earlier` names as they were."""
    attention = EARLIER.items() if "attention" in earlier else ()
    with ExitStack() as stack:
        ways = {name: replace(FAMILIES[name], packing=ways) for name, ways in attention}
        stack.enter_context(patch.dict(FAMILIES, ways))
        if "mlp" in earlier:
            stack.enter_context(patch.object(fused, "fuse_lora_mlps", lambda *_, **__: 0))
        if "gelu" in earlier:
            stack.enter_context(patch.object(build, "fuse_gelu", lambda _: None))
        if "logits" in earlier:
            width = patch.object(linear_cross_entropy, "aligned_width", lambda entries, _: entries)
            stack.enter_context(width)
        yield
