"""Accelerate's YAML: launch, DeepSpeed plugin, FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.lint.document import AUTO, Document, Key
from shardwise.lint.edit import Change, Drop, Put, Rename
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.read import found
from shardwise.lint.schema import accelerate_keys, as_number, closest
from shardwise.lint.setup import Setup

ACCELERATE = "accelerate>=1.0,<2"
IN_THE_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Refused beside `deepspeed_config_file`, which has them itself."""

DS, FSDP = "deepspeed_config", "fsdp_config"
LARGEST = 2**31 - 1
_COUNTS: tuple[tuple[Key, int, int, bool], ...] = (
    (("num_processes",), 1, LARGEST, True),
    (("num_machines",), 1, LARGEST, False),
    (("main_process_port",), 0, 65535, False),
    ((DS, "zero_stage"), 0, 3, True),
    ((DS, "gradient_accumulation_steps"), 1, LARGEST, True),
)
"""Whole numbers: key, least, most, and whether a text is taken for one."""
_SECTION_FOR = {"DEEPSPEED": DS, "FSDP": FSDP, "MEGATRON_LM": "megatron_lm_config"}


def kind_of(document: Document) -> str:
    """`distributed_type`, in capitals; empty where the file has none."""
    return str(document.get("distributed_type") or "").upper()


def _unknown(document: Document, _: Setup) -> Iterator[Hit]:
    top, deepspeed, fsdp = accelerate_keys()
    sections = (((), top, True), ((DS,), deepspeed, False), ((FSDP,), fsdp, False))
    for above, known, refuses in sections:
        values = document.section(*above) if above else document.values
        for name in values:
            if name in known or (above == (FSDP,) and f"fsdp_{name}" in known):
                continue
            near = closest(str(name), list(known))
            key = (*above, str(name))
            effect = "accelerate stops with a ValueError" if refuses else "accelerate passes over it"
            change: Change = (
                Rename(key=key, name=near) if near and not document.has(*above, near) else Drop(key=key)
            )
            yield Hit(
                key=key,
                what=f"accelerate knows no `{name}`{f' in {above[0]}' if above else ''}: {effect}",
                fix=f"did you mean `{near}`?" if near else "take it out",
                changes=(change,),
                severity="error" if refuses or near else "warning",
            )


def _duplicates(document: Document, _: Setup) -> Iterator[Hit]:
    for key, before in document.duplicates:
        yield Hit(
            key=key,
            what=f"`{key[-1]}` is given again (before in line {before}): accelerate takes this one, and "
            f"silently passes over the whole value in line {before}",
            fix="keep one of the two",
        )


def _type(document: Document, _: Setup) -> Iterator[Hit]:
    if not document.has("distributed_type"):
        section = next((name for name in _SECTION_FOR.values() if document.section(name)), DS)
        kind = next(kind for kind, name in _SECTION_FOR.items() if name == section)
        yield Hit(
            key=(),
            what="without `distributed_type` accelerate stops with a ValueError",
            fix=f"distributed_type: {kind}",
            changes=(Put(key=("distributed_type",), value=kind),),
        )
        return
    for kind, section in _SECTION_FOR.items():
        if document.section(section) and kind_of(document) != kind:
            yield Hit(
                key=(section,),
                what=f"`{section}` is not looked at with distributed_type {kind_of(document)}: plain data "
                "parallelism runs",
                fix=f"distributed_type: {kind}, or take the section out",
            )


def _wrong_kind(document: Document, _: Setup) -> Iterator[Hit]:
    for name in (DS, FSDP):
        value = document.get(name)
        if value is not None and not isinstance(value, Mapping):
            stops = "accelerate stops with an AttributeError"
            passed_over = "accelerate passes over it, and FSDP1 runs with its defaults"
            yield Hit(
                key=(name,),
                what=f"`{name}` is {value!r} and has to be a section: {stops if name == DS else passed_over}",
                fix=f"{name}: with `key: value` lines below it, indented",
            )
    for key, least, most, quotes in _COUNTS:
        value = document.get(*key)
        number = as_number(value) if isinstance(value, str) else document.number(*key)
        if value is None or value == AUTO or (key[-1] == "num_processes" and number == -1):
            continue
        if number is None or isinstance(value, float) or not least <= number <= most:
            limits = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
            yield Hit(
                key=key,
                what=f"`{key[-1]}` is {value!r}: the launch stops",
                fix=f"a whole number {limits}",
            )
        elif isinstance(value, str) and not quotes:
            yield Hit(
                key=key,
                what=f"`{key[-1]}` is the text {value!r}: accelerate stops with a TypeError",
                fix=f"{key[-1]}: {number}",
                changes=(Put(key=key, value=number),),
            )


def _names_a_file(document: Document, _: Setup) -> Iterator[Hit]:
    key = (DS, "deepspeed_config_file")
    value = document.get(*key)
    if value is None:
        return
    if not isinstance(value, str):
        yield Hit(
            key=key,
            what=f"{value!r} is no path: the processes stop when they read the file",
            fix="the path of the DeepSpeed JSON",
        )
    elif not found([value], Path(document.name).parent):
        yield Hit(
            key=key,
            what=f"there is no {value}, from here or beside this file: accelerate looks for it from where it "
            "is started, and stops with a ValueError",
            fix="the path of the DeepSpeed JSON, best an absolute one",
            severity="warning",
        )


def _beside_a_file(document: Document, _: Setup) -> Iterator[Hit]:
    if not document.get(DS, "deepspeed_config_file"):
        return
    keys: list[Key] = [(DS, name) for name in IN_THE_FILE if document.has(DS, name)]
    if document.get("mixed_precision") is not None:
        keys.append(("mixed_precision",))
    for key in keys:
        yield Hit(
            key=key,
            what=f"`{key[-1]}` beside `deepspeed_config_file` stops accelerate with a ValueError",
            fix="take it out: the DeepSpeed file says it",
            changes=(Drop(key=key),),
        )


def _precision_is_a_word(document: Document, _: Setup) -> Iterator[Hit]:
    if isinstance(document.get("mixed_precision"), bool):
        yield Hit(
            key=("mixed_precision",),
            what="`no` without quotes is false in YAML; accelerate stops on it with an AttributeError",
            fix="mixed_precision: 'no'",
            changes=(Put(key=("mixed_precision",), value="no"),),
        )
    elif document.get("mixed_precision") not in (None, "no", "fp16", "bf16", "fp8"):
        yield Hit(
            key=("mixed_precision",),
            what=f"accelerate knows no precision {document.get('mixed_precision')!r}: it stops",
            fix="no, fp16, bf16 or fp8",
        )


def _stage(document: Document) -> int | None:
    """The plugin's stage; None where a DeepSpeed file has it."""
    if not document.section(DS) or document.get(DS, "deepspeed_config_file"):
        return None
    stage = document.number(DS, "zero_stage")
    return 2 if stage is None else int(stage)


def _offload(document: Document, _: Setup) -> Iterator[Hit]:
    stage = _stage(document)
    for name, least in (("offload_param_device", 3), ("offload_optimizer_device", 1)):
        if stage is not None and stage < least and document.get(DS, name) not in (None, "none"):
            yield Hit(
                key=(DS, name),
                what=f"at stage {stage} it has no effect, silently",
                fix=f"zero_stage: {least}, or {name}: none",
                changes=(Put(key=(DS, name), value="none"),),
            )
    for name in ("optimizer", "param"):
        path = document.get(DS, f"offload_{name}_nvme_path")
        if document.get(DS, f"offload_{name}_device") == "nvme" and path in (None, "none"):
            yield Hit(
                key=(DS, f"offload_{name}_device"),
                what="`nvme` needs a folder: it fails late",
                fix=f"offload_{name}_nvme_path: a folder on a local NVMe disk",
            )


def _stage_3_flags(document: Document, _: Setup) -> Iterator[Hit]:
    stage = _stage(document)
    if stage is None:
        return
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        if stage < 3 and document.on(DS, name):
            yield Hit(
                key=(DS, name),
                what=f"it is for ZeRO-3; at stage {stage} it has no effect",
                fix=f"{name}: false",
                changes=(Put(key=(DS, name), value=False),),
                severity="note",
            )
    if stage == 3 and document.get(DS, "zero3_save_16bit_model") is not True:
        yield Hit(
            key=(DS, "zero3_save_16bit_model"),
            what="under ZeRO-3 get_state_dict stops without it, and the Trainer saves no model that loads",
            fix="zero3_save_16bit_model: true",
            changes=(Put(key=(DS, "zero3_save_16bit_model"), value=True),),
        )


def _machines(document: Document, _: Setup) -> Iterator[Hit]:
    machines, count = document.number("num_machines") or 1, document.number("num_processes")
    if count is not None and count > 0 and count == int(count) and count % machines:
        yield Hit(
            key=("num_processes",),
            what=f"{count:g} processes over {machines:g} machines: each starts the whole part, the rest is "
            f"lost",
            fix="num_processes counts all machines' GPUs",
        )
    if machines > 1 and not document.get("main_process_ip") and kind_of(document) != "NO":
        yield Hit(
            key=("num_machines",),
            what="the machines do not find each other without `main_process_ip`",
            fix="main_process_ip: the first machine's address, and main_process_port",
        )


def _one_process(document: Document, _: Setup) -> Iterator[Hit]:
    if document.number("num_processes") == -1 or (
        not document.has("num_processes") and kind_of(document) not in ("NO", "")
    ):
        yield Hit(
            key=("num_processes",),
            what="the number of processes is left open: accelerate stops unless --num_processes is given",
            fix="num_processes: one a GPU",
        )


def _parallelism(document: Document, _: Setup) -> Iterator[Hit]:
    section = document.get("parallelism_config")
    if not isinstance(section, Mapping) or not section:
        return
    if kind_of(document) == "DEEPSPEED":
        for name, value in section.items():
            if name.endswith(("tp_size", "cp_size", "dp_shard_size")) and value not in (None, 1):
                yield Hit(
                    key=("parallelism_config", name),
                    what="with DeepSpeed only the sequence-parallel size counts; this is torch's own "
                    "parallelism",
                    fix="tensor_parallel.autotp_size in the DeepSpeed file",
                )
    elif document.number(FSDP, "fsdp_version") != 2:
        yield Hit(
            key=("parallelism_config",),
            what="accelerate refuses it without FSDP2",
            fix="distributed_type: FSDP with fsdp_version: 2",
            severity="error",
        )


_LAUNCH = "accelerate/commands/launch.py: _validate_launch_command"
_PLUGIN = "accelerate/utils/dataclasses.py: DeepSpeedPlugin"


def rule(name: str, severity: str, happens: str, source: str, find: object) -> Rule:
    """One for accelerate's files."""
    return Rule(
        name=name,
        severity=severity,  # type: ignore[arg-type]
        kind="accelerate",
        happens=happens,
        source=source,
        versions=ACCELERATE,
        find=find,  # type: ignore[arg-type]
    )


RULES = (
    rule(
        "accelerate-unknown-key",
        "error",
        "An unknown key at the top stops accelerate; inside `deepspeed_config` and `fsdp_config` it is "
        "passed over.",
        "accelerate/commands/config/config_args.py: from_yaml_file; launch.py",
        _unknown,
    ),
    rule(
        "accelerate-duplicate-key",
        "error",
        "Of a key that is given twice the last is taken, whole sections too.",
        "accelerate/commands/config/config_args.py: yaml.safe_load",
        _duplicates,
    ),
    rule(
        "accelerate-distributed-type",
        "error",
        "`distributed_type` decides which section is read; the others are not looked at.",
        _LAUNCH,
        _type,
    ),
    rule(
        "accelerate-kind-of-value",
        "error",
        "Sections are sections and counts are whole numbers, some even without quotes; else the launch "
        "stops, or, for `fsdp_config`, another FSDP runs.",
        "accelerate/commands/launch.py, accelerate/utils/launch.py; run with 1.15.0",
        _wrong_kind,
    ),
    rule(
        "accelerate-names-a-file",
        "error",
        "The DeepSpeed file is looked for from where accelerate is started.",
        "accelerate/utils/deepspeed.py: HfDeepSpeedConfig.__init__; run with 1.15.0",
        _names_a_file,
    ),
    rule(
        "accelerate-file-and-keys",
        "error",
        "What the DeepSpeed file says may not be said again beside it.",
        f"{_PLUGIN}._deepspeed_config_checks",
        _beside_a_file,
    ),
    rule(
        "accelerate-precision",
        "error",
        "YAML reads a bare `no` as false, and accelerate wants a word.",
        "accelerate/utils/launch.py: args.mixed_precision.lower()",
        _precision_is_a_word,
    ),
    rule(
        "accelerate-offload-and-stage",
        "error",
        "Offloading that the stage does not have is ignored silently.",
        "deepspeed/runtime/zero/config.py: offload_param; run with 0.19.8",
        _offload,
    ),
    rule(
        "accelerate-stage-3-flags",
        "warning",
        "ZeRO-3 needs a flag to save models; at other stages these flags have no effect.",
        f"{_PLUGIN}.__post_init__; accelerate/accelerator.py: get_state_dict",
        _stage_3_flags,
    ),
    rule(
        "accelerate-machines",
        "error",
        "Processes are divided over the machines, which have to find each other.",
        "accelerate/utils/launch.py: prepare_deepspeed_cmd_env, prepare_multi_gpu_env",
        _machines,
    ),
    rule(
        "accelerate-processes",
        "warning",
        "The number of processes has to come from somewhere.",
        _LAUNCH,
        _one_process,
    ),
    rule(
        "accelerate-parallelism",
        "warning",
        "`parallelism_config` drives torch's own parallelism, with FSDP2.",
        f"{_LAUNCH}; accelerate/parallelism_config.py",
        _parallelism,
    ),
)
