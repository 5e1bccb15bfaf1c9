"""What each document says of the keys of a job, where, and what of it is left out."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardwise.errors import JobError
from shardwise.job import source
from shardwise.job.source import Key
from shardwise.lint.document import AUTO, Document
from shardwise.lint.foreign.files import is_open, targets_of
from shardwise.lint.foreign.table import (
    BY_NAME,
    TABLE,
    held_by_heads,
    lacks_number,
    leaves,
    meaning,
    reason,
    without_layer,
)
from shardwise.lint.rules.keys import unknown_keys
from shardwise.lint.schema import as_number, closest, deepspeed_schema, names
from shardwise.lint.script_text import UNDEFINED
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN

_MANY = 8  # keys that are named
_LONGEST = 60  # characters of a value that are shown
QUANTIZES = re.compile(r"(?i)quanti[sz]|load_in_|\bbnb|bitsandbytes|gptq|awq")
_ALPACA = "Below is an instruction that describes a task"
_WARMUPS = ("warmup_steps", "warmup_ratio")
_SELDOM = {"train.seed", "model.trust_remote_code", "model.tokenizer"}  # a job's default does as well


class Statement(NamedTuple):
    """What a file says of a key of the job; `value` is empty where a job cannot have it."""

    key: str
    value: str
    place: str  # where the file says it, and how
    word: bool  # whether a word means it, such as `bf16: true`


_STEPS = ("max_steps", "max_train_steps", "range(steps)")  # which count more than epochs


def statements(document: Document, setup: Setup, strategy: str, said: list[str]) -> Iterator[Statement]:
    """What a document says; `strategy`: the one of the DeepSpeed and accelerate files."""
    counts = (one.get(name) for one in setup.documents for name in _STEPS)
    steps = next((number for count in counts if (number := as_number(count)) is not None), 0)
    left_out = defaultdict[str, list[str]](list)
    wrong = unknown_keys(document) if document.kind == "deepspeed" else []
    for key, value in _pairs(document):
        place = (key,) if document.has(key) else tuple(key.split("."))
        model = str(setup.training("base_model", "model_name_or_path"))
        own = key.endswith("eos_token") and re.search(TABLE["own_eos"].get(str(value), "(?!)"), model)
        half = key.endswith("compute_dtype") and "16" in str(value)  # of the job's own 16 bits
        same = half and ("bfloat" in str(value)) is not (setup.training("fp16") is True)
        if own or same or _is_met(key, setup, strategy) or (key == "get_lr.end" and value == steps):
            continue
        at = f"{document.name}:{document.line(place)}: {key}"
        near = source.nearest(place, wrong)
        if document.syntax != "python" and lacks_number(key, value):
            raise JobError(f"{value!r} is no number", where=at, fix="write a number there")
        alpaca = key.startswith("text by") and any(_ALPACA in one.text for one in setup.documents)
        meant = _unknown(near) if near else meaning("alpaca " * alpaca + key, value, steps)
        rates = document.section("scheduler").get("params") or {}  # of DeepSpeed's warm-up
        linear = "warmup_type" in rates or rates.get("warmup_num_steps") == 0
        notes = {f"{key}={value}", str(value)} & TABLE["notes"].keys() if not linear else ()
        said += [f"changed: {at}: {value}: {TABLE['notes'][note]}" for note in notes]
        word = not isinstance(TABLE["keys"].get(key), str)
        if heads := ", ".join(held_by_heads(key, value)):
            said.append(f"changed: {at}: {heads}: {TABLE['reasons']['adapted head']}")
        if lost := ", ".join(without_layer(key, value, model)):
            said.append(f"to do: {at}: {lost}: in no block of {model}; write model.lora.targets")
        if isinstance(meant, str):
            asks = _kind(meant) != "left out" and type(value) in (str, int, float) and value != ""
            words = " ".join(str(value).split())
            shown = f"{words[:_LONGEST]}{'...' * (len(words) > _LONGEST)}"
            name = f"{key.removeprefix('dataset_info.')} (line {document.line(place)})"
            left_out[meant].append(name + f" `{shown}`" * asks)
            for target in targets_of(document, place):
                yield Statement(target, "", at, word)
            continue
        for change in meant:
            name, _, text = change.partition("=")
            yield Statement(name, text, f"{at} {f'({change})' if word else text}", word)
    for place in _unread(document):
        why = reason(".".join(place), "")
        left_out[why if _kind(why) == "to do" else BY_NAME[0]].append(
            f"{'.'.join(place)} (line {document.line(place)})"
        )
    if document.has(OPEN):
        at = f"{document.name}:{document.line((OPEN,))}: {document.get(OPEN)}"
        said.append(f"to do: {at}: only the shell knows the flags in it; write what they say")
    said += [text for why, keys in left_out.items() for text in _left_out(document, why, keys)]


def _is_met(key: str, setup: Setup, strategy: str) -> bool:
    """Whether there is nothing to say of a key, for what other keys say."""
    if key in _WARMUPS:  # the Trainer takes the share where the count is 0
        count, share = (any(as_number(one.get(name)) for one in setup.documents) for name in _WARMUPS)
        return count and not share if key == "warmup_ratio" else share and not count
    if other := TABLE["overruled"].get(key):
        return any(one.get(other) for one in setup.documents)
    if key == "engine.step()":
        return 1 in (one.get("gradient_accumulation_steps") for one in setup.documents)
    off = key == "zero_optimization.overlap_comm" and '"overlap_comm": false' in strategy
    return off or (key.endswith(".nvme_path") and '"nvme"' not in strategy)


def _left_out(document: Document, why: str, keys: Sequence[str]) -> list[str]:
    """The sentence for keys of one reason, or one for each of them where its name says enough."""
    if why == BY_NAME[0] or why.startswith("shardwise "):
        start = f"left out: {BY_NAME[why != BY_NAME[0]]}: "
        return [start + key.partition(" (")[0] for key in keys]
    more = f" and {len(keys) - _MANY} more" if len(keys) > _MANY + 1 else ""
    shown = ", ".join(keys[:_MANY] if more else keys) + more
    return [f"{_kind(why)}: {document.name}: {shown}: {why}"]


def _kind(why: str) -> str:
    """The kind of sentence by its reason: some ask something of the user, some change what is learned."""
    return str(TABLE["kinds"].get(why.partition(" ")[0], "left out"))


def _unread(document: Document) -> list[Key]:
    """Settings of a script that its text does not show, and that decide nothing of a job.

    No model, data or function is one, nor the call itself.
    """
    other = {"**", UNDEFINED, *names("calls"), *TABLE["objects"]}
    script = document.syntax == "python" and document.kind == "training"
    places = [one for one in document.marks if script and not other & {one[0], one[-1]}]
    places = [one for one in places if is_open(document, one) and not one[-1][:1].isupper()]
    return [one for one in places if not targets_of(document, one)]


def _pairs(document: Document) -> list[tuple[str, Any]]:
    """The document's keys with their values; bf16 last, which wins over fp16."""
    values: dict[str, Any] = {key: value for key, value in document.values.items() if key != UNDEFINED}
    if document.syntax == "shell" and "deepspeed_config_file" in values:  # which decides in their place
        for flag in {"use_deepspeed", *names("in_the_deepspeed_file")} - document.flags:
            values.pop(flag, None)
    words = values.get("fsdp")
    if isinstance(words, str | list):  # `full_shard auto_wrap offload`, and as a list Axolotl's
        words = words.replace(",", " ").split() if isinstance(words, str) else words
        in_section = document.kind == "accelerate"  # whose section says it
        values["fsdp"] = {} if in_section else dict.fromkeys(map(str, words), True)
    return sorted(leaves(values), key=lambda leaf: leaf[0].startswith("bf16"))


def _unknown(key: Key) -> str:
    """Why a key that DeepSpeed does not know is left out."""
    near = closest(key[-1], deepspeed_schema().sections[key[:-1]].keys)
    return "DeepSpeed has no such key" + (f"; did you mean {near}?" if near else "")


def _first_value(document: Document, place: Key) -> str:
    """` (EPOCHS = 3)` where a script's line names a constant that another line may change, or ` null`."""
    if document.syntax != "python" and document.has(*place) and document.get(*place) is None:
        return " null"
    rows, at = document.text.splitlines() if document.syntax == "python" else [], document.line(place)
    name = re.search(r"=\s*([A-Z][A-Z_]+)\b", "".join(rows[at - 1 : at]))  # none where a module has it
    found = name and re.search(rf"^{name[1]} = [\w.+/* -]+?(?=\s*(#|$))", document.text, re.MULTILINE)
    return f" ({found[0]})" if found else ""


def unsaid(documents: Sequence[Document], given: set[str]) -> dict[str, str]:
    """Keys of the job whose values in a file only a run knows, and where; of two, one is enough."""
    found = dict[str, str]()
    given_ = [key for one in documents for key, value in leaves(one.values) if value not in (None, AUTO, "")]
    known = {TABLE["same"].get(key, key) for key in given_}
    quantized = any(QUANTIZES.search(one.text) for one in documents)
    scratch = any(one.has("random weights") for one in documents)
    for document in documents:
        for place in document.marks:
            if scratch and place == ("model_name_or_path",):
                continue  # of a branch that loads weights
            name = TABLE["same"].get(".".join(place), ".".join(place))
            if not is_open(document, place) or (document.syntax == "python" and name in known):
                continue  # of two files, one is enough
            if place == ("lr_scheduler_type",) and "optimizer.schedule" in given:
                continue  # whose other targets are those of a constant rate
            shown = ".".join(place) + _first_value(document, place)
            where = f"{document.name}:{document.line(place)}: {shown}"
            unneeded = _SELDOM | ({"model.quantization"} if place[0] == "**" and not quantized else set())
            for key in sorted(targets_of(document, place) - unneeded):
                part = key == "strategy" and len(place) > 1  # of one that other arguments give in part
                if part or not {key, TABLE["instead"].get(key)} & {*given, *found}:
                    found[key] = where
    return found
