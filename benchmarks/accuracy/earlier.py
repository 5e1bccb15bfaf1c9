"""What was different when older rows were measured: kernels, DeepSpeed's timer, the text.

Such rows are predicted as they ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
from assets import LONGEST, ROWS
from earlier_zero import PATCHES
from torch import Tensor, nn

from shardwise.engines.deepspeed import policy
from shardwise.engines.fsdp2 import memory as fsdp2_memory
from shardwise.engines.fsdp2 import time as fsdp2_time
from shardwise.engines.single import memory as single_memory
from shardwise.engines.single import time as single_time
from shardwise.kernels import fused, linear_cross_entropy, lora_linear, lora_mlp
from shardwise.models import build, own_attention
from shardwise.models.catalog import lookup
from shardwise.models.families import FAMILIES, Packing
from shardwise.models.structure import find_blocks
from shardwise.objective import causal_lm
from shardwise.objective.causal_lm import CausalLM
from shardwise.simulate.memory import recorded
from shardwise.simulate.step_trace import FP32
from shardwise.simulate.time.roofline import table
from shardwise.simulate.time.schedule import NORM_BYTES, Schedule, converted
from shardwise.strategy import Strategy

TIMER_OFF = "2026-11-22T21:24"
"""Since then the engine turns off DeepSpeed's throughput timer, which made the process wait for the GPU."""

ROUTED = "2026-11-23T17:30"
"""Since then the models of EARLIER call the packed kernel; before, they computed all scores in fp32."""

EARLIER: dict[str, tuple[Packing, ...]] = dict.fromkeys(("gpt_neo", "gptj", "falcon"), ("mask",))

SINKS = "2026-11-29T10:15"
"""Since then gpt-oss calls the packed kernel, too, and looks the biases of its experts up in parallel."""

EXPERTS_MASKED = "5.17"
"""transformers that fills rows which no expert computes, though only expert parallelism has such rows."""

MIXTURES = frozenset({"deepseek_v2", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"})

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

RECORDED = "2026-11-26T18:05"
"""Since then the passes of adapters on one GPU are recorded as CUDA graphs, in a pool of their own."""

ALL_RECORDED = "2026-11-27T07:40"
"""Since then those of all weights are, too."""

ALSO_RECORDED = "2026-11-29T21:50"
"""Since then those of FSDP2, and of adapters under ZeRO-0, 1 and 2, are, too."""

UNPACKED = "2026-11-28"
"""Since then INT8 codes are multiplied by a kernel of ours; before, by torch, which took longer."""

GATHERED = "2026-11-29T16:42"
"""Since then ZeRO-3 gathers each parameter into memory of its own, and its layers cost the host less."""

DECIDED_ON_GPU = "2026-11-30T01:15"
"""Since then the host does not wait for the norm of ZeRO-1 and 2, and AdamW's kernel clips."""

HOOKED = "2026-11-30T03:50"
"""Since then passes are recorded with DeepSpeed's hooks, and tensor parallelism takes one norm, without a
wait for it."""

SUMMED = "2026-11-30T04:31"
"""Since then recorded ZeRO-1 and 2 have gradients in fp32, and ZeRO-3 steps fewer elements at once."""

ALL_HOOKED = "2026-11-30T07:15"
"""Since then ZeRO-0, ZeRO-1 with accumulation and adapters under ZeRO-1 and 2 are recorded as all others, and
ZeRO-0 steps in parts. FSDP2 that does not reshard is recorded on one GPU with accumulation, too."""

ZERO3_DECIDED = "2026-11-30T04:02"
"""Since then the host does not wait for ZeRO-3's norm either, where passes are recorded."""

OWN_ADAMW = "2026-11-30T21:40"
"""Since then AdamW is a kernel of ours, which also rounds weights, and gradients of one micro-batch stay as
they are. No row of `ddp-zero1` from before counts."""

ORDERED = "2026-12-01T00:50"
"""Since then, with an optimizer that is not on the GPU, gradients of ZeRO-3 wait there for their reduction,
those of one micro-batch go to the host once, and a bucket is smaller."""

TRUSTED = "2026-12-01T01:30"
"""Since then the host searches no gradients of an offloaded ZeRO-1 or 2 for values that are not finite."""

JOINED = "2026-12-01T04:36"
"""Since then LoRA layers with one input are one node, their products scale the reduced values, and `single`
adds gradients of adapters to nothing where a step has one micro-batch."""

MASKED = "2026-11-26T18:20"
"""Since then models of these types get our masks; before, transformers made them from the positions."""

MASKS = {name for name, family in FAMILIES.items() if family.packing == ("mask",)}
MASKS = MASKS - {"afmoe", "gpt_oss"} | {"gpt2"}  # GPT-2 because of its dropout

UNMASKED = "2026-11-27T05:45"
"""Since then rows of one document get no mask where no layer has a window."""

GELU = frozenset({"bloom", "codegen", "gpt2", "gpt_neo", "gptj", "phi"})


def with_timer(measured: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's throughput timer was on during the measurement."""
    return measured["strategy"]["engine"] == "deepspeed" and str(measured["date"]) < TIMER_OFF


def earlier_kernels(measured: Mapping[str, Any]) -> frozenset[str]:
    """What was different when the row was measured.

    Of `attention`, `sinks`, `experts`, `masks`, `unmasked`, `heads`, `mlp`, `gelu`, `logits`, `passes`,
    `gathers`, `waits`, `hooks`, `norms`, `sums`, `groups`, `parts`, `kept`, `adamw`, `marked`, `buckets`,
    `searched`, `joined`, `stayed`, and two that are predicted as of today: `codes`, and `handed`, gradients
    of adapters that DeepSpeed got after the passes.
    """
    row, date = measured.get("row", {}), str(measured.get("date"))
    model, lora = lookup(row.get("model", "")), bool(row.get("lora"))
    kind = "" if model is None else model.model_type
    release = measured.get("versions", {}).get("transformers", "")
    routed = kind in EARLIER and date < ROUTED
    strategy = measured.get("strategy", {})
    engine = strategy.get("engine")
    others = {
        "attention": routed,
        "sinks": kind == "gpt_oss" and date < SINKS,
        "experts": kind in MIXTURES and release.startswith(EXPERTS_MASKED),
        "masks": (kind in MASKS and date < MASKED) or (routed and kind != "falcon"),
        "unmasked": kind in MASKS and MASKED <= date < UNMASKED,
        "heads": kind == "falcon" and date < RECORDED,
        "mlp": lora and date < MLP_FUSED,
        "gelu": kind in GELU and date < GELU_FUSED,
        "logits": kind in UNALIGNED and date < GELU_FUSED,
        "codes": row.get("quantization") == "int8" and date < UNPACKED,
        "kept": engine == "fsdp2" and date < ALL_HOOKED and _keeps_gathered(_strategy(strategy)),
        "adamw": date < OWN_ADAMW,
        "joined": lora and date < JOINED,
        "stayed": lora and date < JOINED and engine == "single" and strategy["accumulation"] == 1,
        "passes": date < _recorded_since(_strategy(strategy), lora=lora) if strategy else False,
    }
    if engine == "deepspeed":
        others |= _of_deepspeed(_strategy(strategy), date, lora=lora)
    return frozenset(name for name, other in others.items() if other)


def _of_deepspeed(strategy: Strategy, date: str, *, lora: bool) -> dict[str, bool]:
    cut, first, third = strategy.tensor_parallel > 1, strategy.stage == 0, strategy.stage == 3
    decided = ALL_HOOKED if first else ZERO3_DECIDED if third else HOOKED if cut else DECIDED_ON_GPU
    alone = lora and not third and not cut  # Adapters, once recorded without hooks
    late = first or (strategy.stage == 1 and strategy.accumulation > 1)
    hooked = ALSO_RECORDED if alone else ALL_HOOKED if late else HOOKED
    return {
        "gathers": third and date < GATHERED,
        "waits": date < decided and policy.decides_on_gpu(strategy),
        "hooks": date < hooked and policy.records(strategy),
        "norms": date < HOOKED and cut,
        "sums": hooked <= date < (ALL_HOOKED if alone else SUMMED) and policy.records(strategy) and not third,
        "groups": third and date < SUMMED,
        "parts": first and date < ALL_HOOKED,
        "marked": third and not policy.steps_on_gpu(strategy) and date < ORDERED,
        "buckets": not policy.steps_on_gpu(strategy) and date < ORDERED,
        "searched": 0 < strategy.stage < 3 and not policy.steps_on_gpu(strategy) and date < TRUSTED,
        "handed": alone and ALSO_RECORDED <= date < ALL_HOOKED,
    }


def _strategy(values: Mapping[str, Any]) -> Strategy:
    """As a row has it; what it does not name has today's default."""
    names = {field.name for field in fields(Strategy)}
    return Strategy(**{name: value for name, value in values.items() if name in names})


def _keeps_gathered(strategy: Strategy) -> bool:
    """Whether weights once stayed gathered between micro-batches where they do not today."""
    return not strategy.reshard and strategy.accumulation > 1 and strategy.sharers == 1


def _recorded_since(strategy: Strategy, *, lora: bool) -> str:
    """When an engine began to record passes that it records today; "" where `hooks` says it."""
    if strategy.engine == "single":
        return RECORDED if lora else ALL_RECORDED
    if strategy.engine == "fsdp2":
        return ALL_HOOKED if _keeps_gathered(strategy) else ALSO_RECORDED
    return ALSO_RECORDED if strategy.engine == "deepspeed" and lora else ""


def mixed(measured: Mapping[str, Any]) -> bool:
    """Whether the documents of a measurement were mixed: some rows had one, others several.

    A run that ended before all of the text was read did not come to such a row.
    """
    model = lookup(measured.get("row", {}).get("model", ""))
    if model is None or model.model_type != "qwen2" or str(measured.get("date")) >= FULL_ROWS:
        return False
    return sum(measured["tokens_all"]) >= ROWS * LONGEST


def _with_masked_experts(model: nn.Module) -> list[nn.Module]:
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True
    return find_blocks(model)


_ADAMW = Schedule.adamw


def _torchs_adamw(schedule: Schedule, elements: float, tensors: int, *, rounded: int = 0, **_: int) -> None:
    """On fp32 gradients, then a copy of the weights."""
    _ADAMW(schedule, elements, tensors)
    if rounded:
        schedule.streams.move(converted(FP32, rounded) * elements, "foreach_copy")


def _as_torchs(of: str) -> Any:
    return patch.dict(table()[of], adamw=table()[of]["fused_adamw"])


def _scaled_apart(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    return torch.mm(left, right).mul_(scaling)


def _norm_in_fp32(schedule: Schedule, elements: float, *, gradient: int = FP32) -> None:
    if gradient < FP32:
        schedule.streams.move(converted(gradient, FP32) * elements, "foreach_copy")
    schedule.streams.move(NORM_BYTES * elements, "foreach_norm")


def _patches() -> dict[str, list[Any]]:
    """What `earlier_kernels` names, as it was."""
    return {
        "sinks": [patch.object(build, "sum_in_parallel", lambda _: None)],
        "experts": [patch.object(build, "find_blocks", _with_masked_experts)],
        "masks": [  # position ids that restart, and no mask, or transformers' masks
            patch.object(CausalLM, "_masks", lambda *_: None),
            patch.object(causal_lm, "CAUSAL", "sdpa"),
        ],
        "unmasked": [patch.object(CausalLM, "_needs_mask", lambda *_: True)],
        "heads": [  # cut with lists of indices
            patch.object(own_attention, "_falcon_heads", lambda m, x: m._split_heads(x))
        ],
        "mlp": [patch.object(fused, "fuse_lora_mlps", lambda *_, **__: 0)],
        "gelu": [patch.object(build, "fuse_gelu", lambda _: None)],
        "adamw": [
            patch.object(Schedule, "adamw", _torchs_adamw),
            patch.object(Schedule, "gradient_norm", _norm_in_fp32),
            *map(_as_torchs, ("bandwidth", "byte_flops")),
            *(patch.object(one, "keeps_format", lambda _: False) for one in (single_memory, single_time)),
        ],
        "kept": [
            patch.object(module, "released", lambda s, *, backward, last: s.reshard or (backward and last))
            for module in (fsdp2_memory, fsdp2_time)
        ],
        "joined": [
            patch.object(fused, "share_inputs", lambda _: None),
            *(patch.object(module, "scaled", _scaled_apart) for module in (lora_linear, lora_mlp)),
        ],
        "stayed": [patch.object(recorded, "gradients_stay", lambda *_, adapters: adapters)],
        **PATCHES,
        "logits": [patch.object(linear_cross_entropy, "aligned_width", lambda entries, _: entries)],
    }


@contextmanager
def kernels_of(earlier: frozenset[str]) -> Iterator[None]:
    """Within, models are built, traced and simulated with what `earlier` names as it was."""
    attention = dict(EARLIER) if "attention" in earlier else {}
    if "sinks" in earlier:
        attention["gpt_oss"] = ("mask",)
    ways = {name: replace(FAMILIES[name], packing=ways) for name, ways in attention.items()}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(FAMILIES, ways))
        for name, patches in _patches().items():
            for one in patches if name in earlier else ():
                stack.enter_context(one)
        yield
