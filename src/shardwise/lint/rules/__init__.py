"""All rules, by subject. A rule is a function with the decorator `finding.rule`."""

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

SUBJECTS = {
    reader: "How the file is written, and who reads it",
    keys: "Names of keys, kinds of values",
    batch: "Batch sizes",
    zero: "ZeRO",
    offload: "Offloading",
    precision: "Number formats",
    optimizer: "Optimizer, clipping, schedule",
    parallel: "Tensor parallelism, groups, experts",
    sections: "Other sections",
    accelerate: "Accelerate's file",
    fsdp: "FSDP in Accelerate's file",
    training: "Scripts, arguments, launch commands",
}
"""The modules of rules, in the order of the page of all rules."""

RULES = tuple(one for module in SUBJECTS for one in vars(module).values() if isinstance(one, Rule))
