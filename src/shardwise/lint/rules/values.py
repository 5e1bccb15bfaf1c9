"""Values that the libraries refuse: words of closed sets, shares above 1; and what is imported late."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, Severity, training_rule
from shardwise.lint.read import LOADS_YAML
from shardwise.lint.rules.arguments import NUMBERS
from shardwise.lint.rules.program import calls, known_values
from shardwise.lint.rules.training import PLAIN, WORDS, first_imports, given_to_trainers, tool_of
from shardwise.lint.schema import closest, misspelt, names, table
from shardwise.lint.setup import Setup

_CLOSED: dict[str, dict[str, str]] = table("closed_words")
_TRAINERS = {"optimizer": WORDS["optim"], "lr_scheduler": WORDS["lr_scheduler_type"]}  # of Axolotl, too
_CALLS = ("LoraConfig", "get_peft_model", "from_pretrained", *PLAIN, *names("trl_arguments"))
_SHARES = {"lora_dropout": "PEFT stops: `dropout probability has to be between 0 and 1`"}
_SHARES["warmup_ratio"] = "transformers 4 stops: `warmup_ratio must lie in range [0,1]`"
_PART_OF = r"(?:\[['\"]NAME['\"]\]|\.get\(['\"]NAME['\"]\))"
_TEXT = re.compile(r"\d+[eE][-+]?\d+")  # YAML 1.1 wants a dot in `2.0e-5`
_AT = {"type": "axolotl: utils/data/wrappers.py, handle_unknown_dataset_strategy; read in 2026-08"}
_OWN_CODE = re.compile(r"AttentionInterface|trust_remote_code\s*=\s*True|\bregister\(")


def _given(document: Document, setup: Setup) -> Iterator[tuple[str, str, Any, int]]:
    """What files and calls give: the tool or the class, the name, the value, and the line."""
    for name, value in document.values.items() if document.syntax != "python" else ():
        yield tool_of(document), str(name), value, document.line((name,))
    for at, row in enumerate(document.get("datasets") or () if tool_of(document) == "Axolotl" else ()):
        yield "Axolotl", "type", row.get("type"), document.line(("datasets", str(at), "type"))
    for call in calls(document, *_CALLS):
        for key, (line, value) in known_values(document, setup).arguments(call).items():
            yield ast.unparse(call.func).rpartition(".")[2], key[0], value, line


@training_rule("error", "transformers 5.23: training_args.py; PEFT 0.21: config.py; LLaMA-Factory: tuner.py")
def unknown_word(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer, PEFT and other tools know certain words only, and stop at others."""
    own = _OWN_CODE.search(setup.scripts)
    rows = [(name, _CLOSED.get(who, {}).get(name, ""), *rest) for who, name, *rest in _given(document, setup)]
    rows = [(name, words and f"{words} {_TRAINERS.get(name, '')}", *rest) for name, words, *rest in rows]
    rows = [row for row in rows if row[0] != "attn_implementation" or not own]
    for given, line in given_to_trainers(document, setup):
        rows += [(name, known, given.get(name), line) for name, known in WORDS.items()]
    for name, words, value, line in rows:
        word, known = str(value).removeprefix("TaskType."), words.split()
        if not isinstance(value, str) or not known or word in known or not re.fullmatch(r"[\w-]+", word):
            continue  # such as `SchedulerType.COSINE`
        earlier = word in names("earlier_optimizers")
        if name == "type" and not misspelt(word, closest(word, known) or word):
            continue  # a module of the user's own
        same = (one for one in known if sorted(one) == sorted(word))  # `stf` for sft
        near = closest(word.replace("_hf", "_torch"), known) or next(same, None)
        who = "transformers 5.23 has" if name in WORDS else "there is"
        what = f"{who} no {name} {word!r}: it stops" + ". Earlier versions had it" * earlier
        fix = f"did you mean {near!r}?" if near else f"one of {', '.join(known)}"
        at = document.line((name,)) if document.get(name) == value else line
        sure = near or (name not in WORDS and document.syntax == "python")  # a fork may know more words
        severity: Severity = "warning" if earlier or not sure else "error"
        yield Hit((name,), what, fix, (), severity, at, _AT.get(name, ""))


@training_rule("error", "torch/nn/modules/dropout.py; transformers 4: training_args.py; run with PEFT 0.21")
def share_above_one(document: Document, setup: Setup) -> Iterator[Hit]:
    """A share of all is at most 1."""
    for who, name, share, line in _given(document, setup):
        if name in _SHARES and isinstance(share, int | float) and share > 1 and who != "Axolotl":
            fix = f"a share, or warmup_steps {share:g}" if name == "warmup_ratio" else f"{share / 100:g}"
            yield Hit((name,), f"{name} {share:g} is a share of all: {_SHARES[name]}", fix, line=line)


@training_rule("warning", "unsloth/_gpu_init.py: `Unsloth should be imported before`; read in 2026-08")
def unsloth_comes_late(document: Document, _: Setup) -> Iterator[Hit]:
    """Unsloth changes trl, transformers and peft as it is imported: what was imported before stays slow."""
    lines = first_imports(document)
    late = lines.pop("unsloth", 0)
    before = [name for line, name in sorted((line, name) for name, line in lines.items()) if line < late]
    if before:
        what = f"imported before it, {' and '.join(before)} stay{'s' * (len(before) == 1)} as slow as without"
        yield Hit((), what, "`import unsloth` as the first import", line=late)


@training_rule("error", "PyYAML 1.1 resolver; transformers/hf_argparser.py: parse_dict; run with 5.23")
def number_of_yaml_is_text(document: Document, setup: Setup) -> Iterator[Hit]:
    """PyYAML reads `2e-5` without a dot as text, and the optimizer stops: TypeError."""
    reads = document.syntax == "yaml" and LOADS_YAML.search(setup.scripts)
    own, rows = not document.has("base_model") and not tool_of(document), list[tuple[Key, Any]]()
    for section, held in document.values.items() if reads else ():
        rows += [((section,), held)] if own else []
        rows += [((section, key), part) for key, part in held.items()] if isinstance(held, Mapping) else []
    for key, value in rows:
        text = isinstance(value, str) and _TEXT.fullmatch(value) and (name := str(key[-1]))
        if not text or name not in {*NUMBERS, "lr", "learning_rate"} or not _takes(setup, key):
            continue
        if not re.search(rf"float\([^()]*(\([^()]*\))?[^()]*\b{re.escape(name)}\b", setup.scripts):
            right = re.sub("[eE]", ".0e", value)
            yield Hit(key, f"`{name}: {value}` is text for PyYAML: TypeError in the optimizer", right)


def _takes(setup: Setup, key: Key) -> bool:
    """Whether a script gives a call the part of a section: `lr=cfg["sft"]["lr"]`, or by a name of it."""
    part, last = (_PART_OF.replace("NAME", re.escape(str(one))) for one in (key[0], key[-1]))
    named = re.findall(rf"(?m)^ *([\w.]+) = [\w.]+{part}(?=\s*(?:#|$))", setup.scripts)
    holders = "|".join(map(re.escape, named)) or "(?!)"
    given = rf"\b(?:lr|{re.escape(str(key[-1]))})=(?:[\w.]+{part}|{holders}){last}"
    return len(key) == 1 or re.search(given, setup.scripts) is not None
