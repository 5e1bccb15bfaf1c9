"""How the file is written, and which library reads it."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.edit import Drop, Strict
from shardwise.lint.finding import Hit, rule
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
    "pipeline.stages",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
    "expert_parallel.score_apply",
    "expert_parallel.combine_impl",
    "expert_parallel.row_weighting_impl",
    "expert_parallel.score_func",
    "expert_parallel.top_k",
    "expert_parallel.routed_scaling_factor",
}
"""Keys for which DeepSpeed itself knows the value `auto`."""

_FAILS = {
    "train_batch_size": "TypeError at the start",
    "train_micro_batch_size_per_gpu": "TypeError at the start",
    "gradient_accumulation_steps": "TypeError at the start",
    "gradient_clipping": "TypeError at the first step",
}
_JSON_LOAD = "deepspeed/runtime/config.py: hjson.load; accelerate/utils/deepspeed.py: json.load"


def autos(document: Document) -> list[Key]:
    """Keys with the value `auto` that are not DeepSpeed's own."""
    return [key for key in document.marks if document.get(*key) == AUTO and ".".join(key) not in _OWN_AUTO]


@rule("error", "deepspeed/runtime/config_utils.py: DeepSpeedConfigModel.__init__; run with 0.19.8")
def auto_without_trainer(document: Document, setup: Setup) -> Iterator[Hit]:
    """Only the Trainer and Accelerate replace `auto`.

    DeepSpeed itself drops it in some sections, so that `stage: auto` trains at stage 0. In other sections it
    stops with a TypeError.
    """
    keys = autos(document)
    if setup.reader is None and keys:
        more = "" if len(keys) == 1 else f", and for {len(keys) - 1} more keys"
        yield Hit(
            keys[0],
            f"the value is `auto`{more}: the Trainer and Accelerate fill it in; DeepSpeed itself drops it "
            "for some keys (`stage` becomes 0) and stops at others",
            "nothing, if the Trainer or Accelerate reads this file (--reader trainer); else write the values",
            severity="note",
        )
    for key in keys if setup.reader == "deepspeed" else ():
        in_params = key[0] in ("optimizer", "scheduler")
        default = "TypeError at the start" if in_params else "it drops `auto` and uses the default"
        what = "only the Trainer and Accelerate fill in `auto`; DeepSpeed itself: "
        yield Hit(key, what + _FAILS.get(".".join(key), default), "write the value")


@rule(
    "error",
    "transformers/integrations/deepspeed.py: trainer_config_process; accelerate/accelerator.py: "
    "_prepare_deepspeed",
    versions="",
)
def auto_nobody_fills(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer and Accelerate replace `auto` for some keys only; for others it reaches DeepSpeed."""
    if setup.reader not in FILLED:
        return
    for key in autos(document):
        if ".".join(key) in FILLED[setup.reader]:
            continue
        dropped = key[0] in ("zero_optimization", "bf16", "fp16", "tensor_parallel", "compile")
        yield Hit(
            key,
            f"{READER_NAMES[setup.reader]} does not fill in this `auto`; DeepSpeed then "
            + ("uses its default" if dropped else "finds text where it needs a value"),
            "write the value, or remove the key",
            (Drop(key),) if dropped else (),
            severity="warning" if dropped else "error",
        )


@rule("error", _JSON_LOAD)
def comments_in_json(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed reads the file with hjson, which allows comments; the Trainer and Accelerate use json."""
    if document.comments and setup.reader != "deepspeed":
        first, count = line_at(document.text, document.comments[0][0]), len(document.comments)
        words = ("a comment in JSON", "it") if count == 1 else (f"{count} comments in JSON", "them")
        yield _not_strict(document, setup, first, *words)


@rule("error", _JSON_LOAD)
def trailing_comma_in_json(document: Document, setup: Setup) -> Iterator[Hit]:
    """As with comments: hjson allows a trailing comma, json does not."""
    if document.trailing_commas and setup.reader != "deepspeed":
        first = line_at(document.text, document.trailing_commas[0])
        yield _not_strict(document, setup, first, "a comma before a closing bracket", "it")


@rule(
    "error",
    "accelerate/utils/deepspeed.py: open(encoding=utf-8), json.load; run with 1.15.0, and DeepSpeed 0.19.8",
)
def byte_order_mark(document: Document, setup: Setup) -> Iterator[Hit]:
    """Windows editors start a file with a mark: the Trainer and Accelerate stop there, DeepSpeed does not."""
    if document.marked and setup.reader != "deepspeed":
        yield _not_strict(document, setup, 1, "the file begins with a UTF-8 byte order mark", "it")


def _not_strict(document: Document, setup: Setup, line: int, what: str, it: str) -> Hit:
    fatal = setup.hugging_face or bool(autos(document))  # `auto` is written for one of the two
    return Hit(
        (),
        f"{what}: DeepSpeed ignores {it}; the Trainer and Accelerate stop with JSONDecodeError",
        f"remove {it}",
        (Strict(),) if fatal else (),  # the owner may want the comments if strict JSON is not needed
        "error" if fatal else "warning",
        line,
    )


@rule(
    "error",
    "deepspeed/runtime/config_utils.py: dict_raise_error_on_duplicate_keys; "
    "accelerate/utils/deepspeed.py: json.load; run with 0.19.8",
)
def duplicate_key(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed refuses a key that is given twice; the Trainer and Accelerate use the last.

    That holds for entire sections too: the first is ignored. The other rules judge the last.
    """
    for key, before in document.duplicates:
        happens = "DeepSpeed stops with a ValueError: Duplicate keys"
        if setup.hugging_face and setup.reader:
            happens = f"{READER_NAMES[setup.reader]} uses this one, and silently ignores line {before}"
        what = f"`{key[-1]}` is given twice (first in line {before}): {happens}"
        yield Hit(key, what, "keep one of the two")
