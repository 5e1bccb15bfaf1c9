"""The job file: the statements of all files, put together and completed."""

import json
import os
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.job import contradictions, json_schema, paths, source, validate
from shardwise.job.load import leaves as resolved_leaves
from shardwise.lint.document import Document
from shardwise.lint.foreign import files as of_files
from shardwise.lint.foreign import resolve
from shardwise.lint.foreign.datasets import with_datasets
from shardwise.lint.foreign.defaults import defaults, with_peft
from shardwise.lint.foreign.losses import answers_in_text
from shardwise.lint.foreign.reads import unread
from shardwise.lint.foreign.statements import Statement, statements, unsaid
from shardwise.lint.foreign.suspects import not_followed, suspects
from shardwise.lint.foreign.table import BY_NAME, STEPS, TABLE, leaves, run_name
from shardwise.lint.schema import names
from shardwise.lint.setup import Setup, of_script
from shardwise.lint.translate import translate

_NO_STEPS = ("epoch", "no", False)  # `no` without quotes is false in YAML
_COMMENT = textwrap.TextWrapper(106, subsequent_indent="    ", break_on_hyphens=False)
_EVALUATES = {"eval_strategy", "evaluation_strategy", "**"}  # without them a Trainer does not
_TEST_ROWS = re.compile(r"""["']test["']|\.values\(\)|\.test\b""")  # of train_test_split
_SHARED = ("fsdp2", "ddp")  # among several processes
_SHARE = f"a share of {STEPS}"
_LORA, _TARGETS = "model.lora", "model.lora.targets"
_ASKS = r"(write |name (it|that) in |in )(.*, )?"  # before a key that a sentence asks for
_MOST_NAMES = 60  # in a sentence
_HELD_OUT = "a job takes these rows from a file, or holds out a share of its own (data.eval_fraction)"


def translation(files: Sequence[Path], folder: Path = Path()) -> tuple[str, list[str]]:
    """The job file, for `folder`, that configurations and scripts of other tools describe.

    Also a sentence for each key that is left out (`left out: file: keys: reason`), and for each value
    that no file says. JobError where a file is missing, unreadable, a job already, or says nothing of one.
    """
    said, used = list[str](), set[str]()
    read = of_files.read(files, said, used)
    swift = any(one.has("swift") for one in read)
    documents = [part for one in read for part in with_datasets(one, said, swift=swift)]
    setup = Setup(documents=tuple(documents[::-1]))  # the last one wins
    planned = translate(replace(setup, asked_world_size=setup.launched or 1))
    order = [one.name for one in documents if one.kind != "training"]
    in_order = sorted(planned, key=lambda one: order.index(one.file))
    documents.sort(key=lambda one: _rank(one, setup))
    stated = [resolve.of_a_file(one) for one in in_order]
    strategy = stated[-1].value if stated else ""
    for document in documents:
        stated += resolve.folded([*statements(document, setup, strategy, said)], setup, said)
    said += answers_in_text(documents)
    scripts = [one for one in documents if one.syntax == "python"]
    stated = resolve.with_held_out(resolve.of_this_tool(stated, scripts), swift=swift)
    stated, saves, evaluates = _with_times(stated, documents, setup, said)
    if setup.launched == 1:  # which has nothing to share
        stated = [one._replace(value="single") if one.value in _SHARED else one for one in stated]
    first, last = re.compile(": (distributed_type|warmup_ratio)"), re.compile("DataLoader.batch_size")
    stated.sort(key=lambda one: bool(last.search(one.place)) - bool(first.search(one.place)))
    off, keys = _without_adapters(documents), {one.key for one in stated if one.value not in ("", "none")}
    if off and "model.quantization" in keys and any(key.startswith(_LORA) for key in keys):
        said.append(f"changed: {off}: quantized weights are frozen: trained with LoRA, as the other keys say")
    elif off:
        said += [f"changed: {off}: {one.place} is of no use" for one in stated if one.key.startswith(_LORA)]
        stated = [one for one in stated if not one.key.startswith(_LORA)]
    if any(one.get("lora_target_linear") is True for one in documents):  # and others, too
        stated = [one for one in stated if one.key != _TARGETS or one.word]
    models = {one.value for one in stated if one.key == "model.source"}  # whose tokenizers are their own
    stated = [one for one in stated if one.key != "model.tokenizer" or one.value not in models]
    stated = resolve.with_times(resolve.with_labels(stated, said))
    stated = resolve.with_recomputation(stated, "\n".join([*models, *(one.text for one in documents)]))
    stated = resolve.with_warmup(stated, setup, said)
    stated = [resolve.with_last_rate(one, stated, said) for one in stated]
    lost = {one.key for one in stated if not one.value}
    outputs = [one.get("output_dir") for one in documents]
    stated = [resolve.as_folder(one, outputs) for one in stated if one.value]
    stated = resolve.with_precision(stated)
    if not stated:
        to_do = [one for one in said if one.startswith("to do")]
        fix = "; ".join(to_do) or "add the launch command, or the file with the arguments"
        raise JobError("none of its settings is one of a job", where=", ".join(map(str, files)), fix=fix)
    given = {one.key for one in stated} | lost
    idle = {"train.save_every": saves in _NO_STEPS, "train.eval_every": evaluates in _NO_STEPS}
    idle["data.eval"] = evaluates in _NO_STEPS[1:]
    open_ = {key: place for key, place in unsaid(documents, given).items() if not idle.get(key)}
    masks = any("labels(-100)" in one for one in said)  # which says the same of an own collator
    to_do = [one for one in _to_do(open_) if not (masks and ": own_collator(): " in one)]
    adapted = {"model.lora"} if with_peft(documents) else set[str]()
    found = suspects(documents, given | open_.keys() | adapted, said)
    unread(documents, used, said)
    open_ |= {key: place for key, (place, _) in found.items()}
    numbers = {key: until for key, (_, until) in found.items() if until}
    asked = {"data.eval"} if any("write data.eval" in one for one in said) else set[str]()
    plain = {"text" for one in stated if (one.key, one.value) == ("data.format", "text")}
    keys = plain | {key for one in documents for key, value in leaves(one.values) if value is not None}
    model = next((one.value for one in stated[::-1] if one.key == "model.source"), "")
    said += resolve.of_other_senses(stated, model)
    if any(one.has("seed") for one in documents):  # no default of a tool, also where only a run knows it
        asked |= {"train.seed"}
    assumed = defaults(keys | given | open_.keys() | asked, documents, model, said)
    assumed += [f"{key}={value}" for key, value in numbers.items()]
    assumed += ["train.eval_every=0"] * (evaluates in _NO_STEPS[1:] and "data.eval_fraction" in found)
    said += to_do
    parts = [*(one.split("=") for one in assumed), *((one.key, one.value) for one in stated)]
    batch = {name[6:]: int(value) for name, value in parts if name.startswith("batch.")}
    said += resolve.conflicts(resolve.without_times(stated, batch, said))
    if swift and not {"accumulation", "total"} & batch.keys() and "batch.accumulation" not in open_:
        batch["total"] = resolve.swift_rows(batch, said)
    in_part = any(key.startswith("batch.") for key in open_.keys() - numbers)
    rows = resolve.batch(batch, unsaid=in_part, said=said)
    assumed = [one for one in assumed if not one.startswith("batch.")]
    in_order = [] if resolve.without_precision(setup) else in_order
    precision = [change for one in in_order[-1:] for change in one.changes[1:2]]
    job = source.Document(name="the files")
    name = f"name={json.dumps(run_name(files[0]))}"
    source.apply(job, [name, *assumed, *precision, *resolve.changes(stated), *rows])
    _complete(job, said, open_.keys(), documents)
    said[:] = sorted((one.replace(STEPS, _steps(job)) for one in _names_together(said)), key=_weight)
    return _text(job, files, folder, said), said


def _with_times(
    stated: list[Statement], documents: Sequence[Document], setup: Setup, said: list[str]
) -> tuple[list[Statement], Any, Any]:
    """The statements that hold for when the run saves and evaluates, and these two strategies."""
    saves, evaluates = setup.training("save_strategy"), setup.training("eval_strategy", "evaluation_strategy")
    shown = any(re.search("TrainingArguments|SFTConfig", one.text) for one in documents)  # its arguments
    by_trainer = any(of_script(one) == "trainer" for one in documents)
    stated = resolve.with_seed(stated, setup.scripts, said) if by_trainer else stated
    by_trainer = shown and by_trainer
    swift = any(one.has("swift") for one in documents)
    by_factory = not swift and any({*names("of_llama_factory")} & one.values.keys() for one in documents)
    if swift and evaluates is None:
        evaluates = saves  # its eval_strategy follows
        stated += resolve.swift_evaluation(stated, saves, said)
    if (by_trainer or by_factory) and not _EVALUATES & {place[0] for one in documents for place in one.marks}:
        evaluates = None if any(one.endswith(of_files.ARGUED) for one in said) else "no"
    splits = any("train_test_split" in one.place for one in stated if one.key == "data.eval_fraction")
    if splits and not any(_TEST_ROWS.search(one.text) for one in documents):  # no line reads its other part
        evaluates = "no"
    if evaluates in _NO_STEPS[1:]:
        stated = [one for one in stated if one.key not in ("data.eval", "train.eval_every")]
        asks = any("write data.eval_fraction" in one for one in said)
        held_out = [one for one in stated if asks or one.key == "data.eval_fraction"]
        stated += [one._replace(key="train.eval_every", value="0", word=False) for one in held_out[:1]]
    if saves in _NO_STEPS:  # whatever `save_steps` is by default
        stated = [one for one in stated if one.key != "train.save_every" or one.word]
    return stated, saves, evaluates


def _without_adapters(documents: Sequence[Document]) -> str:
    """Where a file says that there are no adapters, whatever their rank would be."""
    if any(one.get(key) is True for one in documents for key in TABLE["no_adapters"]):
        return ""
    for one in documents:
        for key, off in TABLE["no_adapters"].items():
            if one.get(key) == off and type(one.get(key)) is type(off):
                return f"{one.name}:{one.line((key,))}: {key} {json.dumps(off)}"
        if one.has("base_model") and one.syntax == "yaml" and not one.get("adapter") and one.get("lora_r"):
            return f"{one.name}:{one.line(('base_model',))}: no adapter"  # Axolotl trains all weights
    return ""


def shown(said: Sequence[str], out: Path) -> list[str]:
    """What a user reads at once; the reasons of what is left out are at the head of the job, in `out`."""
    kept = [one for one in said if not one.startswith("left out")]
    if reasons := len(said) - len(kept):
        kept.append(f"left out: what a job has not; the head of {out} says why ({reasons} of its lines)")
    return kept


def _weight(sentence: str) -> int:
    """The order in which a user reads: what is to do first, what is left out last."""
    kinds = ("to do", "conflict", "changed", "assumed", "not read", "left out")
    return next(place for place, kind in enumerate(kinds) if sentence.startswith(kind))


def _names_together(said: Sequence[str]) -> list[str]:
    """The sentences, with one for all keys that are left out for the same reason, as the last ones."""
    made = list(said)
    for why in BY_NAME:
        start = f"left out: {why}: "
        names = sorted({one.removeprefix(start) for one in made if one.startswith(start)})
        shown_ = [*names[:_MOST_NAMES], *["..."] * (len(names) > _MOST_NAMES)]
        made = [one for one in made if not one.startswith(start)] + [start + ", ".join(shown_)] * bool(names)
    return made


def _rank(document: Document, setup: Setup) -> tuple[bool, int]:
    """The order in which documents are read: of two, the last counts.

    A launcher's flags are more than accelerate's file, and what a script does is more than its flags.
    The Trainer and Accelerate take DeepSpeed's scheduler; DeepSpeed itself takes the script's.
    """
    deepspeed_last = setup.reader != "deepspeed"
    kinds = {"accelerate": 0, "yaml": 1, "json": 1, "shell": 2}
    kind = document.kind if document.kind == "accelerate" else document.syntax
    return (document.kind == "deepspeed") == deepspeed_last, kinds.get(kind, 3)


def _to_do(open_: dict[str, str]) -> list[str]:
    """A sentence for each place whose value only a run knows."""
    made = list[str]()
    for place in dict.fromkeys(open_.values()):
        keys = (key for key in open_ if open_[key] == place)
        write = dict.fromkeys(resolve.BATCH if one.startswith("batch.") else one for one in keys)
        why = _HELD_OUT if [*write] == ["data.eval"] else "its value could not be read"
        why = TABLE["whys"].get(place.rpartition(": ")[2], why)
        made.append(f"to do: {place}: {why}; write {', '.join(write)}")
    return made


def _complete(
    job: source.Document, said: list[str], open_: Collection[str], documents: Sequence[Document]
) -> None:
    """Fill in what a job must have, leave out what it may not, and say which values are shardwise's own."""
    _fill_in(job, said, open_, documents)
    made, wrong = validate.check(job)
    problems = [(key, problem.what) for key, problem in wrong.items()]
    if made is not None:
        if made.model.quantization != "none" and "lora" not in job.values["model"]:
            rank, kind = made.model.lora and made.model.lora.rank, made.model.quantization
            said.append(f"assumed: LoRA of rank {rank}: {kind} weights are frozen, and no file has adapters")
        found = contradictions.find(made, frozenset(map(source.dotted, job.origins)))
        problems += [(tuple(one.where.split(", ")[0].split(".")), one.what) for one in found]
    for key, what in problems:
        if key != ("optimizer", "final_fraction"):
            share = key in wrong and "every" in key[-1]
            why = f"{_SHARE}; write {source.dotted(key)}" if share else what
            named = why if why.startswith(source.dotted(key)) else f"{source.dotted(key)}: {why}"
            said.append(f"{'to do' if key in wrong else 'left out'}: {named}")
        job.forget(key)
    _fill_in(job, said, open_, documents)  # what a contradiction has taken
    resolved = resolved_leaves(made.model_dump(mode="json")) if made is not None else ()
    rest = {source.dotted(key): value for key, value in resolved if key not in job.origins}
    data, unused = job.values["data"], {"name", "output"}  # which are words of sentences, too
    unused |= {"train.eval_every"} if data.get("eval_fraction") == 0 else set()
    unused |= {"data.loss_on"} if data.get("format") == "text" else set()  # all of it counts
    own = {k: json.dumps(v).replace('"', "") for k, v in rest.items() if v is not None and k not in unused}
    if "lora" not in job.values["model"]:
        own["model.lora"] = "none"
    if not {"steps", "epochs"} & job.values.get("train", {}).keys():
        own |= {"train.epochs": "one epoch", "train.steps": "one epoch"}
    asked = _until_written(said, own)
    asked |= {"train.epochs"} if "train.steps" in asked else set()
    texts = {key: value if " " in value else f"{key} {value}" for key, value in own.items()}
    unset = [texts[key] for key in TABLE["shown"] if key in texts and key not in asked]
    if unset:
        said.append(f"not read from the files, so shardwise's own: {', '.join(unset)}")


def _until_written(said: list[str], own: dict[str, str]) -> set[str]:
    """Add to each sentence that asks for keys what they are until then; return these keys."""
    asked = set[str]()
    for place, sentence in enumerate(said):
        kind, _, rest = sentence.partition(": ")
        asks = own if kind in ("to do", "changed") else ()
        named = [key for key in asks if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", rest)]
        asked |= {*named}
        keys = [key for key in named if kind == "changed" or "write " in rest or rest.startswith(key)]
        texts = [own[key] if len(keys) == 1 or " " in own[key] else f"{key} {own[key]}" for key in keys]
        said[place] += f"; until then {', '.join(dict.fromkeys(texts))}" if keys else ""
    return asked


def _steps(job: source.Document) -> str:
    """How many steps the training has, as far as the job shows it."""
    train = {"epochs": 1, "global_batch": "the rows of a step", **job.values.get("train", {})}
    share = f"{train['epochs']:g} x the data's rows / {train['global_batch']}"
    return f"{STEPS} ({train.get('steps', share)})"


def _fill_in(
    job: source.Document, said: list[str], open_: Collection[str], documents: Sequence[Document]
) -> None:
    """Write a placeholder for what a job must have."""
    for name, text in paths.FILL_IN.items():
        section, last = name.split(".")
        if last not in job.values.get(section, {}):
            source.apply(job, [f"{name}={text}"])
            asked = any(one.startswith("to do") and re.search(_ASKS + re.escape(name), one) for one in said)
            if name not in open_ and not asked:
                seen = not_followed(name, documents)
                said.append(f"to do: {name}: not found in the files{seen}; write it in place of {text}")


def _text(job: source.Document, files: Sequence[Path], folder: Path, said: Sequence[str]) -> str:
    """The job's text for a folder, below what is said."""
    fill, train = paths.FILL_IN["data.train"], job.values["data"]["train"]
    if (back := os.path.relpath(Path.cwd(), folder)) != ".":
        job.values = paths.below(back, job.values)
        if train == fill:
            job.values["data"]["train"] = fill
    lines = [f"made of {', '.join(map(str, files))}", *said]
    head = "".join(f"# {part}\n" for line in lines for part in _COMMENT.wrap(" ".join(line.split())))
    ordered = {key: job.values[key] for key in json_schema.names_below(()) if key in job.values}
    return f"{head}\n{source.job_text(ordered)}"
