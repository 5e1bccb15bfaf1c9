"""Rows and labels: columns that get lost, labels that are shifted twice or not at all."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.model import blocks_for
from shardwise.lint.rules.batch import MICRO
from shardwise.lint.rules.families import named_models
from shardwise.lint.rules.loop import made_by
from shardwise.lint.rules.program import all_code, calls, code_of, tree_of, values_of, walk, within, words_of
from shardwise.lint.schema import names, pattern
from shardwise.lint.setup import ModelFacts, Setup

_JOINED, _TOKENIZES, _OF_TWO = map(pattern, ("joined", "tokenizes", "encodes_and_decodes"))
_CROSS_ENTROPY = re.compile(r"\bcross_entropy$|(^|\.)CrossEntropyLoss(\(.*\)$| )")
_ADDED = re.compile(r" \+=? ")
_HELD_OUT = re.compile("(?i)val|test|dev").search
_OF_CHATS = re.compile(r"'(messages|conversations|prompt|completion)'")
_KEEPS, _SHIFTS, _CAUSAL, _TWICE = map(pattern, ("keeps_columns", "shifts", "causal", "shifted_twice"))


@training_rule("error", "transformers/trainer.py 5.23: _set_signature_columns_if_needed")
def columns_are_dropped(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer drops columns that the model's forward does not take: who reads them gets a KeyError."""
    classes = {one.name: one for one in walk(tree_of(document), ast.ClassDef)}
    plain = {"Trainer", "Seq2SeqTrainer"} - classes.keys()
    own = {name: one for name, one in classes.items() if plain & {*map(ast.unparse, one.bases)}}
    made = [] if _KEEPS.search("".join(d.text for d in setup.documents)) else [*calls(document, *plain, *own)]
    models = [blocks_for(ModelFacts(name=one))[0] for one in named_models(setup)] if made else []
    taken = {"label", "label_ids"}.union(*(one.inputs for one in models if one))
    for call in made if models and all(models) else ():
        given = words_of(call)
        collator = values_of(document).meant(given.get("data_collator", ast.Constant(None)))
        by = ast.unparse(getattr(collator, "func", collator))
        batch = by in (*names("collators"), "None")
        reader = own.get(ast.unparse(call.func)) if batch else classes.get(by, collator)
        found = _keys(reader, "compute_loss" if batch else "__call__", batch)
        lost = {key: line for key, line in found.items() if key not in taken and None not in given}
        if lost:
            what = f"the Trainer drops {', '.join(lost)}, which the model's forward does not take: KeyError"
            yield Hit((), what, "remove_unused_columns=False in the arguments", line=min(lost.values()))


def _keys(reader: Any, method: str, batch: bool) -> dict[str, int]:
    """What a function, or a method of a class, reads without another value of a batch or of each row."""
    of_class, found = isinstance(reader, ast.ClassDef), dict[str, int]()
    bodies = [one for one in reader.body if getattr(one, "name", "") == method] if of_class else [reader]
    for one in (one for one in bodies if isinstance(one, ast.FunctionDef | ast.Lambda)):
        rows, text = "".join(arg.arg for arg in one.args.args[of_class + batch :][:1]), ast.unparse(one)
        each = {*re.findall(rf"\bfor (\w+) in {rows}(?=[:\]\)}}]| if |$)", text)}
        for node in ast.walk(one):
            match node:
                case (
                    ast.Subscript(value=holder, slice=ast.Constant(str(key)), ctx=ast.Load())
                    | ast.Call(func=ast.Attribute(attr="pop", value=holder), args=[ast.Constant(str(key))])
                ) if ast.unparse(holder) in ({rows} if batch else {*each, f"{rows}[0]"}):
                    asked = rf"\['{re.escape(key)}'\] = |'{re.escape(key)}' (not )?in |except"
                    found |= {} if re.search(asked, text) else {key: node.lineno}
    return found


@training_rule("error", "transformers/loss/loss_utils.py: ForCausalLMLoss shifts the labels itself")
def shift_of_labels(document: Document, setup: Setup) -> Iterator[Hit]:
    """A causal model's logits at a token are for the next one: the labels are shifted once, by its loss."""
    code = all_code(setup)
    causal, text = _CAUSAL.search(code), code_of(document)
    parts = [p for p in ast.walk(tree_of(document)) if isinstance(p, ast.Slice) and ast.unparse(p) == "1:"]
    if causal and parts and _TWICE.search(text):
        what = "the model's loss shifts the labels once more: each token learns the one after the next"
        yield Hit((), what, "input_ids and labels of the same tokens", line=parts[0].lineno)
    known, made = values_of(document), made_by(document)
    for call in within(tree_of(document)) if causal and not _SHIFTS.search(code) else ():
        by = ast.unparse(call.func)  # `F.cross_entropy`, `loss_fct`, `nn.CrossEntropyLoss(...)`
        given = [ast.unparse(one) + ast.unparse(known.meant(one)) for one in call.args[:2]]
        loss = _CROSS_ENTROPY.search(f"{made.get(by, '')} {by}") and len(given) == 2
        if loss and "logits" in given[0] and re.search("label|input_ids", given[1]):
            what = "nothing shifts logits and labels: the model learns to repeat its input"
            yield Hit((), what, "logits[:, :-1] and labels[:, 1:]", severity="warning", line=call.lineno)


def _tokenised(node: ast.AST, given: dict[str, ast.expr], deep: int = 4) -> set[str]:
    """The texts whose tokens a value has, as far as a function's assignments show."""
    found = set[str]()
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and one.args and _TOKENIZES.search(ast.unparse(one.func)):
            found.add(ast.unparse(one.args[0]))
        elif isinstance(one, ast.Name) and deep and (held := given.get(one.id)) is not None:
            found |= _tokenised(held, given, deep - 1)
    return found


def _fields(name: str, function: ast.FunctionDef, deep: int = 6) -> set[str]:
    """The texts, such as names of fields, in what a name is made of."""
    found = set[str]()
    for node in ast.walk(function) if deep else ():
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
                pass
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pass
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[value]):
                pass
            case _:
                continue
        if re.search(rf"\b{re.escape(name)}\b", ast.unparse(target)):
            parts = [*ast.walk(value)]
            found |= {
                one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
            others = {one.id for one in parts if isinstance(one, ast.Name)} - {name}
            found |= {text for other in others for text in _fields(other, function, deep - 1)}
    return {one for one in found if one.isidentifier()}


def _apart(ids: str, labels: str, function: ast.FunctionDef) -> bool:
    """Whether texts that are put together from parts have no field in common; of plain fields, True."""
    if not _ADDED.search(ast.unparse(function)):
        return True
    fields = _fields(ids, function), _fields(labels, function)
    return all(fields) and not fields[0] & fields[1] and ids.isidentifier() and labels.isidentifier()


@training_rule("error", "transformers/loss/loss_utils.py: ForCausalLMLoss: a label for each input id")
def labels_of_another_text(document: Document, setup: Setup) -> Iterator[Hit]:
    """A causal model predicts its own input: labels of another text fit no position of it."""
    code = all_code(setup)
    functions = walk(tree_of(document), ast.FunctionDef)
    for one in functions if _CAUSAL.search(code) and not _OF_TWO.search(code) else ():
        rows, given = dict[str, list[ast.expr]](), dict[str, ast.expr]()
        for node in ast.walk(one):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    given.setdefault(name, value)
                case ast.Assign(
                    targets=[ast.Subscript(value=row, slice=ast.Constant("labels"))], value=value
                ):
                    rows |= {"labels": [value], "input_ids": [row, *rows.get("input_ids", [])]}
                case ast.Dict(keys=keys, values=values):
                    fields = {getattr(k, "value", None): v for k, v in zip(keys, values, strict=True)}
                    both = {"labels", "input_ids"} <= fields.keys()
                    rows |= {k: [fields[k]] for k in ("labels", "input_ids")} if both else {}
        ids, labels = (_tokenised(ast.List(rows.get(k, [])), given) for k in ("input_ids", "labels"))
        if len(ids) != 1 or len(labels) != 1 or ids == labels or _JOINED.search(ast.unparse(one)):
            continue
        (text,), (answer,) = ids, labels
        if _apart(text, answer, one):
            what = f"the labels are the tokens of {answer}, and the input ids those of {text}: "
            what += "the loss compares each position with a token of the other text"
            fix = "prompt and answer joined as input ids; their copy, with -100 for the prompt, as labels"
            yield Hit((), what, fix, line=rows["labels"][0].lineno)
            return


@training_rule("error", "trl/trainer/sft_trainer.py: assistant_only_loss, is_conversational; read in 1.10")
def chats_are_texts_by_then(document: Document, _: Setup) -> Iterator[Hit]:
    """`assistant_only_loss` finds the answers of messages: rows of text stop the SFTTrainer."""
    known = values_of(document)
    if not document.on("assistant_only_loss") or "SFTTrainer" not in document.uses:
        return
    for call in calls(document, "map"):
        function = known.meant(call.args[0]) if call.args else None
        made = ast.unparse(function.body) if isinstance(function, ast.Lambda) else ""
        if isinstance(function, ast.FunctionDef):
            made = " ".join(ast.unparse(one) for one in ast.walk(function) if isinstance(one, ast.Return))
        texts = re.search(r"\{'text': [^{}]*(\{[^{}]*\}[^{}]*)*\}$", made) and not _OF_CHATS.search(made)
        if texts and any(one.arg == "remove_columns" for one in call.keywords):
            what = "the rows are texts: ValueError, `the dataset is not conversational`"
            fix = "keep `messages` and let the SFTTrainer write the template; or prompt and completion"
            yield Hit(("assistant_only_loss",), what, fix)


@training_rule("warning", "trl/trainer/sft_trainer.py: not set to a supported Flash Attention variant")
def packed_rows_see_each_other(document: Document, _: Setup) -> Iterator[Hit]:
    """TRL knows flash attention alone to keep the rows of a pack apart, and only warns of another kernel."""
    kernel = document.get("attn_implementation") or document.get("model_init_kwargs", "attn_implementation")
    joined = next((one for one in ("packing", "padding_free") if document.on(one)), "")
    trl = {"SFTTrainer", "SFTConfig"} & {*document.uses} and document.get("packing_strategy") != "wrapped"
    if trl and joined and kernel in ("sdpa", "eager"):
        what = f"with {kernel} attention the rows that `{joined}` joins may see each other: TRL only warns"
        yield Hit((joined,), what, f"attn_implementation='flash_attention_2', or {joined}=False")


@training_rule("warning", "accelerate/accelerator.py: _prepare_deepspeed; read in 1.15")
def loader_and_file_differ(document: Document, setup: Setup) -> Iterator[Hit]:
    """Accelerate reads a DataLoader for `auto` only: a number of the file changes no rows, and is wrong."""
    files = {one.name: count for one in setup.of("deepspeed") if (count := one.number(MICRO))}
    sets = setup.reader != "accelerate" or re.search(f"split_batches|{MICRO}", document.text)
    known, rows = values_of(document), dict[Any, int]()
    for one in walk(tree_of(document), ast.Assign) if len(files) == 1 and not sets else ():
        call, name = one.value, ast.unparse(one.targets[0])
        if isinstance(call, ast.Call) and call in [*calls(document, "DataLoader")] and not _HELD_OUT(name):
            given = words_of(call).get("batch_size", call.args[1] if call.args[1:] else ast.Constant(None))
            rows[known.value(given)] = call.lineno
    for count, line in rows.items() if len(rows) == 1 else ():
        ((name, micro),) = files.items()
        if type(count) is int and count != micro:
            what = f"each GPU computes {count} rows at a time, and {name} counts {micro:g}"
            yield Hit((), what, f'"{MICRO}": "auto", or batch_size={micro:g}', line=line)
