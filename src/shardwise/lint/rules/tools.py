"""Axolotl and LLaMA-Factory: keys and values at which they stop."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.rules.training import tool_of
from shardwise.lint.schema import as_number, table
from shardwise.lint.setup import Setup
from shardwise.lint.shell_text import OPEN

_STOPS: dict[str, list[list[Any]]] = table("stops")
_KINDS: dict[str, dict[str, str]] = table("kinds_of_values")
_OFF = ("none", "false", "0", "0.0", "", "no")
_FILLED = re.compile(r"[{}$<>]|^(auto|\.\.\.)$")  # by something else, later
_TRUTHS = ["true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "none"]
_MOST_PERCENT = 30


def _holds(document: Document, condition: str) -> bool:
    """Whether a file has `key`, or `key|other=word|word`, which `!` negates."""
    keys, _, words = condition.removeprefix("!").partition("=")
    values = [str(document.get(one)).lower() for one in keys.split("|") if document.has(one)]
    if document.syntax == "shell" and "none" in values:
        return False  # only the shell knows it
    held = any(one in words.split("|") if words else one not in _OFF for one in values)
    return held is (condition[0] != "!")


def _stops(document: Document, tool: str) -> Iterator[Hit]:
    """The rows of a table whose conditions all hold."""
    for condition, what, fix, *rest in _STOPS[tool] if document.syntax != "python" else ():
        if all(_holds(document, one) for one in condition.split()) and not document.has(OPEN):
            keys = [key for one in condition.split() for key in re.findall(r"\w+", one.partition("=")[0])]
            key = next(filter(document.has, keys), keys[0])
            yield Hit((key,), what, fix, severity=next(iter(rest), None))


def _other_kinds(document: Document, tool: str, share: str) -> Iterator[Hit]:
    """Text for a number or for a truth value, and percent for a share of the rows."""
    for kind, known in _KINDS[tool].items() if document.syntax == "yaml" else ():
        for name in known.split():
            text = value if isinstance(value := document.get(name), str) else "1"
            wrong = as_number(text) is None if kind == "number" else text.lower() not in _TRUTHS
            if wrong and not _FILLED.search(text):
                happens = f"{tool} stops" + ", or takes it as true" * (kind != "number")
                yield Hit((name,), f"{name} is the text {text!r}, and no {kind}: {happens}", f"a {kind}")
    if 1 < (rows := document.number(share) or 0) <= _MOST_PERCENT:
        what = f"{share} above 1 is a number of rows: {rows:g} rows are held out, and not {rows:g} percent"
        yield Hit((share,), what, f"{share}: {rows / 100:g}", severity="warning")


@training_rule("error", "axolotl/utils/schemas/validation.py: Can't load qlora in 8bit; Require load_in_4bit")
def qlora_without_4_bits(document: Document, _: Setup) -> Iterator[Hit]:
    """Axolotl's `adapter: qlora` needs a base of 4 bits: it stops."""
    yield from _stops(document, "qlora") if document.has("base_model") else ()


@training_rule("error", "axolotl/utils/schemas: validation.py, training.py; read in 2026-08")
def axolotl_stops(document: Document, _: Setup) -> Iterator[Hit]:
    """Axolotl stops at keys that exclude each other or lack another, and at values of another kind."""
    if not document.has("base_model"):
        return
    yield from _stops(document, "base_model")
    if tool_of(document) == "Axolotl":
        yield from _stops(document, "Axolotl")
        yield from _other_kinds(document, "Axolotl", "val_set_size")
        save, evaluate = document.number("save_steps"), document.number("eval_steps")
        ratio = save / evaluate if save and evaluate else 1.0  # both may be shares
        if document.on("load_best_model_at_end") and abs(ratio - round(ratio)) > 1e-6:
            what = "Axolotl silently keeps the last model, and not the best: "
            what += f"`save_steps` {save:g} is no multiple of `eval_steps` {evaluate:g}"
            yield Hit(("load_best_model_at_end",), what, "save_steps: a multiple of eval_steps")
    for at, one in enumerate(rows if isinstance(rows := document.get("datasets"), list) else ()):
        if isinstance(one, Mapping) and str(one.get("type")).startswith("sharegpt"):
            what = "Axolotl stops: `type: sharegpt.*` is deprecated"
            yield Hit(("datasets", str(at), "type"), what, "type: chat_template")


@training_rule("error", "llamafactory/hparams: parser.py, finetuning_args.py, data_args.py; read in 2026-08")
def llama_factory_stops(document: Document, _: Setup) -> Iterator[Hit]:
    """LLaMA-Factory stops at keys that exclude each other or lack another, and at values of another kind."""
    if tool_of(document) == "LLaMA-Factory":
        yield from _stops(document, "LLaMA-Factory")
        yield from _other_kinds(document, "LLaMA-Factory", "val_size")


@training_rule("error", "llamafactory/hparams/parser.py: get_train_args")
def no_rows(document: Document, _: Setup) -> Iterator[Hit]:
    """LLaMA-Factory is to evaluate, or to train, and has no rows for it: it stops."""
    yield from _stops(document, "rows") if tool_of(document) == "LLaMA-Factory" else ()
