"""`--sweep key=v1,v2` and `--strategies a,b`: which variants of a job are asked for."""

import difflib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.engines import ENGINES, parts_of
from shardwise.errors import JobError
from shardwise.job.schema import Job, StrategySpec
from shardwise.job.strategies import NAMED, Parts
from shardwise.space.candidates import REPLICAS, SHAPES, TENSOR_PARALLEL, TENSOR_PARALLEL_STAGES
from shardwise.strategy import Strategy

ALL = "all"
OWN = "strategy."  # Keys that are parts of a job's own strategy begin so


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of the swept values."""

    values: Mapping[str, str]  # Key to value, as typed
    job: Job
    parts: Mapping[str, Any]  # Swept parts of the strategy, which take the place of the strategy's own


Load = Callable[[Sequence[str]], Job]  # The job with more changes (`key=value`)


def points(load: Load, sweeps: Sequence[str]) -> list[Point]:
    """The job at every combination of the sweeps' values. JobError with every value that is wrong."""
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise JobError(f"{twice[0]} is swept twice", where="--sweep", fix="give all its values at once")
    found = []
    for combination in itertools.product(*(values for _, values in axes)):
        values = dict(zip(keys, combination, strict=True))
        job = load([f"{key}={value}" for key, value in values.items() if not key.startswith(OWN)])
        own = {key: value for key, value in values.items() if key.startswith(OWN)}
        found.append(Point(values=values, job=job, parts=_parts(load, own)))
    return found


def shapes(world_size: int) -> dict[str, Parts]:
    """Every strategy that has a name, as its parts; AutoTP's where it divides the processes."""
    parallel = [
        {"engine": "deepspeed", "stage": stage, "tensor_parallel": degree}
        for degree in TENSOR_PARALLEL
        if world_size % degree == 0
        for stage in TENSOR_PARALLEL_STAGES
    ]
    return {Strategy(**parts).name: dict(parts) for parts in (*REPLICAS, *SHAPES, *parallel)}


def chosen_names(text: str, world_size: int) -> list[str]:
    """The names of `--strategies`, in its order. JobError for one that is none, with the closest."""
    known = shapes(world_size)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        fix = "for example --strategies zero2,fsdp2"
        raise JobError("no strategy is named", where="--strategies", fix=fix)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
            raise JobError(f"there is no strategy {name!r}", where="--strategies", fix=fix)
    return names


def own_parts(job: Job) -> Parts:
    """The parts of the strategy that the job itself names. JobError where it leaves it to the plan."""
    if job.strategy == "auto":
        what = "a part of the strategy is swept, and the job leaves the strategy to the plan"
        raise JobError(what, where="--sweep", fix="name the strategies to vary: --strategies zero2,zero3")
    return parts_of(job.strategy)


def varied(parts: Mapping[str, Any], changed: Mapping[str, Any]) -> Parts:
    """A strategy's parts with the swept ones in their place."""
    parts = {**{key: value for key, value in parts.items() if value is not None}, **changed}
    if ENGINES[parts["engine"]].default_stage is None and not parts.get("stage"):
        parts.pop("stage", None)  # DeepSpeed's alone
    return parts


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not all(listed) or not re.fullmatch(r"[a-z_]+(\.[A-Za-z0-9_]+)*", key.strip()):
        fix = "for example --sweep train.micro_batch=1,2,4"
        raise JobError(f"{text!r} is not key=value,value", where="--sweep", fix=fix)
    if key.strip() == "strategy":
        raise JobError("strategies have a flag of their own", where="--sweep", fix=f"--strategies {values}")
    return key.strip(), list(dict.fromkeys(listed))


def _parts(load: Load, own: Mapping[str, str]) -> dict[str, Any]:
    """The swept parts of a strategy as values; each is read, and checked, as a key of the job."""
    found = {}
    for key, text in own.items():
        name = key.removeprefix(OWN)
        if name not in StrategySpec.model_fields:
            fix = f"one of {', '.join(StrategySpec.model_fields)}"
            raise JobError(f"a strategy has no key {name}", where="--sweep", fix=fix)
        base = json.dumps(NAMED["zero3"])  # an engine has to be named for the others to be read
        spec = load([f"strategy={base}", f"{key}={text}"]).strategy
        found[name] = getattr(spec, name)
    return found
