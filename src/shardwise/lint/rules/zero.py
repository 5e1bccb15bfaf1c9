"""ZeRO: settings of `zero_optimization` against its stage."""

from collections.abc import Iterator
from math import isfinite
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Severity, rule
from shardwise.lint.schema import as_number, by_key, names, table
from shardwise.lint.setup import Setup

ZERO = "zero_optimization"

STAGE_3_ONLY: dict[str, Any] = table("stage_3_only") | dict.fromkeys(names("stage_3_keys"))
"""Keys that only stage 3 reads, with the value that requests nothing, or None."""
WITHOUT_EFFECT: dict[Key, list[tuple[str, Any, Severity, str]]] = by_key("without_effect")
"""Stages that have no such setting; the value that requests nothing; how bad it is; what happens."""
SMALLEST_BUCKET = 4_194_304  # elements of a 2048 x 2048 matrix, the smallest projections of a 1B model
LARGE_MATRIX = 1 << 24  # a gradient of 32 MiB in bf16 saturates a link: larger buckets gain nothing

_CONFIG = "deepspeed/runtime/zero/config.py"
_ENGINE = "deepspeed/runtime/engine.py: _configure_zero_optimizer"


def is_template(document: Document) -> bool:
    """Whether stage and batch are elsewhere: a part of a file, or one that the autotuner completes."""
    return (document.bare or document.on("autotuning", "enabled")) and not document.has(ZERO, "stage")


def stage_of(document: Document) -> int | None:
    """The stage DeepSpeed would train at; None if `auto` or the autotuner leaves it to another file."""
    value = document.get(ZERO, "stage")
    if value == AUTO or is_template(document):
        return None
    if isinstance(value, str):
        return int(as_number(value) or 0)
    if isinstance(document.get(ZERO), bool):
        return int(document.get(ZERO))
    return int(value) if isinstance(value, int | float) and isfinite(value) else 0


@rule("error", f"{_CONFIG}: stage; run with 0.19.8")
def stage_is_missing(document: Document, _: Setup) -> Iterator[Hit]:
    """The default stage is 0: a section full of settings, and nothing is sharded."""
    if document.section(ZERO) and not document.has(ZERO, "stage"):
        old = any(document.has(ZERO, name) for name in ("cpu_offload", "cpu_offload_param"))
        what = "without `stage` DeepSpeed trains at stage 0: nothing is sharded, and the other keys are idle"
        what += " (the old keys do not set the stage either)" * old
        yield Hit((ZERO,), what, '"stage": 1, 2 or 3')


@rule("error", "accelerate/utils/dataclasses.py: DeepSpeedPlugin.__post_init__", versions="")
def accelerate_needs_zero(document: Document, setup: Setup) -> Iterator[Hit]:
    """Accelerate's plugin, which the Trainer also uses, refuses a file without `zero_optimization`."""
    if setup.hugging_face and not document.has(ZERO) and not is_template(document):
        what = "Accelerate, also under the Trainer, stops: `Please specify the ZeRO optimization config`"
        yield Hit((), what, f'"{ZERO}": {{"stage": 0}} for no ZeRO', (Put((ZERO,), {"stage": 0}),))


@rule("warning", f"{_ENGINE}: what each optimizer is given")
def stage_3_key_below_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    """Settings of ZeRO-3 are accepted at every stage, but only stage 3 reads them."""
    stage = stage_of(document)
    if stage in (None, 3) or not document.has(ZERO, "stage"):
        return
    for name, nothing in STAGE_3_ONLY.items():
        key = (ZERO, name)
        if document.has(*key) and (nothing is None or document.get(*key) != nothing):
            what = f"only ZeRO-3 reads it; at stage {stage} it has no effect"
            meant = document.has(ZERO, "offload_param")  # which needs stage 3, and then these count
            changes = () if meant else (Drop(key),)
            yield Hit(key, what, "remove it, or `stage`: 3 for sharded parameters", changes)


@rule("note", "deepspeed/runtime/engine.py: what each setting is given to; run with 0.19.8")
def setting_without_effect(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed accepts the setting, and at this stage never reads it, or stops at it later."""
    rows = ((key, *row) for key, held in WITHOUT_EFFECT.items() for row in held)
    for key, stages, nothing, severity, what in rows:
        if document.get(*key) not in (None, AUTO, nothing) and str(stage_of(document)) in stages:
            yield Hit(key, what, changes=(Drop(key),), severity=severity)


@rule("warning", "deepspeed/runtime/zero/stage3.py: reduce_independent_p_g_buckets_and_remove_grads")
def small_reduce_bucket(document: Document, setup: Setup) -> Iterator[Hit]:
    """A gradient larger than the bucket is reduced alone: latency wastes bandwidth for each matrix."""
    key, stage, model = (ZERO, "reduce_bucket_size"), stage_of(document), setup.model
    bucket, hidden = document.number(*key), model.hidden_size if model else None
    least = min(hidden * hidden, LARGE_MATRIX) if hidden else SMALLEST_BUCKET
    if not stage or bucket is None or not 0 < bucket < least:
        return
    matrix = f"{hidden} x {hidden} matrix of {model.name}" if hidden and model else "matrix of a 1B model"
    effect = "every larger gradient is reduced alone: many small collectives"
    if stage == 3:
        effect = "at stage 3 every larger gradient is reduced alone: one collective per matrix"
    what = f"{bucket:,.0f} elements are less than one {matrix} ({least:,}): {effect}"
    fix = "remove it (500,000,000: 1 GB in bf16), or about 50,000,000 if memory is short"
    yield Hit(key, what, fix, (Put(key, 50_000_000),))


@rule("warning", f"{_CONFIG}: overlap_comm")
def overlap_comm_off(document: Document, _: Setup) -> Iterator[Hit]:
    """Gradients are reduced after the backward pass instead of during it."""
    key = (ZERO, "overlap_comm")
    if stage_of(document) in (1, 2, 3) and document.get(*key) is False:
        fix = "true (stages 1 and 2 then need a second bucket), except while debugging"
        yield Hit(key, fix=fix, changes=(Put(key, True),))


@rule("note", f"{_CONFIG}: overlap_comm_valid")
def overlap_comm_default(document: Document, _: Setup) -> Iterator[Hit]:
    """`overlap_comm` is off by default at stages 1 and 2: reductions wait for the backward pass."""
    if stage_of(document) in (1, 2) and not document.has(ZERO, "overlap_comm"):
        fix = '"overlap_comm": true, which needs a second bucket'
        yield Hit((ZERO,), fix=fix, changes=(Put((ZERO, "overlap_comm"), True),))


@rule("warning", "deepspeed/runtime/engine.py: save_16bit_model; transformers/trainer.py: save_model")
def no_model_on_save(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without the flag ZeRO-3 saves shards; the Trainer's `save_model` writes no model that loads."""
    name = "stage3_gather_16bit_weights_on_model_save"
    known = (name, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    asked = any(document.has(ZERO, n) and document.get(ZERO, n) in (True, AUTO) for n in known)
    if stage_of(document) != 3 or asked or setup.reader == "deepspeed":
        return  # the user's own DeepSpeed loop may never save a full model
    what = "under ZeRO-3 no model is saved without it: `save_model` writes only DeepSpeed's own checkpoint, "
    what += "`save_16bit_model` nothing"
    fix = f'"{name}": true; or convert with zero_to_fp32.py afterwards'
    severity: Severity = "warning" if setup.hugging_face else "note"
    yield Hit((ZERO, name), what, fix, (Put((ZERO, name), True),), severity)
