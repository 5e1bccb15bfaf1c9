"""Names of keys, kinds of values: those of DeepSpeed's schema."""

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, holds_for, rule
from shardwise.lint.schema import KeyKind, Section, as_number, by_key, closest, deepspeed_schema
from shardwise.lint.setup import Setup

ZERO = "zero_optimization"
_ELSEWHERE: dict[Key, str] = by_key("meant_keys")
REMOVED = {key: text.split(" ", 1) for key, text in by_key("removed_keys").items()}
_HOMES: tuple[Key, ...] = ((), (ZERO,))
"""Sections that a misplaced key may be moved to; others have names that are too common, such as `verbose`."""
_INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?", re.ASCII)  # text that pydantic accepts as an integer
_PLAIN = {"object": (Mapping, "a section in braces"), "list": (list | str, "a list"), "str": (str, "a text")}
_COMPARE = {">=": ge, "<=": le, ">": gt, "<": lt}
WORDS = dict.fromkeys(("true", "yes", "on", "t", "y"), True)
WORDS |= dict.fromkeys(("false", "no", "off", "f", "n"), False)
"""Words that pydantic accepts as booleans, in any case."""
_CONFIG = "deepspeed/runtime/config.py: DeepSpeedConfig._initialize_params"


def _sections(document: Document) -> Iterator[tuple[Key, Section, Mapping[str, Any]]]:
    for key, section in deepspeed_schema().sections.items():
        if isinstance(document.get(*key), Mapping):
            yield key, section, document.section(*key)


def _unknown(document: Document, *, refuses: bool) -> Iterator[tuple[Key, Section]]:
    for above, section, values in _sections(document):
        for name in values if section.refuses == refuses else ():
            key = (*above, name)
            if name not in section.keys and key not in REMOVED:
                yield key, section


def unknown_keys(document: Document) -> list[Key]:
    """Keys that DeepSpeed refuses or ignores."""
    return [key for refuses in (True, False) for key, _ in _unknown(document, refuses=refuses)]


def _meant(key: Key, section: Section, document: Document) -> tuple[str, tuple[Change, ...]]:
    """The fix for an unknown key, in words and as changes."""
    above, name = key[:-1], key[-1]
    homes = [home for home in deepspeed_schema().homes(name) if home in _HOMES]
    near = _ELSEWHERE.get(key) or (None if homes else closest(name, section.keys))
    if near is not None and document.has(*above, near):
        return f"`{near}` is given too: keep one of the two", ()
    if near is not None:
        return f"did you mean `{near}`?", (Rename(key, near),)
    if homes:
        home = (*homes[0], name)
        moved = (Drop(key), Put(home, document.get(*key)))
        place = f"`{'.'.join(homes[0])}`" if homes[0] else "the top level"
        return f"it belongs in {place}: {'.'.join(home)}", () if document.has(*home) else moved
    if name.startswith("enable") and document.get(*key) is False:  # without the key the section is on
        return f"remove `{'.'.join(above)}`, which is switched off", (Drop(above),) if above else ()
    return "remove it", (Drop(key),)


@rule("error", f"{_CONFIG} reads by name; run with 0.19.8")
def ignored_key(document: Document, _: Setup) -> Iterator[Hit]:
    """Here DeepSpeed reads keys by name and ignores others: `zero_optimisation` trains at stage 0."""
    for key, section in _unknown(document, refuses=False):
        fix, changes = _meant(key, section, document)
        meant, effect = fix != "remove it", "it has no effect"
        if changes and isinstance(changes[0], Rename) and changes[0].name == ZERO:
            effect = "training runs at stage 0, nothing is sharded"
        where = f" in `{'.'.join(key[:-1])}`" if len(key) > 1 else ""
        what = f"DeepSpeed has no such key{where} and silently ignores it: {effect}"
        yield Hit(key, what, fix, changes if meant else (), "error" if meant else "warning")


@rule("error", "deepspeed/runtime/config_utils.py: DeepSpeedConfigModel, extra=forbid")
def refused_key(document: Document, _: Setup) -> Iterator[Hit]:
    """Most sections are pydantic models that forbid unknown keys: DeepSpeed stops."""
    for key, section in _unknown(document, refuses=True):
        what = f"`{'.'.join(key[:-1])}` has no such key: DeepSpeed stops with a validation error"
        yield Hit(key, what, *_meant(key, section, document))


@rule("error", "deepspeed/runtime/config.py: _reject_removed_config_keys", "deepspeed>=0.19.7")
def removed_key(document: Document, setup: Setup) -> Iterator[Hit]:
    """Sections of removed features stop DeepSpeed, even with `enabled: false`."""
    for key, (versions, instead) in REMOVED.items():
        if document.has(*key) and holds_for(f"deepspeed{versions}", "deepspeed", setup.deepspeed):
            version = versions.removeprefix(">=")
            what = f"`{key[-1]}` was removed in DeepSpeed {version}, which stops even if it is switched off"
            yield Hit(key, what, f"remove it; {instead}", (Drop(key),))


@rule("warning", "deepspeed/runtime/zero/config.py: fields with deprecated=True")
def deprecated_key(document: Document, _: Setup) -> Iterator[Hit]:
    """Old names still work, with a warning in the log; together with the new name they stop DeepSpeed."""
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        key, target = (ZERO, old), (ZERO, new)
        if not document.has(*key):
            continue
        both, on = document.has(*target), document.on(*key)
        insert = (Put(target, {"device": "cpu", "pin_memory": True}),) if on and not both else ()
        what = f"`{old}` is the old name of `{new}`"
        what += ": given together, DeepSpeed stops with an AssertionError" if both else ""
        fix = f'"{new}": {{"device": "cpu"}} alone' if on else "remove it"
        yield Hit(key, what, fix, (Drop(key), *insert), "error" if both else "warning")
    pin, gather = (ZERO, "cpu_offload_use_pin_memory"), (ZERO, "stage3_gather_fp16_weights_on_model_save")
    if document.has(*pin):
        fix = "pin_memory inside offload_optimizer and offload_param"
        yield Hit(pin, "DeepSpeed no longer reads `cpu_offload_use_pin_memory`", fix, (Drop(pin),))
    if document.has(*gather):
        new = "stage3_gather_16bit_weights_on_model_save"
        yield Hit(gather, "the name now has 16bit instead of fp16", new, (Rename(gather, new),))
    value = document.get(ZERO)
    if isinstance(value, bool):
        what = "true or false instead of the section is the old form: true means stage 1"
        put = Put((ZERO,), {"stage": int(value)})
        yield Hit((ZERO,), what, '{"stage": 1}, or the stage you need', (put,))


@rule("warning", "deepspeed/runtime/precision_config.py: get_bfloat16_config")
def bfloat16_is_bf16(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed reads `bfloat16` only without `bf16`; the Trainer and Accelerate never read it."""
    key, both = ("bfloat16",), document.has("bf16")
    if document.has(*key):
        what = "`bfloat16` is the old name of `bf16`" + (", and is ignored next to it" if both else "")
        fix = "remove it" if both else "rename it to bf16: the Trainer and Accelerate read only that"
        change = Drop(key) if both else Rename(key, "bf16")
        yield Hit(key, what, fix, (change,), "error" if both else "warning")


def _values(document: Document) -> Iterator[tuple[Key, Any, KeyKind, Section]]:
    for above, section, values in _sections(document):
        for name, value in values.items():
            kind = section.keys.get(name)
            if kind is not None and value != AUTO:
                yield (*above, name), value, kind, section


@rule("error", f"{_CONFIG} and the sections' pydantic models; run with 0.19.8")
def wrong_kind_of_value(document: Document, _: Setup) -> Iterator[Hit]:
    """Text for a number, a fraction for an integer, null for a section: an error at the start or at use."""
    for key, value, kind, section in _values(document):
        problem = _kind_problem(value, kind, lenient=section.refuses)
        if problem is None or (key == (ZERO,) and isinstance(value, bool)):
            continue
        wanted, better = problem
        if isinstance(value, float) and not section.refuses:
            better = None  # half a row is not a rounding error
        fix = f"write {_shown(better)}" if better is not None else f"write {wanted}"
        what = f"`{key[-1]}` is {_shown(value)}; DeepSpeed requires {wanted}"
        yield Hit(key, what, fix, () if better is None else (Put(key, better),))


def _kind_problem(value: Any, kind: KeyKind, *, lenient: bool) -> tuple[str, Any] | None:
    """(requirement, meant value); `lenient`: pydantic reads "3" as a number."""
    if kind.kind == "any" or kind.words or (value is None and kind.nullable):
        return None
    if kind.kind in _PLAIN:
        types, wanted = _PLAIN[kind.kind]
        return None if isinstance(value, types) else (wanted, None)
    if kind.kind == "bool":
        return _bool_problem(value, lenient=lenient)
    return _number_problem(value, integer=kind.kind == "int", lenient=lenient)


def _number_problem(value: Any, *, integer: bool, lenient: bool) -> tuple[str, Any] | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        number = as_number(value)
        accepted = isinstance(value, str) and (not integer or _INTEGER.fullmatch(value.strip()))
        if lenient and number is not None and accepted:
            return None
        return "a number without quotes" if isinstance(value, str) else "a number", number
    if not isfinite(value):
        return "a finite number", None
    near = int(value) or int(value > 0)  # DeepSpeed refuses 0 where a small number was meant
    return ("an integer", near) if integer and value != int(value) else None


def _bool_problem(value: Any, *, lenient: bool) -> tuple[str, Any] | None:
    if isinstance(value, bool) or (lenient and value in (0, 1)):
        return None
    if isinstance(value, str) and value.lower() in WORDS:
        return None if lenient else ("true or false without quotes", WORDS[value.lower()])
    return "true or false", bool(value) if value in (0, 1) else None


@rule("error", "deepspeed/runtime/config.py: DtypeEnum, get_communication_data_type")
def not_a_choice(document: Document, _: Setup) -> Iterator[Hit]:
    """The key accepts certain words only."""
    for key, value, kind, _section in _values(document):
        words = kind.words
        if not words or (value is None and kind.nullable) or value in words:
            continue
        insensitive = key[-1].endswith("communication_data_type") or key[-1] == "gradient_allreduce_op"
        if insensitive and isinstance(value, str) and value.lower() in words:
            continue
        near = closest(str(value), words)
        fix = f"one of {', '.join(words)}" + (f"; did you mean {near}?" if near else "")
        yield Hit(key, f"`{key[-1]}` cannot be {_shown(value)}", fix, (Put(key, near),) if near else ())


@rule("error", "deepspeed/runtime/zero/config.py: Field(gt, ge, le); runtime/config.py: _batch_assertion")
def out_of_bounds(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed refuses the number, such as stage 4 or a bucket of 0 elements."""
    for key, value, kind, _section in _values(document):
        number = as_number(value) if isinstance(value, str) else document.number(*key)
        broken = [b for b in kind.bounds if number is not None and not _COMPARE[b[0]](number, b[1])]
        if broken:
            bound = f"{broken[0][0]} {broken[0][1]:g}"
            yield Hit(key, f"`{key[-1]}` is {_shown(value)}; it must be {bound}", f"a number {bound}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f'"{value}"'
    return "a section" if isinstance(value, Mapping) else str(value)
