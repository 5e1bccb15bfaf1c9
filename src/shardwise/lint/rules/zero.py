"""Settings of `zero_optimization` against its stage."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from shardwise.lint.document import AUTO, Document, Key
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.schema import as_number
from shardwise.lint.setup import Setup

ZERO = "zero_optimization"

STAGE_3_ONLY: dict[str, Any] = {
    "stage3_prefetch_bucket_size": None,
    "stage3_param_persistence_threshold": None,
    "stage3_model_persistence_threshold": None,
    "stage3_max_live_parameters": None,
    "stage3_max_reuse_distance": None,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "sub_group_size": None,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "memory_efficient_linear": None,
    "leaf_module": None,
    "pipeline_loading_checkpoint": False,
}
"""Read at stage 3 only; the value, if any, that asks for nothing."""

STAGE_12_ONLY: dict[str, Any] = {
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "ignore_unused_parameters": True,
    "allgather_bucket_size": None,
}
READ_BY_NOTHING: dict[Key, str] = {
    (ZERO, "allgather_partitions"): "the setting is parsed and read by nothing",
    ("disable_allgather",): "the setting is parsed and read by nothing",
    ("vocabulary_size",): "it only makes a warning in the log",
}
SMALLEST_BUCKET = 4_194_304
"""Elements of a 2048 x 2048 matrix, the smallest projections of a 1B model."""
LARGE_MATRIX = 1 << 24
"""A gradient of this size, 32 MiB in bf16, fills a link on its own: larger buckets gain nothing."""


def stage_of(document: Document) -> int | None:
    """The stage DeepSpeed would train at; None where `auto` leaves it to another file."""
    value = document.get(ZERO, "stage")
    if value == AUTO:
        return None
    if isinstance(value, str):
        return int(as_number(value) or 0)
    if isinstance(document.get(ZERO), bool):
        return int(document.get(ZERO))
    return int(value) if isinstance(value, int | float) and isfinite(value) else 0


def zero_keys(document: Document, names: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Those of the keys that are given and ask for something."""
    for name, nothing in names.items():
        value = document.get(ZERO, name)
        if document.has(ZERO, name) and (nothing is None or value != nothing):
            yield (ZERO, name), value


def _no_stage(document: Document, _: Setup) -> Iterator[Hit]:
    if document.section(ZERO) and not document.has(ZERO, "stage"):
        old = any(document.has(ZERO, name) for name in ("cpu_offload", "cpu_offload_param"))
        yield Hit(
            key=(ZERO,),
            what="without `stage` DeepSpeed trains at stage 0: nothing is sharded, and the rest of the "
            "section has no effect" + (" (the old keys do not set it either)" if old else ""),
            fix='"stage": 1, 2 or 3',
        )


def _accelerate_needs_zero(document: Document, setup: Setup) -> Iterator[Hit]:
    if setup.hugging_face and not document.has(ZERO):
        yield Hit(
            key=(),
            what="Accelerate, also under the Trainer, stops: `Please specify the ZeRO optimization config`",
            fix=f'"{ZERO}": {{"stage": 0}} for none',
            changes=(Put(key=(ZERO,), value={"stage": 0}),),
        )


def _below_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    stage = stage_of(document)
    if stage in (None, 3) or not document.has(ZERO, "stage"):
        return
    for key, _value in zero_keys(document, STAGE_3_ONLY):
        yield Hit(
            key=key,
            what=f"only ZeRO-3 reads it; at stage {stage} it has no effect",
            fix="take it out, or `stage`: 3 if sharded parameters were meant",
            changes=(Drop(key=key),),
        )


def _at_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    if stage_of(document) != 3:
        return
    for key, _value in zero_keys(document, STAGE_12_ONLY):
        yield Hit(
            key=key,
            what="only ZeRO-1 and 2 read it; at stage 3 it has no effect",
            fix="take it out" + ("; `reduce_bucket_size` counts" if "bucket" in key[-1] else ""),
            changes=(Drop(key=key),),
        )


def _without_effect(document: Document, _: Setup) -> Iterator[Hit]:
    for key, reason in READ_BY_NOTHING.items():
        if document.has(*key):
            yield Hit(key=key, what=reason, fix="take it out", changes=(Drop(key=key),))


def _small_bucket(document: Document, setup: Setup) -> Iterator[Hit]:
    stage, bucket = stage_of(document), document.number(ZERO, "reduce_bucket_size")
    if not stage or bucket is None or bucket <= 0:
        return
    hidden = setup.model.hidden_size if setup.model else None
    least = min(hidden * hidden, LARGE_MATRIX) if hidden else SMALLEST_BUCKET
    if bucket >= least:
        return
    matrix = (
        f"{hidden} x {hidden} matrix of {setup.model.name}"
        if hidden and setup.model
        else "matrix of a 1B model"
    )
    effect = (
        "at stage 3 every larger gradient is reduced on its own, past the bucket: a collective a matrix, "
        "with nothing gathered up"
        if stage == 3
        else "every larger gradient is reduced on its own: many small collectives"
    )
    yield Hit(
        key=(ZERO, "reduce_bucket_size"),
        what=f"{bucket:,.0f} elements are less than one {matrix} ({least:,}): {effect}",
        fix="leave it out (500,000,000: 1 GB in bf16), or some 50,000,000 where memory is short",
        changes=(Put(key=(ZERO, "reduce_bucket_size"), value=50_000_000),),
    )


def _overlap_off(document: Document, _: Setup) -> Iterator[Hit]:
    if stage_of(document) in (1, 2, 3) and document.get(ZERO, "overlap_comm") is False:
        yield Hit(
            key=(ZERO, "overlap_comm"),
            what="gradients are reduced after the backward pass instead of during it",
            fix="true (at stages 1 and 2 for the price of a second bucket), unless you debug",
            changes=(Put(key=(ZERO, "overlap_comm"), value=True),),
        )


def _overlap_default(document: Document, _: Setup) -> Iterator[Hit]:
    if stage_of(document) in (1, 2) and not document.has(ZERO, "overlap_comm"):
        yield Hit(
            key=(ZERO,),
            what="`overlap_comm` is off by default at stages 1 and 2: reductions wait for the backward pass",
            fix='"overlap_comm": true, for the price of a second bucket',
            changes=(Put(key=(ZERO, "overlap_comm"), value=True),),
        )


def _gather_on_save(document: Document, setup: Setup) -> Iterator[Hit]:
    name = "stage3_gather_16bit_weights_on_model_save"
    names = (name, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    values = [document.get(ZERO, n) for n in names if document.has(ZERO, n)]
    if stage_of(document) != 3 or any(value in (True, AUTO) for value in values):
        return
    if setup.reader == "deepspeed":
        return  # a loop of its own may never save a whole model
    yield Hit(
        key=(ZERO, name),
        what="under ZeRO-3 no model is saved without it: `save_model` writes only DeepSpeed's own "
        "checkpoint, `save_16bit_model` nothing",
        fix=f'"{name}": true; or convert with zero_to_fp32.py afterwards',
        changes=(Put(key=(ZERO, name), value=True),),
        severity="warning" if setup.hugging_face else "note",
    )


def _legacy(document: Document, _: Setup) -> Iterator[Hit]:
    if document.on(ZERO, "legacy_stage1"):
        yield Hit(
            key=(ZERO, "legacy_stage1"),
            what="DeepSpeed stops: the old stage 1 is gone",
            fix="take it out",
            changes=(Drop(key=(ZERO, "legacy_stage1")),),
        )


def _elastic_checkpoint(document: Document, _: Setup) -> Iterator[Hit]:
    if document.on(ZERO, "elastic_checkpoint"):
        at_3 = stage_of(document) == 3
        yield Hit(
            key=(ZERO, "elastic_checkpoint"),
            what="ZeRO-3 no longer has elastic checkpoints"
            if at_3
            else "it is the old way to resume elsewhere",
            fix="convert with ds_to_universal to resume on another number of GPUs",
            changes=(Drop(key=(ZERO, "elastic_checkpoint")),),
        )


def _grad_norm(document: Document, _: Setup) -> Iterator[Hit]:
    key = (ZERO, "compute_grad_norm")
    if document.get(*key) is not False:
        return
    stage, clipping = stage_of(document), document.number("gradient_clipping")
    if stage not in (1, 2):
        yield Hit(
            key=key, what="DeepSpeed stops: only ZeRO-1 and 2 can leave the norm out", fix="take it out"
        )
    elif clipping != 0:
        yield Hit(
            key=key,
            what="clipping needs the gradient norm, and is on: "
            + ("`gradient_clipping` is 1.0 by default" if clipping is None else f"at {clipping:g}"),
            fix='"gradient_clipping": 0.0, or take it out',
            severity="warning",
        )


_CONFIG = "deepspeed/runtime/zero/config.py"
_ENGINE = "deepspeed/runtime/engine.py: _configure_zero_optimizer"

RULES = (
    Rule(
        name="stage-is-missing",
        severity="error",
        kind="deepspeed",
        happens="The default stage is 0: a section full of settings, and nothing is sharded.",
        source=f"{_CONFIG}: stage; run with 0.19.8",
        find=_no_stage,
    ),
    Rule(
        name="accelerate-needs-zero",
        severity="error",
        kind="deepspeed",
        happens="Accelerate's plugin, which the Trainer uses too, refuses a file without "
        "`zero_optimization`.",
        source="accelerate/utils/dataclasses.py: DeepSpeedPlugin.__post_init__",
        versions="",
        find=_accelerate_needs_zero,
    ),
    Rule(
        name="stage-3-key-below-stage-3",
        severity="warning",
        kind="deepspeed",
        happens="Settings of ZeRO-3 are accepted at every stage and read at stage 3 only.",
        source=f"{_ENGINE}: what each optimizer is given",
        find=_below_stage_3,
    ),
    Rule(
        name="stage-1-2-key-at-stage-3",
        severity="note",
        kind="deepspeed",
        happens="Settings of ZeRO-1 and 2 are accepted at stage 3 and not read there.",
        source=f"{_ENGINE}: what each optimizer is given",
        find=_at_stage_3,
    ),
    Rule(
        name="setting-without-effect",
        severity="note",
        kind="deepspeed",
        happens="The setting is parsed, and then read by nothing.",
        source="deepspeed/runtime/engine.py: zero_allgather_partitions has no caller; config.py: "
        "disable_allgather",
        find=_without_effect,
    ),
    Rule(
        name="small-reduce-bucket",
        severity="warning",
        kind="deepspeed",
        happens="A gradient larger than the bucket never enters it and is reduced alone: bandwidth is "
        "lost to latency, a matrix at a time.",
        source="deepspeed/runtime/zero/stage3.py: reduce_independent_p_g_buckets_and_remove_grads",
        find=_small_bucket,
    ),
    Rule(
        name="overlap-comm-off",
        severity="warning",
        kind="deepspeed",
        happens="Communication waits for the computation.",
        source=f"{_CONFIG}: overlap_comm",
        find=_overlap_off,
    ),
    Rule(
        name="overlap-comm-default",
        severity="note",
        kind="deepspeed",
        happens="The default of `overlap_comm` is on at stage 3 only.",
        source=f"{_CONFIG}: overlap_comm_valid",
        find=_overlap_default,
    ),
    Rule(
        name="no-model-on-save",
        severity="warning",
        kind="deepspeed",
        happens="Without the flag ZeRO-3 saves shards; the Trainer's `save_model` leaves no model that "
        "loads.",
        source="deepspeed/runtime/engine.py: save_16bit_model; transformers/trainer.py: save_model",
        find=_gather_on_save,
    ),
    Rule(
        name="legacy-stage-1",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed raises an exception.",
        source=_ENGINE,
        find=_legacy,
    ),
    Rule(
        name="elastic-checkpoint",
        severity="warning",
        kind="deepspeed",
        happens="At stage 3 it has no effect; universal checkpoints took its place.",
        source=f"{_CONFIG}: elastic_checkpoint_deprecated",
        find=_elastic_checkpoint,
    ),
    Rule(
        name="compute-grad-norm",
        severity="error",
        kind="deepspeed",
        happens="Without the norm there is no clipping, and only ZeRO-1 and 2 can do without it.",
        source=f"{_CONFIG}: compute_grad_norm_valid",
        versions="deepspeed>=0.19.6,<0.20",
        find=_grad_norm,
    ),
)
