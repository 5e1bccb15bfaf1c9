"""Tables over models, GPUs and modes, or sizes of a job: each row is what `plan` says of one question."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import lcm
from typing import Any

from shardwise.app.jobs import AnyJob, hardware_of, read
from shardwise.app.plan import plan
from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware, resized
from shardwise.job.strategies import NAMED
from shardwise.planner.plan import Objective
from shardwise.planner.planning import Making
from shardwise.planner.search import RefusedError
from shardwise.planner.sketch import default_global_batch
from shardwise.planner.tables import MOST_ROWS, Kind, Row, Table

MODELS = "gpt3-small,gpt3-medium,gpt3-large,gpt3-xl,gpt3-2.7b,gpt3-6.7b,gpt3-13b,gpt3-175b"
MODES: dict[Kind, str] = {
    "memory": "full+nockpt,full,lora16,int8+lora16,nf4+lora16",
    "speed": "full",
    "scaling": "full",
    "batch": "full,lora16",
}
HERE = "this machine"
_WORDS: dict[str, dict[str, str]] = {
    "full": {"model.lora": "null"},
    **{word: {"model.quantization": word} for word in ("int8", "nf4")},
    **{word: {"train.precision": word} for word in ("bf16", "fp16", "fp32")},
    "ckpt": {"train.checkpointing": "full"},
    "nockpt": {"train.checkpointing": "none"},
    **{word: {"strategy": word} for word in ("auto", *NAMED)},
}
_FIX = f"words joined by +: lora16 (any rank), autotp2-zero1, {', '.join(_WORDS)}; as in int8+lora16+zero2"
_BATCH = "train.global_batch="


def tables(
    kind: Kind,
    models: str | Sequence[str] = MODELS,
    *,
    gpus: str | Sequence[str] | None = None,
    modes: str | Sequence[str] | None = None,
    sequence: int | None = None,
    changes: Sequence[str] = (),
    memory_cap: str | int | None = None,
    margin: str | float | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Table:
    """Predict every model on every kind of GPUs in every mode; each row is kept as a plan is.

    Args:
        kind: `memory`: what a GPU needs for a micro-batch of 1. `speed`: steps and days. `scaling`: the same
            step on several numbers of GPUs. `batch`: the largest micro-batch that fits.
        models: hub ids, folders or known names; a list, or text with commas, as are the next two.
        gpus: `4x24GB,8xH100`; None: this machine's.
        modes: words joined by `+`: `full`, `lora16`, `int8`, `nf4`, `fp16`, `nockpt`, `zero3-offload`.
            A mode without a strategy means the plan's choice in `speed` and `scaling`, which takes seconds a
            row. In `memory` and `batch` it means `single` on one GPU and `zero2` on several, with every
            block recomputed.
        sequence: tokens in a row.
        changes: `key=value` texts, as for `plan`.
        memory_cap: use no more of each GPU.
        margin: share of the memory to leave free; `10%` or 0.1.
        progress: called with a text before each row.

    Raises:
        JobError: a model, a mode or a change is wrong, or no row is possible.
        MachineError: no GPU is named, and this machine has none.
    """
    texts = [_listed(value) for value in (models, modes or MODES[kind], gpus or HERE)]
    if not all(texts):
        raise JobError("the table has no rows", where="shardwise tables", fix="name a model, a mode and GPUs")
    each = {mode: _changes(mode) for mode in texts[1]}
    worlds = {text: hardware_of(None if text == HERE else text).world_size for text in texts[2]}
    given = [*([] if sequence is None else [f"data.sequence_length={sequence}"]), *changes]
    if kind == "scaling":
        common = lcm(*worlds.values())
        given = [f"{_BATCH}{-(-default_global_batch(max(worlds.values())) // common) * common}", *given]
    questions = [(model, mode, text) for model in texts[0] for mode in each for text in worlds]
    rows = []
    for number, (model, mode, text) in enumerate(questions, 1):
        progress(f"{number} of {len(questions)}: {model}, {mode}, {text}")
        named = {key: value for key, value in each[mode].items() if key != "model.lora" or value != "null"}
        words = [f"{key}={value}" for key, value in (_unset(kind, worlds[text]) | named).items()]
        asked: dict[str, Any] = {"model": model, "memory_cap": memory_cap, "margin": margin}
        asked["gpus"] = None if text == HERE else text
        changed = [*words, *given]
        row = _largest(changed, worlds[text], **asked) if kind == "batch" else _row(changed, **asked)
        rows.append(replace(row, mode=mode))
    return _table(kind, rows, "--modes")


def scale(
    sizes: str,
    job: AnyJob | None = None,
    *,
    gpus: str | None,
    model: str | None = None,
    changes: Sequence[str] = (),
    objective: Objective = "throughput",
    memory_cap: str | int | None = None,
    straggler: str | float | None = None,
    margin: str | float | None = None,
    making: Making = nullcontext,
) -> Table:
    """Plan the same job on several numbers of GPUs.

    Args:
        sizes: `1,2,4,8,16x8`: GPUs, or nodes x GPUs. More GPUs than a node has are several nodes.
        job: as for `plan`. Without one, the rows of a step are those that `plan` takes for the most GPUs.
        gpus: their kind and links, as for `plan`; its last number says how many a node has.
        model: as for `plan`, as are the others.
        changes: `key=value` texts.
        objective: the metric to choose by.
        memory_cap: use no more of each GPU.
        straggler: standard deviation of a GPU's step time.
        margin: share of the memory to leave free.
        making: entered while a plan is made.

    Returns:
        The choice for each size, in the order asked for.

    Raises:
        JobError: the sizes cannot be read, or the job is wrong whatever the number of GPUs.
    """
    if gpus is None:
        raise JobError("--scale needs to know which GPUs", where="--scale", fix="name them: --gpus 8xH100")
    worlds = {
        text: parse_hardware(text).world_size for text in (_size(one, gpus) for one in sizes.split(","))
    }
    if job is None and not any(change.replace(" ", "").startswith(_BATCH) for change in changes):
        changes = [*changes, f"{_BATCH}{default_global_batch(max(worlds.values()))}"]
    price = _price(job, changes)
    shared: dict[str, Any] = {"objective": objective, "memory_cap": memory_cap, "straggler": straggler}
    shared |= {"model": model, "job": job, "margin": margin, "making": making}
    rows = [_row(changes, gpus=text, **shared) for text in worlds]
    return _table("scaling", [replace(row, price_per_gpu_hour=price) for row in rows], "--scale")


def _table(kind: Kind, rows: Sequence[Row], where: str) -> Table:
    if all(row.plan is None for row in rows):
        raise JobError(f"no row is possible: {rows[0].problem}", where=where, fix="change it, or the GPUs")
    return Table(kind=kind, rows=tuple(_compared(rows) if kind == "scaling" else rows))


def _row(changes: Sequence[str], *, gpus: str | None, **asked: Any) -> Row:
    """What `plan` says, or the rule that refuses it."""
    flags = {"--model": asked["model"], "--gpus": gpus, "--memory-cap": asked["memory_cap"]}
    flags |= {"--margin": asked["margin"]}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, f"{value}")]
    command = shlex.join(["shardwise", "plan", *words, *(w for change in changes for w in ("--set", change))])
    fields: dict[str, Any] = {"model": f"{asked['model'] or ''}", "gpus": gpus or HERE, "command": command}
    try:
        made = plan(gpus=gpus, changes=changes, nearest=False, **asked)
        return Row(**fields | {"model": asked["model"] or made.job.model}, plan=made)
    except RefusedError as error:
        return Row(**fields, plan=None, problem="; ".join(problem.what for problem in error.problems))


def _largest(changes: Sequence[str], world: int, **asked: Any) -> Row:
    """The row of the largest micro-batch that fits, or of 1.

    Each step has two micro-batches: gradients that add up take memory that a single one does not need.
    """

    def of(rows: int) -> Row:
        more = (f"train.micro_batch={rows}", f"{_BATCH}{2 * rows * world}")
        return _row([*changes, *more], **asked)

    best, rows, too_many = of(1), 1, MOST_ROWS + 1
    while best.option is not None and best.option.fit == "fits" and rows < too_many - 1:
        tried = min(2 * rows, MOST_ROWS) if too_many > MOST_ROWS else (rows + too_many) // 2
        found = of(tried)
        if found.option is not None and found.option.fit == "fits":
            best, rows = found, tried
        else:
            too_many = tried
    return best


def _compared(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with their tokens/s as a multiple of the first one of the same model and mode that fits."""
    first: dict[tuple[str, str], tuple[float, int]] = {}
    for row in rows:
        if row.option is None or row.option.fit == "no":
            yield row
            continue
        time = row.option.prediction.time
        now = time.tokens_per_second_per_gpu, time.world_size
        speed, gpus = first.setdefault((row.model, row.mode), now)
        yield replace(row, speedup=now[0] * now[1] / speed / gpus, efficiency=now[0] / speed)


def _listed(value: str | Sequence[str]) -> list[str]:
    """Each text once, in order."""
    texts = value.split(",") if isinstance(value, str) else value
    return list(dict.fromkeys(text.strip() for text in texts if text.strip()))


def _changes(mode: str) -> dict[str, str]:
    """A mode's keys of a job and their values; JobError for a word that is none, and for contradictions."""
    found: dict[str, str] = {}
    for word in mode.split("+"):
        rank, tensor = re.fullmatch(r"lora([1-9]\d*)", word), re.fullmatch(r"autotp(\d+)-zero([12])", word)
        changes = _WORDS.get(word, {})
        if rank is not None:
            changes = {"model.lora": f"{{rank: {rank[1]}}}"}
        elif tensor is not None:
            parts = f"{{engine: deepspeed, stage: {tensor[2]}, tensor_parallel: {tensor[1]}}}"
            changes = {"strategy": parts}
        if not changes:
            raise JobError(f"{word!r} of {mode!r} is no word of a mode", where="--modes", fix=_FIX)
        if changes.keys() & found.keys():
            what = f"{mode!r} says {', '.join(changes)} twice"
            raise JobError(what, where="--modes", fix="keep one of the words")
        found |= changes
    return found


def _unset(kind: Kind, world: int) -> dict[str, str]:
    """What `memory` and `batch` take where the mode does not say it."""
    if kind in ("speed", "scaling"):
        return {}
    found = {"strategy": "single" if world == 1 else "zero2", "train.checkpointing": "full"}
    return found | ({"train.micro_batch": "1"} if kind == "memory" else {})


def _size(size: str, gpus: str) -> str:
    """The hardware text of one size."""
    numbers = re.fullmatch(r"\s*(?:([1-9][0-9]{0,4})\s*[x×]\s*)?([1-9][0-9]{0,4})\s*", size)
    if numbers is None:
        fix = "numbers of GPUs, or nodes x GPUs, with commas, such as 1,2,4,8,16x8"
        raise JobError(f"{size.strip()!r} is no number of GPUs", where="--scale", fix=fix)
    return resized(gpus, nodes=None if numbers[1] is None else int(numbers[1]), gpus=int(numbers[2]))


def _price(job: AnyJob | None, changes: Sequence[str]) -> float | None:
    """The job's `energy.price_per_gpu_hour`."""
    if job is not None:
        return read(job, changes).job.energy.price_per_gpu_hour
    named = dict(change.split("=", 1) for change in changes)
    price = named.get("energy.price_per_gpu_hour")
    return None if price is None else float(price)
