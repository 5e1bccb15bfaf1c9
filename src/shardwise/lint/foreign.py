"""A job from files of other tools (foreign.toml has their keys), and what of them it leaves out."""

import json
import math
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.job import contradictions, json_schema, paths, source, validate
from shardwise.lint.check import load
from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.read import found, referred
from shardwise.lint.schema import as_number
from shardwise.lint.script_text import UNDEFINED
from shardwise.lint.setup import Setup
from shardwise.lint.translate import translate

TABLE = tomllib.loads(resources.files("shardwise.lint").joinpath("foreign.toml").read_text(encoding="utf-8"))
TABLE["keys"] |= {other: TABLE["keys"][key] for other, key in TABLE["same"].items()}
FILL_IN = {"model.source": "fill-in-the-model", "data.train": "fill-in-the-data.jsonl"}
_EXPONENT = re.compile(r"[0-9.]+[eE][-+]?[0-9]+")  # text for YAML 1.1, such as 1e-4
_OVERLAP = "zero_optimization.overlap_comm"
_MODEL = re.compile(r"Model\w*\.from_pretrained\(\s*[\"']([^\"']+)")


def translation(files: Sequence[Path], folder: Path = Path()) -> tuple[str, list[str]]:
    """The job file, for `folder`, that configurations and scripts of other tools describe.

    Also a sentence for each key that is left out (`left out: file: keys: reason`), and for each value
    that no file says. JobError where a file is missing, unreadable or a job already.
    """
    documents = _read(files, said := list[str]())
    setup = Setup(documents=documents[::-1])  # the last one wins
    engines = {one.file: one for one in translate(replace(setup, asked_world_size=setup.launched or 1))}
    translated = [engines[one.name] for one in documents if one.name in engines]
    kept = ("strategy=", "train.precision=")
    words = [change for one in translated[-1:] for change in one.changes if change.startswith(kept)]
    changes, batch, keys = list[str](), dict[str, int](), set[str]()
    left_out = dict[tuple[str, str], list[str]]()
    values = defaultdict[tuple[str, bool], list[tuple[str, str]]](list)
    """Of a key of the job, and apart where words mean it: each `key=value`, and where and how it is said."""
    values["strategy", True] += [(one.changes[0], f"{one.file} ({one.changes[0]})") for one in translated]
    for document in documents:
        model = _MODEL.search(document.text) if document.syntax == "python" else None
        changes += [] if model is None else [f"model.source={json.dumps(model[1])}"]
        for key, value in _leaves({k: v for k, v in document.values.items() if k != UNDEFINED}):
            rule, meant = TABLE["keys"].get(key), _meaning(key, value, setup)
            lost = key.endswith(".nvme_path") and '"nvme"' not in " ".join(words)
            if lost or (key == _OVERLAP and '"overlap_comm": false' in " ".join(words)):
                meant = []  # a key of the strategy that was translated above, or of another
            line = document.line(tuple(key.split(".")))
            keys |= {key} if value is not None else set()
            if str(value) in TABLE["notes"]:
                said.append(f"changed: {document.name}:{line}: {key}: {value}: {TABLE['notes'][value]}")
            if isinstance(meant, str):
                left_out.setdefault((document.name, meant), []).append(f"{key} (line {line})")
                continue
            for change in meant:
                name, _, plain = change.partition("=")
                shown = plain if isinstance(rule, str) else f"({change})"
                values[name, shown != plain].append((change, f"{document.name}:{line}: {key} {shown}"))
            if isinstance(rule, str) and meant and rule.startswith("batch."):
                batch[rule.removeprefix("batch.")] = int(meant[0].partition("=")[2])
            elif isinstance(rule, str):
                changes += meant
            else:
                words += meant  # a key of its own says more than a word
    words += ["model.lora.variants=[dora, rslora]"] * (len({one for one in words if "variants" in one}) == 2)
    defaults = _defaults(keys | {change.partition("=")[0] for change in (*words, *changes)}, said)
    said += [f"left out: {name}: {', '.join(lost)}: {why}" for (name, why), lost in left_out.items()]
    said += [text for (_, word), all_ in values.items() if all_ for text in _conflicts(all_, words=word)]
    job = source.Document(name="the files")
    source.apply(job, [f"name={_name(files[0])}", *defaults, *words, *changes, *_rows(batch, said)])
    _complete(job, said)
    if (back := os.path.relpath(Path.cwd(), folder)) != ".":
        job.values = paths.below(back, job.values)
    lines = (" ".join(line.split()) for line in (f"made of {', '.join(map(str, files))}", *said))
    ordered = {key: job.values[key] for key in json_schema.names_below(()) if key in job.values}
    return "".join(f"# {line}\n" for line in lines) + f"\n{source.job_text(ordered)}", said


def _read(files: Sequence[Path], said: list[str]) -> tuple[Document, ...]:
    """The files and the DeepSpeed files that they name; Axolotl's own may have keys of DeepSpeed's."""
    documents, broken = load(files, other="training")
    for wrong in broken:
        raise JobError(wrong.what, where=wrong.where, fix=wrong.fix)
    known, more, read = {Path(one.name).resolve() for one in documents}, list[Path](), list[Document]()
    for one in documents:
        if one.kind == "job":
            raise JobError("it is a job file already", where=one.name, fix="shardwise train takes it")
        mistaken = one.kind == "deepspeed" and one.syntax == "yaml" and {*TABLE["marks"]} & one.values.keys()
        read.append(replace(one, kind="training") if mistaken else one)
        for name in referred(read[-1]):
            there = found([name], Path(one.name).parent)
            more += [path for path in there if path.resolve() not in known]
            line = line_at(one.text, max(0, one.text.find(name)))
            said += [] if there else [f"to do: {one.name}:{line}: {name} is not there; add it to --from"]
    return (*read, *(_read(more, said) if more else ()))


def _defaults(given: set[str], said: list[str]) -> list[str]:
    """What Axolotl or the Trainer does where none of the keys says it; those of the job and of the files."""
    rows = [
        row for row in TABLE["defaults"] if given >= {*row.get("only", ())} and not given & {*row["unless"]}
    ]
    unsaid = [change for row in rows for change in row["job"]] if given & {*TABLE["marks"]} else []
    said += [f"assumed, the tool's defaults: {', '.join(unsaid)}"] * bool(unsaid)
    return unsaid


def _complete(job: source.Document, said: list[str]) -> None:
    """Fill in what a job must have, and leave out what it may not."""
    for name, text in FILL_IN.items():
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
        said.append(f"left out: {source.dotted(key)}: {what}")
        job.forget(key)


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
    if value in (AUTO, None) or key in TABLE["strategy"]["keys"]:
        return []
    steps = as_number(setup.training("max_steps")) or 0
    if steps > 0 and rule == "train.epochs":
        return f"max_steps {steps} says how long to train, whatever the epochs"
    rule = rule if isinstance(rule, str) else TABLE["otherwise"].get(key)
    if isinstance(value, str) and key in TABLE["lists"] and ("," in value or key != "dataset"):
        text = json.dumps([part.strip() for part in value.split(",") if part.strip()])
    if rule and rule.startswith("batch.") and not (isinstance(number, int) and number > 0):
        return f"{text} is no number of rows, steps or GPUs"
    if rule:
        return [f"name={_name(Path(str(value)))}" if rule == "name" else f"{rule}={text}"]
    if key == "warmup_ratio" and number and steps > 0:
        return [f"optimizer.warmup_steps={math.ceil(number * steps)}"]
    near = max((one for one in TABLE["reasons"] if key.startswith(one)), key=len, default="")
    known = f"{text}: nothing in a job file has this value"
    return str(TABLE["reasons"].get(near, known if key in TABLE["keys"] else "a job file has no such key"))


def _conflicts(said: list[tuple[str, str]], *, words: bool) -> list[str]:
    """What is said of a key's values, `key=value` and where: the last is used.

    Keys of one file do not conflict: `output_dir` and `run_name` both name the run. Words do, such as
    `load_in_4bit` and `load_in_8bit`; but for DoRA and rsLoRA, which go together.
    """
    of, files = dict(said), {place.partition(":")[0] for _, place in said}
    used = of.pop(said[-1][0])
    conflict = (words or len(files) > 1) and "variants" not in used
    return [f"conflict: {used} is used, not {one}" for one in of.values() if conflict]


def _rows(batch: Mapping[str, int], said: list[str]) -> Iterator[str]:
    """The micro-batch, and the rows of a step over all GPUs."""
    if not batch.keys() - {"gpus"}:
        return
    gpus, micro, times = (batch.get(name, 1) for name in ("gpus", "micro", "accumulation"))
    rows = batch.get("total", gpus * micro * times)
    yield f"train.global_batch={rows}"
    if "micro" in batch and rows % micro == 0:
        yield f"train.micro_batch={micro}"
    if not batch.keys() & {"gpus", "total"}:
        said.append(f"to do: train.global_batch {rows} is {micro} x {times} x GPUs; no file says how many")


def _name(path: Path) -> str:
    """A job's name from a file's or folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "-", path.stem).strip("-.")[:100] or "job"
