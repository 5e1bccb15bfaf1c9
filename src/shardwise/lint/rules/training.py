"""A training script, its arguments or its launch command, against the configuration it runs with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.lint.document import AUTO, Document
from shardwise.lint.finding import DEEPSPEED, Hit, Rule
from shardwise.lint.rules.accelerate import DS
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.script_text import STEPPED
from shardwise.lint.setup import Setup

TRANSFORMERS = "transformers>=5"

_TRAINER_KEYS: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (("train_micro_batch_size_per_gpu",), "per_device_train_batch_size", 8),
    (("gradient_accumulation_steps",), "gradient_accumulation_steps", 1),
    (("gradient_clipping",), "max_grad_norm", 1.0),
    (("optimizer", "params", "lr"), "learning_rate", 5e-5),
    (("optimizer", "params", "eps"), "adam_epsilon", 1e-8),
    (("optimizer", "params", "weight_decay"), "weight_decay", 0.0),
    (("bf16", "enabled"), "bf16", False),
    (("fp16", "enabled"), "fp16", False),
)
"""Where the Trainer compares the two, and its default where the script says nothing."""


_PLAIN = {"TrainingArguments", "Seq2SeqTrainingArguments"}


def _zero_stage(setup: Setup) -> int | None:
    stages = [stage_of(document) for document in setup.of("deepspeed")]
    stages += [int(n) for d in setup.of("accelerate") if (n := d.number(DS, "zero_stage")) is not None]
    named = setup.training("zero_stage")
    return next((stage for stage in (*stages, named) if isinstance(stage, int)), None)


def _distributed(setup: Setup) -> bool:
    """Whether something says that several processes run."""
    launcher = setup.training("launcher") is not None or setup.training("deepspeed") not in (None, False)
    return launcher or bool(setup.of("deepspeed") or setup.of("accelerate")) or (setup.world_size or 0) > 1


def _device_map(document: Document, setup: Setup) -> Iterator[Hit]:
    value = document.get("device_map")
    if value is None:
        return
    if _zero_stage(setup) == 3:
        yield Hit(
            key=("device_map",),
            what="from_pretrained stops: ZeRO-3 does not take a `device_map`",
            fix="take it out: ZeRO-3 places the parameters",
        )
    elif value in ("auto", "balanced", "balanced_low_0", "sequential") and _distributed(setup):
        yield Hit(
            key=("device_map",),
            what=f'"{value}" spreads the model over all GPUs of the machine, in every process; under a '
            "distributed launch Accelerator.prepare stops: `You can't train a model that has been loaded "
            "with device_map='auto' in any distributed mode`",
            fix='take it out; for a quantised base {"": local_rank}',
        )


def _eight_bit(document: Document, _: Setup) -> Iterator[Hit]:
    for name in ("load_in_8bit", "load_in_4bit"):
        if document.syntax == "python" and document.on(name) and "BitsAndBytesConfig" not in document.uses:
            yield Hit(
                key=(name,),
                what=f"transformers 5 takes no `{name}` in from_pretrained: TypeError",
                fix=f"quantization_config=BitsAndBytesConfig({name}=True)",
            )


def _quantised_under_zero(document: Document, setup: Setup) -> Iterator[Hit]:
    for name, bits in (("load_in_8bit", 8), ("load_in_4bit", 4)):
        if not document.on(name) or not _distributed(setup):
            continue
        if not setup.lora:
            yield Hit(
                key=(name,),
                what=f"{bits}-bit weights get no gradients: without adapters the Trainer refuses to train",
                fix="add LoRA adapters (PEFT)",
                severity="error",
            )
        stage = _zero_stage(setup)
        if bits == 8 and stage == 3:
            yield Hit(
                key=(name,),
                what="8-bit weights under ZeRO-3 are reported to fail on GPUs",
                fix="ZeRO-2, or 4-bit with a float bnb_4bit_quant_storage",
                severity="warning",
            )
        elif stage == 3 or stage == 2:
            yield Hit(
                key=(name,),
                what="every process loads the whole quantised model before anything is sharded",
                fix="plan host and GPU memory for one whole copy a GPU",
                severity="note",
            )


def _mismatch(document: Document, setup: Setup) -> Iterator[Hit]:
    if setup.reader != "trainer":
        return
    for config in setup.of("deepspeed"):
        for key, name, default in _TRAINER_KEYS:
            value, given = config.get(*key), document.get(name)
            if value is None or value == AUTO or (given is None and document.syntax != "python"):
                continue
            if given is None and not _PLAIN & document.uses:  # others have other defaults
                continue
            have = default if given is None else given
            if isinstance(have, int | float) and value != have:
                said = f"`{name}` is {have}" + ("" if given is not None else " by default")
                yield Hit(
                    key=(name,),
                    what=f"{said}, {config.name} says `{'.'.join(key)}`: {value}. The Trainer stops: `Please "
                    "correct the following DeepSpeed config values`",
                    fix=f'"auto" for `{".".join(key)}`, or the same value in both',
                )


def _module_flag(document: Document, _: Setup) -> Iterator[Hit]:
    script = document.get("script")
    if document.get("module") in (True, "true") and isinstance(script, str) and script.endswith(".py"):
        yield Hit(
            key=("module",),
            what=f"`--module` wants a module's name, and {script} is a file: ModuleNotFoundError",
            fix="take --module out",
        )


def _visible_devices(document: Document, _: Setup) -> Iterator[Hit]:
    if document.get("launcher") != "deepspeed" or not document.has("CUDA_VISIBLE_DEVICES"):
        return
    flags = [name for name in ("include", "exclude", "num_gpus", "num_nodes") if document.has(name)]
    if flags:
        yield Hit(
            key=("CUDA_VISIBLE_DEVICES",),
            what=f"the deepspeed launcher overwrites it where --{flags[0]} is given",
            fix="--include localhost:0,1 names the GPUs; take CUDA_VISIBLE_DEVICES out",
        )


def _include_and_number(document: Document, _: Setup) -> Iterator[Hit]:
    if document.get("launcher") == "deepspeed" and (document.has("include") or document.has("exclude")):
        for name in ("num_gpus", "num_nodes"):
            if document.has(name):
                yield Hit(
                    key=(name,),
                    what=f"deepspeed stops: --{name} cannot be combined with --include or --exclude",
                    fix="keep one of the two",
                )


def _found_batch_size(document: Document, setup: Setup) -> Iterator[Hit]:
    if document.on("auto_find_batch_size") and _zero_stage(setup) == 3:
        yield Hit(
            key=("auto_find_batch_size",),
            what="the Trainer refuses it with ZeRO-3",
            fix="take it out; `shardwise plan` says what fits",
        )


def _stepped(document: Document, _: Setup) -> Iterator[Hit]:
    stepped = document.get(STEPPED)
    if stepped is None:
        return
    if stepped.given:
        yield Hit(
            key=(STEPPED,),
            what=f"`{stepped.optimizer}` is what DeepSpeed was given: under ZeRO its parameters have no "
            "gradients, and nothing is trained, without an error",
            fix=f"{stepped.engine}.step(), which steps the optimizer that DeepSpeed made of it",
        )
    else:
        yield Hit(
            key=(STEPPED,),
            what=f"`{stepped.optimizer}.step()` goes around the engine: it steps at every micro-batch and no "
            "learning-rate schedule, or stops where ZeRO-2 accumulates gradients",
            fix=f"{stepped.engine}.step()",
            severity="warning",
        )


_DEVICE_MAP = "accelerate/accelerator.py: verify_device_map; transformers: from_pretrained under ZeRO-3"


def _rule(name: str, severity: str, happens: str, source: str, find: object, versions: str = "") -> Rule:
    return Rule(
        name=name,
        severity=severity,  # type: ignore[arg-type]
        kind="training",
        happens=happens,
        source=source,
        versions=versions,
        find=find,  # type: ignore[arg-type]
    )


RULES = (
    _rule(
        "device-map-and-processes",
        "error",
        "A device map spreads one process over GPUs; a distributed launch gives each GPU a process.",
        _DEVICE_MAP,
        _device_map,
    ),
    _rule(
        "load-in-8bit-was-removed",
        "error",
        "transformers 5 takes a quantization_config only.",
        "transformers 5: modeling_utils.py knows no load_in_8bit",
        _eight_bit,
        TRANSFORMERS,
    ),
    _rule(
        "quantised-under-zero",
        "error",
        "Quantised weights are loaded whole by every process, and are not trained themselves.",
        "transformers/modeling_utils.py: zero.Init is skipped; "
        "https://github.com/huggingface/accelerate/issues/3730",
        _quantised_under_zero,
    ),
    _rule(
        "trainer-and-file-differ",
        "error",
        "The Trainer compares its arguments with the DeepSpeed file and stops where they differ.",
        "transformers/integrations/deepspeed.py: fill_match, trainer_config_finalize",
        _mismatch,
    ),
    _rule(
        "module-flag-and-file",
        "error",
        "The launcher imports what it takes for a module.",
        "deepspeed/launcher/launch.py: -m",
        _module_flag,
    ),
    _rule(
        "visible-devices",
        "warning",
        "The launcher sets the variable itself.",
        "deepspeed/launcher/runner.py: CUDA_VISIBLE_DEVICES",
        _visible_devices,
    ),
    _rule(
        "include-and-number",
        "error",
        "Two ways to choose GPUs.",
        "deepspeed/launcher/runner.py: Cannot specify num_nodes/gpus with include/exclude",
        _include_and_number,
    ),
    _rule(
        "found-batch-size-and-stage-3",
        "error",
        "ZeRO-3 cannot begin anew with a smaller batch.",
        "transformers/trainer.py: auto_find_batch_size",
        _found_batch_size,
    ),
    _rule(
        "optimizer-beside-engine",
        "error",
        "DeepSpeed's engine steps: when an accumulation ends, the optimizer that it made, and the schedule.",
        "run with 0.19.8 at stages 0, 2 and 3",
        _stepped,
        DEEPSPEED,
    ),
)
