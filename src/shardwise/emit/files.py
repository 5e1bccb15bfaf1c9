"""Everything that starts a training with a strategy: of the user's own script, or of shardwise itself."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from shardwise.emit import cluster
from shardwise.emit.batch import YOURS, batch_script, own_script
from shardwise.emit.request import Request
from shardwise.engines import descriptor
from shardwise.errors import JobError
from shardwise.job import schema
from shardwise.strategy import Strategy

Target = Literal["deepspeed", "accelerate", "torchrun", "slurm", "kubernetes", "skypilot"]

PORT = 29500
PURPOSES = {  # what a file is for, by a part of its name
    ".auto.json": "the same for a Hugging Face Trainer, which fills in each `auto`",
    "deepspeed.json": "DeepSpeed's settings",
    "fsdp.json": "FSDP's settings of a Hugging Face Trainer",
    "accelerate.yaml": "settings of `accelerate launch`",
    "energy_callback": "measures energy in a Hugging Face Trainer",
    "launch-trainer": "starts a script that takes TrainingArguments",
    "launch": "starts the training",
    "jobset": "the job for Kubernetes with JobSet",
    "trainjob": "instead, with Kubeflow Trainer",
    "job.yaml": "the job",
    "task": "the job for SkyPilot",
}
_NAME_IS_KNOWN = """# a pod's name is known once it is placed
until getent ahosts "$PET_MASTER_ADDR" > /dev/null; do sleep 2; done"""
HERE = "$here"  # in a script: the folder that it and its files lie in, wherever it is started from


def _start(target: Target, request: Request, configs: Sequence[tuple[str, str]]) -> str:
    """What starts one process a GPU; the script and its arguments follow it.

    `configs`: flags of Accelerate that name its files. On several nodes HEAD_NODE has to be set, or HOSTFILE
    for deepspeed, or torchrun's own variables for Kubernetes and SkyPilot.
    """
    nodes, gpus = request.nodes, request.gpus_per_node
    if target == "accelerate":
        return " ".join(["accelerate launch", *_flags(configs)])
    if target == "deepspeed":
        hosts = '--hostfile "${HOSTFILE:?lines of: host slots=GPUs}" ' if nodes > 1 else ""
        return f"deepspeed {hosts}--num_gpus {gpus}"
    if nodes == 1:
        return f"torchrun --standalone --nproc_per_node {gpus}"
    if target in cluster.TARGETS:
        return "torchrun"
    head = "$HEAD_NODE" if target == "slurm" else "${HEAD_NODE:?the name of the first node}"
    group = ' --rdzv_id "$SLURM_JOB_ID"' if target == "slurm" else ""
    meeting = f'{group} --rdzv_backend c10d --rdzv_endpoint "{head}:{PORT}"'
    return f"torchrun --nnodes {nodes} --nproc_per_node {gpus}{meeting}"


def _script(target: Target, request: Request, start: str, flags: Sequence[tuple[str, str]], duty: str) -> str:
    """A script that starts `start`, the script in its arguments, and the flags."""
    usage = "train.py [its arguments]" + (f"\n# {duty}" if duty else "")
    call = " \\\n    ".join([f'{start} "$@"', *_flags(flags)])
    if target != "slurm":
        return _bash(request, call, usage)
    lines = ["set -euo pipefail"]
    if request.nodes > 1:
        # sed reads to the end: head would close the pipe on a long list, and pipefail end the job
        lines.append("""HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)""")
        lines += descriptor(request.strategy).slurm_exports()
    # one task a node would be bound to one core, and all of its processes with it
    return batch_script(request, [*lines, f"srun --cpu-bind=none {call}"], usage)


def _bash(request: Request, call: str, arguments: str = "", *, before: Sequence[str] = ()) -> str:
    """A script for one node that starts `call`, which may name its folder, after the lines `before`."""
    here = ['here=$(dirname "$(realpath "$0")")'] if HERE in call else []
    head = (*request.title, f"Usage: bash this-file {arguments}".rstrip())
    lines = (*(f"# {line}" for line in head), "set -euo pipefail", *here, *before, f"exec {call}")
    return "\n".join(["#!/bin/bash", *lines]) + "\n"


def _flags(flags: Sequence[tuple[str, str]]) -> list[str]:
    return [f"--{name} {_quoted(value)}".rstrip() for name, value in flags]


def _quoted(value: str) -> str:
    if value.startswith(HERE):
        return f'"{value}"'  # in quotes that let the shell put the folder in
    return shlex.quote(value) if value else ""


def trainer_flags(
    strategy: Strategy, optimizer: schema.Optimizer | None, train: schema.Train | None = None
) -> list[tuple[str, str]]:
    """TrainingArguments, as flags and their values; of a job's settings those that are known."""
    flags = [
        ("per_device_train_batch_size", str(strategy.micro_batch)),
        ("gradient_accumulation_steps", str(strategy.accumulation)),
        ("max_grad_norm", str(strategy.clip_norm)),
    ]
    if strategy.precision != "fp32":
        flags.append((strategy.precision, "true"))
    every = 0 if descriptor(strategy).sets_checkpointing else strategy.checkpoint_every
    if every == 1:
        flags.append(("gradient_checkpointing", "true"))
    elif every > 1:
        flags += [
            ("activation_checkpointing", "true"),
            ("activation_checkpointing_kwargs", f'{{"every_n_layers": {every}}}'),
        ]
    if optimizer is not None:
        flags += [
            *((name, str(getattr(optimizer, name))) for name in ("learning_rate", "weight_decay")),
            *((f"adam_{name}", str(getattr(optimizer, name))) for name in ("beta1", "beta2", "epsilon")),
            *_schedule(optimizer),
        ]
    if train is not None:  # transformers would go through the data three times
        epochs = ("num_train_epochs", str(train.epochs or 1.0))
        flags.append(epochs if train.steps is None else ("max_steps", str(train.steps)))
    return flags


def _schedule(optimizer: schema.Optimizer) -> list[tuple[str, str]]:
    """The same curve in transformers' names, which go down to nothing unless a further one is taken.

    A `warmup_steps` below 1 is a share of all steps. How many those are is the script's to say.
    """
    unset = optimizer.warmup_steps is None
    warmup = ("warmup_steps", str(schema.WARMUP_SHARE if unset else optimizer.warmup_steps))
    last = optimizer.final_fraction
    names: dict[str, tuple[str, dict[str, float]]] = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": last}) if last else ("cosine", {}),
        "linear": ("polynomial", {"lr_end": last * optimizer.learning_rate}) if last else ("linear", {}),
    }
    name, options = names[optimizer.schedule]
    flags = [("lr_scheduler_type", name), warmup]
    return [*flags, ("lr_scheduler_kwargs", json.dumps(options))] if options else flags


CALLBACK, JOB = "energy_callback.py", "job.yaml"
YAML = "accelerate.yaml"
_HEAD_NODE = "HEAD-NODE"  # stands for the first node's address where nothing tells it


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """Texts by file name, and what has to be known to use them."""

    files: Mapping[str, str]
    notes: tuple[str, ...] = ()
    start: tuple[str, ...] = ()  # Commands that begin a training


def emit(target: Target, request: Request) -> Emitted:
    """The files for a launcher. JobError where the strategy cannot be run with it."""
    if request.job_text is not None:
        return _own(target, request, request.job_text)
    strategy = request.strategy
    descriptor(strategy).check_launcher(target, strategy)
    if strategy.offload_parameters == "nvme":
        what = "parameters on NVMe need buffers for the model's largest one, which is not known here"
        fix = "offload_parameters: cpu, or `shardwise train`, which measures it"
        raise JobError(what, where="strategy.offload_parameters", fix=fix)
    run, suffix = ("sbatch", "sbatch") if target == "slurm" else ("bash", "sh")
    own, trainer = (f"{name}.{suffix}" for name in ("launch", "launch-trainer"))
    files, notes = _files(target, request, own, trainer), tuple(_notes(target, request))
    if target in cluster.TARGETS:
        packed, starts = cluster.pack(target, request, files, [trainer, "train.py"])
        how = f"{trainer} is for scripts that take TrainingArguments; write {own} for it for others"
        return Emitted(files=packed, notes=(*notes, how), start=starts)
    starts = tuple(f"{run} {shlex.quote(request.path(name))} train.py" for name in (own, trainer))
    trains = f"{starts[1]}  # one that takes TrainingArguments"
    return Emitted(files=files, notes=notes, start=(starts[0], trains))


def _own(target: Target, request: Request, job_text: str) -> Emitted:
    """The files that train the job with shardwise itself, again and again until it is done."""
    call = f"shardwise train {_quoted(f'{HERE}/{JOB}')} --resume-or-start"
    if target == "slurm":
        start = f"sbatch --time=24:00:00 {shlex.quote(request.path('launch.sbatch'))}"
        files = {JOB: job_text, "launch.sbatch": own_script(request, call)}
        return Emitted(files=files, notes=(f"launch.sbatch: {YOURS}",), start=(start,))
    if target not in cluster.TARGETS:
        fix = "--to slurm, kubernetes or skypilot; on machines of your own: `shardwise train`"
        raise JobError(f"{target} starts scripts, not shardwise", where="--to", fix=fix)
    before = [_NAME_IS_KNOWN] if request.nodes > 1 else []
    if request.nodes > 1:
        call += ' --nodes "$PET_NNODES" --node-rank "$PET_NODE_RANK"'
        call += ' --rendezvous "$PET_MASTER_ADDR:$PET_MASTER_PORT"'
    files = {JOB: job_text, "launch.sh": _bash(request, call, before=before)}
    packed, starts = cluster.pack(target, request, files, ["launch.sh"])
    return Emitted(files=packed, start=starts)


def _files(target: Target, request: Request, own: str, trainer: str) -> dict[str, str]:
    """Configurations, `own`, a script that calls the engine, and `trainer`, one of the Trainer."""
    strategy = request.strategy
    of_trainer, configs = trainer_flags(strategy, request.optimizer, request.train), []
    if target == "accelerate":
        made = descriptor(strategy).accelerate_files(strategy, request.trainable_parameters)
        files, configs = {YAML: _yaml(request)}, [("config_file", f"{HERE}/{YAML}"), *made.flags]
    else:
        made = descriptor(strategy).script_files(strategy, request.optimizer, request.trainable_parameters)
        files, of_trainer = {}, [*made.flags, *of_trainer]
    files |= {name: as_json(values) for name, values in made.files.items()}
    start = _start(target, request, configs)
    scripts = {own: ([], made.duty), trainer: (of_trainer, "")}
    return files | {name: _script(target, request, start, *one) for name, one in scripts.items()}


def _yaml(request: Request) -> str:
    """What `accelerate config` would write."""
    strategy = request.strategy
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": descriptor(strategy).accelerate_type,
        "num_machines": request.nodes,
        "num_processes": request.nodes * request.gpus_per_node,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    if request.nodes > 1:
        values |= {"main_process_ip": _HEAD_NODE, "main_process_port": PORT, "same_network": True}
    values |= descriptor(strategy).accelerate_settings(strategy, nodes=request.nodes, folder=request.folder)
    head = "".join(f"# {line}\n" for line in request.title)
    return head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _notes(target: Target, request: Request) -> list[str]:
    """What the files cannot say."""
    strategy = request.strategy
    notes = [f"the prediction is for a script that {'; '.join(request.duties)}"]
    if strategy.tensor_parallel > 1:
        notes.append(
            f"{strategy.tensor_parallel} GPUs share each row: the data loader has to give them the same rows"
        )
    if target == "slurm":
        notes.append(f"both batch scripts: {YOURS}")
    if target == "accelerate":
        notes.append(f"your script's data loader decides the micro-batch: batch_size={strategy.micro_batch}")
        if request.nodes > 1:
            notes.append(f"write the first node's address for {_HEAD_NODE}, and each node's own machine_rank")
    notes += descriptor(strategy).script_notes(strategy, target, own_optimizer=request.optimizer is None)
    return notes


def with_energy(emitted: Emitted) -> Emitted:
    """The files and notes, and the callback that measures a Trainer's energy with its own."""
    text = Path(__file__).with_name(f"{CALLBACK}.txt").read_text(encoding="utf-8")
    note = f"{CALLBACK} is for a Trainer: it measures energy with Zeus in each process, and sets no limit"
    return replace(emitted, files={**emitted.files, CALLBACK: text}, notes=(*emitted.notes, note))


def as_json(values: Mapping[str, Any]) -> str:
    """Strict JSON, as the Trainer reads it."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
