"""Number formats: bf16, fp16, autocast, and what gradients are added up and sent in."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.setup import Setup

_TORCH = {"torch.bfloat16": "bf16", "bfloat16": "bf16", "torch.float16": "fp16", "float16": "fp16"}


def _both(document: Document, _: Setup) -> Iterator[Hit]:
    if document.on("bf16", "enabled") and document.on("fp16", "enabled"):
        yield Hit(
            key=("fp16", "enabled"),
            what="bf16 and fp16 are both on: DeepSpeed stops with an AssertionError",
            fix="keep bf16 (Ampere and later), which needs no loss scaling",
            changes=(Put(key=("fp16", "enabled"), value=False),),
        )


def mixed(document: Document) -> bool:
    """Whether half precision is on, or left to somebody else."""
    named = [document.get(name, "enabled") for name in ("bf16", "fp16", "torch_autocast", "bfloat16")]
    return any(value in (True, AUTO) for value in named)


def _model_precision(setup: Setup) -> tuple[str, str] | None:
    """(precision, where that is said) of the model, where something says it."""
    if setup.model is not None and setup.model.precision is not None:
        return setup.model.precision, f"{setup.model.name} is published in {setup.model.precision}"
    loaded = _TORCH.get(str(setup.training("torch_dtype", "dtype")))
    return (loaded, f"the script loads the model in {loaded}") if loaded else None


def _no_mixed_precision(document: Document, setup: Setup) -> Iterator[Hit]:
    if mixed(document):
        return
    asked = any(setup.training(name) is True for name in ("bf16", "fp16")) or any(
        doc.get("mixed_precision") in ("bf16", "fp16") for doc in setup.of("accelerate")
    )
    if setup.hugging_face and asked:
        return  # Accelerate puts the section in
    known, stage = _model_precision(setup), stage_of(document)
    precision = known[0] if known else "bf16"
    kept = (
        "AdamW then works on the half-precision weights themselves, without fp32 masters: small updates "
        "are lost"
        if stage == 0
        else "gradients are added up and sent in fp32, twice the bytes, and no overflow is looked for"
    )
    what = (
        f"{known[1]}, and neither `bf16` nor `fp16` is on: {kept}"
        if known
        else "neither `bf16` nor `fp16` is on: a model in fp32 takes twice the memory and runs at a "
        f"fraction of the speed; of a model loaded in bf16, {kept}"
    )
    yield Hit(
        key=(),
        what=what,
        fix=f'"{precision}": {{"enabled": true}}',
        changes=(Put(key=(precision, "enabled"), value=True),) if known else (),
        severity="error" if known and not setup.hugging_face else "warning",
    )


def _other_precision(document: Document, setup: Setup) -> Iterator[Hit]:
    known = _model_precision(setup)
    if known and known[0] == "bf16" and document.on("fp16", "enabled"):
        yield Hit(
            key=("fp16", "enabled"),
            what=f"{known[1]}; its values can be too large for fp16, which ends at 65,504: skipped steps, "
            f"then NaN",
            fix='"bf16": {"enabled": true} in its place',
            changes=(Put(key=("fp16", "enabled"), value=False), Put(key=("bf16", "enabled"), value=True)),
        )


def _fp16_at_0(document: Document, _: Setup) -> Iterator[Hit]:
    if document.on("fp16", "enabled") and stage_of(document) == 0:
        yield Hit(
            key=("fp16", "enabled"),
            what="at stage 0 gradients are divided by a loss scale that the loss was never multiplied with",
            fix="`stage`: 1, or bf16",
        )


def _masters(document: Document, _: Setup) -> Iterator[Hit]:
    stage = stage_of(document)
    for section, name in (
        ("bf16", "bf16_master_weights_and_grads"),
        ("fp16", "fp16_master_weights_and_grads"),
    ):
        if document.on(section, name) and stage == 0:
            yield Hit(key=(section, name), what="DeepSpeed stops: it needs ZeRO", fix="`stage`: 1, 2 or 3")
    key = ("bf16", "bf16_optimizer_states")
    if document.on(*key) and not document.on("bf16", "bf16_master_weights_and_grads"):
        yield Hit(
            key=key,
            what="DeepSpeed stops: it needs `bf16_master_weights_and_grads`",
            fix='"bf16_master_weights_and_grads": true, or take it out',
            changes=(Drop(key=key),),
        )


def _loss_scale(document: Document, _: Setup) -> Iterator[Hit]:
    if not document.on("fp16", "enabled"):
        return
    scale = document.number("fp16", "loss_scale")
    if scale:
        yield Hit(
            key=("fp16", "loss_scale"),
            what=f"the loss scale stays at {scale:g}: nothing adapts when gradients overflow or vanish",
            fix="0 adapts it",
            changes=(Put(key=("fp16", "loss_scale"), value=0),),
            severity="warning",
        )
        return
    for name in ("loss_scale_window", "min_loss_scale"):
        value = document.number("fp16", name)
        if value is not None and value <= 0:
            yield Hit(
                key=("fp16", name),
                what=f"{value:g} stops DeepSpeed: it has to be above 0",
                fix="take it out",
                changes=(Drop(key=("fp16", name)),),
            )


def _accumulates_in_half(document: Document, _: Setup) -> Iterator[Hit]:
    steps = document.number("gradient_accumulation_steps") or 1
    if (
        document.on("bf16", "enabled")
        and stage_of(document) in (2, 3)
        and steps > 1
        and document.get("data_types", "grad_accum_dtype") is None
    ):
        yield Hit(
            key=("gradient_accumulation_steps",),
            what=f"{steps:g} micro-batches are added up in bf16, 8 bits of mantissa",
            fix='"data_types": {"grad_accum_dtype": "fp32"}: no more traffic at stages 2 and 3, 2 bytes '
            "more a parameter of the GPU's share",
            changes=(Put(key=("data_types", "grad_accum_dtype"), value="fp32"),),
        )


def _autocast(document: Document, _: Setup) -> Iterator[Hit]:
    if not document.on("torch_autocast", "enabled"):
        return
    if document.on("zero_optimization", "zero_quantized_weights"):
        yield Hit(
            key=("zero_optimization", "zero_quantized_weights"),
            what="DeepSpeed refuses it together with `torch_autocast`",
            fix="take one of the two out",
            severity="error",
        )
    for name in ("bf16", "fp16"):
        if document.on(name, "enabled"):
            yield Hit(
                key=("torch_autocast", "enabled"),
                what=f"`{name}` already makes the weights half precision; autocast on top has little left "
                f"to do",
                fix="take one of the two out",
            )


def _sent_as(document: Document, _: Setup) -> Iterator[Hit]:
    sent = document.get("communication_data_type")
    if document.on("bf16", "enabled") and sent == "fp16":
        yield Hit(
            key=("communication_data_type",),
            what="bf16 gradients are turned into fp16 on the way: beyond 65,504 they become infinite",
            fix="take it out: bf16 is sent as bf16",
            changes=(Drop(key=("communication_data_type",)),),
        )


_SANITY = "deepspeed/runtime/config.py: _do_error_check"

RULES = (
    Rule(
        name="bf16-and-fp16",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops with an AssertionError.",
        source="deepspeed/runtime/config.py: bfloat16 and fp16 modes cannot be simultaneously enabled",
        find=_both,
    ),
    Rule(
        name="no-mixed-precision",
        severity="warning",
        kind="deepspeed",
        happens="DeepSpeed's default is fp32. A half-precision model keeps its weights, but gradients are "
        "sent in fp32 and not checked for overflow; at stage 0 there are no fp32 masters. An error where "
        "the model is known to be half precision.",
        source="deepspeed/runtime/engine.py: get_data_types, communication_data_type; run with 0.19.8",
        find=_no_mixed_precision,
    ),
    Rule(
        name="fp16-for-a-bf16-model",
        severity="warning",
        kind="deepspeed",
        happens="A model trained in bf16 has activations that fp16 cannot hold.",
        source="largest fp16 number: IEEE 754",
        versions="",
        find=_other_precision,
    ),
    Rule(
        name="fp16-needs-zero",
        severity="error",
        kind="deepspeed",
        happens="Without ZeRO the engine does not scale the loss, and its optimizer divides by the scale.",
        source="deepspeed/runtime/engine.py 0.19.8: backward scales the loss for ZeRO's optimizers only",
        find=_fp16_at_0,
    ),
    Rule(
        name="half-masters-need-zero",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed stops with an AssertionError.",
        source=_SANITY,
        find=_masters,
    ),
    Rule(
        name="loss-scale",
        severity="error",
        kind="deepspeed",
        happens="A fixed loss scale does not adapt; a window or a floor of 0 stops DeepSpeed.",
        source="deepspeed/runtime/precision_config.py: _validate_dynamic_loss_scale_params",
        find=_loss_scale,
    ),
    Rule(
        name="accumulates-in-bf16",
        severity="note",
        kind="deepspeed",
        happens="Gradients of several micro-batches are added up in the model's format by default.",
        source="deepspeed/runtime/engine.py: get_data_types",
        find=_accumulates_in_half,
    ),
    Rule(
        name="autocast-and-more",
        severity="warning",
        kind="deepspeed",
        happens="torch_autocast is a third way to mixed precision, not an addition; quantised weights "
        "refuse it.",
        source="deepspeed/runtime/torch_autocast.py; run with 0.19.8",
        find=_autocast,
    ),
    Rule(
        name="bf16-sent-as-fp16",
        severity="warning",
        kind="deepspeed",
        happens="Gradients overflow on the way.",
        source="deepspeed/runtime/engine.py: communication_data_type",
        find=_sent_as,
    ),
)
