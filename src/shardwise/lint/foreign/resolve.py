"""One value for each key of the job: which of several statements counts, and what is said of the others.

Of the strategy, calls, flags and words give parts, which are put together.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from shardwise.job.paths import is_local
from shardwise.job.schema import Train
from shardwise.job.strategies import NAMED
from shardwise.lint.document import AUTO, Document
from shardwise.lint.foreign.reads import is_choice, names_read
from shardwise.lint.foreign.statements import QUANTIZES, Statement
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.schema import as_number
from shardwise.lint.setup import Setup
from shardwise.lint.translate import Translated
from shardwise.strategy import Strategy

TIMES = "batch.accumulation"
BATCH = "train.micro_batch, train.global_batch"
_SEEDS = re.compile(r": (set_seed|manual_seed|seed_everything)\.")
_COUNTS = "train.eval_every counts steps"
_LOW = 0.1  # the first rate of a warm-up, as a share, that is as good as 0
_OF_FILES = ("strategy.nvme_path", "strategy.bucket")  # which belong to the strategy of a DeepSpeed file
_NO_BITS = re.compile(TABLE["words"]["no_bits"])
_OF_BITS = re.compile(r"\bprepare_model_for_\w+")
_TOGETHER = ("name", "model.lora.variants")  # `output_dir` and `run_name`; DoRA and rsLoRA


def of_a_file(one: Translated) -> Statement:
    """The strategy of a configuration, and its name with what the name does not say."""
    value = one.changes[0].partition("=")[2]
    parts = Strategy(**json.loads(value))
    words = [parts.name]
    if parts.bucket is not None:
        words.append(f"bucket {parts.bucket}")
    if not parts.overlap_comm:
        words.append("overlap_comm false")
    return Statement("strategy", value, f"{one.file} ({', '.join(words)})", True)


def with_precision(stated: Sequence[Statement]) -> list[Statement]:
    """The statements, with the format of the weights as one of the precision.

    Weights in fp32 are the masters of a computation in halves. Of two halves the computation's counts.
    """
    halves = {one.value for one in stated if one.key == "train.precision"} - {"fp32", ""}
    others = [one for one in stated if one.key != "weights"]
    own = [one._replace(key="train.precision") for one in stated if one.key == "weights"]
    if not halves:
        return [*others, *own]
    return [*(one for one in own if one.value != "fp32"), *others]


def without_precision(setup: Setup) -> bool:
    """Whether no file of DeepSpeed or Accelerate says a precision, and fp32 is not what follows.

    TRL's arguments then compute in bf16, and `auto` takes the format of the model's files.
    """
    files = (*setup.of("deepspeed"), *setup.of("accelerate"))
    said = any(one.has(key) for one in files for key in ("mixed_precision", "bf16", "bfloat16", "fp16"))
    own = re.search(r"(?<!class )\bSFTConfig\b", setup.scripts) or AUTO in (
        setup.training("torch_dtype"),
        setup.training("dtype"),
    )
    return bool(own) and not said and setup.training("bf16") is not False


def of_this_tool(stated: Sequence[Statement], scripts: Sequence[Document]) -> list[Statement]:
    """The statements without what another tool means by a name that a script has for its own.

    That is the rank of ms-swift's `train_type: lora`, and `dataset: sql` where the script compares it with
    words to choose its data.
    """
    read = names_read(scripts)
    keys = [one.place.partition(": ")[2].partition(" ")[0] for one in stated]
    own = [key for key, one in zip(keys, stated, strict=True) if one.key == "model.lora.rank" and one.word]
    choices = {
        (key, one.value)
        for key, one in zip(keys, stated, strict=True)
        if one.key == "data.train" and re.fullmatch(r'"[\w-]+"', one.value)
        if is_choice(key, json.loads(one.value), scripts)
    }
    ranks = read & {*own}
    return [
        one._replace(value="") if (key, one.value) in choices else one
        for key, one in zip(keys, stated, strict=True)
        if not (one.key == "model.lora.rank" and one.word and key in ranks)
    ]


def with_last_rate(one: Statement, stated: Sequence[Statement], said: list[str]) -> Statement:
    """A statement of the last rate as a share of the first; without a value where no file says the first."""
    if one.key != "least_rate" or not one.value:
        return one
    rates = [as_number(rate.value) for rate in stated if rate.key == "optimizer.learning_rate"]
    first, least = (rates or [None])[-1], as_number(one.value)
    if least and not first:
        said.append(f"to do: {one.place}: write optimizer.final_fraction, this rate as a share of the first")
    share = f"{least / first:.6g}" if least and first else "0" * (least == 0)
    return one._replace(key="optimizer.final_fraction", value=share)


def with_seed(stated: Sequence[Statement], scripts: str, said: list[str]) -> list[Statement]:
    """The statements without the seeds of calls: the Trainer of transformers sets its own once it is made.

    Where a parser fills the Trainer's arguments, `set_seed(args.seed)` has their seed.
    """
    own = rf"\({'(seed=)?{}' * bool(re.search(TABLE['words']['fills'], scripts))}"
    seeds = [one for one in stated if one.key == "train.seed"]
    lost = [one for one in seeds if _SEEDS.search(one.place)]
    lost = [one for one in lost if re.search(rf"\b{_call(one)}{own.format(one.value)}", scripts)]
    kept = next((one.value for one in seeds[::-1] if one not in lost), "42")
    others = [one for one in lost if one.value not in (kept, "")]
    said += [
        f"left out: {one.place}: the Trainer sets its own seed ({kept}) when it is made" for one in others
    ]
    return [one for one in stated if one not in lost]


def with_warmup(stated: Sequence[Statement], setup: Setup, said: list[str]) -> list[Statement]:
    """The statements, with the warm-up of the schedule that runs: the Trainer's `constant` has none.

    A schedule of DeepSpeed's file runs in place of the Trainer's, with the Trainer's warm-up.
    """
    if ramps := [*_ramps(setup, said)]:
        return [*(one for one in stated if one.key != "optimizer.warmup_steps"), *ramps]
    schedules = [one.place.partition(" (")[0] for one in stated if one.key == "optimizer.schedule"]
    warmups = [one for one in stated if one.key == "optimizer.warmup_steps"]
    none = [one for one in warmups if one.word and ": lr_scheduler" in one.place]
    replaced = setup.reader == "trainer" and any(one.section("scheduler") for one in setup.of("deepspeed"))
    stated = [one for one in stated if one not in none or (one.value and not replaced)]
    if replaced or not any(one.value and one.place.startswith(schedules[-1]) for one in none):
        return stated  # also of a schedule that a job has not, which warms up
    lost = [one for one in warmups if one not in none]
    said += [f"left out: {one.place}: the constant schedule has no warm-up" for one in lost]
    return [one for one in stated if one not in lost]


def _ramps(setup: Setup, said: list[str]) -> Iterator[Statement]:
    """The warm-up of SequentialLR, whose first part is LinearLR; a to do where only a run knows it."""
    for one in setup.documents:
        if one.has("LinearLR()") and one.has("CosineAnnealingLR()") and "SequentialLR(" in one.text:
            steps, place = one.section("LinearLR").get("total_iters"), ("LinearLR", "total_iters")
            at = f"{one.name}:{one.line(place)}: LinearLR.total_iters"
            if type(steps) is int:
                first = as_number(one.section("LinearLR").get("start_factor", 1 / 3))
                if first is not None and first <= _LOW:
                    said[:] = [text for text in said if not text.startswith(f"changed: {one.name}: LinearLR")]
                yield Statement("optimizer.warmup_steps", str(steps), at, False)
            else:
                said.append(f"to do: {at}: its value could not be read; write optimizer.warmup_steps")
                yield Statement("optimizer.warmup_steps", "", at, False)


def with_labels(stated: Sequence[Statement], said: list[str]) -> list[Statement]:
    """The statements without masks of a script's own, where the collator makes the labels again."""
    again = any(": DataCollatorForLanguageModeling()" in one.place for one in stated)
    lost = [one for one in stated if again and one.key == "data.loss_on" and ": masked()" in one.place]
    said += [f"left out: {one.place}: DataCollatorForLanguageModeling makes the labels again" for one in lost]
    return [one for one in stated if one not in lost]


def with_recomputation(stated: Sequence[Statement], texts: str) -> list[Statement]:
    """The statements without `gradient_checkpointing=False`, which turns off nothing that a call turns on.

    PEFT's call turns on nothing where no weights are quantized, which `texts` of all files would show.
    """
    if not QUANTIZES.search(_NO_BITS.sub("", texts)):
        stated = [one for one in stated if one.value != "full" or not _OF_BITS.search(one.place)]
    own = [one for one in stated if one.key == "train.checkpointing"]
    calls = [one for one in own if _call(one) != "gradient_checkpointing"]
    lost = [one for one in own if calls and calls[-1].value == "full" and one.value == "none"]
    return [one for one in stated if one not in lost]


def of_other_senses(stated: Sequence[Statement], model: str) -> Iterator[str]:
    """What is said of a model that also reads pictures, as far as its name shows."""
    if re.search(TABLE["words"]["other_senses"], model.strip('"')):
        place = next(one.place for one in stated[::-1] if one.key == "model.source")
        yield f"to do: {place}: {TABLE['reasons']['model of pictures']}"


def as_folder(one: Statement, outputs: Sequence[Any]) -> Statement:
    """A model that a run has written, as a path: `out/checkpoint-100` could be a name on a hub."""
    name = one.value.strip('"')
    written = re.search(r"(^|/)checkpoint-\d+/?$", name)
    inside = any(f"{name}/".startswith(f"{str(folder).rstrip('/')}/") for folder in outputs if folder)
    own = one.key == "model.source" and not is_local(name) and (written or inside)
    return one._replace(value=f"./{name}") if own else one


def changes(stated: Sequence[Statement]) -> list[str]:
    """`key=value` for each statement but the batch's; a key of its own says more than a word."""
    stated = [one for one in stated if not one.key.startswith("batch.")]
    words = [f"{one.key}={one.value}" for one in stated if one.word]
    if len({one for one in words if "variants" in one}) == 2:
        words.append("model.lora.variants=[dora, rslora]")
    return [*words, *(f"{one.key}={one.value}" for one in stated if not one.word)]


def conflicts(stated: Sequence[Statement]) -> Iterator[str]:
    """The values of each key that are not used: the last is."""
    groups = defaultdict[tuple[str, bool], dict[str, str]](dict)
    for one in stated:
        places = groups[one.key, one.word]
        places.pop(one.value, None)
        places[one.value] = one.place
    for (key, _), places in groups.items():
        *lost, used = places.values()
        if key not in _TOGETHER:
            yield from (f"conflict: {used} is used, not {one}" for one in lost)


def with_times(stated: Sequence[Statement]) -> list[Statement]:
    """The statements, with Axolotl's rows of a step on a GPU as an accumulation; a plain one counts more."""
    micro = next((int(one.value) for one in stated[::-1] if one.key == "batch.micro" and one.value), 1)
    each = [one for one in stated if one.key == "batch.each"]
    plain = [one._replace(key=TIMES, place=one.place.replace("axolotl.", "")) for one in each]
    own = [one._replace(value=one.value and str(max(1, int(one.value) // micro))) for one in plain]
    return [*own, *(one for one in stated if one not in each)]


def without_times(stated: Sequence[Statement], parts: Mapping[str, int], said: list[str]) -> list[Statement]:
    """The statements without accumulations next to all rows of a step, which leave no choice of one."""
    totals = [one for one in stated if one.key == "batch.total"]
    micro, gpus = parts.get("micro", 1), parts.get("gpus", 1) * parts.get("nodes", 1)
    for value, one in {one.value: one for one in stated if totals and one.key == TIMES}.items():
        rows, total = micro * int(value) * gpus // parts.get("sequence", 1), int(totals[-1].value)
        known = {"micro", "gpus"} <= parts.keys()
        if total != rows if known else total % max(1, rows):
            why = f"{micro} x {value} x {gpus} GPUs = {rows}" if known else f"no multiple of {rows}"
            said.append(f"conflict: {totals[-1].place} is used, not {one.place}: {why}")
    return [one for one in stated if not totals or one.key != TIMES]


def with_held_out(stated: Sequence[Statement], *, swift: bool) -> list[Statement]:
    """The statements without a share next to files that are held out: of 0, or any of ms-swift's."""
    files = any(one.key == "data.eval" and one.value for one in stated)
    shares = [one for one in stated if one.key == "data.eval_fraction" and files]
    return [one for one in stated if one not in shares or not (swift or as_number(one.value) == 0)]


def swift_evaluation(stated: Sequence[Statement], saves: Any, said: list[str]) -> list[Statement]:
    """When ms-swift evaluates the rows that are held out, where no key says it: when it saves."""
    places = {one.key: one for one in stated if as_number(one.value) != 0}
    held = places.get("data.eval", places.get("data.eval_fraction"))
    if not held or "train.eval_every" in places or saves in ("no", False):
        return []
    if saves == "epoch":
        said.append(f"changed: {held.place}: evaluated after epochs, as ms-swift saves: {_COUNTS}")
        return []
    every = places.get("train.save_every", held._replace(value="500", word=False))
    said.append(f"assumed, as ms-swift 4 does: train.eval_every={every.value}")
    return [every._replace(key="train.eval_every")]


def swift_rows(parts: Mapping[str, int], said: list[str]) -> int:
    """The rows of a step where ms-swift chooses the accumulation: 16 at least (its trainers/arguments.py)."""
    each = parts.get("micro", 1) * parts.get("gpus", 1) * parts.get("nodes", 1)
    rows = max(1, each * max(1, math.ceil(16 / each)) // parts.get("sequence", 1))
    said.append(f"assumed, as ms-swift 4 does: train.global_batch={rows}")
    return rows


def batch(parts: Mapping[str, int], *, unsaid: bool, said: list[str]) -> list[str]:
    """The micro-batch, and the rows of a step over all GPUs; `unsaid`: whether a factor is not known."""
    if not parts.keys() - {"gpus", "nodes", "sequence"}:
        return []
    micro, times = parts.get("micro", 1), parts.get("accumulation", 1)
    groups = max(1, parts.get("nodes", 1) * parts.get("gpus", 1) // parts.get("sequence", 1))
    rows = parts.get("total", groups * micro * times)
    if parts.get("sequence", 1) > 1:
        said.append(f"changed: a job keeps a row on one GPU; the files share it among {parts['sequence']}")
    if "total" not in parts and unsaid:
        known = ", ".join(f"{name} {count}" for name, count in parts.items())
        what, asks = f"of a step's rows the files say {known}", f"; write {BATCH}"
        asked = [at for at, one in enumerate(said) if one.startswith("to do") and one.endswith(asks)]
        start = f"{said.pop(asked[0]).removesuffix(asks)}; " if asked else "to do: "
        said.append(f"{start}{what}{'' if asked else ', and another factor could not be read'}{asks}")
        more = [f"train.global_batch={rows}"] * (Train().global_batch % micro > 0)  # a default loses
        return [f"train.micro_batch={micro}", *more] if "micro" in parts else []
    if not parts.keys() & {"total", "micro"}:
        said.append(f"to do: no file says how many rows a GPU takes at a time; write {BATCH}")
        return []
    made = [f"train.global_batch={rows}"]
    if "micro" in parts and rows % micro == 0:
        made.append(f"train.micro_batch={micro}")
    elif "micro" in parts:
        said.append(f"left out: {micro} rows of a GPU at a time: {rows} rows of a step are no multiple of it")
    if not parts.keys() & {"gpus", "total"}:
        what = f"train.global_batch {rows} is {micro} x {times} x GPUs; no file says how many"
        said.append(f"to do: {what}: write it where there are several")
    return made


def folded(stated: Sequence[Statement], setup: Setup, said: list[str]) -> list[Statement]:
    """The statements of one document, with its strategy, which calls and flags give part by part, as one."""
    parts = [one for one in stated if one.key.partition(".")[0] == "strategy" and one.value]
    if not any(one.key in ("strategy", "strategy.engine") for one in parts):
        own = [one for one in parts if not one.key.startswith(_OF_FILES)]
        said += [f"left out: {one.place}: nothing says which strategy it belongs to" for one in own]
        return [one for one in stated if one not in own]
    names = ("nproc_per_node", "devices", "num_gpus")
    counts = (one.number(name) for one in setup.documents for name in names)
    gpus = next((int(count) for count in counts if count), None)
    return [*(one for one in stated if one not in parts), _strategy(parts, said, gpus)]


def _strategy(parts: Sequence[Statement], said: list[str], gpus: int | None) -> Statement:
    """One statement for the parts, of which the last of each counts. `gpus`: of a node, if that is known."""
    made = dict[str, Any]()
    engine = parts[0]
    for one in parts:
        name = one.key.partition(".")[2]
        if not name:
            made = dict(NAMED[one.value])
            engine = one
        elif name == "engine" and made.get("engine", one.value) != one.value:
            if _call(engine) != _call(one):
                said.append(f"conflict: {one.place} is used, not {engine.place}")
            made, engine = {"engine": one.value}, one
        else:
            engine = one if name == "engine" else engine
            made[name] = yaml.safe_load(one.value)
    if made.get("engine") != "fsdp2":
        made.pop("reshard", None)
    if made.get("shard_group") == "node":
        made["shard_group"] = gpus
        if gpus is None:
            del made["shard_group"]
            said.append(f"to do: {engine.place}: write strategy.shard_group: the GPUs of a node")
    if made.get("engine") == "ddp":
        made = {"engine": "ddp"}
    places = dict.fromkeys(one.place.partition(" (")[0] for one in parts)
    name = next((name for name, words in NAMED.items() if words == made), "")
    shown = name or ", ".join(f"{key} {value}" for key, value in made.items())
    return Statement("strategy", name or json.dumps(made), f"{', '.join(places)} ({shown})", True)


def _call(one: Statement) -> str:
    """The call or key that says it."""
    return one.place.partition(": ")[2].partition("(")[0].partition(".")[0].strip()
