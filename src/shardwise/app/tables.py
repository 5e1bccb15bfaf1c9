"""Tables over models, GPUs and modes, or sizes of a job: each row is what `plan` says of one question."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from shardwise.app.jobs import AnyJob, hardware_of
from shardwise.app.plan import plan
from shardwise.errors import JobError
from shardwise.hardware.parse import resized
from shardwise.job.strategies import NAMED, with_degree
from shardwise.planner.search import RefusedError
from shardwise.planner.sketch import default_global_batch
from shardwise.planner.tables import MOST_ROWS, Kind, Row, Table

MODELS = "gpt3-small,gpt3-medium,gpt3-large,gpt3-xl,gpt3-2.7b,gpt3-6.7b,gpt3-13b,gpt3-175b"
MODES: dict[Kind, tuple[str, str]] = {
    "memory": (
        "full+nockpt,full,lora16,int8+lora16,nf4+lora16",
        "full+zero1,full+zero2,full+zero3,full+zero3-offload,lora16+zero2,nf4+lora16+zero2",
    ),
    "speed": ("full,lora16", "full,lora16"),
    "scaling": ("full", "full"),
    "batch": ("full,lora16,nf4+lora16", "full+zero2,full+zero3,lora16+zero2,lora16+zero3"),
}
"""Compared by default: on one GPU, and on several."""
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
    job: AnyJob | None = None,
    gpus: str | Sequence[str] | None = None,
    modes: str | Sequence[str] | None = None,
    sequence: int | None = None,
    changes: Sequence[str] = (),
    progress: Callable[[str], object] = lambda _: None,
    **asked: Any,
) -> Table:
    """Predict every model on every kind of GPUs in every mode; each row is kept as a plan is.

    Args:
        kind: `memory`: what a GPU needs for a micro-batch of 1. `speed`: steps and days. `scaling`: the same
            step on several numbers of GPUs. `batch`: the largest micro-batch that fits.
        models: hub ids, folders or known names; a list, or text with commas, as are `gpus` and `modes`.
        job: a job instead of models.
        gpus: `4x24GB,8xH100`; None: this machine's. One of `scaling`: its half, a quarter and so on, too.
        modes: words joined by `+`: `full`, `lora16`, `int8`, `nf4`, `fp16`, `nockpt`, `zero3-offload`.
            Without a strategy `memory` and `batch` take `single` on one GPU and `zero2` on several, with
            every block recomputed; the others take the plan's choice, in seconds a row.
        sequence: tokens in a row.
        changes: `key=value` texts, as for `plan`.
        progress: called with a text before each row.
        asked: other arguments of `plan`: `memory_cap`, `margin`, `objective` and others.

    Raises:
        JobError: a model, a mode or a change is wrong, or no row is possible.
        MachineError: no GPU is named, and this machine has none.
    """
    named = [None] if job is not None else _listed(models)
    found = {text: hardware_of(None if text == HERE else text) for text in _listed(gpus or HERE)}
    worlds = {text: hardware.world_size for text, hardware in found.items()}
    if kind == "scaling" and len(worlds) == 1 and isinstance(gpus, str):
        ((text, world),), node = worlds.items(), next(iter(found.values())).gpus_per_node
        halves = (world >> power for power in range(world.bit_length() - 1, 0, -1))
        parts = (n for n in halves if world % n == 0 == n % min(n, node))  # of full nodes
        worlds = {resized(text, nodes=None, gpus=n): n for n in parts} | worlds
    usual = MODES[kind][max(worlds.values(), default=1) > 1]
    each = {mode: _changes(mode) for mode in _listed(modes or ("" if job else usual))}
    questions = [(model, mode, text) for model in named for mode in each for text in worlds]
    if not questions:
        raise JobError("the table has no rows", where="shardwise tables", fix="name a model, a mode and GPUs")
    given = [*([] if sequence is None else [f"data.sequence_length={sequence}"]), *changes]
    if kind == "scaling" and job is None:  # the same step on all
        common = lcm(*worlds.values())
        given = [f"{_BATCH}{-(-default_global_batch(max(worlds.values())) // common) * common}", *given]
    rows = []
    for number, (model, mode, text) in enumerate(questions, 1):
        progress(f"{number} of {len(questions)}: {' '.join(filter(None, (model, mode, text)))}")
        words = [f"{key}={value}" for key, value in (_unset(kind, worlds[text]) | each[mode]).items()]
        question = {"job": job, "model": model, "gpus": None if text == HERE else text, **asked}
        changed = [*(word for word in words if word != "model.lora=null"), *given]
        row = _largest(changed, worlds[text], **question) if kind == "batch" else _row(changed, **question)
        rows.append(replace(row, mode=mode))
    if all(row.plan is None for row in rows):
        what = f"no row is possible: {rows[0].problem}"
        raise JobError(what, where="shardwise tables", fix="change the modes, or the GPUs")
    return Table(kind=kind, rows=tuple(_compared(rows) if kind == "scaling" else rows))


def scale(
    sizes: str, job: AnyJob | None = None, *, gpus: str | None, model: str | None, **asked: Any
) -> Table:
    """Plan the same job on `1,2,4,8,16x8` GPUs or nodes x GPUs: the table `scaling`, in that order.

    `gpus`: their kind and links, as for `plan`; its last number says how many a node has. More are several
    nodes. `model` is instead of a job; a step then has the rows that `plan` takes for the most GPUs.
    JobError where the sizes cannot be read, or the job is wrong whatever the number of GPUs.
    """
    if gpus is None:
        raise JobError("--scale needs to know which GPUs", where="--scale", fix="name them: --gpus 8xH100")
    texts = [_size(one, gpus) for one in sizes.split(",")]
    return tables("scaling", model or "", job=job, gpus=texts, modes=[""], **asked)


def _row(changes: Sequence[str], *, gpus: str | None, **asked: Any) -> Row:
    """What `plan` says, or the rule that refuses it."""
    names = {"--model": "model", "--memory-cap": "memory_cap", "--margin": "margin"}
    flags = {"--gpus": gpus, **{flag: asked.get(name) for flag, name in names.items()}}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, f"{value}")]
    command = shlex.join(["shardwise", "plan", *words, *(w for change in changes for w in ("--set", change))])
    fields: dict[str, Any] = {"model": asked.get("model") or "", "gpus": gpus or HERE, "command": command}
    try:
        made = plan(gpus=gpus, changes=changes, nearest=False, **asked)
        return Row(**fields | {"model": made.job.model}, plan=made)
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
    texts = [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value
    return list(dict.fromkeys(texts))


def _changes(mode: str) -> dict[str, str]:
    """A mode's keys of a job and their values; JobError for a word that is none, and for contradictions."""
    found: dict[str, str] = {}
    for word in mode.split("+") if mode else ():
        rank, parts = re.fullmatch(r"lora([1-9]\d*)", word), with_degree(word)
        changes = {"strategy": json.dumps(parts)} if parts else _WORDS.get(word, {})
        if rank is not None:
            changes = {"model.lora": f"{{rank: {rank[1]}}}"}
        if not changes:
            raise JobError(f"{word!r} of {mode!r} is no word of a mode", where="--modes", fix=_FIX)
        if changes.keys() & found.keys():
            what = f"{mode!r} says {', '.join(changes)} twice"
            raise JobError(what, where="--modes", fix="keep one of the words")
        found |= changes
    if "model.quantization" in found and "model.lora" not in found:
        what = f"{mode!r} freezes the weights, and trains none"
        raise JobError(what, where="--modes", fix=f"{mode}+lora16")
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
