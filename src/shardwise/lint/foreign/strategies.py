"""The strategy that calls, flags and words of one document give part by part."""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from shardwise.job.strategies import NAMED
from shardwise.lint.foreign.statements import Statement
from shardwise.lint.setup import Setup

_OF_FILES = ("strategy.nvme_path", "strategy.bucket")  # which belong to the strategy of a DeepSpeed file


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
