"""Losses of a script's own, which a job has not."""

import ast
import re
from collections.abc import Iterator, Sequence

from shardwise.lint.document import Document, line_at
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.schema import names
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_run import own_parts

_WORDS = {name: re.compile(TABLE["words"][name]) for name in ("model_loss", "more_loss")}


def own_losses(script: Document, texts: str) -> Iterator[str]:
    """What is said of trainers of no library, and of losses of the script's own. `texts`: of all scripts."""
    known = {*names("trainers"), *TABLE["reasons"], "UnslothTrainer", "L.Trainer", "pl.Trainer"}
    for name in sorted(script.uses):
        mine = f"class {name.rpartition('.')[2]}(" in texts
        if name.endswith("Trainer") and not mine and not {name, name.rpartition(".")[2]} & known:
            yield f"to do: {script.name}: {name} is no library's trainer: see whether its loss is another"
    lines = [line_at(script.text, one.start()) for one in re.finditer("compute_loss_func=", script.text)]
    for node in ast.walk(ast.parse(script.text)):
        bases = [ast.unparse(one) for one in node.bases] if isinstance(node, ast.ClassDef) else []
        own = node.body if any(one.endswith("Trainer") for one in bases) else []  # type: ignore[attr-defined]
        lines += [one.lineno for one in own if getattr(one, "name", "") == "training_step"]
        if isinstance(node, ast.FunctionDef | ast.Module):
            lines += _terms(node)
    for line in lines[:1]:
        yield f"to do: {script.name}:{line}: a loss of the script's own, which a job has not"


def answers_in_text(documents: Sequence[Document]) -> Iterator[str]:
    """What is said of a collator that finds the answers in rows of text, which a job counts in full."""
    marks = {place[0].partition(" ")[0] for one in documents for place in one.marks}  # `text by a function`
    for one in documents if marks & {"dataset_text_field", "formatting_func"} and "text" not in marks else ():
        if one.has(name := "DataCollatorForCompletionOnlyLM()") and "apply_chat_template(" not in one.text:
            what = (
                "it finds the answers in a text, and a job counts all of a text; prepare the rows as messages"
            )
            yield f"to do: {one.name}:{one.line((name,))}: {name}: {what}, or as prompts and completions"


def _terms(scope: ast.FunctionDef | ast.Module) -> Iterator[int]:
    """The line where a function, or a script's top level, has another loss, or adds a term to the model's."""
    name, text, parts = getattr(scope, "name", ""), ast.unparse(scope), [*own_parts(scope)]
    if name == "compute_loss" and (_WORDS["more_loss"].search(text) or not _WORDS["model_loss"].search(text)):
        yield getattr(scope, "lineno", 1)
    calls = [one for one in parts if isinstance(one, ast.Call) and name_of(one.func).endswith("backward")]
    learned = {one.id for call in calls for one in ast.walk(call) if isinstance(one, ast.Name)}
    learned |= {"loss"} if "loss" in name else set()
    for node in parts if learned else ():
        match node:
            case ast.Return(value=ast.expr() as value) if "loss" in name and _is_sum(value):
                yield node.lineno
            case ast.Assign(targets=[ast.Name(id=to)], value=value) if to in learned and _is_sum(value):
                yield node.lineno
            case ast.AugAssign(target=ast.Name(id=to), op=ast.Add(), value=value) if to in learned:
                yield from [node.lineno] if ".item()" not in ast.unparse(value) else []  # which is shown


def _is_sum(value: ast.expr) -> bool:
    """Whether an expression adds two terms, of which none is a number."""
    match value:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return not {ast.Constant} & {type(left), type(right)}
        case ast.BinOp(left=left, right=right):
            return _is_sum(left) or _is_sum(right)
        case ast.Tuple(elts=[first, *_]) | ast.IfExp(body=first):
            return _is_sum(first)
    return False
