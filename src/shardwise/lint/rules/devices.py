"""GPUs of the launch: how many a node shows, and whether they have bf16."""

import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.lint import shell_values
from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.schema import as_number, names
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN

SHOWS = "CUDA_VISIBLE_DEVICES"
_EACH = "NPROC_PER_NODE"
_SHOWN = re.compile(r"^os\.environ\[.CUDA_VISIBLE_DEVICES.\] *= *['\"]([\d,]+)['\"]", re.MULTILINE)
_SETS = re.compile(rf"{SHOWS}=(?!\$\{{?{SHOWS})")  # `echo NAME=$NAME` does not
_GRES = re.compile(r"(?:^|,)gpu((?::(?=[\w-]*[A-Za-z])[\w-]+)?)(?::(\d{1,6}))?(?=[,(]|$)")  # no part of a GPU
_COUNT = re.compile(r"((?:[\w-]+:)?)(\d{1,6})")
_OLD = re.compile(rf"(?i)(?<![a-z0-9])(?:{'|'.join(names('gpus_without_bf16'))})(?![a-z0-9])")
_NEW = re.compile(r"(?i)(?<![a-z])(?:[abh]\d{2,3}|gh200|l40?|mi\d{3})|rtx[-_]?(?:[345]0|a|pro)")
_ONE_FOR_ALL = re.compile("|".join(names("one_process_for_all_gpus")))
_SETS_RANKS = re.compile(r"WORLD_SIZE|\bRANK\b|mpirun|mpiexec|srun|spawn\(|notebook_launcher|subprocess")
_TASKS = re.compile(r"\bsrun\b.*\s(?:--ntasks|--gres|--gpus|-n|-G)")
_ON_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_ASKS_THE_GPU = re.compile("b(?:float|f)16_(?:supported|available|gpu)|device_(?:capability|properties)")


def of_launcher(document: Document, name: str) -> bool:
    """Whether the launcher gets a flag of this name, and not the script."""
    return document.has(name) and name not in document.flags


def header(document: Document) -> dict[str, str]:
    """What a script asks of Slurm, by the long names of the options."""
    return shell_values.header(document.text) if document.syntax == "shell" else {}


def gpus_of(asked: dict[str, str]) -> tuple[int | None, str]:
    """How many GPUs a node of a job has, and what they are; None or empty where the header does not say."""
    if found := _GRES.search(asked.get("gres", "")):
        return int(found[2] or 1), found[1].lstrip(":")
    alone = asked.get("gpus", "") if asked.get("nodes") == "1" else ""
    found = _COUNT.fullmatch(asked.get("gpus-per-node", alone))
    kind = next((one for name in ("gpus", "gpus-per-task") if ":" in (one := asked.get(name, ""))), "")
    return (int(found[2]), found[1].rstrip(":")) if found else (None, kind.partition(":")[0])


def shown_devices(document: Document, setup: Setup) -> str | None:
    """The list of GPUs that processes see; empty if nothing limits them, None where only the shell knows."""
    inside = (_SHOWN.search(one.text) for one in setup.of("training", "python"))
    given = document.get(SHOWS) if document.has(SHOWS) else document.environment.get(SHOWS)
    shown = next((one[1] for one in inside if one), given)  # which counts more
    if shown is None:
        return None if _SETS.search(document.text) else ""
    return str(shown).strip(",") if re.fullmatch(r"\d+(,\d+)*,?", str(shown)) else None


def devices_of(document: Document, setup: Setup) -> tuple[int, str] | None:
    """How many GPUs the processes of a node see, and what says so; None if nothing does."""
    shown = shown_devices(document, setup)
    if shown:
        return len(shown.split(",")), f"{SHOWS}={shown} shows"
    count, _ = gpus_of(header(document))
    return (count, "a node of the job has") if count and shown is not None else None


def processes_of_node(document: Document, setup: Setup) -> tuple[float, str, Document] | None:
    """How many processes a command starts on a node, the flag that says so, and the file that has it."""
    if document.get("launcher") == "torchrun":
        each = document.number("nproc_per_node") if of_launcher(document, "nproc_per_node") else None
        return (each, "nproc_per_node", document) if each else None
    if document.get("launcher") in ("llamafactory-cli", "swift"):  # which start torchrun
        given = as_number(document.environment.get(_EACH, document.get(_EACH)))
        alone = "swift" not in document.text and "FORCE_TORCHRUN" not in document.text  # for one GPU
        alone &= "," not in (shown_devices(document, setup) or "")
        return (given, _EACH, document) if given and not alone and "RAY" not in document.text else None
    named = Path(str(document.get("config_file"))).name if of_launcher(document, "config_file") else None
    files = [one for one in setup.of("accelerate") if Path(one.name).name == named]
    sources = [document, *(one for one in files if one.get("distributed_type") in _ON_GPUS)]
    other = any(one.get("gpu_ids") not in (None, "all") for one in sources)
    other |= any(one.on("cpu") or one.on("use_cpu") for one in sources)
    unread = named is not None and len(sources) == 1 and not of_launcher(document, "num_machines")
    if document.get("launcher") != "accelerate" or other or unread:
        return None
    both = ("num_processes", "num_machines")  # of each, flags come first
    holder, machines = (next((one for one in sources if of_launcher(one, name)), None) for name in both)
    nodes = machines.number("num_machines") if machines else 1
    count = holder.number("num_processes") if holder else None
    return (count / nodes, "num_processes", holder) if holder and count and nodes else None


@training_rule("warning", "torch/distributed/run.py: --nproc-per-node, default 1; deepspeed/comm/comm.py")
def one_process_for_several_gpus(document: Document, setup: Setup) -> Iterator[Hit]:
    """Without --nproc_per_node torchrun starts one process, as python does: it uses one GPU."""
    counted = any(name.startswith("np") and name not in document.flags for name in document.values)
    counted |= document.has(OPEN) or "PET_NPROC" in document.text
    asked = header(document)
    tasks = {asked.get("ntasks"), asked.get("ntasks-per-node")} - {None, "1", asked.get("nodes")}
    several = _TASKS.search(document.text) or tasks
    alone = any(_ONE_FOR_ALL.search(one.text) for one in setup.of("training"))
    launcher, sets = document.get("launcher"), _SETS_RANKS.search(f"{document.text}\n{setup.scripts}")
    plain = launcher in ("python", "python3") and document.has("deepspeed") and not sets
    if not (plain or launcher == "torchrun") or counted or several or alone:
        return  # `several`: Slurm starts torchrun for each GPU
    seen = devices_of(document, setup)
    stated = setup.gpus_per_node or setup.asked_world_size
    if seen is None and stated and shown_devices(document, setup) == "":
        seen = stated, "--gpus says"
    if seen and seen[0] > 1:
        who = "python" if plain else "without --nproc_per_node torchrun"
        what = f"{who} starts one process, which uses one GPU: {seen[1]} {seen[0]}"
        fix = f"{'torchrun ' * plain}--nproc_per_node {seen[0]}"
        yield Hit((), what, fix, line=document.line(("launcher",)))


def gpu_without_bf16(document: Document) -> str:
    """The GPU without bf16 that a job asks for; empty if it asks for another, or for none by name."""
    asked = header(document)
    _, kind = gpus_of(asked)
    for named in filter(None, (kind, asked.get("constraint"), asked.get("partition"))):
        found = _OLD.search(named)
        if _NEW.search(named) or (named != kind and re.search(r"[|,\[]", named)):
            return ""  # another, or one of several
        if found and (named == kind or re.search(r"\d", found[0])):  # `titan` may be the cluster's name
            return found[0]
    return ""


def _bf16_elsewhere(command: Document, setup: Setup) -> Iterator[str]:
    """The files of a launch, other than scripts and arguments, that ask for bf16."""
    for one in setup.of("accelerate") if not command.has("mixed_precision") else ():
        if one.get("mixed_precision") == "bf16":
            yield f"mixed_precision of {Path(one.name).name}"
    for one in setup.of("deepspeed"):
        if one.on("bf16", "enabled"):
            yield f"bf16.enabled of {Path(one.name).name}"


@training_rule("warning", "torch/cuda/__init__.py: is_bf16_supported; transformers/training_args.py")
def bf16_without_hardware(document: Document, setup: Setup) -> Iterator[Hit]:
    """GPUs before Ampere have no bf16: it is emulated and slow, and earlier versions stop."""
    jobs = [one for one in setup.of("training") if header(one)]
    old = [gpu_without_bf16(one) for one in jobs]
    if setup.gpu:  # --gpus counts more than a header
        jobs, old = [*setup.of("training")], [setup.gpu if _OLD.search(setup.gpu) else ""]
    if not jobs or not all(old) or (document.syntax == "python" and _ASKS_THE_GPU.search(document.text)):
        return
    key = "bf16" if document.on("bf16") else "mixed_precision"
    on = document.on("bf16") or document.get("mixed_precision") == "bf16"
    off = document.syntax == "yaml" and any(one.get("bf16") is False for one in jobs)
    places = [(f"`{key}`", document.line((key,)))] if on and not off else []
    if document is jobs[0]:
        header_line = document.text.split("#SBATCH")[0].count("\n") + 1
        places += [(where, header_line) for where in _bf16_elsewhere(document, setup)]
    for where, line in places:
        what = f"{where}: the job's {old[0]} has no bf16: PyTorch emulates it slowly; earlier versions stop"
        yield Hit((), what, "fp16 in its place, or GPUs from Ampere on, such as A100", line=line)
