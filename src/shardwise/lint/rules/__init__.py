"""All rules, by subject."""

from __future__ import annotations

from shardwise.lint.finding import Rule
from shardwise.lint.rules import (
    accelerate,
    batch,
    fsdp,
    keys,
    offload,
    optimizer,
    parallel,
    precision,
    reader,
    sections,
    training,
    zero,
)

RULES: tuple[Rule, ...] = (
    *reader.RULES,
    *keys.RULES,
    *batch.RULES,
    *zero.RULES,
    *offload.RULES,
    *precision.RULES,
    *optimizer.RULES,
    *parallel.RULES,
    *sections.RULES,
    *accelerate.RULES,
    *fsdp.RULES,
    *training.RULES,
)
