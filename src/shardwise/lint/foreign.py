"""A job from files of other tools (foreign.toml has their keys), and what of them it leaves out."""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import JobError
from shardwise.job import contradictions, json_schema, paths, source, validate
from shardwise.job.load import leaves
from shardwise.job.schema import BUCKET
from shardwise.job.source import Key
from shardwise.lint.check import load
from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.read import found, referred
from shardwise.lint.rules.accelerate import DS, as_deepspeed
from shardwise.lint.rules.keys import unknown_keys
from shardwise.lint.schema import as_number, closest, deepspeed_schema, names, toml_file
from shardwise.lint.script_settings import CONFIGURATIONS, Settings
from shardwise.lint.script_text import UNDEFINED
from shardwise.lint.setup import Setup, of_script
from shardwise.lint.translate import Translated, translate
from shardwise.strategy import Strategy

TABLE = toml_file("foreign.toml")
TABLE["keys"] |= {other: TABLE["keys"][key] for other, key in TABLE["same"].items()}
_KNOWN = [*TABLE["keys"], *TABLE["strategy"]["keys"]]
_EXPONENT = re.compile(r"[0-9.]+[eE][-+]?[0-9]+")  # text for YAML 1.1, such as 1e-4
_BATCH = "train.micro_batch, train.global_batch"
_OPEN = re.compile(r"\$[{(\w]")  # a variable of the shell
_OVERLAP = "zero_optimization.overlap_comm"


class Said(NamedTuple):
    """What a file says of a key of the job."""

    key: str
    value: str
    place: str  # where the file says it, and how
    word: bool  # whether a word means it, such as `bf16: true`


def translation(files: Sequence[Path], folder: Path = Path()) -> tuple[str, list[str]]:
    """The job file, for `folder`, that configurations and scripts of other tools describe.

    Also a sentence for each key that is left out (`left out: file: keys: reason`), and for each value
    that no file says. JobError where a file is missing, unreadable, a job already, or says nothing of one.
    """
    documents = _read(files, said := list[str]())
    setup = Setup(documents=tuple(documents[::-1]))  # the last one wins
    order = [one.name for one in documents if one.kind != "training"]
    # The Trainer and Accelerate take DeepSpeed's scheduler; DeepSpeed itself takes the script's.
    documents.sort(key=lambda one: (one.kind == "deepspeed") == (setup.reader != "deepspeed"))
    strategies = translate(replace(setup, asked_world_size=setup.launched or 1))
    planned = sorted(strategies, key=lambda one: order.index(one.file))
    taken = [_strategy(one) for one in planned]
    strategy = taken[-1].value if taken else ""
    precision = [change for one in planned[-1:] for change in one.changes[1:2]]
    taken += [one for each in documents for one in _taken(each, setup, strategy, said)]
    lost = {one.key for one in taken if not one.value}
    half = {one.value for one in taken if one.key == "train.precision"} - {"fp32"}
    own = [one for one in taken if one.key == "weights" and not (half and one.value == "fp32")]
    own = [one._replace(key="train.precision") for one in own]  # on which autocast computes in halves
    others = [one for one in taken if one.value and one.key != "weights"]
    taken = [*own, *others] if half else [*others, *own]
    if not taken:
        fix = "; ".join(said) or "add the launch command, or the file with the arguments"
        what, where = "none of its settings is one of a job", ", ".join(map(str, files))
        raise JobError(what, where=where, fix=fix)
    changes = [f"{one.key}={one.value}" for one in taken if one.word]
    # A key of its own says more than a word.
    both = len({one for one in changes if "variants" in one}) == 2
    changes += ["model.lora.variants=[dora, rslora]"] * both
    batch = {one.key[6:]: int(one.value) for one in taken if one.key.startswith("batch.")}
    changes += [f"{one.key}={one.value}" for one in taken if not one.word and one.key[:6] != "batch."]
    given, unsaid = {one.key for one in taken}, dict[str, str]()
    for key, place in (row for one in documents for row in _unsaid(one)):
        known = {key, TABLE["instead"].get(key)} & {*given, *unsaid}
        unsaid |= {} if known else {key: place}
    keys = {key for one in documents for key, value in _leaves(one.values) if value is not None}
    defaults = _defaults(keys | given | lost | unsaid.keys(), documents, said)
    said += _conflicts(taken)
    for place in dict.fromkeys(unsaid.values()):
        names_ = (key for key in unsaid if unsaid[key] == place)
        write = dict.fromkeys(_BATCH if one.startswith("batch.") else one for one in names_)
        said.append(f"to do: {place}: only a run knows its value; write {', '.join(write)}")
    job = source.Document(name="the files")
    rows = _rows(batch, any(key.startswith("batch.") for key in unsaid), said)
    source.apply(job, [f"name={_name(files[0])}", *defaults, *precision, *changes, *rows])
    _complete(job, said)
    fill, train = paths.FILL_IN["data.train"], job.values["data"]["train"]
    if (back := os.path.relpath(Path.cwd(), folder)) != ".":
        job.values = paths.below(back, job.values)
        job.values["data"] |= {"train": fill} if train == fill else {}
    lines = (" ".join(line.split()) for line in (f"made of {', '.join(map(str, files))}", *said))
    ordered = {key: job.values[key] for key in json_schema.names_below(()) if key in job.values}
    return "".join(f"# {line}\n" for line in lines) + f"\n{source.job_text(ordered)}", said


def _strategy(one: Translated) -> Said:
    """The strategy of a file, and its name with what the name does not say."""
    value = one.changes[0].partition("=")[2]
    parts = Strategy(**json.loads(value))
    other = [f"bucket {parts.bucket}"] * (parts.bucket != BUCKET)
    other += ["overlap_comm false"] * (not parts.overlap_comm)
    return Said("strategy", value, f"{one.file} ({', '.join([parts.name, *other])})", word=True)


def _taken(document: Document, setup: Setup, strategy: str, said: list[str]) -> Iterator[Said]:
    """What a document says of keys of the job; "" where it is left out, as `said` says then."""
    wrong = unknown_keys(document) if document.kind == "deepspeed" else []
    left_out = defaultdict[str, list[str]](list)
    pairs = _leaves({key: v for key, v in _datasets(document, said).items() if key != UNDEFINED})
    for key, value in sorted(pairs, key=lambda leaf: leaf[0].startswith("bf16")):  # it wins over fp16
        word, place = not isinstance(TABLE["keys"].get(key), str), tuple(key.split("."))
        near, at = source.nearest(place, wrong), f"{document.name}:{document.line(place)}: {key}"
        meant = _unknown(near) if near else _meaning(key, value, setup)
        if str(value) in TABLE["notes"]:
            said.append(f"changed: {at}: {value}: {TABLE['notes'][value]}")
        lost = key.endswith(".nvme_path") and '"nvme"' not in strategy  # it belongs to another strategy
        if lost or (key == _OVERLAP and '"overlap_comm": false' in strategy):
            continue
        if isinstance(meant, str):
            left_out[meant].append(f"{key} (line {document.line(place)})")
            yield from (Said(one, "", at, word) for one in _targets(document, place))
            continue
        for change in meant:
            name, _, text = change.partition("=")
            yield Said(name, text, f"{at} {f'({change})' if word else text}", word)
    said += [f"left out: {document.name}: {', '.join(lost)}: {why}" for why, lost in left_out.items()]


def _unknown(key: Key) -> str:
    """Why a key that DeepSpeed does not know is left out."""
    near = closest(key[-1], deepspeed_schema().sections[key[:-1]].keys)
    return "DeepSpeed has no such key" + (f"; did you mean {near}?" if near else "")


def _unsaid(document: Document) -> Iterator[tuple[str, str]]:
    """Keys of the job whose values in a script only a run knows, and where they are."""
    for place in document.marks:
        value, python = document.get(*place), document.syntax == "python"
        if place in document.unknown or (value is None if python else _OPEN.search(str(value))):
            where = f"{document.name}:{document.line(place)}: {'.'.join(place)}"
            yield from ((name, where) for name in sorted(_targets(document, place)))


def _targets(document: Document, place: Key) -> set[str]:
    """The keys of the job that a key of a document, or one below it, decides."""
    key, deep = ".".join(place), document.kind == "deepspeed" or len(place) > 1
    rules = [v for k, v in TABLE["keys"].items() if k == key or (deep and k.startswith(f"{key}."))]
    words = [[rule] if isinstance(rule, str) else [c for one in rule.values() for c in one] for rule in rules]
    found = {one.partition("=")[0] for row in words for one in row} | {*TABLE["unread"].get(key, ())}
    return {"train.precision" if one == "weights" else one for one in found - {"name"}}


def _datasets(document: Document, said: list[str]) -> dict[str, Any]:
    """The values, with Axolotl's datasets as one that has all paths, and LLaMA-Factory's names as paths."""
    values = dict(document.values)
    for name in ("datasets", "test_datasets"):
        if isinstance(rows := values.get(name), list) and all(isinstance(row, Mapping) for row in rows[1:]):
            columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
            same = {key: column[0] for key, column in columns.items() if column.count(column[0]) == len(rows)}
            values[name] = [columns | same] if rows else rows
    if not values.keys() & {"finetuning_type", "template"}:  # LLaMA-Factory's
        return values
    file, known = f"{values.get('dataset_dir', 'data')}/dataset_info.json", dict[str, Any]()
    for there in found([file], Path(document.name).parent):
        with suppress(ValueError, OSError):
            known, file = dict(json.loads(there.read_bytes())), str(there)
    for name in {"dataset", "eval_dataset"} & values.keys():
        asked = [one.strip() for one in str(values[name]).split(",") if one.strip()]
        rows = ((one, known[one] if isinstance(known.get(one), Mapping) else {}) for one in asked)
        files = [
            row.get("hf_hub_url")
            or (str(Path(file).parent / row["file_name"]) if "file_name" in row else "")
            or one * ("/" in one or paths.is_local(one))
            for one, row in rows
        ]
        if not all(files):
            line, key = document.line((name,)), TABLE["keys"][name]
            what = f"{values.pop(name)}: files that {file} should name; write {key}"
            said.append(f"to do: {document.name}:{line}: {name}: {what}")
        elif asked != files:
            values[name] = files
    return values


def _read(files: Sequence[Path], said: list[str]) -> list[Document]:
    """The files, and the DeepSpeed settings that they name or hold, unless `files` has a file of those."""
    documents, broken = load(files, other="training")
    for wrong in broken:
        raise JobError(wrong.what, where=wrong.where, fix=wrong.fix)
    asked, read, others = {Path(one).resolve() for one in files}, list[Document](), list[Document]()
    for one in (one for one in documents if (one.kind, one.syntax) != ("deepspeed", "python")):
        if one.kind == "job":
            raise JobError("it is a job file already", where=one.name, fix="shardwise train takes it")
        for each in _documents(one) if one.syntax == "python" else (one,):
            own = each.kind != "deepspeed" or (each is one and Path(one.name).resolve() in asked)
            (read if own else others).append(each)
    mine = next((one.name for one in reversed(read) if one.kind == "deepspeed"), "")
    for one in read:
        for name in referred(one):
            there = found([name], Path(one.name).parent)
            place = f"{one.name}:{line_at(one.text, max(0, one.text.find(name)))}"
            if mine and name.endswith(".json") and not {path.resolve() for path in there} & asked:
                said.append(f"conflict: {mine} is used, not {name}, which {place} names")
            elif not there:
                said.append(f"to do: {place}: {name} is not there; add it to --from")
        for name in CONFIGURATIONS if one.syntax == "python" and not mine and not others else ():
            if one.has(name) and one.get(name) is None:
                place = f"{one.name}:{one.line((name,))}"
                said.append(f"to do: {place}: only a run knows {name}; add the JSON to --from")
    written = [f"{one.name}:{one.first}" for one in others if one.syntax == "python" and mine]
    said += [f"conflict: {mine} is used, not the DeepSpeed settings in {place}" for place in written]
    return read if mine else [*read, *others]


def _documents(script: Document) -> Iterator[Document]:
    """A script with its settings of a job, and each DeepSpeed configuration that is written in it."""
    said = Settings(script.text, TABLE["calls"])
    data = (said.values.get("load_dataset") or {}).get("data_files")
    for path in found([data] if isinstance(data, str) else [], Path(script.name).parent):
        with path.open(encoding="utf-8", errors="replace") as rows:
            if "completion_only_loss" not in said.values and '"completion"' in rows.readline(100_000):
                said.values |= {"completion()": True} if "SFTTrainer" in script.text else {}
    yield replace(script, values=said.values, marks=said.marks)
    held = replace(script, kind="deepspeed", marks={}, uses=frozenset())
    yield from (replace(one, name=script.name, text=script.text) for one in said.configurations)
    precision = said.values.get("mixed_precision")
    for line, plugin in said.plugins:
        values = as_deepspeed(replace(held, values={DS: plugin, "mixed_precision": precision}))
        values |= {} if precision else {"bf16": {"enabled": AUTO}}
        yield replace(held, values=values, first=line)


def _defaults(given: set[str], documents: Sequence[Document], said: list[str]) -> list[str]:
    """What the tools do where none of the keys says it; `given`: those of the job and of the files."""
    tools = dict.fromkeys(tool for one in documents for tool in _tools(one))
    changes = list[str]()
    for tool in tools:
        rows = (row for row in TABLE["defaults"] if tool in row["of"] and not given & {*row["unless"]})
        own = [change for row in rows for change in row["job"] if change not in changes]
        said += [f"assumed, as {TABLE['tools'][tool]} does: {', '.join(own)}"] * bool(own)
        changes += own
    return changes


def _tools(document: Document) -> list[str]:
    """Whose defaults hold for what a document does not say."""
    if document.kind == "deepspeed":
        return ["deepspeed"] * document.has("optimizer", "type")
    if document.syntax != "python":
        known = {*TABLE["marks"]} & document.values.keys()
        return ["axolotl" if "base_model" in known else "trainer"] * bool(known)
    if of_script(document) == "trainer":
        trl = {name.rpartition(".")[2] for name in document.uses} & {"SFTTrainer", *names("trl_arguments")}
        return ["trl"] * bool(trl & {"SFTTrainer", "SFTConfig"}) + ["trainer"] * (not trl)
    torch = ["torch"] * any(document.has(f"{name}()") for name in TABLE["adam"])
    own = "engine" if "deepspeed.initialize" in document.uses else "loop"
    return [*torch, *[own] * bool(own == "engine" or torch or document.has("DataLoader()"))]


def _complete(job: source.Document, said: list[str]) -> None:
    """Fill in what a job must have, and leave out what it may not."""
    for name, text in paths.FILL_IN.items():
        section, last = name.split(".")
        if last not in job.values.get(section, {}):
            source.apply(job, [f"{name}={text}"])
            said.append(f"to do: {name}: no file says it; write it in place of {text}")
    made, wrong = validate.check(job)
    if made is not None and made.model.quantization != "none" and "lora" not in job.values["model"]:
        rank, kind = made.model.lora and made.model.lora.rank, made.model.quantization
        said.append(f"assumed: LoRA of rank {rank}, since {kind} weights are frozen and no file has adapters")
    problems = [(key, problem.what) for key, problem in wrong.items()]
    if made is not None:
        found = contradictions.find(made, frozenset(map(source.dotted, job.origins)))
        problems += [(tuple(one.where.split(", ")[0].split(".")), one.what) for one in found]
    for key, what in problems:
        said += [f"left out: {source.dotted(key)}: {what}"] * (key != ("optimizer", "final_fraction"))
        job.forget(key)
    resolved = leaves(made.model_dump(mode="json")) if made is not None else ()
    unset = [f"{source.dotted(key)} {value}" for key, value in resolved if key not in job.origins]
    long = {"steps", "epochs"} & job.values.get("train", {}).keys()
    unset = [one for one in unset if one.partition(" ")[0] in TABLE["shown"]] + ["one epoch"] * (not long)
    said += [f"not said by the files, so shardwise's own: {', '.join(unset)}"] * bool(unset)


def _leaves(values: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); items of a list have their index as key, but for a list of texts."""
    if isinstance(values, list) and not all(isinstance(item, str) for item in values):
        values = {str(index): item for index, item in enumerate(values)}
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _leaves(value, f"{above}.{name}" if above else str(name))
    else:
        yield above, values


def _meaning(key: str, value: Any, setup: Setup) -> list[str] | str:
    """The changes of a job that a key means; or why it is left out."""
    rule = TABLE["keys"].get(key)
    value = paths.expand_home(value) if rule in paths.LOCAL else value
    plain = isinstance(value, bool) or (isinstance(value, str) and not _EXPONENT.fullmatch(value))
    number = None if plain else as_number(value)
    text = json.dumps(value if number is None else number)
    if isinstance(rule, Mapping) and text.strip('"') in rule:
        return list(rule[text.strip('"')])
    if value == AUTO and key in TABLE["auto"]:
        return str(TABLE["auto"][key])
    if value in (AUTO, None) or _OPEN.search(str(value)) or key in TABLE["strategy"]["keys"]:
        return []
    steps = as_number(setup.training("max_steps")) or 0
    if steps > 0 and rule == "train.epochs":
        return f"max_steps {steps} says how long to train, whatever the epochs"
    rule = rule if isinstance(rule, str) else TABLE["otherwise"].get(key)
    if isinstance(value, str) and key in TABLE["lists"] and ("," in value or key != "dataset"):
        text = json.dumps([part.strip() for part in value.split(",") if part.strip()])
    if rule == "train.steps" and number is not None and number <= 0:
        return []  # the epochs say it
    if rule == "data.eval_fraction" and number and number >= 1:
        return f"{text} rows: a job holds out a share of them; write data.eval_fraction"
    if rule and rule.startswith("batch.") and not (isinstance(number, int) and number > 0):
        return f"{text} is no number of rows, steps or GPUs"
    if rule:
        return [f"name={_name(Path(str(value)))}" if rule == "name" else f"{rule}={text}"]
    if key == "warmup_ratio" and number and steps > 0:
        return [f"optimizer.warmup_steps={math.ceil(number * steps)}"]
    near = max((one for one in TABLE["reasons"] if key.startswith(one)), key=len, default="")
    known = f"{text}: nothing in a job file has this value"
    top, tops = key.partition(".")[0], {one.partition(".")[0] for one in _KNOWN}
    meant = get_close_matches(key if top in tops else top, _KNOWN if top in tops else tops, n=1, cutoff=0.85)
    other = f"a job file has no such key{f'; did you mean {meant[0]}?' if meant else ''}"
    return str(TABLE["reasons"].get(near, known if key in TABLE["keys"] else other))


def _conflicts(taken: Sequence[Said]) -> Iterator[str]:
    """The values of each key that are not used: the last is.

    `output_dir` and `run_name` may both name the run, and DoRA and rsLoRA go together.
    """
    groups = defaultdict[tuple[str, bool], dict[str, str]](dict)
    for one in taken:
        places = groups[one.key, one.word]
        places.pop(one.value, None)
        places[one.value] = one.place
    for (key, _), places in groups.items():
        *lost, used = places.values()
        if key not in ("name", "model.lora.variants"):
            yield from (f"conflict: {used} is used, not {one}" for one in lost)


def _rows(batch: Mapping[str, int], unsaid: bool, said: list[str]) -> Iterator[str]:
    """The micro-batch, and the rows of a step over all GPUs."""
    if not batch.keys() - {"gpus", "nodes"}:
        return
    nodes, gpus, micro, times = (batch.get(name, 1) for name in ("nodes", "gpus", "micro", "accumulation"))
    rows = batch.get("total", nodes * gpus * micro * times)
    if "total" not in batch and unsaid:
        yield from [f"train.micro_batch={micro}"] * ("micro" in batch)
        return
    yield f"train.global_batch={rows}"
    if "micro" in batch and rows % micro == 0:
        yield f"train.micro_batch={micro}"
    if not batch.keys() & {"gpus", "total"}:
        said.append(f"to do: train.global_batch {rows} is {micro} x {times} x GPUs; no file says how many")


def _name(path: Path) -> str:
    """A job's name from a file's or folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "-", path.stem).strip("-.")[:100] or "job"
