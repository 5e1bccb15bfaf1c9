"""What DeepSpeed cannot combine, read in DeepSpeed 0.19.8."""

import tomllib
from collections.abc import Callable
from importlib import resources
from math import gcd
from typing import Any

from shardwise.engines.facts import PLAN_STYLES, Architecture, Facts, Rule

DEEPSPEED = "deepspeed>=0.19,<0.20"
_TABLE = resources.files("shardwise.engines.deepspeed").joinpath("rules.toml")


def _cut(facts: Facts) -> Architecture | None:
    """The model, where tensor parallelism would cut it and its architecture is known."""
    return facts.architecture if facts.strategy.tensor_parallel > 1 else None


def _lacks_a_plan(facts: Facts) -> bool:
    shape = _cut(facts)
    return bool(shape and shape.attends and (not shape.plan_styles or shape.plan_styles - PLAN_STYLES))


def _plan_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    unknown = sorted(facts.architecture.plan_styles - PLAN_STYLES)
    if not unknown:
        return "transformers has no plan of how to cut this architecture's layers"
    ways = ", ".join(unknown)
    return f"transformers' plan for this architecture cuts layers in ways AutoTP does not know: {ways}"


def _keeps_fp32(facts: Facts) -> bool:
    return facts.architecture is not None and facts.architecture.fp32_parameters


def _splits_a_head(facts: Facts) -> bool:
    shape = _cut(facts)
    return bool(shape and shape.attends and shape.key_value_heads % facts.strategy.tensor_parallel)


def _quantizes(facts: Facts) -> bool:
    return facts.strategy.quantized_weights or facts.strategy.quantized_gradients


def _heads_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    heads, degree = facts.architecture.key_value_heads, facts.strategy.tensor_parallel
    return f"{degree} GPUs cannot share {heads} key-value heads equally: AutoTP would cut through heads"


def _heads_fix(facts: Facts) -> str:
    assert facts.architecture is not None
    both = gcd(facts.architecture.key_value_heads, facts.world_size)
    degree = max(n for n in range(1, facts.strategy.tensor_parallel + 1) if both % n == 0)
    return f"tensor_parallel: {degree}"


_BROKEN: dict[str, Callable[[Facts], bool]] = {
    "parameter-offload-needs-stage-3": lambda f: (
        f.strategy.offload_parameters != "none" and f.strategy.stage < 3
    ),
    "optimizer-offload-needs-zero": lambda f: (
        f.strategy.offload_optimizer != "none" and f.strategy.stage == 0
    ),
    "nvme-needs-stage-3": lambda f: f.uses_nvme and f.strategy.stage < 3,
    "tensor-parallel-and-lora": lambda f: f.strategy.tensor_parallel > 1 and f.lora,
    "tensor-parallel-divides-key-value-heads": _splits_a_head,
    "tensor-parallel-needs-heads": lambda f: f.strategy.tensor_parallel > 1 and not f.attends,
    "tensor-parallel-needs-a-plan": _lacks_a_plan,
    "tensor-parallel-and-unplanned-weights": lambda f: bool((shape := _cut(f)) and shape.unplanned_weights),
    "tensor-parallel-is-for-zero-1-and-2": lambda f: (
        f.strategy.tensor_parallel > 1 and f.strategy.stage not in (1, 2)
    ),
    "hpz-needs-reshard": lambda f: f.strategy.shard_group > 0 and not f.strategy.reshard,
    "quantized-collectives-need-a-gpu": lambda f: _quantizes(f) and f.devices == "cpu",
    "quantized-gradients-are-fp16": lambda f: (
        f.strategy.quantized_gradients and f.strategy.reduced_in(f.strategy.precision) != "fp16"
    ),
    "quantized-collectives-keep-parameters-on-the-gpu": lambda f: (
        _quantizes(f) and f.strategy.offload_parameters != "none"
    ),
    "reduce-dtype-needs-zero": lambda f: f.strategy.reduce_dtype != "auto" and f.strategy.stage == 0,
    "fp16-needs-a-gpu": lambda f: f.strategy.precision == "fp16" and f.devices == "cpu",
    "fp16-needs-zero": lambda f: f.strategy.precision == "fp16" and f.strategy.stage == 0,
    "fp16-and-parameters-in-fp32": lambda f: f.strategy.precision == "fp16" and _keeps_fp32(f),
}
_WORDS: dict[str, dict[str, Any]] = {
    "tensor-parallel-divides-key-value-heads": {"reason": _heads_reason, "fix": _heads_fix},
    "tensor-parallel-needs-a-plan": {"reason": _plan_reason},
}
"""What depends on the facts; rules.toml has all other words, and the sources."""

RULES = tuple(
    Rule(name=name, broken=_BROKEN[name], **row, **_WORDS.get(name, {}))
    for name, row in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()
)
