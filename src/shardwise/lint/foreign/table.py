"""What a key of another tool means in a job: foreign.toml, read."""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.folders import packaged
from shardwise.job import json_schema, paths
from shardwise.lint.document import AUTO
from shardwise.lint.schema import as_number
from shardwise.lint.script_inputs import OPEN

TABLE = packaged("lint/foreign.toml")
TABLE["keys"] |= {other: TABLE["keys"][key] for other, key in TABLE["same"].items()}
_OF_ADAM = {key[4:]: rule for key, rule in TABLE["keys"].items() if key.startswith("Adam.")}
TABLE["keys"] |= {name + key: rule for name in TABLE["of_adam"] for key, rule in _OF_ADAM.items()}
TABLE["reasons"] |= {key: why for why, keys in TABLE["refused"].items() for key in keys.split()}

STEPS = "all steps"  # job.py says how many they are

NO_KEY = "a job has no such key"
BY_NAME = (NO_KEY, "shardwise does it itself")  # reasons that need no more than the names of the keys

_KNOWN = [*TABLE["keys"], *TABLE["strategy"]["keys"]]
_MEANT = {"weights": "train.precision", "least_rate": "optimizer.final_fraction"}  # resolve.py
_SWITCH = {"true", "false", "boolean"}  # words of a rule, or the type of a job's key
_ON, _OFF = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_PLACEHOLDER = re.compile(r"<[^<>]+>|\{[^{}]+\}|\[[^\[\],]*[/ -][^\[\],]*\]")  # `[meta-llama/Llama-3.1-8B]`
_WORD = re.compile(r"(?!(auto|none|inf|all|gpu)$)[A-Za-z ]+")  # but those that a tool takes for a number
_OTHER_ROWS = re.compile(TABLE["words"]["other_rows"])
_EXPONENT = re.compile(r"[0-9.]+[eE][-+]?[0-9]+")  # text for YAML 1.1, such as 1e-4


def meaning(key: str, value: Any, steps: float) -> list[str] | str:
    """The changes of a job that a key means, or why it is left out. `steps`: the files' `max_steps`."""
    rule = TABLE["keys"].get(key)
    value = paths.expand_home(value) if isinstance(rule, str) and rule in paths.LOCAL else value
    if isinstance(rule, Mapping) and isinstance(value, list) and {*map(str, value)} <= rule.keys():
        if len(value) > 1 and key == "report_to":
            return [f"tracking=[{', '.join(map(str, value))}]"]
        value = value[0] if len(value) == 1 else value
    number, word = plain_number(value), _text(value).strip('"')
    if isinstance(rule, Mapping) and word in rule:
        return list(rule[word])
    if value == AUTO and key in TABLE["auto"]:
        return str(TABLE["auto"][key])
    if value in (AUTO, None) or OPEN.search(str(value)) or key in TABLE["strategy"]["keys"]:
        return []
    if steps > 0 and rule == "train.epochs":
        return f"max_steps {steps} says how long to train, whatever the epochs"
    rule = rule if isinstance(rule, str) else TABLE["otherwise"].get(key)
    if heads := held_by_heads(key, value):
        value = [one for one in value if one not in heads]
    return _taken(key, rule, value, number) if rule is not None else reason(key, word)


def held_by_heads(key: str, value: Any) -> list[str]:
    """The modules in a list of targets that are a model's head or embeddings, where a job has no adapters."""
    targeted = TABLE["keys"].get(key) == "model.lora.targets" and isinstance(value, list)
    return [str(one) for one in value if str(one).rpartition(".")[2] in TABLE["heads"]] if targeted else []


def without_layer(key: str, value: Any, model: str) -> list[str]:
    """The modules in a list of targets that no layer of this family is, as far as the model's name shows."""
    known = next((names for sign, names in TABLE["modules"].items() if re.search(sign, model)), "").split()
    held = known and isinstance(value, list) and TABLE["keys"].get(key) == "model.lora.targets"
    known = [*known, *TABLE["heads"]]
    return [str(one) for one in value if str(one).rpartition(".")[2] not in known] if held else []


def switched(key: str, value: Any) -> Any:
    """A switch as HfArgumentParser takes it: also `1`, `yes` and `t`, `0`, `no` and `f`."""
    rule = TABLE["keys"].get(key)
    at = json_schema.at(tuple(rule.split("."))) if isinstance(rule, str) else ()
    kinds = rule.keys() if isinstance(rule, Mapping) else {one.get("type") for one in at}
    word = str(value).lower()
    other = word not in (*_ON, *_OFF) or word in kinds  # `eval_strategy: no`
    return word in _ON if kinds & _SWITCH and not other else value


def lacks_number(key: str, value: Any) -> bool:
    """Whether a file has a word in place of the number that a key is."""
    rule = TABLE["keys"].get(key)
    if not isinstance(rule, str) or not isinstance(value, str) or not _WORD.fullmatch(value):
        return False
    kinds = {one.get("type") for one in json_schema.at(tuple(rule.split(".")))}
    return rule.startswith("batch.") or (bool(kinds) and kinds <= {"integer", "number", "null"})


def plain_number(value: Any) -> float | int | None:
    """The number that a value is, also `1e-4` as text."""
    is_text = isinstance(value, str) and not _EXPONENT.fullmatch(value)
    number = None if isinstance(value, bool) or is_text else as_number(value)
    return float(f"{number:.12g}") if isinstance(number, float) else number  # of 2e-6 / 2e-5


def _text(value: Any) -> str:
    number = plain_number(value)
    return json.dumps(value if number is None else number)


def _taken(key: str, rule: str, value: Any, number: float | int | None) -> list[str] | str:
    """The change that gives a key of the job the value; or why it cannot have it."""
    text = _text(value)
    word = value[0] if isinstance(value, list) and len(value) == 1 else value
    if rule == "model.lora.targets" and re.search(TABLE["words"]["module_choice"], str(word)):
        return _modules(key, str(word))
    if rule in paths.LOCAL and (lost := _no_path(rule, value)) is not None:
        return lost
    if rule == "train.steps" and number is not None and number <= 0:
        return []  # the epochs say it
    if rule == "data.eval_fraction" and number and number >= 1:
        return "write data.eval_fraction, the share of all rows that these are"
    if rule == "optimizer.clip_norm" and number and number < 0:
        return [f"{rule}=0"]  # the Trainer, DeepSpeed and loops clip where it is above 0
    if key == "warmup_ratio" and number and number >= 1:
        return "write optimizer.warmup_steps, a share below 1, or a count of steps"
    if rule == "batch.gpus" and re.fullmatch(r"\d+(,\d+)+", str(value)):
        return [f"{rule}={len(str(value).split(','))}"]  # Lightning's `0,1,2,3`
    if rule.startswith("batch.") and not (isinstance(number, int) and number > 0):
        return f"{text} is no number of rows, steps or GPUs"
    if rule == "tracking":  # the name of a project, which is empty where nothing tracks
        return [f"{rule}=[wandb]"] * bool(value)
    if rule == "name":
        return [f"name={json.dumps(run_name(Path(str(value))))}"]
    is_list = key in TABLE["lists"] and ("," in str(value) or key != "dataset")
    if isinstance(value, str) and (is_list or re.fullmatch(r"\[[\w., ]+\]", value)):
        text = json.dumps([part.strip() for part in value.strip("[]").split(",") if part.strip()])
    return [f"{rule}={text}"]


def _no_path(rule: str, value: Any) -> list[str] | str | None:
    """What is said where a value is no file, folder or name of a hub; None where it may be one."""
    if value in ("", True) or _PLACEHOLDER.fullmatch(str(value)):
        unneeded = value in ("", True) or rule == "model.tokenizer"
        return [] if unneeded else f"placeholder of its author; write {rule}"
    if rule in ("data.train", "data.eval") and _OTHER_ROWS.search(str(value)):
        return f"save the rows as jsonl or parquet, and name that in {rule}"
    if rule == "model.source" and str(value).endswith(".json"):
        return "prepare a folder with this file as its config.json, and name it in model.source"
    return None


def _modules(key: str, word: str) -> list[str] | str:
    """The targets of a word for several modules, or of PEFT's pattern of their full names."""
    names = re.fullmatch(TABLE["words"]["module_pattern"], word)
    if not names or word == "DEFAULT":  # of ms-swift 2
        return reason(key, word) if names else "write model.lora.targets: this pattern chooses some layers"
    return ["model.lora.targets=" + ("all-linear" if word[0] in "aA" else json.dumps(names[1].split("|")))]


def reason(key: str, text: str) -> str:
    """Why a key is left out."""
    beginnings = [one for one in TABLE["reasons"] if f"{key}={text}".startswith(one)]
    if beginnings:
        return str(TABLE["reasons"][max(beginnings, key=len)])
    if key.isupper():
        return "a variable of the environment, not of a job"
    if key in TABLE["keys"]:
        return f"{text}: nothing in a job file has this value"
    known = [one for one in _KNOWN if one.count(".") == key.count(".")]  # `lora.r` is the user's own
    near = get_close_matches(key, known, n=1, cutoff=0.93)
    return NO_KEY + (f"; did you mean {near[0]}?" if near else "")


def targets(key: str, *, below: bool) -> set[str]:
    """The keys of a job that a key of another tool decides; `below`: also what keys below it decide."""
    found = {*TABLE["unread"].get(key, ())}
    rules = TABLE["keys"].items()
    for rule in (one for name, one in rules if name == key or (below and name.startswith(f"{key}."))):
        changes = [rule] if isinstance(rule, str) else [one for row in rule.values() for one in row]
        found |= {change.partition("=")[0] for change in changes}
    found = {_MEANT.get(one, one) for one in found - {"name"}}
    return {"strategy" if one.startswith("strategy.") and one != "strategy.bucket" else one for one in found}


def leaves(values: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); items of a list have their index as key, but for a list of texts."""
    if isinstance(values, list) and not all(isinstance(item, str) for item in values):
        values = {str(index): item for index, item in enumerate(values)}
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from leaves(value, f"{above}.{name}" if above else str(name))
    else:
        yield above, values


def names_rows(value: Any) -> bool:
    """Whether a value is a file or a data set of a hub, and no word among which a script chooses."""
    return paths.is_local(str(value)) or re.fullmatch(r"[\w.-]+/[\w.-]+", str(value)) is not None


def run_name(path: Path) -> str:
    """A job's name from a file's or folder's."""
    name = path.stem if re.fullmatch(r"\.[A-Za-z]+", path.suffix) else path.name  # not of `Llama-3.2-11B`
    return re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "-", name).strip("-.")[:100] or "job"
