"""FSDP in accelerate's YAML."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.blocks import blocks_of
from shardwise.lint.document import Document
from shardwise.lint.edit import Drop, Put
from shardwise.lint.finding import Hit
from shardwise.lint.rules.accelerate import FSDP, kind_of, rule
from shardwise.lint.setup import Setup

_OF_TORCH = ("Linear", "Embedding", "LayerNorm", "Conv1d", "ModuleList")
_ONLY_FSDP1 = {
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters",
    "fsdp_sync_module_states": "FSDP2 needs no synchronising",
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_sharding_strategy": "FSDP2 has `fsdp_reshard_after_forward`: true or false",
}


def _version(document: Document, _: Setup) -> Iterator[Hit]:
    if not document.section(FSDP) or kind_of(document) != "FSDP":
        return
    version = document.number(FSDP, "fsdp_version") or document.number(FSDP, "version")
    if version is None:
        yield Hit(
            key=(FSDP,),
            what="accelerate's default is still FSDP1, which transformers is about to drop",
            fix="fsdp_version: 2 (`accelerate to-fsdp2` converts the rest)",
        )


def _fsdp2(document: Document, _: Setup) -> Iterator[Hit]:
    if document.number(FSDP, "fsdp_version") != 2:
        return
    for name, reason in _ONLY_FSDP1.items():
        if document.has(FSDP, name) and document.get(FSDP, name) is not None:
            yield Hit(
                key=(FSDP, name),
                what=f"of FSDP1; {reason}",
                fix="take it out",
                changes=(Drop(key=(FSDP, name)),),
            )
    if document.on(FSDP, "fsdp_forward_prefetch"):
        yield Hit(
            key=(FSDP, "fsdp_forward_prefetch"),
            what="FSDP2 has none: accelerate stops with a ValueError",
            fix="take it out",
            changes=(Drop(key=(FSDP, "fsdp_forward_prefetch")),),
            severity="error",
        )
    reshard = document.get(FSDP, "fsdp_reshard_after_forward")
    if isinstance(reshard, str) and reshard.lower() not in ("true", "false"):
        yield Hit(
            key=(FSDP, "fsdp_reshard_after_forward"),
            what=f"{reshard!r} is FSDP1's way to say it: FSDP2 wants true or false, and stops",
            fix="true",
            changes=(Put(key=(FSDP, "fsdp_reshard_after_forward"), value=True),),
            severity="error",
        )
    if document.get(FSDP, "fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        yield Hit(
            key=(FSDP, "fsdp_state_dict_type"),
            what="FSDP2 has no local state dicts: accelerate stops",
            fix="SHARDED_STATE_DICT",
            changes=(Put(key=(FSDP, "fsdp_state_dict_type"), value="SHARDED_STATE_DICT"),),
            severity="error",
        )


def _efficient_loading(document: Document, _: Setup) -> Iterator[Hit]:
    key = (FSDP, "fsdp_cpu_ram_efficient_loading")
    if document.on(*key) and document.get(FSDP, "fsdp_sync_module_states") is False:
        yield Hit(
            key=key,
            what="`accelerate launch` refuses it with fsdp_sync_module_states: false",
            fix="take fsdp_sync_module_states out",
            changes=(Drop(key=(FSDP, "fsdp_sync_module_states")),),
        )


def _wrapping(document: Document, _: Setup) -> Iterator[Hit]:
    policy = document.get(FSDP, "fsdp_auto_wrap_policy")
    if kind_of(document) == "FSDP" and document.section(FSDP) and policy in (None, "NO_WRAP"):
        yield Hit(
            key=(FSDP, "fsdp_auto_wrap_policy"),
            what="without wrapping the model is one unit: all of it is gathered on every GPU",
            fix="fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            changes=(Put(key=(FSDP, "fsdp_auto_wrap_policy"), value="TRANSFORMER_BASED_WRAP"),),
        )


def _block_class(document: Document, setup: Setup) -> Iterator[Hit]:
    key = (FSDP, "fsdp_transformer_layer_cls_to_wrap")
    value, policy = document.get(*key), document.get(FSDP, "fsdp_auto_wrap_policy")
    if (
        value is None
        or setup.model is None
        or policy != "TRANSFORMER_BASED_WRAP"
        or kind_of(document) != "FSDP"
    ):
        return
    known = blocks_of(setup.model.model_types)
    if known is None:
        return
    right = ",".join(known.blocks)
    changes = (Put(key=key, value=right),) if right else ()
    fix = f"{right}, or leave it out: it is the default" if right else "a class of the model's blocks"
    for name in str(value).split(","):
        if name in known.blocks:
            continue
        what = f"in {setup.model.name} no block is a {name!r}"
        if name not in known.classes and name not in _OF_TORCH:
            what += ": accelerate stops with `Could not find the transformer layer class`"
            yield Hit(key=key, what=what, fix=fix, changes=changes)
        elif known.blocks:
            what += ": FSDP gathers by that class, and the blocks are no units of their own"
            yield Hit(key=key, what=what, fix=fix, severity="warning")


_PLUGIN = "accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin.__post_init__"

RULES = (
    rule("fsdp-version", "warning", "The default is FSDP1.", _PLUGIN, _version),
    rule(
        "fsdp1-key-with-fsdp2",
        "warning",
        "FSDP2 ignores settings of FSDP1 with a warning, or stops.",
        _PLUGIN,
        _fsdp2,
    ),
    rule(
        "fsdp-efficient-loading",
        "error",
        "One rank loads the model and sends it to the others, which needs them to be synchronised.",
        "accelerate/utils/launch.py: prepare_multi_gpu_env",
        _efficient_loading,
    ),
    rule(
        "fsdp-block-class",
        "error",
        "A class to wrap that the model does not have stops accelerate; `--model` tells the model.",
        "accelerate/utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy; transformers: _no_split_modules",
        _block_class,
    ),
    rule(
        "fsdp-wraps-nothing",
        "warning",
        "One unit for the whole model saves memory between steps only.",
        _PLUGIN,
        _wrapping,
    ),
)
