"""One value for each key of the job: which of several statements counts, and what is said of the others."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from shardwise.job.schema import BUCKET, Train
from shardwise.lint.foreign.statements import Statement
from shardwise.lint.translate import Translated
from shardwise.strategy import Strategy

BATCH = "train.micro_batch, train.global_batch"
_TOGETHER = ("name", "model.lora.variants")  # `output_dir` and `run_name`; DoRA and rsLoRA


def of_a_file(one: Translated) -> Statement:
    """The strategy of a configuration, and its name with what the name does not say."""
    value = one.changes[0].partition("=")[2]
    parts = Strategy(**json.loads(value))
    words = [parts.name]
    if parts.bucket != BUCKET:
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


def changes(stated: Sequence[Statement]) -> list[str]:
    """`key=value` for each statement but the batch's; a key of its own says more than a word."""
    words = [f"{one.key}={one.value}" for one in stated if one.word]
    if len({one for one in words if "variants" in one}) == 2:
        words.append("model.lora.variants=[dora, rslora]")
    keys = [one for one in stated if not one.word and not one.key.startswith("batch.")]
    return [*words, *(f"{one.key}={one.value}" for one in keys)]


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


def swift_rows(parts: Mapping[str, int], said: list[str]) -> int:
    """The rows of a step where ms-swift chooses the accumulation: 16 at least (its trainers/arguments.py)."""
    each = parts.get("micro", 1) * parts.get("gpus", 1) * parts.get("nodes", 1)
    rows = each * max(1, math.ceil(16 / each))
    said.append(f"assumed, as ms-swift 4 does: train.global_batch={rows}")
    return rows


def batch(parts: Mapping[str, int], *, unsaid: bool, said: list[str]) -> list[str]:
    """The micro-batch, and the rows of a step over all GPUs; `unsaid`: whether a factor is not known."""
    if not parts.keys() - {"gpus", "nodes"}:
        return []
    micro, times = parts.get("micro", 1), parts.get("accumulation", 1)
    rows = parts.get("total", parts.get("nodes", 1) * parts.get("gpus", 1) * micro * times)
    if "total" not in parts and unsaid:
        known = ", ".join(f"{name} {count}" for name, count in parts.items())
        what = f"of a step's rows the files say {known}, and another factor could not be read"
        said.append(f"to do: {what}; write {BATCH}")
        more = [f"train.global_batch={rows}"] * (Train().global_batch % micro > 0)  # a default loses
        return [f"train.micro_batch={micro}", *more] if "micro" in parts else []
    if not parts.keys() & {"total", "micro"}:
        said.append(f"to do: no file says how many rows a GPU takes at a time; write {BATCH}")
        return []
    made = [f"train.global_batch={rows}"]
    if "micro" in parts and rows % micro == 0:
        made.append(f"train.micro_batch={micro}")
    if not parts.keys() & {"gpus", "total"}:
        what = f"train.global_batch {rows} is {micro} x {times} x GPUs; no file says how many"
        said.append(f"to do: {what}: write it where there are several")
    return made
