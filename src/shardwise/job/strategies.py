"""The words for strategies in a job: engines, the strategies with a name, and what their parts are.

This table is all that a job knows of an engine. What an engine does is in its descriptor (`engines/`).
"""

import re
from typing import Any, NamedTuple

Parts = dict[str, Any]
"""Engine, stage, places, reshard and parallel degrees: fields of `Strategy`."""


def ranks_a_row(parts: Parts) -> int:
    """Ranks that work on the same rows: those of all stages and of a tensor-parallel group."""
    return int(parts.get("pipeline", 1)) * int(parts.get("tensor_parallel", 1))


class EngineWords(NamedTuple):
    """How the strategies of an engine are named."""

    base: str
    """`{stage}` stands for the ZeRO stage."""
    optimizer_only_below: int = 0
    """Below this stage only the optimizer can be offloaded, so `-offload` says all."""
    group: str = "group"
    """What the engine's users call its way to share weights in groups (`Strategy.shard_group`)."""
    split: str = "autotp"
    """What tensor parallelism is called."""


ENGINES: dict[str, EngineWords] = {
    "single": EngineWords("single"),
    "deepspeed": EngineWords("zero{stage}", optimizer_only_below=3, group="hpz"),
    "fsdp2": EngineWords("fsdp2", group="hsdp"),
    "ddp": EngineWords("ddp"),
    "ddp-zero1": EngineWords("ddp-zero1"),
    "pipeline": EngineWords("zero1", split="tp"),
}

_HOST = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}

NAMED: dict[str, Parts] = {
    "single": {"engine": "single"},
    "zero0": {"engine": "deepspeed", "stage": 0},
    "zero1": {"engine": "deepspeed", "stage": 1},
    "zero2": {"engine": "deepspeed", "stage": 2},
    "zero3": {"engine": "deepspeed", "stage": 3},
    "zero3-noreshard": {"engine": "deepspeed", "stage": 3, "reshard": False},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-noreshard": {"engine": "fsdp2", "reshard": False},
    "zero1-offload": {"engine": "deepspeed", "stage": 1, "offload_optimizer": "cpu"},
    "zero2-offload": {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    "zero3-offload-optimizer": {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu"},
    "zero3-offload": {"engine": "deepspeed", "stage": 3, **_HOST},
    "fsdp2-offload": {"engine": "fsdp2", **_HOST},
    "ddp": {"engine": "ddp"},
    "ddp-zero1": {"engine": "ddp-zero1"},
}
"""From the fastest to the leanest, replicas last. A plan names others in the same way (`Strategy.name`)."""

_WITH_DEGREE: tuple[tuple[str, Parts, str], ...] = (
    ("autotp{}-zero1", {"engine": "deepspeed", "stage": 1}, "tensor_parallel"),
    ("autotp{}-zero2", {"engine": "deepspeed", "stage": 2}, "tensor_parallel"),
    ("zero3-hpz{}", {"engine": "deepspeed", "stage": 3}, "shard_group"),
    ("fsdp2-hsdp{}", {"engine": "fsdp2"}, "shard_group"),
    ("fsdp2-hsdp{}-noreshard", {"engine": "fsdp2", "reshard": False}, "shard_group"),
    ("pp{}-zero1", {"engine": "pipeline"}, "pipeline"),
)


def with_degree(name: str) -> Parts:
    """The parts of a strategy that a plan names with a number, as `autotp2-zero1`; empty for other names."""
    for pattern, parts, degree in _WITH_DEGREE:
        if found := re.fullmatch(pattern.format(r"([1-9]\d*)"), name):
            return {**parts, degree: int(found[1])}
    return {}
