"""What stands in a bench's files: the keys that a report reads, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardwise.simulate.prediction import MemoryTerms

Kind = tuple[type, ...]
NUMBER: Kind = (int, float)
NONE = type(None)
MAYBE: Kind = (*NUMBER, NONE)
TEXT, LIST, OBJECT, WHOLE = (str,), (list,), (dict,), (int,)

HEAD: Mapping[str, Kind] = {
    "name": TEXT,
    "job": OBJECT,
    "job.model": OBJECT,
    "job.model.source": TEXT,
    "job.data": OBJECT,
    "job.data.sequence_length": WHOLE,
    "job.train": OBJECT,
    "job.train.global_batch": WHOLE,
    "job.train.precision": TEXT,
    "processes": WHOLE,
    "warmup_steps": WHOLE,
    "steps": WHOLE,
    "environment": OBJECT,
    "left_out": LIST,
    "order": LIST,
}
"""Of `bench.json`; a key within another is written with a dot."""

ROW: Mapping[str, Kind] = {
    "key": TEXT,
    "label": TEXT,
    "date": TEXT,
    "status": TEXT,
    "error": (str, NONE),
    "why": LIST,
    "strategy": OBJECT,
    "strategy.micro_batch": WHOLE,
    "strategy.accumulation": WHOLE,
    "strategy.checkpoint_every": WHOLE,
    "predicted_unavailable": (str, NONE),
    "predicted": (dict, NONE),
    "predicted.memory": OBJECT,
    "predicted.memory.peak_reserved_bytes": NUMBER,
    "predicted.memory.peak_allocated_bytes": NUMBER,
    "predicted.memory.outside_allocator_bytes": NUMBER,
    "predicted.memory.capacity_bytes": NUMBER,
    "predicted.memory.terms": OBJECT,
    **{f"predicted.memory.terms.{field.name}": NUMBER for field in fields(MemoryTerms)},
    "predicted.time": OBJECT,
    "predicted.time.tokens_per_second_per_gpu": NUMBER,
    "predicted.time.exposed_communication_fraction": NUMBER,
    "predicted.energy": OBJECT,
    "predicted.energy.joules_per_token": NUMBER,
    "measured": (dict, NONE),
    **{
        f"measured.{name}": MAYBE
        for name in (
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "outside_allocator_bytes",
            "tflops_per_gpu",
            "mfu",
            "joules_per_token",
            "exposed_communication_fraction",
        )
    },
    **{f"measured.{name}": NUMBER for name in ("step_seconds", "tokens_per_second_per_gpu")},
    **{f"measured.{name}": WHOLE for name in ("steps", "warmup_steps")},
    **{f"measured.{name}": TEXT for name in ("memory_of", "verdict")},
    **{
        f"measured.{name}": LIST
        for name in (
            "loss",
            "grad_norm",
            "verdict_why",
            "step_seconds_all",
            "reserved_by_step_bytes",
            "allocated_by_step_bytes",
        )
    },
    **{f"measured.{name}": (str, NONE) for name in ("mfu_unavailable", "joules_unavailable")},
    "measured.exposed_unavailable": (str, NONE),
}
"""Of a line of `rows.jsonl`; what lies within null is not looked for."""

_WORDS = {int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object", NONE: "null"}


def wrong(values: Mapping[str, Any], expected: Mapping[str, Kind]) -> Iterator[str]:
    """`measured.loss is missing`, `order is no list`; nothing within what is itself wrong."""
    passed_over: list[str] = []
    for path, kinds in expected.items():
        if any(path.startswith(f"{outer}.") for outer in passed_over):
            continue
        *outer, name = path.split(".")
        place: Any = values
        for key in outer:
            place = place[key]
        if name not in place:
            passed_over.append(path)
            yield f"{path} is missing"
        elif isinstance(place[name], bool) or not isinstance(place[name], kinds):
            passed_over.append(path)
            yield f"{path} is not {' or '.join(dict.fromkeys(_WORDS[kind] for kind in kinds))}"
        elif place[name] is None:
            passed_over.append(path)
