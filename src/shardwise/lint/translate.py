"""Translate a configuration to a job to plan, and list the settings that the simulator ignores."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.engines.deepspeed.config import NEVER_RELEASE, PERSIST, PREFETCH
from shardwise.folders import packaged
from shardwise.job.schema import BUCKET, LEAST_BUCKET, MOST_BUCKET
from shardwise.lint.document import AUTO, Document
from shardwise.lint.rules.accelerate import DS, FILE, FSDP, as_deepspeed
from shardwise.lint.rules.batch import ACCUMULATION, MICRO, TOTAL
from shardwise.lint.rules.families import targets_of
from shardwise.lint.rules.keys import unknown_keys
from shardwise.lint.rules.offload import OPTIMIZER, PARAMETERS, place
from shardwise.lint.rules.parallel import degree_of
from shardwise.lint.rules.training import tool_of
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.schema import names
from shardwise.lint.script_settings import LORA
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN
from shardwise.strategy import Strategy
from shardwise.units import processes

FOREVER = 10**12  # from this many elements on, ZeRO-3's limits release nothing of any model
ACCELERATE_STAGE = 2  # the stage of `auto`, or of no stage, in Accelerate

_HALVES = re.compile(r"\b(?:bf16|fp16|SFTConfig)\b")  # the last computes in bf16 by default
_BITS = ("quantization_bit", "load_in_4bit", "load_in_8bit")
_MEANT = packaged("lint/foreign.toml")["keys"]  # what a key says of a job
_NOT_SIMULATED = [tuple(key.split(".")) for key in names("not_simulated")]


@dataclass(frozen=True, kw_only=True)
class Translated:
    """Changes (`key=value`) to a planned job, and what they leave out."""

    file: str
    changes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()  # values that are assumed because the files do not give them
    left_out: tuple[str, ...] = ()  # settings that are simulated with another value, or not simulated


def translate(setup: Setup, *, as_it_runs: bool = False) -> Iterator[Translated]:
    """Translate each configuration of the setup, whose `world_size` must be known.

    `as_it_runs`: a file that leaves `overlap_comm` out has DeepSpeed's default, not a job's.
    """
    for document in (*setup.of("deepspeed"), *setup.of("accelerate")):
        if document.kind == "deepspeed":
            yield _deepspeed(document, setup, as_it_runs=as_it_runs)
        elif document.section(DS) and not document.get(DS, FILE):
            made = replace(document, values=as_deepspeed(document))
            yield _deepspeed(made, setup, as_it_runs=as_it_runs)
        elif document.section(FSDP):
            yield _fsdp(document, setup)


def _deepspeed(document: Document, setup: Setup, *, as_it_runs: bool) -> Translated:
    degree = max(1, degree_of(document))
    stage, assumed = stage_of(document), []
    if stage is None:
        stage = ACCELERATE_STAGE
        assumed.append(f"stage {stage}, the meaning of `auto` in Accelerate")
    live = document.number(ZERO, "stage3_max_live_parameters") or 0
    reuse = document.number(ZERO, "stage3_max_reuse_distance") or 0
    asked = document.number(ZERO, "reduce_bucket_size")
    strategy: dict[str, Any] = {
        "engine": "deepspeed",
        "stage": stage,
        "offload_optimizer": place(document, OPTIMIZER) if stage else "none",
        "offload_parameters": place(document, PARAMETERS) if stage == 3 else "none",
        "reshard": not (stage == 3 and min(live, reuse) >= FOREVER),
    }
    overlaps = document.get(ZERO, "overlap_comm")
    waits = overlaps is False or (overlaps is None and as_it_runs and stage < 3)
    if document.get(ZERO, "reduce_bucket_size") == AUTO:  # a job leaves it out
        bucket = Strategy(**strategy).bucket_size
    else:
        bucket = BUCKET if asked is None else int(min(max(asked, LEAST_BUCKET), MOST_BUCKET))
        if stage and (bucket != BUCKET or strategy["offload_optimizer"] != "none"):
            strategy["bucket"] = bucket
    strategy |= {"overlap_comm": False} if waits and stage == 2 else {}
    strategy |= {"tensor_parallel": degree} if degree > 1 else {}
    group, world = document.number(ZERO, "zero_hpz_partition_size") or 1, setup.world_size or 1
    if stage == 3 and 1 < group < world and world % group == 0:
        strategy["shard_group"] = int(group)
    precision = _precision(document, setup, assumed)
    clip = document.number("gradient_clipping")
    batch = _batch(document, setup, assumed, degree=degree)
    changes = [f"optimizer.clip_norm={1.0 if clip is None else clip}", *batch, *_script(setup, assumed)]
    left_out = tuple(_left_out(document, stage, bucket, waits=waits))
    return replace(_translated(document, strategy, precision, changes, assumed), left_out=left_out)


def _fsdp(document: Document, setup: Setup) -> Translated:
    assumed = [] if document.number(FSDP, "fsdp_version") == 2 else ["FSDP2 instead of FSDP1"]
    names_ = ("fsdp_reshard_after_forward", "reshard_after_forward", "fsdp_sharding_strategy")
    words = re.findall(r"\w+", str(document.get("fsdp")).upper())  # the Trainer's `full_shard offload`
    asked = {*words, *(str(document.get(FSDP, name)) for name in names_)}
    reshard = not asked & {"False", "false", "SHARD_GRAD_OP", "2"}
    strategy: dict[str, Any] = {"engine": "fsdp2", "reshard": reshard}
    if asked & {"NO_SHARD", "3"}:
        strategy = {"engine": "ddp"}
    offloads = any(document.on(FSDP, name) for name in ("fsdp_offload_params", "offload_params"))
    if offloads or "OFFLOAD" in asked:
        strategy["offload_parameters"] = "cpu"
    keys = ("fsdp_activation_checkpointing", "activation_checkpointing")  # accelerate's, and Axolotl's
    checkpointing = any(document.on(FSDP, name) for name in keys)
    changes = [*_batch(document, setup, assumed), *_script(setup, assumed, checkpointing=checkpointing)]
    changes += ["train.checkpointing=full"] * checkpointing
    half = document.get("mixed_precision")
    return _translated(document, strategy, half if half in ("bf16", "fp16") else "fp32", changes, assumed)


def _translated(
    document: Document, strategy: dict[str, Any], precision: str, changes: list[str], assumed: list[str]
) -> Translated:
    if "nvme" in strategy.values():
        strategy["nvme_path"] = "."  # the folder does not change a prediction
    all_changes = (f"strategy={json.dumps(strategy)}", f"train.precision={precision}", *changes)
    return Translated(file=document.name, changes=all_changes, assumed=tuple(assumed))


def _precision(document: Document, setup: Setup, assumed: list[str]) -> str:
    for name in ("bf16", "bfloat16", "fp16"):
        if document.on(name, "enabled"):
            return name.replace("bfloat16", "bf16")
    auto = [name for name in ("bf16", "fp16") if document.get(name, "enabled") == AUTO]
    if auto or setup.hugging_face:
        launched = [one.get("mixed_precision") for one in setup.of("accelerate")]
        for name in ("bf16", "fp16"):
            if setup.training(name) is True or name in launched:
                return name
    if auto and not _without_halves(setup):
        assumed.append(f"{auto[0]}, which the Trainer's arguments decide")
        return auto[0]
    return "fp32"


def _without_halves(setup: Setup) -> bool:
    """Whether all of the Trainer's arguments are known, and none asks for halves: by default they are off."""
    calls = {name.rpartition(".")[2] for one in setup.of("training") for name in one.uses}
    if "HfArgumentParser" in calls:
        commands = [one for one in setup.of("training") if one.has("launcher")]
        known = bool(commands) and not any(one.has(OPEN) for one in commands)
    else:
        called = calls & {*names("trainers_arguments")}
        known = bool(called) and not {f"{one}(**)" for one in called} & calls
    return known and "TrainingArguments" in setup.scripts and not _HALVES.search(setup.scripts)


def _batch(document: Document, setup: Setup, assumed: list[str], *, degree: int = 1) -> list[str]:
    """Micro- and global batch of the file, else the script or planner. `degree`: GPUs that share a layer."""
    world = max(1, (setup.world_size or 1) // degree)
    micro = document.number(MICRO) or _number(setup, "per_device_train_batch_size", "micro_batch_size")
    steps = document.number(ACCUMULATION) or _number(setup, "gradient_accumulation_steps")
    total = document.number(TOTAL)
    if micro is None and total is not None:
        micro = total // (world * (steps or 1))
    if micro is None or micro < 1:
        assumed.append("the best micro-batch: no file gives one")
        return []
    if steps is None:
        steps = max(1, total // (world * micro)) if total else 1
    rows = int(micro * steps) * world
    if total is not None and degree == 1 and setup.world_size is not None and rows != total:
        assumed.append(f"{rows} rows per step: {TOTAL} {total:g} is impossible with {processes(world)}")
    return [f"train.micro_batch={int(micro)}", f"train.global_batch={rows}"]


def _number(setup: Setup, *names: str) -> int | None:
    value = setup.training(*names)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _script(setup: Setup, assumed: list[str], *, checkpointing: bool = False) -> list[str]:
    """Settings that only the script has: checkpointing, adapters and their base, sequence length."""
    changes = []
    recompute = setup.training("gradient_checkpointing", "activation_checkpointing")
    if recompute is None and any(tool_of(one) == "LLaMA-Factory" for one in setup.of("training")):
        recompute = not setup.training("disable_gradient_checkpointing")
    if isinstance(recompute, bool):
        changes.append(f"train.checkpointing={'full' if recompute else 'none'}")
    elif not checkpointing:
        assumed.append("the best activation checkpointing: no file says whether the script uses it")
    rank = _number(setup, LORA, "lora_r", "lora_rank")
    if rank is None and setup.training("finetuning_type") == "lora":
        rank = 8  # LLaMA-Factory's
    length = _number(setup, "max_seq_length", "max_length", "cutoff_len", "sequence_len")
    counts = {"model.lora.rank": rank, "data.sequence_length": length}
    if rank is not None:
        said = (_MEANT[name].get(str(setup.training(name)).lower(), []) for name in _BITS)
        changes += [*next(filter(None, said), []), *_targets(setup, assumed)]
    return changes + [f"{key}={count}" for key, count in counts.items() if count is not None]


def _targets(setup: Setup, assumed: list[str]) -> list[str]:
    """The layers with adapters, where the files list them."""
    found = (value for one in setup.of("training") for _, value, _ in targets_of(one, setup))
    given = next(found, None)
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return [f"model.lora.targets={json.dumps(given)}"]
    if given not in ("all", "all-linear") and setup.training("lora_target_linear") is not True:
        assumed.append("adapters on all linear layers: no file lists the layers")
    return []


def _left_out(document: Document, stage: int, bucket: int, *, waits: bool) -> list[str]:
    """Settings with a value that the simulator does not support."""
    simulated = {"reduce_bucket_size": bucket}
    at_3 = {"stage3_prefetch_bucket_size": PREFETCH, "stage3_param_persistence_threshold": PERSIST}
    simulated |= at_3 if stage == 3 else {"allgather_bucket_size": bucket}
    given = ((name, document.get(ZERO, name), used) for name, used in simulated.items())
    found = [f"{n} {v}: simulated with {used:,}" for n, v, used in given if v not in (None, used)]
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        value = document.number(ZERO, name)
        if stage == 3 and value is not None and value not in (1e9, NEVER_RELEASE) and value < FOREVER:
            found.append(f"{name} {value:g}: simulated with 1e9")
    for key in _NOT_SIMULATED:
        value = document.get(*key)
        if value is True or value not in (None, False, 1, AUTO):  # 1: a group of one, or all of the optimizer
            found.append(f"{'.'.join(key)}: not simulated")
    found += [f"{'.'.join(key)}: DeepSpeed has no such key" for key in unknown_keys(document)]
    if waits and stage in (1, 3):
        default = "" if document.get(ZERO, "overlap_comm") is False else ", DeepSpeed's default"
        found.append(f"overlap_comm false{default}: simulated with true")
    kind = str(document.get("optimizer", "type") or "AdamW")
    if kind.lower() not in ("adam", "adamw"):
        found.append(f"optimizer {kind}: simulated with AdamW")
    return found
