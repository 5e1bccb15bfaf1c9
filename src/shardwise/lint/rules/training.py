"""Scripts and arguments: against the configuration that they run with."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.finding import Hit, Severity, training_rule
from shardwise.lint.read import imported
from shardwise.lint.rules.accelerate import DS, FILE, FSDP
from shardwise.lint.rules.program import calls, known_values, tree_of, values_of, walk
from shardwise.lint.rules.zero import stage_of
from shardwise.lint.schema import names, table
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_names import derived_of, nested
from shardwise.lint.script_settings import ARGUMENT_CLASSES
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN

_TRAINER_KEYS, _PLUGIN_KEYS = (
    [(tuple(key.split(".")), name, next(iter(default), None)) for key, name, *default in rows]
    for rows in (table("compared")[of] for of in ("trainer", "plugin"))
)
"""What the Trainer compares, and its default if the script gives no value; the same of Accelerate's file."""
DEFAULTS = {"logging_steps": 500, "save_steps": 500, "save_strategy": "steps", "eval_strategy": "no"}
PLAIN, _OF_TRL = names("trainers_arguments"), names("changed_by_trl")

_OF_FRAMEWORKS = {"base_model", "finetuning_type", "cutoff_len"}
WORDS: dict[str, str] = table("words_of_the_trainer")
_REPLACED = dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "scheduler")
_REPLACED |= dict.fromkeys(("optim", "optimizer"), "optimizer")
_SHAPES: dict[str, tuple[str, str]] = table("schedule_shapes")  # the Trainer's word for it, and what it does
_CHANGED = re.compile(r"(?:from|import) (trl|transformers|peft|unsloth)\b")
_OWN_LOOP = re.compile(r"\.backward\(|FullyShardedData|DistributedDataPar|fully_shard\(")
_PLEASE = "`Please correct the following DeepSpeed config values`"


def zero_stage(setup: Setup) -> int | None:
    """The stage that a file or a flag says."""
    stages = [stage_of(document) for document in setup.of("deepspeed")]
    stages += [int(n) for d in setup.of("accelerate") if (n := d.number(DS, "zero_stage")) is not None]
    return next((one for one in (*stages, setup.training("zero_stage")) if isinstance(one, int)), None)


def has_engine(document: Document, setup: Setup) -> bool:
    """Whether a file, the command or a plugin of a script's Accelerator turns DeepSpeed on."""
    launched = [one for one in setup.of("training") if one.get("launcher") == "accelerate"]
    asked = setup.of("deepspeed") or any(one.on("use_deepspeed") for one in launched)
    words = (word for call in calls(document, "Accelerator") for word in call.keywords)
    given = (values_of(document).meant(one.value) for one in words if one.arg == "deepspeed_plugin")
    plugin = any(isinstance(one, ast.Call) for one in given)
    return bool(asked or plugin or any(one.section(DS) for one in setup.of("accelerate")))


def first_imports(document: Document) -> dict[str, int]:
    """Unsloth and the libraries that it changes: the lines where a script first imports them, at its top."""
    rows = [(one.lineno, _CHANGED.match(ast.unparse(one))) for one in tree_of(document).body]
    return {found[1]: line for line, found in reversed(rows) if found}


def distributed(setup: Setup) -> bool:
    """Whether a file or a flag says that several processes run."""
    launcher = setup.training("launcher") not in (None, "python", "python3")
    launcher |= setup.training("deepspeed") not in (None, False)
    shell = "\n".join(one.text for one in setup.of("training", "shell"))
    alone = re.search(r"(?m)^[^#\n]*CUDA_VISIBLE_DEVICES=[\"']?\d+\b(?!,)", shell)  # one GPU is shown
    several = launcher or bool(setup.of("deepspeed") or setup.of("accelerate"))
    return (several and not alone) or (setup.world_size or 0) > 1


@training_rule("error", "accelerate/accelerator.py: verify_device_map; transformers: from_pretrained")
def device_map_and_processes(document: Document, setup: Setup) -> Iterator[Hit]:
    """A device map spreads one process over GPUs; a distributed launch gives each GPU a process."""
    key = ("device_map",)
    given = [] if document.syntax == "python" else [(document.get("device_map"), document.line(key))]
    known = known_values(document, setup)
    for call in calls(document, "from_pretrained"):
        if known.runs(call) and known.flow.certain(call):  # not only with 8 bits, or in a debugger
            line, value = known.arguments(call).get(key, (0, None))
            given.append((None if value == UNKNOWN else value, line))
    value, line = next(((value, line) for value, line in given if value is not None), (None, 0))
    if value is not None and zero_stage(setup) == 3:
        what = "from_pretrained stops: ZeRO-3 does not allow a `device_map`"
        yield Hit(key, what, "remove it: ZeRO-3 places the parameters", line=line)
    elif value in ("auto", "balanced", "balanced_low_0", "sequential") and distributed(setup):
        what = f'"{value}" spreads the model over all GPUs, in every process: '
        stops = "Accelerator.prepare stops, `You can't train a model that has been loaded with "
        stops += "device_map='auto' in any distributed mode`"
        own = setup.reader is None and _OWN_LOOP.search(setup.scripts)
        what += "they share the memory of each" if own else stops
        severity: Severity | None = "warning" if own else None
        yield Hit(key, what, 'remove it; for a quantised base {"": local_rank}', severity=severity, line=line)


def tool_of(document: Document) -> str:
    """The framework that certainly reads a file."""
    rows = document.get("datasets") or document.get("pretraining_dataset")
    listed = isinstance(rows, list) and all(isinstance(one, Mapping) and "path" in one for one in rows)
    if document.has("base_model") and listed:
        return "Axolotl"
    factory = document.has("model_name_or_path") and document.has("finetuning_type")
    return "LLaMA-Factory" if factory and document.syntax != "python" else ""


@training_rule("warning", "https://github.com/huggingface/accelerate/issues/3730")
def quantised_under_zero(document: Document, setup: Setup) -> Iterator[Hit]:
    """Every process loads all quantised weights, which ZeRO does not shard."""
    stage, factory = zero_stage(setup), tool_of(document) == "LLaMA-Factory"
    stored = factory or setup.training("bnb_4bit_quant_storage") is not None  # it says so itself
    for name in names("quantising") if distributed(setup) else ():
        value = document.get(name)
        if value in (None, False, 0, 16, 32) or value == "full":
            continue
        bits = 8 if value == 8 or "8" in name else 4
        if stage == 3 and (bits == 8 or not stored):
            what = f"{bits}-bit weights kept as integers are not sharded: frameworks refuse it, or it fails"
            fix = "ZeRO-2, or 4-bit with bnb_4bit_quant_storage in the training's format (bf16)"
            yield Hit((name,), what, fix, severity="warning")
        elif stage in (2, 3):
            what = "every process loads the entire quantised model before anything is sharded"
            yield Hit((name,), what, "plan host and GPU memory for one full copy per GPU", severity="note")


@training_rule("error", "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1945")
def quantised_under_fsdp2(document: Document, setup: Setup) -> Iterator[Hit]:
    """FSDP2 gathers 4-bit codes that are stored as floating-point numbers as such, which changes them."""
    files = [one for one in setup.of("accelerate") if one.number(FSDP, "fsdp_version") == 2]
    own = any(one.rpartition(".")[2] == "fully_shard" for one in document.uses)
    formats = [one.get("mixed_precision") for one in files] + [setup.training("mixed_precision")]
    formats += [name for name in ("bf16", "fp16") if setup.training(name) is True]
    formats += ["bf16"] * ("param_dtype=torch.bfloat16" in document.text)
    used = next((one for one in formats if one in ("bf16", "fp16")), None)
    storage = str(document.get("bnb_4bit_quant_storage")).removeprefix("torch.")
    two = files or own or setup.training("fsdp_version") == 2
    if used and two and setup.world_size != 1 and storage in ("bfloat16", "float16", "float32"):
        same = {"bf16": "bfloat16", "fp16": "float16"}[used] == storage
        what = "the copy before gathering (torch._foreach_copy_, on CUDA) replaces all codes that are NaN as "
        what = f"{what}{storage} numbers" if same else f"FSDP2 casts the {storage} numbers to {used}"
        what += ": the 4-bit base computes with other weights on several GPUs, without an error"
        fix = "remove it: as uint8 the base is not sharded (fully_shard: ignored_params=); or ZeRO-3"
        yield Hit(("bnb_4bit_quant_storage",), what, fix)


def _compared(config: Document, document: Document, setup: Setup) -> Iterator[tuple[Key, Any, str, Any]]:
    """(key, value of the file, name of the argument, its default) of what the Trainer compares."""
    axolotls = {_TRAINER_KEYS[0][1]: "micro_batch_size"} if document.syntax == "yaml" else {}
    for key, name, default in _TRAINER_KEYS if config.kind == "deepspeed" else _PLUGIN_KEYS:
        yield key, config.get(*key), name if document.has(name) else axolotls.get(name, name), default
    precision = config.get("mixed_precision")
    if precision in ("bf16", "fp16") and not any(setup.training(name) is True for name in ("bf16", "fp16")):
        yield ("mixed_precision",), True, precision, False


@training_rule("error", "transformers/integrations/deepspeed.py: fill_match; run with 5.23, Accelerate 1.15")
def trainer_and_file_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer compares its arguments with the DeepSpeed or Accelerate file, and stops if they differ."""
    plugins = (one for one in setup.of("accelerate") if one.section(DS) and not one.get(DS, FILE))
    for config in (*setup.of("deepspeed"), *plugins):
        absent, differing = [], dict[str, dict[Key, Any]]()
        for key, value, name, default in _compared(config, document, setup):
            given, steps = document.get(name), name in ("warmup_steps", "max_steps")
            if value is None or value == AUTO or (steps and not (isinstance(given, int) and given > 0)):
                continue
            if given is None and setup.reader == "trainer" and not document.has(name):
                absent += [(key, value, name, default)] if setup.training(name) is None else []
            elif isinstance(given, int | float) and value != given:
                differing.setdefault(name, {})[key] = value
        for name, keys in differing.items():
            yield from _differs(config, setup, keys, name, document.get(name))
        called = _called_for_arguments(document) if document.syntax == "python" and absent else ("", "")
        absent = [row for row in absent if not _is_set(document, *called, row[2])]
        for key, value, name, default in absent if called[0] else ():
            if value != default:
                what = f"`{name}` is {default} by default, but {config.name} has `{'.'.join(key)}`: "
                what += f"{json.dumps(value)}. The Trainer stops: {_PLEASE}"
                fix = f'"auto" for `{".".join(key)}`, or {name}={value!r} in the arguments'
                other = {"bf16": "fp16", "fp16": "bf16"}.get(name)
                if other and document.on(other):
                    fix += f"; `{other}` of the arguments needs a section `{other}` in the file"
                yield Hit((called[0],), what, fix)
        missing = [row for row in absent if row[1] != row[3]]
        yield from _other_format(document, config, [row[2] for row in missing])
        parsed = not setup.scripts or re.search(r"Parser|parse_args|[Ff]ire|argv", setup.scripts)
        known = document.syntax == "shell" and not document.has(OPEN) and ".y" not in document.text
        if missing and known and parsed:
            each = [f"`--{name}` (default {d}; file: {json.dumps(v)})" for _, v, name, d in missing]
            words = ", ".join(dict.fromkeys(each))  # the optimizer and the scheduler have the learning rate
            others = {"bf16": "fp16", "fp16": "bf16"}  # the Trainer refuses both
            certain = any(document.on(others.get(name, "")) for _, _, name, _ in missing)
            stops = "stops" if certain else "may stop"
            what = f"{config.name} gives {words}, and the command does not: the Trainer {stops}, {_PLEASE}"
            fix = '"auto" in the file, or the same values in both'
            yield Hit(("script",), what, fix, severity="error" if certain else "warning")


def _called_for_arguments(document: Document) -> tuple[str, str]:
    """The class of the Trainer's arguments that a script calls, and its text if it is the script's own.

    Empty where arguments are handed on that no call shows.
    """
    own = derived_of(tree_of(document), ARGUMENT_CLASSES)
    for call in calls(document, *ARGUMENT_CLASSES, *own):
        name, by = ast.unparse(call.func), name_of(call.func).rpartition(".")[2]
        if by in own or name in document.uses:
            given = any(one.arg is None for one in call.keywords) or f"{name}(**)" in document.uses
            return ("", "") if given else (by, ast.unparse(own[by]) if by in own else "")
    return "", ""


def _is_set(document: Document, called: str, text: str, name: str) -> bool:
    """Whether a class of arguments may have a default of its own; TRL's bf16 is off where fp16 is on."""
    of_trl = any(one in f"{called} {text}" for one in names("trl_arguments")) and name in _OF_TRL
    own = re.search(rf"\b({name}|__init__|__post_init__)\b", text)
    return own is not None or (of_trl and not (name == "bf16" and document.on("fp16")))


def _other_format(document: Document, config: Document, missing: list[str]) -> Iterator[Hit]:
    """fp16 in a YAML of LLaMA-Factory, and bf16 in DeepSpeed's file, or the other way round."""
    factory = document.syntax == "yaml" and document.has("finetuning_type")
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")) if factory else ():
        if name in missing and document.on(other):
            what = f"`{other}` is on, and so is `{name}` in {config.name}. The Trainer stops: {_PLEASE}"
            yield Hit((other,), what, 'the same in both, or "auto" in the file')


def _differs(config: Document, setup: Setup, keys: dict[Key, Any], name: str, given: Any) -> Iterator[Hit]:
    said = {f"`{'.'.join(key)}`": value for key, value in keys.items()}
    has = " and ".join(f"{key}: {json.dumps(value)}" for key, value in said.items())
    what = f"`{name}` is {given}, but {config.name} has {has}. "
    fix = f'"auto" for {" and ".join(said)}, or the same value in both'
    if setup.reader == "trainer":
        yield Hit((name,), f"{what}The Trainer stops: {_PLEASE}", fix)
    elif setup.reader == "accelerate" and name == "gradient_accumulation_steps":
        what += "The Trainer stops; a script with its own Accelerator accumulates as the file says"
        yield Hit((name,), what, "the same value in both")


@training_rule("error", "transformers/trainer.py: auto_find_batch_size")
def found_batch_size_and_stage_3(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer refuses it with ZeRO-3, which cannot restart with a smaller batch."""
    if document.on("auto_find_batch_size") and zero_stage(setup) == 3:
        yield Hit(("auto_find_batch_size",), fix="remove it; `shardwise plan` shows what fits")


@training_rule("error", "transformers/trainer.py: Trainer.__init__; read in 5.23")
def fsdp_and_deepspeed(document: Document, _: Setup) -> Iterator[Hit]:
    """The Trainer takes one of `fsdp` and `deepspeed`: with both it stops with a ValueError."""
    if document.get("fsdp") and document.get("deepspeed"):
        yield Hit(("fsdp",), fix="remove `fsdp`, or remove `deepspeed`")


def given_to_trainers(
    document: Document, setup: Setup, *, every: bool = False
) -> list[tuple[dict[Any, Any], int | None]]:
    """What calls, commands and files give the Trainer, and lines; `every`: whoever reads, with defaults."""
    groups = list[tuple[dict[Any, Any], int | None]]()
    values = known_values(document, setup) if every else values_of(document)
    mine = derived_of(tree_of(document), ARGUMENT_CLASSES)
    for call in calls(document, *ARGUMENT_CLASSES, *mine):
        given = nested(values.arguments(call))
        if (called := ast.unparse(call.func)) in document.uses or called in mine:
            own = {} if called.endswith("TrainingArguments") else {"logging_steps": None}
            groups.append((DEFAULTS | own | given, call.lineno))
    trainers = every or setup.reader == "trainer" or document.has(_TRAINER_KEYS[0][1])
    if document.syntax != "python" and trainers:
        scripts = setup.of("training", "python")
        said = [given for one in scripts for given, _ in given_to_trainers(one, setup, every=True)]
        written = said[0] if len(said) == 1 else {}  # by the only call, which reads this file
        open_ = document.syntax != "yaml" or document.has("base_model")  # Axolotl's, and those of a script
        defaults = {name: None if open_ else written.get(name, value) for name, value in DEFAULTS.items()}
        groups.append((defaults | {**document.values}, None))
    return groups


@training_rule("warning", "transformers/integrations/deepspeed.py: deepspeed_optim_sched; read in 5.23")
def file_replaces_argument(document: Document, setup: Setup) -> Iterator[Hit]:
    """A scheduler or optimizer in the DeepSpeed file replaces the one that the Trainer's argument names."""
    for config in setup.of("deepspeed") if setup.reader == "trainer" else ():
        for name, section in _REPLACED.items():
            asked = str(document.get(name) or "").rpartition(".")[2].lower()
            used = config.get(section, "type")
            if not asked or not isinstance(used, str) or used == AUTO:
                continue
            alike, does = _SHAPES.get(used, (used.lower().removesuffix("w"), ""))
            if not asked.startswith(alike) or (section == "optimizer" and re.search("[48]bit|paged", asked)):
                what = f"`{name}` is {asked}, but the Trainer silently uses {used} of {config.name}{does}"
                yield Hit((name,), what, f"remove `{section}` from {config.name}, or make both the same")
        yield from _left_by_the_file(document, config)


def _left_by_the_file(document: Document, config: Document) -> Iterator[Hit]:
    """What the `scheduler` or the `optimizer` of the DeepSpeed file silently leaves out."""
    classes = [*walk(tree_of(document), ast.ClassDef)]
    own = [one for one in classes if any(name_of(base).endswith("Trainer") for base in one.bases)]
    for method in (one for made in own for one in made.body if isinstance(one, ast.FunctionDef)):
        section = method.name.removeprefix("create_")
        if section in _REPLACED.values() and config.section(section) and method.name != section:
            what = f"the Trainer never calls `{method.name}`: it uses the `{section}` of {config.name}"
            yield Hit((), what, f"remove one of the two, here or in {config.name}", line=method.lineno)
    given = config.section("optimizer", "params")
    decided = {*given, *(["lr"] if config.section("scheduler") else [])}  # a schedule sets the rate
    decided |= {"weight_decay"} if "torch_adam" in given else set()  # whose default is another
    adam = str(config.get("optimizer", "type")).lower() in ("adam", "adamw")
    for part, name, default in table("compared")["unfilled"] if adam else ():
        value = document.number(name)
        if part not in decided and value not in (None, default):
            what = f"{config.name} has no `optimizer.params.{part}`: `{name}` {value:g} is silently ignored, "
            yield Hit((name,), f"{what}and DeepSpeed takes its default", f'"{part}": "auto" there')


@training_rule("note", "check reads files and runs nothing")
def not_read(document: Document, setup: Setup) -> Iterator[Hit]:
    """Values that only a run knows, and settings of a framework, are not judged."""
    others = any(one.syntax != "python" for one in setup.of("training"))
    named = {Path(one.name).resolve() for one in setup.documents}
    others |= any(one.resolve() in named for one in imported(document))  # a module with the values
    open_ = [f"`{one.removesuffix('(**)')}(**...)`" for one in sorted(document.uses) if one.endswith("(**)")]
    open_ += ["the command's flags"] * ("HfArgumentParser" in document.uses and not others)
    if document.syntax == "python":
        judged = dict.fromkeys([*(name for _, name, _ in _TRAINER_KEYS), *WORDS])
        known = [given for given, _ in given_to_trainers(document, setup, every=True)]
        given = {name for one in known for name, value in one.items() if value not in (None, UNKNOWN)}
        unknown = [one for one in judged if document.has(one) and setup.training(one) is None]
        open_ += [f"`{name}`" for name in unknown if name not in given]
    if open_:
        what = f"only a run knows the values of {', '.join(open_)}: no rule judged them"
        fix = "write them in the script"
        fix = fix if others else f"name the command or file with the values, too, or {fix}"
        yield Hit((), what, fix)
    elif _OF_FRAMEWORKS & document.values.keys():
        what = "only batch, precision, quantisation, LoRA and the Trainer's arguments are judged of this file"
        yield Hit((), what, f"`shardwise init --from {document.name}` reads more, and says what it leaves")
