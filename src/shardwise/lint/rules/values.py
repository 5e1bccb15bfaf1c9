"""Values and names that the libraries refuse: words of closed sets, shares above 1, methods."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.rules.arguments import tool_of
from shardwise.lint.rules.training import PLAIN, WORDS, calls, given_to_trainers, known_values, tree_of
from shardwise.lint.schema import closest, names, table
from shardwise.lint.setup import Setup

_CLOSED: dict[str, dict[str, str]] = table("closed_words")
_CALLS = ("LoraConfig", "get_peft_model", "from_pretrained", *PLAIN, *names("trl_arguments"))
_SHARES = {"lora_dropout": "PEFT stops: `dropout probability has to be between 0 and 1`"}
_SHARES["warmup_ratio"] = "transformers 4 stops: `warmup_ratio must lie in range [0,1]`"
_OWN_CODE = re.compile(r"AttentionInterface|trust_remote_code\s*=\s*True|\bregister\(")
_METHODS: dict[str, str] = table("methods")
_IMPORTS = re.compile(r"(?:from|import) (trl|transformers|peft|unsloth)\b")
_ASSIGNED = re.compile(r"^ *([\w.]+) = (.*)$", re.MULTILINE)
_LOADS = re.compile(r"(transformers\.)?AutoModel\w*\.from_pretrained\(")
_WRAPS = re.compile(r"(peft\.)?(get_peft_model|prepare_model_for_kbit_training)\(")


def _given(document: Document, setup: Setup) -> Iterator[tuple[str, str, Any, int]]:
    """What files and calls give: the tool or the class, the name, the value, and the line."""
    for name, value in document.values.items() if document.syntax != "python" else ():
        yield tool_of(document), str(name), value, document.line((name,))
    for call in calls(document, *_CALLS):
        for key, (line, value) in known_values(document, setup).arguments(call).items():
            yield ast.unparse(call.func).rpartition(".")[2], key[0], value, line


def _near(word: str, known: list[str], least: float = 0.8) -> str | None:
    """The known word that is similar, or has the same letters."""
    return closest(word, known, least=least) or next((k for k in known if sorted(k) == sorted(word)), None)


@training_rule("error", "transformers 5.23: training_args.py; PEFT 0.21: config.py; LLaMA-Factory: tuner.py")
def unknown_word(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer, PEFT and other tools know certain words only, and stop at others."""
    own = _OWN_CODE.search(setup.scripts)
    rows = [(name, _CLOSED.get(who, {}).get(name, ""), *rest) for who, name, *rest in _given(document, setup)]
    rows = [row for row in rows if row[0] != "attn_implementation" or not own]
    for given, line in given_to_trainers(document, setup):
        rows += [(name, known, given.get(name), line) for name, known in WORDS.items()]
    for name, words, value, line in rows:
        word, known = str(value).removeprefix("TaskType."), words.split()
        if not isinstance(value, str) or not known or word in known or not re.fullmatch(r"[\w-]+", word):
            continue  # such as `SchedulerType.COSINE`
        earlier = word in names("earlier_optimizers")
        near = _near(word.replace("_hf", "_torch"), known)
        who = "transformers 5.23 has" if name in WORDS else "there is"
        what = f"{who} no {name} {word!r}: it stops" + ". Earlier versions had it" * earlier
        fix = f"did you mean {near!r}?" if near else f"one of {', '.join(known)}"
        at = document.line((name,)) if document.get(name) == value else line
        sure = near or (name not in WORDS and document.syntax == "python")  # a fork may know more words
        yield Hit((name,), what, fix, severity="warning" if earlier or not sure else None, line=at)


@training_rule("error", "torch/nn/modules/dropout.py; transformers 4: training_args.py; run with PEFT 0.21")
def share_above_one(document: Document, setup: Setup) -> Iterator[Hit]:
    """A share of all is at most 1."""
    for who, name, share, line in _given(document, setup):
        if name in _SHARES and isinstance(share, int | float) and share > 1 and who != "Axolotl":
            fix = f"a share, or warmup_steps {share:g}" if name == "warmup_ratio" else f"{share / 100:g}"
            yield Hit((name,), f"{name} {share:g} is a share of all: {_SHARES[name]}", fix, line=line)


@training_rule("error", "transformers 5.23, PEFT 0.21: the names of the classes' methods")
def misspelt_method(document: Document, _: Setup) -> Iterator[Hit]:
    """The class has no such method: AttributeError."""
    made, trainers = defaultdict[str, list[str]](list), "|".join(names("trainers"))
    for to, value in _ASSIGNED.findall(ast.unparse(tree_of(document))):
        made[to].append(value)
    nodes = ast.walk(tree_of(document)) if not _OWN_CODE.search(document.text) else ()
    for call in (one for one in nodes if isinstance(one, ast.Call)):
        holder, _dot, name = ast.unparse(call.func).rpartition(".")
        first, *others = made.get(holder, [""])
        model = _LOADS.match(first) and all(map(_WRAPS.match, others))
        trainer = re.match(rf"({trainers})\(", first) and first.partition("(")[0] in document.uses
        kind = "model" if model else "trainer" if trainer and not others else ""
        known = _METHODS[kind].split() if kind else []
        if name not in known and (near := _near(name, known, least=0.85)):
            what = f"a {kind} has no method `{name}`: AttributeError"
            yield Hit((), what, f"did you mean `{near}`?", line=call.lineno)


@training_rule("warning", "unsloth/_gpu_init.py: `Unsloth should be imported before`; read in 2026-08")
def unsloth_comes_late(document: Document, _: Setup) -> Iterator[Hit]:
    """Unsloth changes trl, transformers and peft as it is imported: what was imported before stays slow."""
    rows = ((one.lineno, _IMPORTS.match(ast.unparse(one))) for one in tree_of(document).body)
    found = [(line, one[1]) for line, one in rows if one]
    late = next((at for at, name in found if name == "unsloth"), 0)
    before = dict.fromkeys(name for at, name in found if at < late)
    if before:
        what = f"imported before it, {' and '.join(before)} stay{'s' * (len(before) == 1)} as slow as without"
        yield Hit((), what, "`import unsloth` as the first import", line=late)
