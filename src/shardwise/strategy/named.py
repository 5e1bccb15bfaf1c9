"""The strategies a job can call by name, and what a name or a job's own parts stand for."""

from __future__ import annotations

from typing import Any

from shardwise.errors import Problem
from shardwise.job import schema

DEFAULT_STAGE = 2

Parts = dict[str, Any]
"""Engine, stage, places, reshard and tensor-parallel size: fields of `Strategy`."""

NAMED: dict[str, Parts] = {
    "single": {"engine": "single"},
    "zero0": {"engine": "deepspeed", "stage": 0},
    "zero1": {"engine": "deepspeed", "stage": 1},
    "zero2": {"engine": "deepspeed", "stage": 2},
    "zero3": {"engine": "deepspeed", "stage": 3},
    "zero2-offload": {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    "zero3-offload": {
        "engine": "deepspeed",
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu",
    },
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-offload": {"engine": "fsdp2", "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}


def parts_of(spec: str | schema.StrategySpec) -> Parts:
    """What a name other than `auto`, or a job's own parts, stand for."""
    if isinstance(spec, str):
        return dict(NAMED[spec])
    parts = spec.model_dump()
    parts["stage"] = _stage(spec)
    if spec.engine == "fsdp2" and spec.offload_parameters == "cpu":
        parts["offload_optimizer"] = "cpu"  # FSDP2 steps the parameters where they are
    return parts


def spec_problems(spec: str | schema.StrategySpec) -> list[Problem]:
    """What is wrong with a job's own parts and would not show in the strategy."""
    if isinstance(spec, str) or spec.stage is None or spec.engine == "deepspeed":
        return []
    return [
        Problem(
            what=f"stage is DeepSpeed's ZeRO stage; {spec.engine} has none",
            where="strategy.stage",
            fix="strategy.engine: deepspeed, or leave stage out",
        )
    ]


def _stage(spec: schema.StrategySpec) -> int:
    if spec.engine != "deepspeed":
        return 0
    return DEFAULT_STAGE if spec.stage is None else spec.stage
