"""The three experiments: which settings and which programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from inputs import Setting
from programs import Program

Rows = Iterator[tuple[Setting, Program]]

ZERO2: dict[str, Any] = {"engine": "deepspeed", "stage": 2}
OFFLOAD: dict[str, Any] = {**ZERO2, "offload_optimizer": "cpu"}

ON_CPU = (
    Setting(
        name="small",
        shape="small",
        precision="fp32",
        sequence_length=128,
        micro_batch=2,
        accumulation=2,
        learning_rate=1e-3,
    ),
)
ON_GPU = (
    Setting(name="1.1B-full", shape="tinyllama-1.1b", micro_batch=2, accumulation=2),
    Setting(
        name="7B-lora16",
        shape="llama-2-7b",
        lora=16,
        micro_batch=2,
        accumulation=1,
        checkpointing="full",
    ),
)


def settings(gpu: bool) -> tuple[Setting, ...]:
    return ON_GPU if gpu else ON_CPU


def against_plain(gpu: bool) -> Rows:
    """1: the plain PyTorch loop, and what ZeRO-2 and offloading change. Loss and gradient norm must agree."""
    for setting in settings(gpu):
        yield setting, Program(name="plain loop")
        yield setting, Program(name="single", strategy={"engine": "single"})
        yield setting, Program(name="zero2", strategy=ZERO2)
        yield setting, Program(name="zero2-offload", strategy=OFFLOAD)


def sweep(gpu: bool, *, full: bool = False) -> Rows:
    """2: micro-batch, accumulation, offloading and overlap, one at a time from a base; `full`: all 36."""
    base = {"micro_batch": 2, "accumulation": 8, "offload": False, "overlap": True}
    changes: list[dict[str, Any]] = [
        {},
        {"micro_batch": 1},
        {"micro_batch": 4},
        {"accumulation": 16},
        {"accumulation": 32},
        {"overlap": False},
        {"offload": True},
        {"offload": True, "overlap": False},
    ]
    if full:
        values = ((1, 2, 4), (8, 16, 32), (False, True), (True, False))
        changes = [dict(zip(base, point, strict=True)) for point in product(*values)]
    length = 1024 if gpu else 64
    setting = replace(settings(gpu)[0], sequence_length=length)
    for change in changes:
        point = base | change
        parts = OFFLOAD if point["offload"] else ZERO2
        sizes = {key: point[key] for key in ("micro_batch", "accumulation")}
        name = " ".join(f"{key}={str(value).lower()}" for key, value in point.items())
        yield (
            replace(setting, **sizes),
            Program(
                name=name,
                strategy={**parts, "overlap_comm": point["overlap"]},
                steps=5,
                warmup=1,
                about={"point": point},
            ),
        )


def memory(gpu: bool) -> Rows:
    """3: memory after each of 30 steps, and within a step. What grows is a leak."""
    setting = settings(gpu)[0]
    for name, parts in (("plain loop", None), ("single", {"engine": "single"}), ("zero2-offload", OFFLOAD)):
        yield setting, Program(name=name, strategy=parts, steps=30, profile=parts is not None)


EXPERIMENTS = {"plain": against_plain, "sweep": sweep, "memory": memory}
