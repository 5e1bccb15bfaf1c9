"""Scripts, arguments, launch commands: against the configuration that they run with."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from shardwise.lint.document import AUTO, Document
from shardwise.lint.finding import DEEPSPEED, Hit, rule
from shardwise.lint.rules.accelerate import DS
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.script_text import STEPPED
from shardwise.lint.setup import Setup

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
"""What the Trainer compares, and its default if the script gives no value."""
_PLAIN = {"TrainingArguments", "Seq2SeqTrainingArguments"}

training_rule = partial(rule, versions="", kind="training")


def _zero_stage(setup: Setup) -> int | None:
    stages = [stage_of(document) for document in setup.of("deepspeed")]
    stages += [int(n) for d in setup.of("accelerate") if (n := d.number(DS, "zero_stage")) is not None]
    named = setup.training("zero_stage")
    return next((stage for stage in (*stages, named) if isinstance(stage, int)), None)


def distributed(setup: Setup) -> bool:
    """Whether a file or a flag says that several processes run."""
    launcher = setup.training("launcher") is not None or setup.training("deepspeed") not in (None, False)
    return launcher or bool(setup.of("deepspeed") or setup.of("accelerate")) or (setup.world_size or 0) > 1


@training_rule(
    "error", "accelerate/accelerator.py: verify_device_map; transformers: from_pretrained under ZeRO-3"
)
def device_map_and_processes(document: Document, setup: Setup) -> Iterator[Hit]:
    """A device map spreads one process over GPUs; a distributed launch gives each GPU a process."""
    key, value = ("device_map",), document.get("device_map")
    if value is not None and _zero_stage(setup) == 3:
        what = "from_pretrained stops: ZeRO-3 does not allow a `device_map`"
        yield Hit(key, what, "remove it: ZeRO-3 places the parameters")
    elif value in ("auto", "balanced", "balanced_low_0", "sequential") and distributed(setup):
        what = f'"{value}" spreads the model over all GPUs of the machine, in every process; under a '
        what += "distributed launch Accelerator.prepare stops: `You can't train a model that has been loaded "
        what += "with device_map='auto' in any distributed mode`"
        yield Hit(key, what, 'remove it; for a quantised base {"": local_rank}')


@training_rule("error", "transformers 5: modeling_utils.py knows no load_in_8bit", versions="transformers>=5")
def load_in_8bit_was_removed(document: Document, _: Setup) -> Iterator[Hit]:
    """A quantization_config is the only way in transformers 5."""
    for name in ("load_in_8bit", "load_in_4bit"):
        if document.syntax == "python" and document.on(name) and "BitsAndBytesConfig" not in document.uses:
            what = f"from_pretrained of transformers 5 has no `{name}`: TypeError"
            yield Hit((name,), what, f"quantization_config=BitsAndBytesConfig({name}=True)")


@training_rule(
    "error",
    "transformers/modeling_utils.py: zero.Init is skipped; "
    "https://github.com/huggingface/accelerate/issues/3730",
)
def quantised_under_zero(document: Document, setup: Setup) -> Iterator[Hit]:
    """Every process loads all quantised weights, and these are not trained themselves."""
    stage = _zero_stage(setup)
    for name, bits in (("load_in_8bit", 8), ("load_in_4bit", 4)):
        if not document.on(name) or not distributed(setup):
            continue
        if not setup.lora:
            what = f"{bits}-bit weights get no gradients: without adapters the Trainer refuses to train"
            yield Hit((name,), what, "add LoRA adapters (PEFT)")
        if bits == 8 and stage == 3:
            what = "8-bit weights under ZeRO-3 are reported to fail on GPUs"
            fix = "ZeRO-2, or 4-bit with a float bnb_4bit_quant_storage"
            yield Hit((name,), what, fix, severity="warning")
        elif stage in (2, 3):
            what = "every process loads the entire quantised model before anything is sharded"
            yield Hit((name,), what, "plan host and GPU memory for one full copy per GPU", severity="note")


@training_rule("error", "transformers/integrations/deepspeed.py: fill_match, trainer_config_finalize")
def trainer_and_file_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer compares its arguments with the DeepSpeed file and stops if they differ."""
    for config in setup.of("deepspeed") if setup.reader == "trainer" else ():
        for key, name, default in _TRAINER_KEYS:
            value, given = config.get(*key), document.get(name)
            if value is None or value == AUTO or (given is None and document.syntax != "python"):
                continue
            if given is None and not _PLAIN & document.uses:  # others have other defaults
                continue
            have, by_default = (default, " by default") if given is None else (given, "")
            if isinstance(have, int | float) and value != have:
                what = f"`{name}` is {have}{by_default}, but {config.name} has `{'.'.join(key)}`: {value}. "
                what += "The Trainer stops: `Please correct the following DeepSpeed config values`"
                yield Hit((name,), what, f'"auto" for `{".".join(key)}`, or the same value in both')


@training_rule("error", "deepspeed/launcher/launch.py: -m")
def module_flag_and_file(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher imports the script as a module."""
    script = document.get("script")
    if document.get("module") in (True, "true") and isinstance(script, str) and script.endswith(".py"):
        what = f"`--module` requires a module's name, and {script} is a file: ModuleNotFoundError"
        yield Hit(("module",), what, "remove --module")


@training_rule("warning", "deepspeed/launcher/runner.py: CUDA_VISIBLE_DEVICES")
def visible_devices(document: Document, _: Setup) -> Iterator[Hit]:
    """The launcher sets the variable itself."""
    if document.get("launcher") != "deepspeed" or not document.has("CUDA_VISIBLE_DEVICES"):
        return
    flags = [name for name in ("include", "exclude", "num_gpus", "num_nodes") if document.has(name)]
    if flags:
        what = f"the deepspeed launcher overwrites it if --{flags[0]} is given"
        fix = "--include localhost:0,1 names the GPUs; remove CUDA_VISIBLE_DEVICES"
        yield Hit(("CUDA_VISIBLE_DEVICES",), what, fix)


@training_rule("error", "deepspeed/launcher/runner.py: Cannot specify num_nodes/gpus with include/exclude")
def include_and_number(document: Document, _: Setup) -> Iterator[Hit]:
    """Two ways to choose GPUs exclude each other."""
    if document.get("launcher") == "deepspeed" and (document.has("include") or document.has("exclude")):
        for name in ("num_gpus", "num_nodes"):
            if document.has(name):
                what = f"deepspeed stops: --{name} cannot be combined with --include or --exclude"
                yield Hit((name,), what, "keep one of the two")


@training_rule("error", "transformers/trainer.py: auto_find_batch_size")
def found_batch_size_and_stage_3(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer refuses it with ZeRO-3, which cannot restart with a smaller batch."""
    if document.on("auto_find_batch_size") and _zero_stage(setup) == 3:
        yield Hit(("auto_find_batch_size",), fix="remove it; `shardwise plan` shows what fits")


@training_rule("error", "run with 0.19.8 at stages 0, 2 and 3", versions=DEEPSPEED)
def optimizer_outside_engine(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed's engine steps its own optimizer and schedule, at the end of an accumulation."""
    stepped = document.get(STEPPED)
    if stepped is not None and stepped.given:
        what = f"`{stepped.optimizer}` was given to DeepSpeed: under ZeRO its parameters have no gradients, "
        what += "and nothing is trained, without an error"
        fix = f"{stepped.engine}.step(), which steps the optimizer that DeepSpeed made from it"
        yield Hit((STEPPED,), what, fix)
    elif stepped is not None:
        what = f"`{stepped.optimizer}.step()` bypasses the engine: it steps at every micro-batch, without a "
        what += "learning-rate schedule, or stops if ZeRO-2 accumulates gradients"
        yield Hit((STEPPED,), what, f"{stepped.engine}.step()", severity="warning")
