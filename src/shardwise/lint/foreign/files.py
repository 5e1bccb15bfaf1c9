"""The files, and what they name: configurations, scripts with their settings, commands."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.lint.document import AUTO, Document, Mark, line_at
from shardwise.lint.finding import Finding
from shardwise.lint.foreign.hydra import composed
from shardwise.lint.foreign.lightning import with_calls
from shardwise.lint.foreign.losses import own_losses
from shardwise.lint.foreign.reads import (
    called,
    overwritten,
    switched_off,
    unnamed,
    without_deepspeed,
    without_idle,
    without_preparations,
)
from shardwise.lint.foreign.sections import opened, with_settings
from shardwise.lint.foreign.sources import loaded, with_variables, written
from shardwise.lint.foreign.table import NO_KEY, TABLE, names_rows, switched, targets
from shardwise.lint.read import found, referred
from shardwise.lint.rules.accelerate import DS, as_deepspeed
from shardwise.lint.rules.arguments import unread_tool
from shardwise.lint.schema import as_number, names
from shardwise.lint.script_inputs import OPEN, Inputs, field_names, options_of
from shardwise.lint.script_links import modules_of
from shardwise.lint.script_settings import CONFIGURATIONS, Settings
from shardwise.lint.setup import launched_processes
from shardwise.lint.shell_text import OPEN as OPEN_FLAGS
from shardwise.lint.shell_text import flags_within

_ALL_VISIBLE = ("deepspeed", "accelerate", "llamafactory-cli", "swift", "axolotl", "python", "python3")
_WORDS = {name: re.compile(pattern) for name, pattern in TABLE["words"].items()}
_FILLS, _OTHERS = _WORDS["fills"], re.compile(TABLE["other_scripts"])
ARGUED = "its command, or a file, gives it arguments; add that to --from"
_ARGUMENTS, _DATA = frozenset(names("trainer_arguments")), ({"data.train"}, {"data.eval"})
_OWN_TRAINER = re.compile(r"(?m)^class (\w*Trainer)\b(?!\([^)]{0,300}Trainer)")  # of no library's
_OF_FLAGS = ("data.sequence_length", "batch.accumulation", "train.epochs")
_OTHER = TABLE["reasons"]["DPOTrainer"]  # why a method is refused
_GPUS = ("num_gpus", "nproc_per_node", "num_processes", "NPROC_PER_NODE")


def read(files: Sequence[Path], said: list[str], taken: set[str]) -> list[Document]:
    """The files, and the DeepSpeed settings that they name or hold, unless `files` has a file of those.

    `taken` gets the flags, and the keys of files, whose values a script uses.
    """
    documents, broken = loaded(files, said)
    documents = tuple(with_variables(one, files, said) if one.syntax == "shell" else one for one in documents)
    made = [part for one in documents if one.syntax == "shell" for part in written(one)]
    documents = (*documents, *made)
    said += map(_of_part, broken)
    documents = tuple(with_calls(composed([*without_preparations(documents, said)], said)))
    reached = tuple(called(one, documents) if one.syntax == "python" else one for one in documents)
    documents = tuple(overwritten(one, reached, said) for one in reached)
    texts = "\n".join(one.text for one in documents if one.syntax == "python")
    theirs = {*_OWN_TRAINER.findall(texts)}
    calls = ([name for name in one.uses if name.rpartition(".")[2] not in theirs] for one in documents)
    documents = tuple(replace(one, uses=frozenset(kept)) for one, kept in zip(documents, calls, strict=True))
    for one in documents:
        _refuse(one, texts)
        said += own_losses(one, texts) if one.syntax == "python" and one.kind == "training" else []
        said += unnamed(one, documents) if one.syntax == "python" else []
    options = {name for one in documents if one.syntax == "python" for name in options_of(one.text)}
    fills = _FILLS.search(texts) is not None  # any of the scripts, for all of them
    options |= _ARGUMENTS if fills else set()
    documents = tuple(_in_full(one, options) for one in with_settings(documents, said))
    deep = any(one.kind == "deepspeed" for one in documents) and "spawn(" not in texts
    as_given = commands = [_with_gpus(one, said, alone=deep) for one in documents if one.syntax == "shell"]
    plain = [one for one in documents if one.syntax not in ("shell", "python")]
    known = [one for one in plain if one.kind == "training" or _ARGUMENTS & one.values.keys()]
    scripts, inner, taken_in = list[Document](), list[Document](), set[Path]()
    settings = known if fills or _WORDS["updates"].search(texts) else []
    for one in documents:
        if one.syntax == "python" and one.kind != "deepspeed":
            if _FILLS.search(one.text) and not (commands or settings):
                said.append(f"to do: {one.name}: {ARGUED}")
            inputs = _inputs(one, settings, as_given, documents)
            script, *held = _documents(one, inputs, said, {key for part in plain for key in part.values})
            commands = [_without_flags(command, script, inputs, said, fills=fills) for command in commands]
            for at, part in enumerate(plain):
                if part.name in {held.name for held in settings}:
                    own = replace(part, flags=frozenset(part.values))
                    plain[at] = _without_flags(own, script, inputs, said, fills=fills)
            scripts.append(script)
            inner += held
            taken_in |= inputs.loaded
            taken |= inputs.taken
    asked = {Path(one).resolve() for one in [*files, *(Path(one.name) for one in made)]}
    plain = [one for one in plain if one.kind != "deepspeed" or Path(one.name).resolve() not in taken_in]
    if not inner and (off := switched_off([*commands, *scripts, *plain])):
        idle = [one.name for one in plain if one.kind == "deepspeed"]
        idle += [f"{one.name}: {DS}" for one in plain if one.section(DS)]
        said += [f"left out: {name}: nothing switches it on ({off})" for name in idle]
        commands = [without_deepspeed(one) for one in commands]
        plain = [without_deepspeed(one) for one in plain if one.kind != "deepspeed"]
    for at, one in enumerate(plain):
        if one.kind == "training" and one.section("deepspeed"):
            plain[at], held_in = _apart(one)
            inner.append(held_in)
    order = {one.name: place for place, one in enumerate(documents)}
    mine = [one for one in plain if one.kind != "deepspeed" or Path(one.name).resolve() in asked]
    named = [one for one in plain if one not in mine]
    given = next((one.name for one in reversed(mine) if one.kind == "deepspeed"), "")
    apart = [
        without_idle(one, texts, taken, said)
        if Path(one.name).resolve() in taken_in
        else opened(one, scripts, said)
        for one in mine
    ]
    used = sorted([*commands, *scripts, *apart], key=lambda one: order[one.name])
    for one in used:
        said += _of_names(one, given, asked, alone=not (named or inner))
    if given:
        lost = f"conflict: {given} is used, not the DeepSpeed settings in"
        said += [f"{lost} {one.name}:{one.first}" for one in inner]
        return used
    return [*used, *sorted([*named, *inner], key=lambda one: order[one.name])]


def _of_part(wrong: Finding) -> str:
    """What is said of a script that is read without a part of it; of another file it is an error."""
    what = re.sub(r"\bcheck\b", "init", wrong.what)
    if wrong.severity != "warning" or not wrong.file.endswith(".py"):
        raise JobError(what, where=wrong.where, fix=wrong.fix)
    return f"to do: {wrong.where}: {what}; the rest is read; run {wrong.fix}"


def _apart(document: Document) -> tuple[Document, Document]:
    """A YAML file, and DeepSpeed's settings that it has in place of the name of a file."""
    within = {key: mark for key, mark in document.marks.items() if key[0] == "deepspeed"}
    marks = {key[1:]: mark for key, mark in within.items() if key[1:]}
    values = {key: value for key, value in document.values.items() if key != "deepspeed"}
    rest = {key: mark for key, mark in document.marks.items() if key not in within}
    held = replace(document, kind="deepspeed", values=document.section("deepspeed"), marks=marks)
    return replace(document, values=values, marks=rest), held


def _refuse(document: Document, texts: str) -> None:
    """Stop at a job, at a file that is not read, and at a method that no job has. `texts`: all scripts'."""
    if not document.text.strip():
        raise JobError("it is empty", where=document.name, fix="name the file with the settings")
    if document.kind == "job":
        raise JobError("it is a job file already", where=document.name, fix="shardwise train takes it")
    if document.syntax != "python" and (tool := unread_tool(document)):
        fix = f"`shardwise init` writes a job to fill in; --from reads {TABLE['readable']}"
        raise JobError(f"it is a file of {tool}, which is not read", where=document.name, fix=fix)
    given = {key: document.get(key) for key in TABLE["other_methods"] if document.kind != "deepspeed"}
    other = [
        (f"{key}: {value}", document.line((key,)))
        for key, value in given.items()
        if isinstance(value, str) and value.isalpha() and value not in TABLE["other_methods"][key]
    ]
    modules = re.finditer(TABLE["other_modules"], document.text if document.syntax == "shell" else "")
    other += [(one[1], line_at(document.text, one.start())) for one in modules]
    other += [(one, document.line(("script",))) for one in _OTHERS.findall(str(document.get("script")))]
    own = TABLE["other_keys"] if document.syntax in ("yaml", "json") else {}
    other += [(f"{key} ({of})", document.line((key,))) for key, of in own.items() if document.has(key)]
    calls = {name.rpartition(".")[2] for name in document.uses}
    if not calls & {*names("trainers")}:
        other += [(name, document.first) for name in sorted(calls) if TABLE["reasons"].get(name) == _OTHER]
    task = _WORDS["task"].search(document.text) if document.syntax == "python" else None
    if task and not _WORDS["causal"].search(texts):
        other.append((f"a model {task[0]}", line_at(document.text, task.start())))
    script = document.text if document.syntax == "python" and document.kind == "training" else ""
    imported = rf"(?m)^\s*(from|import)\b.*\b{re.escape(Path(document.name).stem)}\b"
    idle = not (_WORDS["trains"].search(script) or re.search(imported, texts))
    idle = idle and bool(_WORDS["generates"].search(script))
    if document.syntax in ("yaml", "json") and not texts and {*TABLE["no_training"]} & document.values.keys():
        decided = {target for key in document.values for target in targets(key, below=True)}
        idle = not decided & {"data.train", "optimizer.learning_rate", "train.epochs", "train.steps"}
    if idle:
        fix = "name the script that does"
        raise JobError("nothing in it trains a model", where=document.name, fix=fix)
    for name, line in other:
        fix = "name the files of that stage of training"
        raise JobError(f"{name}: {_OTHER}", where=f"{document.name}:{line}", fix=fix)


def _in_full(command: Document, options: set[str]) -> Document:
    """The command with the full names of flags, as argparse takes their beginnings; switches are bool."""
    values, marks, flags = dict(command.values), dict(command.marks), set(command.flags)
    if command.kind == "training" and command.syntax != "python":
        values = {key: switched(key, value) for key, value in values.items()}
    for flag in command.flags - options if options else ():
        full = [name for name in options if name.startswith(flag)]
        if len(full) == 1 and flag in values and full[0] not in values:
            values[full[0]], marks[full[0],] = values.pop(flag), marks.pop((flag,))
            flags = flags - {flag} | {full[0]}
    return replace(command, values=values, marks=marks, flags=frozenset(flags))


def _inputs(
    script: Document, settings: Sequence[Document], commands: Sequence[Document], all_: Sequence[Document]
) -> Inputs:
    """What the commands, and files of `settings`, give the script."""
    flags, environment = dict[str, Any](), dict[str, str]()
    for one in settings:
        flags |= one.values
    for one in commands:
        flags |= {key: one.values[key] for key in one.flags & one.values.keys()}
        environment |= one.environment
        environment |= {name: str(value) for name, value in one.values.items() if name.isupper()}
    plain = any(str(one.get("launcher")).startswith("python") for one in commands)
    counts = map(launched_processes, (*commands, *(one for one in all_ if one.kind == "accelerate")))
    count = next((count for count in counts if count is not None), None)
    own = (one.number(name) for one in commands for name in ("nproc_per_node", "num_gpus"))
    here = next((int(number) for number in own if number), None)
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": here}  # a launcher sets them, whatever the shell has
    environment = {name: text for name, text in environment.items() if plain or name not in sizes}
    environment |= {name: str(number) for name, number in sizes.items() if number is not None}
    known = bool(commands or settings) and not any(one.has(OPEN_FLAGS) for one in commands)
    started = {Path(str(one.get("script"))).name for one in commands if one.get("script")}
    mine = {Path(one.name).name for one in all_ if one.syntax == "python"} & started
    imported = bool(mine) and Path(script.name).name not in mine
    files = [one.name for one in all_ if one.syntax in ("yaml", "json") and one.kind == "training"]
    given = [] if settings else [str(Path(one).resolve()) for one in files]
    others = {one.name: one.text for one in all_ if one.syntax == "python" and one is not script}
    return Inputs(
        flags,
        environment,
        Path(script.name).parent,
        commanded=known,
        more={name for one in commands for name in flags_within(one)},
        alone=plain and not any("srun" in one.text for one in commands),
        imported=imported,
        given=given,
        stem=Path(script.name).stem,
        others=modules_of(others),
        data=[one.values for one in all_ if not settings and one.name in files],
    )


def _with_gpus(command: Document, said: list[str], *, alone: bool) -> Document:
    """The command with the number of GPUs that it lists, or that SLURM gives it.

    `alone`: whether `python` starts one process, and DeepSpeed does not spread it over all GPUs.
    """
    values = dict(command.values)
    in_file = values["launcher"] == "accelerate" and "config_file" in values
    asked = command.environment.get("SLURM_GPUS_ON_NODE", "")
    if values.get("nproc_per_node") in ("gpu", "auto") and asked.isdecimal():
        values["nproc_per_node"] = int(asked)
    if not in_file and not any(name in values for name in _GPUS):
        shown = values.get("CUDA_VISIBLE_DEVICES", command.environment.get("CUDA_VISIBLE_DEVICES", ""))
        shown = str(values.get("include", shown)).rpartition(":")[2]
        if "srun" in command.text and str(values["launcher"]).startswith("python"):
            names = ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE")
            count = next((command.environment[one] for one in names if one in command.environment), "")
            values |= {"nproc_per_node": int(count)} if count.isdecimal() else {}
            nodes = command.environment.get("SLURM_NNODES", "")
            values |= {"nnodes": int(nodes)} if nodes.isdecimal() else {}
        elif str(values["launcher"]).startswith("python") and alone:
            values["num_gpus"] = 1
            place = f"{command.name}:{command.line(('launcher',))}"
            said.append(f"assumed: {place}: python starts one process, and DeepSpeed no others")
        elif values["launcher"] in _ALL_VISIBLE and shown and not OPEN.search(shown):
            values["num_gpus"] = len(shown.split(","))
        elif values["launcher"] in _ALL_VISIBLE and asked.isdecimal():
            values["num_gpus"] = int(asked)
    return replace(command, values=values)


def _without_flags(
    command: Document, script: Document, inputs: Inputs, said: list[str], *, fills: bool
) -> Document:
    """The command without the flags that the script's settings have taken, or that only the script knows."""
    unread = [place for place in script.marks if is_open(script, place)]
    open_ = {target for place in unread for target in targets_of(script, place)}
    stated = {target for place in script.marks for target in targets_of(script, place)}
    unused = {flag for flag in inputs.taken & TABLE["keys"].keys() if not targets(flag, below=False) & stated}
    # a field of the Trainer's arguments that the script only reads decides what it always does, and an
    # adapter's rank is one wherever the script hands it on
    inherited = unused - options_of(script.text) if fills else set()
    kept = inherited | {flag for flag in unused if flag.startswith("lora_")}
    kept |= {one for one in unused if f"{one}={command.get(one)}" in TABLE["notes"]}
    kept |= {one for one in unused if TABLE["keys"][one] == "name"}
    plain = (one for one in unused if as_number(command.get(one)) is not None)  # else a helper gets it
    kept |= {one for one in plain if isinstance(rule := TABLE["keys"][one], str) and rule != "batch.total"}
    rows = {one for one in inputs.taken if targets(one, below=False) in _DATA}
    rows = {one for one in rows if one in unused or targets(one, below=False) & open_}
    kept |= {one for one in rows if names_rows(command.get(one))}
    gone = inputs.taken - kept - TABLE["no_adapters"].keys()  # which decide whether adapters' ranks hold
    for flag in sorted(inputs.defined - inputs.taken):
        if flag not in command.flags:
            continue
        decided = targets(flag, below=False)
        if decided in _DATA and names_rows(command.get(flag)):
            continue  # which a function of the script's loads
        if decided & open_ or flag not in TABLE["keys"]:
            gone.add(flag)
        if not decided & open_ and flag not in TABLE["keys"] and flag not in TABLE["strategy"]["keys"]:
            said.append(f"left out: {NO_KEY}: {flag}")
    gone &= command.flags | command.environment.keys()
    values = {key: value for key, value in command.values.items() if key not in gone}
    marks = {key: mark for key, mark in command.marks.items() if key[0] not in gone}
    own = "|".join(["__file__", *re.findall(r"(?m)^\s*(\w+) *=[^\n]*\b__file__\b", script.text)])
    for flag in (one for one in command.flags & values.keys() if targets(one, below=False) in _DATA):
        if re.search(rf"(join\(|/)[^\n]*\b({own})\b[^\n]*\b{flag}\b", script.text):  # from its own folder
            values[flag] = str(Path(script.name).parent / str(values[flag]))
    return replace(command, values=values, marks=marks)


def is_open(document: Document, place: tuple[str, ...]) -> bool:
    """Whether only a run, or the shell, knows the value there."""
    value = document.get(*place)
    unread = value is None if document.syntax == "python" else OPEN.search(str(value)) is not None
    return place in document.unknown or unread or (value is None and place == ("max_length",))  # no cut


def targets_of(document: Document, place: tuple[str, ...]) -> set[str]:
    """The keys of a job that a key of a document, or one below it, decides."""
    return targets(".".join(place), below=document.kind == "deepspeed" or len(place) > 1)


def _of_names(one: Document, given: str, asked: set[Path], *, alone: bool) -> Iterator[str]:
    """What is said of the DeepSpeed files that a document names; `given`: the one that is used instead."""
    for name in referred(one):
        there = {path.resolve() for path in found([name], Path(one.name).parent)}
        place = f"{one.name}:{line_at(one.text, max(0, one.text.find(name)))}"
        same = Path(name).name in {path.name for path in asked}  # in another folder
        if given and name.endswith(".json") and not there & asked and not same:
            yield f"conflict: {given} is used, not {name}, which {place} names"
        elif not there and not same and not name.endswith((*TABLE["own_scripts"],)):
            yield f"to do: {place}: {name} is not there; add it to --from"
    for name in CONFIGURATIONS if one.syntax == "python" and not given and alone else ():
        if one.has(name) and one.get(name) is None:
            place = f"{one.name}:{one.line((name,))}"
            yield f"to do: {place}: only a run knows {name}; add the JSON to --from"


def _take_flags(script: Document, read_: Settings, given: set[str], others: str) -> None:
    """Flags that some function of the script counts or cuts by; QLoRA's scripts cut the answers apart."""
    values, marks, presets = read_.values, read_.marks, read_.known.presets
    halves = [presets.of(name) for name in ("source_max_len", "target_max_len")]
    if all(halves):
        numbers: list[Any] = [read_.known.value(given[0]) if len(given) == 1 else None for given in halves]
        values["tokenizer"] = {k: v for k, v in (values.get("tokenizer") or {}).items() if k != "max_length"}
        marks["max_length",] = Mark(line=halves[0][0].lineno)
        values |= {"max_length": sum(numbers)} if all(isinstance(one, int) for one in numbers) else {}
    cut = values.get("tokenizer") or {}
    if isinstance(cut.get("max_length"), int) and re.search(r"\[[\"']input_ids[\"']\]\[:-1\]", script.text):
        cut["max_length"] -= 1  # a token more was cut off, to be left out
    stated = {target for place in marks for target in targets_of(script, place)}
    open_ = {rule for rule in _OF_FLAGS if not {rule, TABLE["instead"].get(rule)} & stated}
    names_ = (name for name, rule in TABLE["keys"].items() if isinstance(rule, str) and rule in open_)
    made = [one for one in ast.parse(script.text).body if f"{getattr(one, 'name', '?')}(" in others]
    given = given | {name for one in made for name in field_names(one, lambda base: base)}
    for name in (one for one in names_ if one not in given):
        for default in (shown := presets.of(name))[:1]:
            marks[name,] = Mark(line=default.lineno)
            number = read_.known.value(default)
            values |= {name: number} if len(shown) == 1 and isinstance(number, int) else {}


def _documents(script: Document, inputs: Inputs, said: list[str], given: set[str]) -> Iterator[Document]:
    """A script with its settings of a job, and each DeepSpeed configuration that is written in it.

    `given`: keys of files, which count more than what a field is by default.
    """
    read_ = Settings(script.text, TABLE["calls"], {key.partition(".")[0] for key in TABLE["keys"]}, inputs)
    values = read_.values
    data = (values.get("load_dataset") or {}).get("data_files")
    for path in found([data] if isinstance(data, str) else [], Path(script.name).parent):
        with path.open(encoding="utf-8", errors="replace") as rows:
            pairs = '"completion"' in rows.readline(100_000)
        if pairs and "completion_only_loss" not in values and "SFTTrainer" in script.text:
            values["completion()"] = True
    _take_flags(script, read_, given, "".join(map(ast.unparse, inputs.others.values())))
    taken = [Path(name).name for name in inputs.given if Path(name) in inputs.loaded]
    said += [f"assumed: {script.name} reads {name}" for name in taken]
    known = {one.name for one in inputs.loaded}
    for name in sorted(one for one in inputs.outside if Path(one).name not in known):
        said.append(f"to do: {script.name}: {name} is outside of this folder; add it to --from")
    if read_.trainings:
        first, *more = read_.trainings
        lines = ", ".join(map(str, more))
        said.append(f"to do: {script.name}:{lines}: another training, which is not read; line {first}'s is")
    if inputs.absent:
        absent = ", ".join(f"{name} ({value})" for name, value in inputs.absent.items())
        said.append(f"assumed: {script.name} finds no variable of the environment {absent}")
    if inputs.supported:
        said.append(f"assumed: the GPUs compute in bf16, which {script.name} asks them")
    yield replace(script, values=values, marks=read_.marks)
    for one in read_.configurations:
        yield replace(one, name=script.name, text=script.text)
    held = replace(script, kind="deepspeed", marks={}, uses=frozenset())
    precision = values.get("mixed_precision")
    for line, plugin in read_.plugins:
        settings = as_deepspeed(replace(held, values={DS: plugin, "mixed_precision": precision}))
        open_ = {"gradient_clipping": AUTO} | ({} if precision else {"bf16": {"enabled": AUTO}})
        yield replace(held, values=open_ | settings, first=line)
