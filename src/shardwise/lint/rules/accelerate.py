"""Accelerate's file: launch, DeepSpeed plugin, FSDP."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, Severity, rule, training_rule
from shardwise.lint.read import found, is_file
from shardwise.lint.schema import accelerate_keys, as_number, by_key, closest, names, table
from shardwise.lint.setup import Setup, leaves_the_file
from shardwise.lint.shell_text import OPEN

IN_THE_FILE = names("in_the_deepspeed_file")

DS, FSDP, FILE = "deepspeed_config", "fsdp_config", "deepspeed_config_file"
LARGEST = 2**31 - 1
_COUNTS = by_key("accelerate_counts")  # minimum, maximum, and whether text is accepted as a number
_SECTION_FOR = {"DEEPSPEED": DS, "FSDP": FSDP, "MEGATRON_LM": "megatron_lm_config"}
_USUAL = table("usual_in_accelerate")  # what runs without a key
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2")
_LAUNCH = "accelerate/commands/launch.py: _validate_launch_command"
_EMPTY = re.compile(r"( *)[^\n]*:\s*(#.*)?\n(\s*(#.*)?\n)*+(?!\1[ -])")  # a key without value or section
_PLUGIN = "accelerate/utils/dataclasses.py: DeepSpeedPlugin"

accelerate_rule = partial(rule, versions="accelerate>=1.0,<2", kind="accelerate")


def launched_with(command: Document, file: Document) -> bool:
    """Whether `accelerate launch` gets this file."""
    named = Path(str(command.get("config_file"))).name if "config_file" not in command.flags else ""
    return command.get("launcher") == "accelerate" and named == Path(file.name).name


def certainly_missing(name: str, command: Document, setup: Setup) -> bool:
    """Whether a file is not where a command starts, which the path of its script shows."""
    named = (Path(one.name).name for one in setup.of("training", "python"))
    script = Path(str(command.get("script") or next((one for one in named if one in command.text), None)))
    last = Path(name).name
    above = (Path(), *Path(command.name).absolute().parents)
    starts = [] if script.is_absolute() else [folder for folder in above if is_file(folder / script)]
    made = re.search(
        rf"(?m)>\s*\S*{re.escape(last)}|^\s*(cd|cp|mv|ln|wget|curl|git|sed|envsubst)\b", command.text
    )
    there = Path(name).is_absolute() or any(is_file(folder / name) for folder in starts)
    return bool(starts) and not (made or there or last in setup.scripts)


def kind_of(document: Document) -> str:
    """`distributed_type`, in capitals; empty if the file has none."""
    return str(document.get("distributed_type") or "").upper()


@accelerate_rule("error", "accelerate/commands/config/config_args.py: from_yaml_file; launch.py")
def accelerate_unknown_key(document: Document, _: Setup) -> Iterator[Hit]:
    """An unknown top-level key stops accelerate; in `deepspeed_config` and `fsdp_config` it is ignored."""
    top, deepspeed, fsdp = accelerate_keys()
    sections = (((), top, True), ((DS,), deepspeed, False), ((FSDP,), fsdp, False))
    for above, known, refuses in sections:
        for name in document.section(*above):
            own = not above and document.get("compute_environment") == "AMAZON_SAGEMAKER"  # has its own keys
            if own or name in known or (above == (FSDP,) and f"fsdp_{name}" in known):
                continue
            near, key = closest(str(name), known), (*above, str(name))
            change: Change = Rename(key, near) if near and not document.has(*above, near) else Drop(key)
            effect = ": it stops with a ValueError" if refuses else f" in {''.join(above)}, and ignores it"
            what, given = f"accelerate has no such key{effect}", document.section(*key)
            parts = ((f"{one}_device", below) for one, below in given.items() if isinstance(below, Mapping))
            lost = [f"{one}: {below.get('device')}" for one, below in parts if one in known]
            what += f"; lost: {', '.join(lost)}" if lost else ""
            fix = f"did you mean `{near}`?" if near else f"{', '.join(lost)} in {DS}" if lost else ""
            wrong: Severity = "error" if refuses or near or lost else "warning"
            wrong = "note" if not refuses and document.get(*key) in _USUAL.get(near or name, ()) else wrong
            yield Hit(key, what, fix, () if lost else (change,), wrong)


def given_twice(document: Document, happens: str, *, stops: bool = False) -> Iterator[Hit]:
    """The keys that a section has twice. `stops`: also where the first is empty, so that nothing is lost."""
    for key, before in document.duplicates:
        what = f"`{key[-1]}` is given twice (first in line {before}): {happens}"
        rest = "".join(document.text.splitlines(keepends=True)[before - 1 :])
        empty = document.syntax == "yaml" and not stops and _EMPTY.match(rest)
        lines = [*{before, document.line(key)}]
        rows = {re.sub(r"\s#.*|,\s*$", "", document.text.split("\n")[at - 1]).strip() for at in lines}
        same = len(lines) > len(rows) and not stops and not isinstance(document.get(*key), Mapping | list)
        yield Hit(key, what, "keep one of the two", severity="note" if empty else "warning" if same else None)


@accelerate_rule("error", "accelerate/commands/config/config_args.py: yaml.safe_load")
def accelerate_duplicate_key(document: Document, _: Setup) -> Iterator[Hit]:
    """If a key is given twice the last is used, also for entire sections."""
    yield from given_twice(document, "accelerate uses this one, and silently ignores the first")


@accelerate_rule("error", _LAUNCH)
def accelerate_distributed_type(document: Document, _: Setup) -> Iterator[Hit]:
    """`distributed_type` decides which section is read; the others are ignored."""
    key, asked = ("distributed_type",), kind_of(document)
    given = [kind for kind, section in _SECTION_FOR.items() if document.section(section)]
    if not document.has(*key):
        what = "without `distributed_type` accelerate stops with a ValueError"
        yield Hit((), what, changes=(Put(key, given[0] if given else "DEEPSPEED"),))
        return
    for kind in given:
        if asked != kind:
            section = _SECTION_FOR[kind]
            what = f"`{section}` is ignored with distributed_type {asked}: plain data parallelism runs"
            severity: Severity = "warning" if asked == "NO" else "error"  # NO is chosen, not forgotten
            yield Hit((section,), what, f"distributed_type: {kind}, or remove the section", severity=severity)


@accelerate_rule("error", "accelerate/commands/launch.py, accelerate/utils/launch.py; run with 1.15.0")
def accelerate_kind_of_value(document: Document, _: Setup) -> Iterator[Hit]:
    """Sections must be sections, counts integers, some unquoted: else the launch stops, or FSDP1 runs."""
    for name in ("fsdp_backward_prefetch", "backward_prefetch"):
        asked = document.get(FSDP, name)
        if kind_of(document) == "FSDP" and asked is not None and str(asked).upper() not in _PREFETCH:
            what = f"torch has no {asked!r}: accelerate stops with a KeyError"
            yield Hit((FSDP, name), what, " or ".join(_PREFETCH[:3]))
    for name in (DS, FSDP):
        value = document.get(name)
        if value is not None and not isinstance(value, Mapping):
            ignored = "accelerate ignores it, and FSDP1 runs with its defaults"
            effect = "accelerate stops with an AttributeError" if name == DS else ignored
            what = f"`{name}` is {value!r} and must be a section: {effect}"
            yield Hit((name,), what, f"{name}: with `key: value` lines below it, indented")
    for key, (least, most, quotes) in _COUNTS.items():
        value = document.get(*key)
        number = as_number(value) if isinstance(value, str) else document.number(*key)
        if value is None or value == AUTO or (key[-1] == "num_processes" and number == -1):
            continue
        if number is None or isinstance(value, float) or not least <= number <= most:
            limits = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
            yield Hit(key, f"`{key[-1]}` is {value!r}: the launch stops", f"an integer {limits}")
        elif isinstance(value, str) and not quotes:
            what = f"`{key[-1]}` is the text {value!r}: accelerate stops with a TypeError"
            yield Hit(key, what, changes=(Put(key, number),))


@accelerate_rule("error", "accelerate/utils/deepspeed.py: HfDeepSpeedConfig.__init__; run with 1.15.0")
def accelerate_names_a_file(document: Document, setup: Setup) -> Iterator[Hit]:
    """The path of the DeepSpeed file is relative to the folder in which accelerate starts."""
    key, fix = (DS, FILE), "the path of the DeepSpeed JSON"
    value = document.get(*key)
    if value is not None and not isinstance(value, str):
        yield Hit(key, f"{value!r} is not a path: the processes stop when they read the file", fix)
    elif value is not None and not found([value], Path(document.name).parent):
        launches = [one for one in setup.of("training") if launched_with(one, document)]
        sure = launches and all(certainly_missing(value, one, setup) for one in launches)
        what = f"{value} is neither here nor next to this file: accelerate stops, unless it starts elsewhere"
        yield Hit(key, what, f"{fix}, preferably absolute", severity=None if sure else "warning")


@accelerate_rule("error", f"{_PLUGIN}._deepspeed_config_checks")
def accelerate_file_and_keys(document: Document, _: Setup) -> Iterator[Hit]:
    """Settings of the DeepSpeed file must not be repeated in accelerate's file."""
    keys: list[Key] = [(DS, name) for name in IN_THE_FILE if document.has(DS, name)]
    if document.get("mixed_precision") is not None:
        keys.append(("mixed_precision",))
    for key in keys if document.get(DS, FILE) else ():
        what = "together with `deepspeed_config_file` it stops accelerate with a ValueError"
        yield Hit(key, what, "remove it: the DeepSpeed file sets it", (Drop(key),))


@training_rule("error", "accelerate: config_args.py: load_config_from_file", versions="accelerate>=1.0,<2")
def deepspeed_file_for_accelerate(document: Document, setup: Setup) -> Iterator[Hit]:
    """`--config_file` takes accelerate's own YAML; --deepspeed_config_file is read with DeepSpeed on only."""
    kinds = [kind_of(one) for one in setup.of("accelerate") if launched_with(document, one)]
    if leaves_the_file(document) and "DEEPSPEED" not in kinds and (kinds or not document.has("config_file")):
        sure = kinds or document.has("multi_gpu") or document.has("use_fsdp")
        what = "without --use_deepspeed accelerate silently ignores it"
        what += "" if sure else ", unless default_config.yaml of this machine chooses DEEPSPEED"
        fix = "--use_deepspeed before the script's name"
        yield Hit((FILE,), what, fix, severity="error" if sure else "warning")
    named = str(document.get("config_file") or "").rpartition("/")[2]
    for one in setup.of("deepspeed") if named and document.get("launcher") == "accelerate" else ():
        if one.name.rpartition("/")[2] == named:
            what = f"{one.name} is DeepSpeed's, and accelerate stops at its keys: ValueError"
            yield Hit(("config_file",), what, f"--use_deepspeed --deepspeed_config_file {one.name}")


@accelerate_rule("error", "accelerate/utils/launch.py: args.mixed_precision.lower()")
def accelerate_precision(document: Document, _: Setup) -> Iterator[Hit]:
    """YAML reads a bare `no` as false, and accelerate requires a word."""
    key = ("mixed_precision",)
    value = document.get(*key)
    if isinstance(value, bool):
        what = "`no` without quotes is false in YAML: accelerate stops with an AttributeError"
        yield Hit(key, what, changes=(Put(key, "no"),))
    elif value not in (None, "no", "fp16", "bf16", "fp8"):
        yield Hit(key, f"accelerate has no precision {value!r}: it stops", "no, fp16, bf16 or fp8")


def as_deepspeed(document: Document) -> dict[str, Any]:
    """The DeepSpeed configuration that accelerate's plugin makes of its section."""
    given, precision = document.section(DS), document.get("mixed_precision")
    config = {key: given[key] for key in ("gradient_accumulation_steps", "gradient_clipping") if key in given}
    config |= {precision: {"enabled": True}} if precision in ("bf16", "fp16") else {}
    devices = {name: given.get(f"{name}_device") for name in ("offload_optimizer", "offload_param")}
    on = {name: {"device": device} for name, device in devices.items() if device in ("cpu", "nvme")}
    return {**config, "zero_optimization": {"stage": given.get("zero_stage", 2), **on}}


def _stage(document: Document) -> int | None:
    """The plugin's stage; None if a DeepSpeed file sets it."""
    if not document.section(DS) or document.get(DS, FILE):
        return None
    stage = document.number(DS, "zero_stage")
    return 2 if stage is None else int(stage)


@accelerate_rule("error", "deepspeed/runtime/zero/config.py: offload_param; run with 0.19.8")
def accelerate_offload_and_stage(document: Document, _: Setup) -> Iterator[Hit]:
    """Offloading that the stage does not support is silently ignored."""
    stage = _stage(document)
    for name, least in (("offload_param_device", 3), ("offload_optimizer_device", 1)):
        key = (DS, name)
        if stage is not None and stage < least and document.get(*key) not in (None, "none"):
            what = f"at stage {stage} it is silently ignored"
            yield Hit(key, what, f"zero_stage: {least}, or {name}: none")  # only the owner knows which
    for name in ("optimizer", "param"):
        key, path = (DS, f"offload_{name}_device"), f"offload_{name}_nvme_path"
        if document.get(*key) == "nvme" and document.get(DS, path) in (None, "none"):
            yield Hit(key, "`nvme` needs a folder: it fails late", f"{path}: a folder on a local NVMe disk")


@accelerate_rule("warning", f"{_PLUGIN}.__post_init__; accelerate/accelerator.py: get_state_dict")
def accelerate_stage_3_flags(document: Document, _: Setup) -> Iterator[Hit]:
    """ZeRO-3 needs a flag to save models; at other stages these flags have no effect."""
    stage, save = _stage(document), (DS, "zero3_save_16bit_model")
    for key in ((DS, "zero3_init_flag"), save):
        if stage is not None and stage < 3 and document.on(*key):
            what = f"it is for ZeRO-3; at stage {stage} it has no effect"
            yield Hit(key, what, changes=(Put(key, False),), severity="note")
    if stage == 3 and document.get(*save) is not True:
        what = "under ZeRO-3 get_state_dict stops without it, and the Trainer saves no model that loads"
        yield Hit(save, what, changes=(Put(save, True),))


@accelerate_rule("error", "accelerate/utils/launch.py: prepare_deepspeed_cmd_env, prepare_multi_gpu_env")
def accelerate_machines(document: Document, setup: Setup) -> Iterator[Hit]:
    """Processes are divided over the machines, which must find each other."""
    machines, count = document.number("num_machines") or 1, document.number("num_processes")
    if count is not None and count > 0 and count == int(count) and count % machines:
        what = f"{count:g} processes over {machines:g} machines: the remainder of the division is not started"
        yield Hit(("num_processes",), what, "num_processes counts all machines' GPUs")
    launch = [one for one in setup.of("training") if one.get("launcher") == "accelerate"]
    found = any(one.has("main_process_ip") or one.has(OPEN) for one in (document, *launch))
    found |= document.get(DS, "deepspeed_multinode_launcher") not in (None, "standard")  # a hostfile is read
    found |= document.has(DS, "deepspeed_hostfile")
    if machines > 1 and not found and kind_of(document) != "NO":
        what = "the machines do not find each other without `main_process_ip`"
        fix = "main_process_ip: the first machine's address, and main_process_port; or --main_process_ip"
        yield Hit(("num_machines",), what, fix, severity=None if launch else "warning")


@accelerate_rule("error", _LAUNCH)
def accelerate_processes(document: Document, setup: Setup) -> Iterator[Hit]:
    """The number of processes is not given: accelerate stops unless --num_processes is."""
    absent = not document.has("num_processes") and kind_of(document) not in ("NO", "")
    launch = next((one for one in setup.of("training") if launched_with(one, document)), None)
    given = launch and any(launch.has(name) for name in ("num_processes", OPEN))
    if (absent or document.number("num_processes") == -1) and not given:
        what = "no line gives the number of processes: accelerate stops" if launch else ""
        fix = "num_processes: one per GPU"
        yield Hit(("num_processes",), what, fix, severity=None if launch else "warning")


@accelerate_rule("error", _LAUNCH)
def accelerate_file_is_not_read(document: Document, setup: Setup) -> Iterator[Hit]:
    """Only `accelerate launch` reads the file: with another launcher none of it takes effect."""
    launches = [one for one in setup.of("training") if one.has("launcher")]
    last, others = Path(document.name).name, ("torchrun", "deepspeed", "python", "python3")
    own = "accelerate" in " ".join(one.text for one in launches) or last in setup.scripts
    if launches and not own and all(one.get("launcher") in others for one in launches):
        named = any(Path(str(one.get("config_file"))).name == last for one in launches)
        what = f"`{launches[0].get('launcher')}` starts the training, and does not read this file"
        fix = f"accelerate launch --config_file {last}, in place of it"
        yield Hit((), what, fix, severity=None if named else "warning", line=1)


@accelerate_rule("warning", f"{_LAUNCH}; accelerate/parallelism_config.py")
def accelerate_parallelism(document: Document, _: Setup) -> Iterator[Hit]:
    """`parallelism_config` drives torch's own parallelism, with FSDP2."""
    key = ("parallelism_config",)
    deepspeed = kind_of(document) == "DEEPSPEED"
    for name, value in document.section(*key).items() if deepspeed else ():
        if str(name).endswith(("tp_size", "cp_size", "dp_shard_size")) and value not in (None, 1):
            what = "with DeepSpeed only the sequence-parallel size counts; this is torch's own parallelism"
            yield Hit((*key, str(name)), what, "tensor_parallel.autotp_size in the DeepSpeed file")
    if document.section(*key) and not deepspeed and document.number(FSDP, "fsdp_version") != 2:
        fix = "distributed_type: FSDP with fsdp_version: 2"
        yield Hit(key, "accelerate refuses it without FSDP2", fix, severity="error")
