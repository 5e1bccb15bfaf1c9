"""Names of keys and kinds of values, by DeepSpeed's own schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any

from shardwise.lint.document import AUTO, Document, Key
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, Rule, holds_for
from shardwise.lint.schema import KeyKind, Section, as_number, closest, deepspeed_schema
from shardwise.lint.setup import Setup

_ELSEWHERE: dict[Key, str] = {
    ("tensor_parallel", "tp_size"): "autotp_size",
    ("tensor_parallel", "tensor_parallel_size"): "autotp_size",
    ("tensor_parallel", "size"): "autotp_size",
    ("bf16", "enable"): "enabled",
    ("fp16", "enable"): "enabled",
    ("bf16", "check_overflow"): "check_grad_overflow",
}
"""What is meant by a name that is not near any known one."""

REMOVED_TOP = {
    "nebula": (">=0.19.7", "checkpoints go through torch.save"),
    "compression_training": (">=0.19.7", "DeepSpeed no longer compresses"),
    "quantize_training": (">=0.19.7", "DeepSpeed no longer quantises in training"),
    "sparse_attention": (">=0.19.7", "use the model's own attention"),
    "amp": (">=0.19.8", "use bf16, fp16 or torch_autocast"),
    "sparse_gradients": (">=0.19.8", "build the embedding with sparse=True"),
    "eigenvalue": (">=0.19.8", "it served the removed quantize_training"),
    "elasticity": (">=0.19.8", "give the batch sizes directly"),
    "graph_harvesting": (">=0.19.8", "there is no replacement"),
    "curriculum_learning": (">=0.19.8", "use data_efficiency.data_sampling.curriculum_learning"),
    "progressive_layer_drop": (">=0.19.8", "there is no replacement"),
}
REMOVED_ZERO = {
    "mics_shard_size": (">=0.19.7", "use zero_hpz_partition_size"),
    "mics_hierarchical_params_gather": (">=0.19.7", "use zero_hpz_partition_size"),
    "zeropp_loco_param": (">=0.19.8", "zero_quantized_gradients works without it"),
}
_DEPRECATED = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu", "pin_memory": True}),
    "cpu_offload_param": ("offload_param", {"device": "cpu", "pin_memory": True}),
}
_HOMES: tuple[Key, ...] = ((), ("zero_optimization",))
"""Sections that a key of theirs is put back into; names inside others, such as `verbose`, tell too little."""
_WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?", re.ASCII)
"""A text that pydantic takes for a whole number."""
_COMPARE = {">=": ge, "<=": le, ">": gt, "<": lt}


def _sections(document: Document) -> Iterator[tuple[Key, Section, Mapping[str, Any]]]:
    for key, section in deepspeed_schema().sections.items():
        if key == () or isinstance(document.get(*key), Mapping):
            yield key, section, document.section(*key) if key else document.values


def _removed(key: Key) -> tuple[str, str] | None:
    if len(key) == 1:
        return REMOVED_TOP.get(key[0])
    return REMOVED_ZERO.get(key[1]) if key[:-1] == ("zero_optimization",) else None


def _unknown(document: Document, *, refuses: bool) -> Iterator[tuple[Key, Section]]:
    for above, section, values in _sections(document):
        if section.refuses == refuses:
            for name in values:
                key = (*above, name)
                if name not in section.keys and _removed(key) is None:
                    yield key, section


def _meant(key: Key, section: Section, document: Document) -> tuple[str, tuple[Change, ...]]:
    """How to mend an unknown key, in words and as changes."""
    above, name = key[:-1], key[-1]
    near = _ELSEWHERE.get((*above, name)) or closest(name, list(section.keys))
    if near is not None and document.has(*above, near):
        return f"`{near}` is given too: keep one of the two", ()
    if near is not None:
        return f"did you mean `{near}`?", (Rename(key=key, name=near),)
    homes = [home for home in deepspeed_schema().homes(name) if home in _HOMES]
    if homes:
        home = (*homes[0], name)
        moved = (Drop(key=key), Put(key=home, value=document.get(*key)))
        place = f"`{'.'.join(homes[0])}`" if homes[0] else "the top level"
        return f"it belongs in {place}: {'.'.join(home)}", () if document.has(*home) else moved
    switched_off = document.get(*key) is False  # without it the section would be on
    return "take it out", () if switched_off else (Drop(key=key),)


def _ignored_key(document: Document, _: Setup) -> Iterator[Hit]:
    for key, section in _unknown(document, refuses=False):
        fix, changes = _meant(key, section, document)
        meant = not fix.startswith("take it out")
        effect = "it has no effect"
        if changes and isinstance(changes[0], Rename) and changes[0].name == "zero_optimization":
            effect = "training runs at stage 0, nothing is sharded"
        where = f" in `{'.'.join(key[:-1])}`" if len(key) > 1 else ""
        yield Hit(
            key=key,
            what=f"DeepSpeed knows no `{key[-1]}`{where} and passes over it silently: {effect}",
            fix=fix,
            changes=changes if meant else (),
            severity="error" if meant else "warning",
        )


def _refused_key(document: Document, _: Setup) -> Iterator[Hit]:
    for key, section in _unknown(document, refuses=True):
        fix, changes = _meant(key, section, document)
        yield Hit(
            key=key,
            what=f"`{'.'.join(key[:-1])}` knows no `{key[-1]}`: DeepSpeed stops with a validation error",
            fix=fix,
            changes=changes,
        )


def _removed_key(document: Document, setup: Setup) -> Iterator[Hit]:
    for removed, above in ((REMOVED_TOP, ()), (REMOVED_ZERO, ("zero_optimization",))):
        for name, (versions, instead) in removed.items():
            key = (*above, name)
            if document.has(*key) and holds_for(f"deepspeed{versions}", "deepspeed", setup.deepspeed):
                yield Hit(
                    key=key,
                    what=f"`{name}` was removed in DeepSpeed {versions.removeprefix('>=')}, which stops "
                    "even where it is switched off",
                    fix=f"take it out; {instead}",
                    changes=(Drop(key=key),),
                )


def _deprecated_key(document: Document, _: Setup) -> Iterator[Hit]:
    for old, (new, value) in _DEPRECATED.items():
        key, target = ("zero_optimization", old), ("zero_optimization", new)
        if not document.has(*key):
            continue
        both = document.has(*target)
        insert = (Put(key=target, value=value),) if document.get(*key) is True and not both else ()
        yield Hit(
            key=key,
            what=f"`{old}` is the old name of `{new}`"
            + (": given together, DeepSpeed stops with an AssertionError" if both else ""),
            fix=f'"{new}": {{"device": "cpu"}} alone' if document.on(*key) else "take it out",
            changes=(Drop(key=key), *insert),
            severity="error" if both else "warning",
        )
    pin = ("zero_optimization", "cpu_offload_use_pin_memory")
    if document.has(*pin):
        yield Hit(
            key=pin,
            what="`cpu_offload_use_pin_memory` is read by nothing any more",
            fix="pin_memory inside offload_optimizer and offload_param",
            changes=(Drop(key=pin),),
        )
    gather = ("zero_optimization", "stage3_gather_fp16_weights_on_model_save")
    if document.has(*gather):
        yield Hit(
            key=gather,
            what="the name ends in 16bit now",
            fix="stage3_gather_16bit_weights_on_model_save",
            changes=(Rename(key=gather, name="stage3_gather_16bit_weights_on_model_save"),),
        )
    if isinstance(document.get("zero_optimization"), bool):
        yield Hit(
            key=("zero_optimization",),
            what="true or false in the place of the section is the old way: true means stage 1",
            fix='{"stage": 1}, or the stage you want',
            changes=(
                Put(key=("zero_optimization",), value={"stage": int(document.get("zero_optimization"))}),
            ),
        )


def _bfloat16(document: Document, _: Setup) -> Iterator[Hit]:
    if document.has("bfloat16"):
        both = document.has("bf16")
        yield Hit(
            key=("bfloat16",),
            what="`bfloat16` is the old name of `bf16`" + (", and is ignored beside it" if both else ""),
            fix="take it out" if both else "rename it to bf16: the Trainer and Accelerate know only that",
            changes=(Drop(key=("bfloat16",)) if both else Rename(key=("bfloat16",), name="bf16"),),
            severity="error" if both else "warning",
        )


def _values(document: Document) -> Iterator[tuple[Key, Any, KeyKind, Section]]:
    for above, section, values in _sections(document):
        for name, value in values.items():
            kind = section.keys.get(name)
            if kind is not None and value != AUTO:
                yield (*above, name), value, kind, section


def _wrong_kind(document: Document, _: Setup) -> Iterator[Hit]:
    for key, value, kind, section in _values(document):
        if key == ("zero_optimization",) and isinstance(value, bool):
            continue
        problem = _kind_problem(value, kind, lenient=section.refuses)
        if problem is not None:
            wanted, better = problem
            if isinstance(value, float) and not section.refuses:
                better = None  # half a row: it is not rounding that was forgotten
            yield Hit(
                key=key,
                what=f"`{key[-1]}` is {_shown(value)}; DeepSpeed wants {wanted}",
                fix=f"write {_shown(better)}" if better is not None else f"write {wanted}",
                changes=() if better is None else (Put(key=key, value=better),),
            )


def _kind_problem(value: Any, kind: KeyKind, *, lenient: bool) -> tuple[str, Any] | None:
    """(what is wanted, the value that was meant); `lenient`: pydantic reads "3" as a number."""
    if kind.kind == "any" or kind.words or (value is None and kind.nullable):
        return None
    if kind.kind == "object":
        return None if isinstance(value, Mapping) else ("a section in braces", None)
    if kind.kind == "list":
        return None if isinstance(value, list | str) else ("a list", None)
    if kind.kind == "str":
        return None if isinstance(value, str) else ("a text", None)
    if kind.kind == "bool":
        return _bool_problem(value, lenient=lenient)
    if isinstance(value, bool) or not isinstance(value, int | float):
        number = as_number(value)
        taken = isinstance(value, str) and (kind.kind != "int" or _WHOLE.fullmatch(value.strip()))
        if lenient and number is not None and taken:
            return None
        return "a number without quotes" if isinstance(value, str) else "a number", number
    if not isfinite(value):
        return "a finite number", None
    if kind.kind == "int" and value != int(value):
        return "a whole number", int(value)
    return None


WORDS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n"), False),
}
"""Those that pydantic takes for booleans, in any case."""


def _bool_problem(value: Any, *, lenient: bool) -> tuple[str, Any] | None:
    if isinstance(value, bool) or (lenient and value in (0, 1)):
        return None
    if isinstance(value, str) and value.lower() in WORDS:
        return None if lenient else ("true or false without quotes", WORDS[value.lower()])
    return "true or false", bool(value) if value in (0, 1) else None


def _not_a_choice(document: Document, _: Setup) -> Iterator[Hit]:
    for key, value, kind, _section in _values(document):
        words = kind.words
        if not words or (value is None and kind.nullable) or value in words:
            continue
        lower = isinstance(value, str) and value.lower() in words
        insensitive = key[-1].endswith("communication_data_type") or key[-1] == "gradient_allreduce_op"
        if lower and insensitive:
            continue
        near = closest(str(value), list(words))
        yield Hit(
            key=key,
            what=f"`{key[-1]}` cannot be {_shown(value)}",
            fix=f"one of {', '.join(words)}" + (f"; did you mean {near}?" if near else ""),
            changes=(Put(key=key, value=near),) if near else (),
        )


def _out_of_bounds(document: Document, _: Setup) -> Iterator[Hit]:
    for key, value, kind, _section in _values(document):
        number = as_number(value) if isinstance(value, str) else document.number(*key)
        if number is None:
            continue
        for sign, limit in kind.bounds:
            if not _COMPARE[sign](number, limit):
                yield Hit(
                    key=key,
                    what=f"`{key[-1]}` is {_shown(value)}; it has to be {sign} {limit:g}",
                    fix=f"a number {sign} {limit:g}",
                )
                break


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f'"{value}"'
    return "a section" if isinstance(value, Mapping) else str(value)


_CONFIG = "deepspeed/runtime/config.py: DeepSpeedConfig._initialize_params"

RULES = (
    Rule(
        name="ignored-key",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed reads the keys it knows at the top level and in some sections, and never looks "
        "at the others: `zero_optimisation` trains at stage 0. A warning where no known key is near.",
        source=f"{_CONFIG} reads by name; run with 0.19.8",
        find=_ignored_key,
    ),
    Rule(
        name="refused-key",
        severity="error",
        kind="deepspeed",
        happens="Most sections are pydantic models that forbid unknown keys: DeepSpeed stops.",
        source="deepspeed/runtime/config_utils.py: DeepSpeedConfigModel, extra=forbid",
        find=_refused_key,
    ),
    Rule(
        name="removed-key",
        severity="error",
        kind="deepspeed",
        happens="Sections of features that DeepSpeed gave up stop it, even with `enabled: false`.",
        source="deepspeed/runtime/config.py: _reject_removed_config_keys",
        versions="deepspeed>=0.19.7",
        find=_removed_key,
    ),
    Rule(
        name="deprecated-key",
        severity="warning",
        kind="deepspeed",
        happens="Old names still work, with a warning in the log; beside the new name they stop DeepSpeed.",
        source="deepspeed/runtime/zero/config.py: fields with deprecated=True",
        find=_deprecated_key,
    ),
    Rule(
        name="bfloat16-is-bf16",
        severity="warning",
        kind="deepspeed",
        happens="DeepSpeed reads `bfloat16` only where there is no `bf16`; the Trainer and Accelerate "
        "never do.",
        source="deepspeed/runtime/precision_config.py: get_bfloat16_config",
        find=_bfloat16,
    ),
    Rule(
        name="wrong-kind-of-value",
        severity="error",
        kind="deepspeed",
        happens="A text where a number belongs, a fraction where a whole number belongs, null where a "
        "section belongs: a validation error, or a TypeError when the value is first used.",
        source=f"{_CONFIG} and the sections' pydantic models; run with 0.19.8",
        find=_wrong_kind,
    ),
    Rule(
        name="not-a-choice",
        severity="error",
        kind="deepspeed",
        happens="The key takes certain words only.",
        source="deepspeed/runtime/zero/offload_config.py, runtime/config.py: DtypeEnum, "
        "get_communication_data_type",
        find=_not_a_choice,
    ),
    Rule(
        name="out-of-bounds",
        severity="error",
        kind="deepspeed",
        happens="The number is outside what DeepSpeed takes, such as stage 4 or a bucket of 0 elements.",
        source="deepspeed/runtime/zero/config.py: Field(gt, ge, le); runtime/config.py: _batch_assertion",
        find=_out_of_bounds,
    ),
)
