"""Run `init --from` on public recipes, and compare the job with answers that were written before.

`python benchmarks/init/run.py FOLDER benchmarks/init/results/public.json`

FOLDER holds a folder OWNER__NAME for each repository of `cases.json`, as `git clone` makes it at the commit
that stands there. This repository holds none of their files.

Each answer of a case is one of these:

    right   the job has the value; or leaves the key out, and shardwise's own default is the value
    to do   a sentence asks the user for the key
    own     the job leaves the key out, and shardwise's own default is another value
    wrong   the job has another value
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.job import source, validate
from shardwise.job.source import job_values
from shardwise.job.strategies import NAMED
from shardwise.lint.foreign import translation

HERE = Path(__file__).parent
PARTS = ("seen", "unseen", "walk")  # whether the code was written with the set in view; a later walk's
KINDS = ("right", "to do", "own", "wrong")
_ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # of a Llama
_UNSET = {"model.quantization": "none", "train.checkpointing": "none", "strategy": "single"}
"""What a job without the key has that is no default of the key: `auto` finds it."""


def value_of(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def plain(key: str, value: Any) -> Any:
    """The value without what only its spelling says: a strategy's name, paths, the order of a list."""
    if key == "strategy" and isinstance(value, dict):
        parts = {name: value.get(name, "none") for name in ("offload_optimizer", "offload_parameters")}
        named = (name for name, one in NAMED.items() if one.get("engine") == value.get("engine"))
        stage = value.get("stage")
        name = f"zero{stage}" if stage is not None else next(named, str(value.get("engine")))
        return name + " offload" * (
            parts["offload_optimizer"] == "cpu" or parts["offload_parameters"] == "cpu"
        )
    if isinstance(value, list):
        return "all-linear" if {*value} == _ALL else sorted(map(str, value))
    if isinstance(value, str):
        return value.casefold().replace("\\", "/").removeprefix("./").rstrip("/")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def judged(key: str, answer: Any, job: dict[str, Any], own: dict[str, Any], to_do: str) -> str:
    """Which of KINDS it is."""
    if key in to_do or (key.endswith("_batch") and "_batch" in to_do):
        return "to do"
    value = value_of(job, key)
    if str(value).startswith("fill-in"):
        return "to do"
    if value is None:
        default = _UNSET.get(key, value_of(own, key))
        return "right" if plain(key, default) == plain(key, answer) else "own"
    return "right" if plain(key, value) == plain(key, answer) else "wrong"


def compared(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The kinds of a case's answers, and those that are not right."""
    os.chdir(folder / case["repository"].replace("/", "__") / case["base"])
    row = {name: case[name] for name in ("repository", "commit", "base", "files")}
    row |= {"part": case.get("part", "seen")}
    try:
        text, said = translation([Path(file) for file in case["files"]])
    except JobError as error:
        return row | {"refused": str(error).partition("\n")[0], "right": case.get("refused", False)}
    if case.get("refused"):
        return row | {"refused": "", "right": False}
    document = source.Document(name="job.yaml")
    document.values = job_values(text)
    made, _ = validate.check(document)
    own = made.model_dump(mode="json") if made else {}
    to_do = " ".join(one for one in said if one.startswith("to do"))
    kinds = {key: judged(key, one, document.values, own, to_do) for key, one in case["answers"].items()}
    others = {
        key: {"is": kind, "job": value_of(document.values, key), "answer": case["answers"][key]}
        for key, kind in kinds.items()
        if kind != "right"
    }
    return row | {"counts": dict(Counter(kinds.values())), "others": others, "to do": to_do.count("to do: ")}


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {kind: sum(row.get("counts", {}).get(kind, 0) for row in rows) for kind in KINDS}
    wrongly = [row["repository"] for row in rows if row.get("right") is False]
    return {"sets": len(rows), "answers": counts, "wrongly refused or not": wrongly}


def main(folder: Path, out: Path, cases: Path) -> None:
    rows = [compared(case, folder) for case in json.loads(cases.read_text(encoding="utf-8"))]
    summary = {name: counted([row for row in rows if row["part"] == name]) for name in PARTS}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    out.write_text(f'{{"summary": {json.dumps(summary)},\n"sets": [\n{lines}\n]}}\n', encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    given = [Path(one).resolve() for one in sys.argv[1:]]
    main(*(given if len(given) == 3 else [*given, HERE / "cases.json"]))
