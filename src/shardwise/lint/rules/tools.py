"""Axolotl and LLaMA-Factory: keys and values at which they stop."""

import re
from collections.abc import Iterator, Mapping

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, Severity, training_rule
from shardwise.lint.rules.arguments import tool_of
from shardwise.lint.schema import as_number, table
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN

_ROWS: dict[str, list[list[str]]] = table("stops")  # of each tool: a condition, what is said, and the fix
_KINDS: dict[str, dict[str, str]] = table("kinds_of_values")
_OFF = ("none", "false", "0", "0.0", "", "no")
_PLACE = re.compile(r"[{}$<>]|^(auto|\.\.\.)$")  # what something else fills in
_TRUTHS = ("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "none")
_MOST_PERCENT = 30


def _holds(document: Document, condition: str) -> bool:
    """Whether a file has `key`, `key=word|other`, or `!` in front of these, not; `key|other`: one of them."""
    keys, _, words = condition.removeprefix("!").partition("=")
    named = [one for one in keys.split("|") if document.has(one)]
    if document.syntax == "shell" and any(document.get(one) is None for one in named):
        return False  # only the shell knows it
    values = [str(document.get(one)).lower() for one in named]
    return any(one in words.split("|") if words else one not in _OFF for one in values) is (
        condition[0] != "!"
    )


def _stops(document: Document, tool: str) -> Iterator[Hit]:
    """The rows of names.toml that hold, and values of another kind than the tool takes."""
    certain = tool_of(document) == tool and not document.has(OPEN)
    for condition, words, fix, *more in _ROWS[tool] if document.syntax in ("yaml", "json", "shell") else ():
        parts = condition.split()
        if (certain or " !" not in f" {condition}") and all(_holds(document, one) for one in parts):
            keys = [key for one in parts for key in one.strip("!").partition("=")[0].split("|")]
            key = next((one for one in keys if document.has(one)), keys[0])
            severity: Severity | None = "warning" if more else None
            what = words if more else f"{tool} stops: {words}"
            yield Hit((key,), what, fix, severity=severity)
    for name, value in document.values.items() if certain and document.syntax == "yaml" else ():
        kind = next((one for one, known in _KINDS[tool].items() if name in known.split()), "")
        text = value if isinstance(value, str) and not _PLACE.search(value) else "1"
        if kind == "numbers" and as_number(text) is None:
            yield Hit((name,), f"{name} is the text {text!r}, and no number: {tool} stops", "a number")
        elif kind == "truths" and text.lower() not in _TRUTHS:
            happens = "it stops" if tool == "Axolotl" else "any text counts as true"
            yield Hit((name,), f"{name} is the text {text!r}, and not true or false: {happens}", "true")
    share = {"Axolotl": "val_set_size", "LLaMA-Factory": "val_size"}[tool]
    rows = document.number(share) or 0
    if certain and 1 < rows <= _MOST_PERCENT:
        what = f"{share} above 1 is a number of rows: {rows:g} rows are held out, and not {rows:g} percent"
        yield Hit((share,), what, f"{share}: {rows / 100:g}", severity="warning")


@training_rule("error", "axolotl/utils/schemas/validation.py: Can't load qlora in 8bit; Require load_in_4bit")
def qlora_without_4_bits(document: Document, _: Setup) -> Iterator[Hit]:
    """Axolotl's `adapter: qlora` needs a base of 4 bits: it stops."""
    if document.get("adapter") == "qlora" and document.has("base_model"):
        if document.on("load_in_8bit"):
            yield Hit(("load_in_8bit",), "Axolotl stops: `Can't load qlora in 8bit`", "load_in_8bit: false")
        elif document.get("load_in_4bit") in (None, False) and not document.has("peft"):
            what = "Axolotl stops: `Require cfg.load_in_4bit to be True for qlora`"
            yield Hit(("adapter",), what, "load_in_4bit: true")


@training_rule("error", "axolotl/utils/schemas: validation.py, training.py, enums.py; read in 2026-08")
def axolotl_stops(document: Document, _: Setup) -> Iterator[Hit]:
    """Axolotl stops at keys that exclude each other or lack another, and at values of another kind."""
    if not document.has("base_model"):
        return
    yield from _stops(document, "Axolotl")
    unsplit = document.get("val_set_size") == 0 and not document.get("test_datasets")
    asked = [one for one in ("eval_steps", "eval_strategy") if document.get(one) not in (None, "no")]
    if asked and unsplit:
        what = f"Axolotl stops: `{asked[0]}` with `val_set_size: 0`, and no rows to evaluate"
        yield Hit((asked[0],), what, "val_set_size: 0.05, or remove it")
    elif unsplit and document.get("evals_per_epoch"):
        what = "with `val_set_size: 0` there are no rows to evaluate: it has no effect"
        yield Hit(("evals_per_epoch",), what, "val_set_size: 0.05, or remove it", severity="note")
    rows = document.get("datasets")
    for at, one in enumerate(rows if isinstance(rows, list) else ()):
        if isinstance(one, Mapping) and str(one.get("type")).startswith("sharegpt"):
            what = "Axolotl stops: `type: sharegpt.*` is deprecated"
            yield Hit(("datasets", str(at), "type"), what, "type: chat_template")


@training_rule("error", "llamafactory/hparams: parser.py, finetuning_args.py, data_args.py; read in 2026-08")
def llama_factory_stops(document: Document, _: Setup) -> Iterator[Hit]:
    """LLaMA-Factory stops at keys that exclude each other or lack another, and at values of another kind."""
    if tool_of(document) == "LLaMA-Factory":
        yield from _stops(document, "LLaMA-Factory")


@training_rule("error", "llamafactory/hparams/parser.py: get_train_args")
def no_rows(document: Document, _: Setup) -> Iterator[Hit]:
    """LLaMA-Factory is to evaluate, or to train, and has no rows for it: it stops."""
    if tool_of(document) != "LLaMA-Factory":
        return
    asked = [one for one in ("eval_strategy", "do_eval") if document.get(one) in (True, "steps", "epoch")]
    rows = document.get("eval_dataset") or document.number("val_size")
    if asked and not rows:
        what = "LLaMA-Factory stops: `Please make sure eval_dataset be provided or val_size >1e-6`"
        yield Hit((asked[0],), what, "val_size: 0.1, or eval_dataset, or remove it")
    if document.on("do_train") and not document.get("dataset"):
        what = "LLaMA-Factory stops: `Please specify dataset for training`"
        yield Hit(("do_train",), what, "dataset: NAME, as dataset_info.json has it")
