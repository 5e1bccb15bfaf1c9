"""How the file is written, and who can read it so."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document, Key, line_at
from shardwise.lint.edit import Drop, Strict
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.setup import READER_NAMES, Setup

_BY_BOTH = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
}
FILLED = {"trainer": _BY_BOTH | {"optimizer.params.betas", "optimizer.params.eps"}, "accelerate": _BY_BOTH}
"""Keys whose `auto` the Trainer and Accelerate replace; the plugin they share fills stage and devices."""

_OWN_AUTO = {
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "pipeline.stages",
    "expert_parallel.score_apply",
    "expert_parallel.combine_impl",
    "expert_parallel.row_weighting_impl",
    "expert_parallel.score_func",
    "expert_parallel.top_k",
    "expert_parallel.routed_scaling_factor",
}
"""Keys where `auto` is a value of DeepSpeed's own."""

_FAILS = {
    "train_batch_size": "TypeError when it starts",
    "train_micro_batch_size_per_gpu": "TypeError when it starts",
    "gradient_accumulation_steps": "TypeError when it starts",
    "gradient_clipping": "TypeError at the first step",
}


def autos(document: Document) -> list[Key]:
    """Keys that stand at `auto` and are not DeepSpeed's own."""
    return [key for key in document.marks if document.get(*key) == AUTO and ".".join(key) not in _OWN_AUTO]


def _times(count: int) -> str:
    return "" if count == 1 else f" and at {count - 1} more keys"


def _auto_without_trainer(document: Document, setup: Setup) -> Iterator[Hit]:
    if setup.reader is None and (keys := autos(document)):
        yield Hit(
            key=keys[0],
            what=f"`auto` stands here{_times(len(keys))}: the Trainer and Accelerate fill it in; DeepSpeed "
            "itself drops it in some (`stage` becomes 0) and stops at others",
            fix="nothing, if one of them reads this file (--reader trainer says so); else write the values",
            severity="note",
        )
    if setup.reader != "deepspeed":
        return
    for key in autos(document):
        name = ".".join(key)
        effect = _FAILS.get(name)
        if effect is None:
            in_params = key[0] in ("optimizer", "scheduler")
            effect = "TypeError when it starts" if in_params else "it is dropped and the default is used"
        yield Hit(
            key=key,
            what=f"`auto` is filled in by the Trainer and Accelerate only; DeepSpeed itself: {effect}",
            fix="write the value",
        )


def _auto_nobody_fills(document: Document, setup: Setup) -> Iterator[Hit]:
    if setup.reader not in FILLED:
        return
    for key in autos(document):
        name = ".".join(key)
        if name in FILLED[setup.reader]:
            continue
        dropped = key[0] in ("zero_optimization", "bf16", "fp16", "tensor_parallel", "compile")
        yield Hit(
            key=key,
            what=f"{READER_NAMES[setup.reader]} does not fill this `auto`; DeepSpeed then "
            + ("takes its default" if dropped else "meets a text where it wants a value"),
            fix="write the value, or leave the key out",
            changes=(Drop(key=key),) if dropped else (),
            severity="warning" if dropped else "error",
        )


def _comments(document: Document, setup: Setup) -> Iterator[Hit]:
    if document.comments and setup.reader != "deepspeed":
        count = len(document.comments)
        first = line_at(document.text, document.comments[0][0])
        words = ("a comment in JSON", "it") if count == 1 else (f"{count} comments in JSON", "them")
        yield _not_strict(document, setup, first, *words)


def _trailing_commas(document: Document, setup: Setup) -> Iterator[Hit]:
    if document.trailing_commas and setup.reader != "deepspeed":
        first = line_at(document.text, document.trailing_commas[0])
        yield _not_strict(document, setup, first, "a comma before a closing bracket", "it")


def _byte_order_mark(document: Document, setup: Setup) -> Iterator[Hit]:
    if document.marked and setup.reader != "deepspeed":
        yield _not_strict(document, setup, 1, "the file begins with a UTF-8 byte order mark", "it")


def _not_strict(document: Document, setup: Setup, line: int, what: str, it: str) -> Hit:
    fatal = setup.hugging_face or bool(autos(document))  # `auto`: it was written for one of the two
    return Hit(
        key=(),
        line=line,
        what=f"{what}: DeepSpeed reads over {it}; the Trainer and Accelerate stop with JSONDecodeError",
        fix=f"take {it} out",
        changes=(Strict(),) if fatal else (),  # whoever needs no strict JSON may like the comments
        severity="error" if fatal else "warning",
    )


def _duplicates(document: Document, setup: Setup) -> Iterator[Hit]:
    for key, before in document.duplicates:
        happens = "DeepSpeed stops with a ValueError: Duplicate keys"
        if setup.hugging_face:
            name = READER_NAMES[setup.reader] if setup.reader else ""
            happens = f"{name} takes this one, and silently passes over the whole value in line {before}"
        yield Hit(
            key=key,
            what=f"`{key[-1]}` is given again (before in line {before}): {happens}",
            fix="keep one of the two",
        )


RULES = (
    Rule(
        name="auto-without-trainer",
        severity="error",
        kind="deepspeed",
        happens="Only the Trainer and Accelerate replace `auto`. DeepSpeed itself drops it in some "
        "sections, so that `stage: auto` trains at stage 0, and stops with a TypeError in others.",
        source="deepspeed/runtime/config_utils.py: DeepSpeedConfigModel.__init__; run with 0.19.8",
        find=_auto_without_trainer,
    ),
    Rule(
        name="auto-nobody-fills",
        severity="error",
        kind="deepspeed",
        happens="The Trainer and Accelerate replace `auto` at certain keys only; anywhere else it reaches "
        "DeepSpeed.",
        source="transformers/integrations/deepspeed.py: trainer_config_process; accelerate/accelerator.py: "
        "_prepare_deepspeed",
        versions="",
        find=_auto_nobody_fills,
    ),
    Rule(
        name="comments-in-json",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed opens the file with hjson, which knows comments; the Trainer and Accelerate "
        "open it with json, which does not.",
        source="deepspeed/runtime/config.py: hjson.load; accelerate/utils/deepspeed.py: json.load",
        find=_comments,
    ),
    Rule(
        name="trailing-comma-in-json",
        severity="error",
        kind="deepspeed",
        happens="As with comments: hjson takes a trailing comma, json does not.",
        source="deepspeed/runtime/config.py: hjson.load; accelerate/utils/deepspeed.py: json.load",
        find=_trailing_commas,
    ),
    Rule(
        name="byte-order-mark",
        severity="error",
        kind="deepspeed",
        happens="The Trainer and Accelerate open the file as UTF-8 and stop at the mark that editors of "
        "Windows put before it; DeepSpeed's hjson reads over it.",
        source="accelerate/utils/deepspeed.py: open(encoding=utf-8), json.load; run with 1.15.0, and "
        "DeepSpeed 0.19.8",
        find=_byte_order_mark,
    ),
    Rule(
        name="duplicate-key",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed refuses a key that is given twice; the Trainer and Accelerate take the last, "
        "whole sections too: nothing of the one before is left. The other rules judge the last.",
        source="deepspeed/runtime/config_utils.py: dict_raise_error_on_duplicate_keys; "
        "accelerate/utils/deepspeed.py: json.load; run with 0.19.8",
        find=_duplicates,
    ),
)
