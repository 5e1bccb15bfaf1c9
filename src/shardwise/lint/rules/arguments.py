"""Names and numbers of arguments: misspelt ones, and those that exclude each other."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from shardwise.folders import packaged
from shardwise.lint.document import Document
from shardwise.lint.edit import Drop, Rename
from shardwise.lint.finding import Hit, Severity, loop_rule, training_rule
from shardwise.lint.read import is_file
from shardwise.lint.rules.accelerate import certainly_missing
from shardwise.lint.rules.families import LEARNED, named_models
from shardwise.lint.rules.program import (
    calls,
    is_optimizer,
    known_values,
    tree_of,
    values_of,
    walk,
    within,
    words_of,
)
from shardwise.lint.rules.training import DEFAULTS, given_to_trainers, tool_of
from shardwise.lint.schema import as_number, closest, misspelt, names, pattern, table
from shardwise.lint.script_inputs import options
from shardwise.lint.setup import Setup, launched_processes
from shardwise.models.catalog import lookup

_ARGUMENTS = packaged("lint/arguments.toml")
_TRAINERS = frozenset([*names("trainer_arguments"), *_ARGUMENTS["earlier"].split()])
_FOREIGN = {key.partition(".")[0] for key in packaged("lint/foreign.toml")["keys"] if "(" not in key}
_FRAMEWORKS = _TRAINERS | {*_ARGUMENTS["frameworks"].split(), *_FOREIGN}
_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # and their defaults
_OTHERS = {"generation_batch_size", "steps_per_generation"}  # what else makes a batch of completions
_ROWS = ("eval_dataset", None)  # None: `**rest`
_EVALUATES = re.compile(r"\.eval(uation)?_strategy\s*=|\.evaluate\(")
_PACKAGES = ("transformers", "trl", "peft", "unsloth")
_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_LETTERS = 3  # names that differ by as many are not renamed by --fix
NUMBERS = frozenset(_ARGUMENTS["numbers"].split())
_OF_LOADER = ("batch_size", "num_workers", "prefetch_factor")
_CONVERTERS = ("int", "float", "eval", "literal_eval", "round")
_CHANGES = re.compile(r"setattr\(|jsonargparse|simple_parsing|OmegaConf|ast\.literal_eval|__dict__")
_OTHER = {"type", "action", "nargs", "choices", "const", None}  # None: `**rest`
_STRANGE = 4  # a file of which more than one key in four is not known is another tool's
_OTHER_NAMES: dict[str, dict[str, str]] = _ARGUMENTS["other_names"]
_DROPS = {"Axolotl": "which drops it silently, and uses its default"}
_DROPS["LLaMA-Factory"] = "which stops: `Some keys are not used by the HfArgumentParser`"
_LENGTHS = ("max_length", "max_seq_length", "sequence_len", "cutoff_len")
_KNOWN: dict[str, tuple[frozenset[str], str, Severity]] = {
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), (_TRAINERS, "TypeError", "error")),
    "LoraConfig": (frozenset(_ARGUMENTS["LoraConfig"].split()), "TypeError", "error"),
    "BitsAndBytesConfig": (frozenset(_ARGUMENTS["BitsAndBytesConfig"].split()), "it is ignored", "error"),
    **dict.fromkeys(names("trl_arguments"), (_FRAMEWORKS, "TypeError", "warning")),
}
"""The classes' arguments, what happens at others, and how certain it is: TRL's names change often."""


def unread_tool(document: Document) -> str:
    """The tool whose settings a file has, if no rule knows them."""
    signs = table("unread_tools").items()
    return next((tool for tool, sign in signs if re.search(sign, document.text, re.MULTILINE)), "")


def _near(name: str, known: frozenset[str]) -> str | None:
    """The known name that a name is a misspelling of: no known name itself, and not of another number."""
    near = None if name in known else closest(name, known, least=0.85)
    of_training = near.replace("_eval_", "_train_") if near and "eval" not in name else near
    near = of_training if of_training in known else near
    return near if near and re.findall(r"\d", near) == re.findall(r"\d", name) else None


def _imported(document: Document) -> set[str]:
    """How a script may call what it imports from the libraries."""
    found = (one for one in walk(tree_of(document), ast.ImportFrom) if one.module)
    mine = [one for one in found if not one.level and str(one.module).partition(".")[0] in _PACKAGES]
    return {alias.name for one in mine for alias in one.names}  # `tree_of` calls them so


@training_rule("error", "transformers/training_args.py: TrainingArguments.__post_init__; read in 5.23")
def contradicting_arguments(document: Document, setup: Setup) -> Iterator[Hit]:
    """The Trainer's arguments stop with a ValueError."""
    for hit in _contradictions(document, setup):
        same = (hit.key[0], hit.key[0].replace("eval_", "evaluation_"))
        made = (call.keywords for call in within(tree_of(document)) if call.lineno == hit.line)
        lines = (one.value.lineno for words in made for one in words if one.arg in same)
        yield replace(hit, line=next(lines, hit.line))


def _contradictions(document: Document, setup: Setup) -> Iterator[Hit]:
    """The same, each at the line where its call begins."""
    started = any(one.syntax == "shell" for one in setup.of("training"))  # with the flags that it gives
    every = started and document.syntax == "python"
    groups = [one for one in given_to_trainers(document, setup, every=every) if "**" not in one[0]]
    if document.syntax == "yaml" and document.values.keys() - _FRAMEWORKS:
        groups = [(dict.fromkeys(DEFAULTS) | {**document.values}, None)]  # the script may say the others
    trainers = [one for one in calls(document, *names("trainers")) if ast.unparse(one.func) in document.uses]
    rows = [one for one in trainers if len(one.args) > 4 or any(k.arg in _ROWS for k in one.keywords)]
    for given, line in groups:
        if given.get("bf16") is given.get("fp16") is True:
            what = "ValueError `At most one of fp16 and bf16 can be True, but not both`"
            yield Hit(("fp16",), what, "keep bf16 (Ampere and later), which needs no loss scaling", line=line)
        both = given["save_strategy"], given.get("evaluation_strategy", given["eval_strategy"])
        save, evaluate = (str(one).rpartition(".")[2].lower() for one in both)  # also of SaveStrategy.STEPS
        if (len(groups), len(trainers), rows) == (1, 1, []) and evaluate in ("steps", "epoch"):
            what = f"it is {evaluate}, and the Trainer gets no `eval_dataset`: ValueError"
            yield Hit(("eval_strategy",), what, "eval_dataset=ROWS of the Trainer, or remove it", line=line)
        steps = given["save_steps"], given.get("eval_steps", given["logging_steps"])
        apart = save == "steps" and all(isinstance(n, int) and n for n in steps) and steps[0] % steps[1]
        off = document.has("eval_strategy") or document.has("evaluation_strategy")  # a choice
        asked, none = given.get("eval_steps"), evaluate == "no" and not _EVALUATES.search(setup.scripts)
        if none and not off and isinstance(asked, int) and given.get("load_best_model_at_end") is not True:
            what = f"`eval_steps` {asked} without an eval strategy, whose default is `no`: "
            what += "nothing is evaluated"
            yield Hit(("eval_steps",), what, 'eval_strategy="steps"', severity="warning", line=line)
        if len(groups) == len(trainers) == 1 and given.get("max_steps", -1) in (0, -1) and _streams(document):
            what = "streamed rows have no length: ValueError `max_steps has to be specified`"
            yield Hit(("max_steps",), what, "max_steps=1000, or rows without streaming=True", line=line)
        world = setup.asked_world_size or launched_processes(document) or setup.launched
        batch = [*(given.get(name, value) for name, value in _BATCH.items()), world]
        each = given.get("num_generations")  # GRPO's
        counted = all(isinstance(one, int) for one in (each, *batch)) and not _OTHERS & given.keys()
        if counted and each and prod(batch) % each:
            what = f"{' x '.join(map(str, batch))} GPUs = {prod(batch)} completions are no multiple of {each}"
            yield Hit(("num_generations",), f"{what}: ValueError", "a batch that is a multiple", line=line)
        known = given.get("load_best_model_at_end") is True and {save, evaluate} <= {"no", "steps", "epoch"}
        if known and (save != evaluate or apart):
            what = f"ValueError: the model is saved by `{save}` and evaluated by `{evaluate}`"
            what = f"{what}; {steps[0]} is not a multiple of {steps[1]}" if save == evaluate else what
            fix = "the same save_ and eval_strategy and steps"
            yield Hit(("load_best_model_at_end",), what, fix, line=line)


def _streams(document: Document) -> bool:
    """Whether all rows of a script are streamed, and none of them are put in a list."""
    loads, known = [*calls(document, "load_dataset")], values_of(document)
    given = [one.value for call in loads for one in call.keywords if one.arg == "streaming"]
    kept = re.search(r"\bfrom_list\(|\bfrom_generator\(|\blist\(|max_steps =", document.text)
    return bool(loads) and not kept and [known.value(one) for one in given] == [True] * len(loads)


@training_rule("error", "transformers 5.23, PEFT 0.21, TRL 1.16: the classes of arguments")
def misspelt_argument(document: Document, _: Setup) -> Iterator[Hit]:
    """The class has no such argument: TypeError at the start."""
    imported = _imported(document)
    for call in calls(document, *_KNOWN):
        called = ast.unparse(call.func)
        package, _dot, last = called.rpartition(".")
        if called not in document.uses or not (called in imported or package in _PACKAGES):
            continue  # a class of the script's own
        known, happens, severity = _KNOWN[last]
        for keyword in call.keywords:
            if keyword.arg and (near := _near(keyword.arg, known)):
                what = f"{last} has no argument `{keyword.arg}`: {happens}"
                change = Rename((keyword.arg,), near, keyword.lineno)
                sure = near in _TRAINERS or misspelt(keyword.arg, near)  # of the Trainer's TRL's are derived
                what += "" if sure or severity == "error" else ", unless yours is newer"
                yield Hit((keyword.arg,), what, "", (change,), "error" if sure else severity, keyword.lineno)


@loop_rule("error", "transformers/training_args.py, argparse, DataLoader: text stays text; run with 5.23")
def argument_is_text(document: Document, setup: Setup) -> Iterator[Hit]:
    """The arguments' class takes text, and the training stops where it needs the number."""
    yield from _flags_as_text(document, setup)
    for call in calls(document, *_KNOWN):
        for keyword in call.keywords if ast.unparse(call.func) in document.uses else ():
            value = getattr(keyword.value, "value", None)
            name = keyword.arg or ""
            if isinstance(value, str) and name in NUMBERS and as_number(value) is not None:
                what = f"{name} is the text {value!r}, and no number: TypeError where it is needed"
                yield Hit((name,), what, f"{name}={value}", (), None, keyword.lineno)


def _flags_as_text(document: Document, setup: Setup) -> Iterator[Hit]:
    """Flags without `type=` whose text reaches what needs a number, and stops it."""
    if "argparse" not in document.text or _CHANGES.search(document.text):
        return
    program = tree_of(document)
    holders = _holders(program)
    found = [(node, who) for who, node in _need_numbers(program) if isinstance(node, ast.Attribute)]
    needs = {node.attr: who for node, who in found if ast.unparse(node.value) in holders}
    for call in calls(document, "add_argument"):
        flags, name, default = options(call)
        if name not in needs or _OTHER & {one.arg for one in call.keywords} or not flags:
            continue
        who = needs[name]
        value = getattr(default, "value", None) if default else None
        always = value is None or (isinstance(value, str) and as_number(value) is not None)
        passed = [n for one in setup.of("training") if (n := _passed(one, document, flags)) is not None]
        if (always or passed) and _unchanged(program, name, holders):
            kind = "float" if float in map(type, (value, *passed)) or name == "lr" else "int"
            shown = f"--{flags[0]}" if "'--" in ast.unparse(call) else name
            what = f"`{shown}` has no type=: argparse gives it as text, and {who} stops: it needs a number"
            yield Hit((), what, f"type={kind} in its add_argument", line=call.lineno)


def _passed(command: Document, script: Document, flags: list[str]) -> float | None:
    """The number that a command gives the flag of a script."""
    mine = Path(str(command.get("script"))).name == Path(script.name).name
    name = next((one for one in flags if mine and one in command.flags), None)
    return command.number(name) if name else None


def _last(node: ast.AST | None) -> str:
    return ast.unparse(node).rpartition(".")[2] if isinstance(node, ast.Name | ast.Attribute) else ""


def _need_numbers(program: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What needs a number, and the expressions that it gets."""
    for call in within(program):
        who = _last(call.func)
        needed = NUMBERS if who in _KNOWN else {*_OF_LOADER} if who == "DataLoader" else frozenset[str]()
        needed = {"lr"} if is_optimizer(who) else needed
        places = call.args if who == "range" else call.args[1:2] if who == "DataLoader" else []
        yield from ((who, one) for one in places)
        yield from ((who, one.value) for one in call.keywords if one.arg in needed)


def _holders(program: ast.Module) -> set[str]:
    """The variables that hold what a parser read."""
    own = [one.name for one in walk(program, ast.FunctionDef) if "parse_args(" in ast.unparse(one)]
    makers = "|".join(["parse_args", "parse_known_args", *own])
    made = rf"(?m)^ *\(?([\w.]+)(?:, [^=\n]*)? = (?:.*\.)?(?:{makers})\([^()]*\)$"
    return {*re.findall(made, ast.unparse(program))}


def _unchanged(program: ast.Module, name: str, holders: set[str]) -> bool:
    """Whether no statement makes a number of a flag's text, and other variables of its name hold it, too."""
    uses = [one for one in walk(program, ast.Attribute) if one.attr == name]
    if not any(ast.unparse(one.value) in holders for one in uses):
        return False
    for one in ast.walk(program):
        match one:
            case ast.Call(func=made, args=given) if _last(made) in _CONVERTERS:
                if any(_last(inner) == name for part in given for inner in ast.walk(part)):
                    return False
            case ast.Assign(targets=targets, value=value):
                plain = _last(value) == name and not any(isinstance(to, ast.Attribute) for to in targets)
                if name in map(_last, targets) and not plain:
                    return False
            case ast.AugAssign(target=to) | ast.AnnAssign(target=to) | ast.For(target=to):
                if _last(to) == name:
                    return False
    return True


def _names_of_others(document: Document, own: set[str], tool: str, *, lenient: bool) -> Iterator[Hit]:
    """Keys that other tools have for what this file's tool calls otherwise; `lenient`: it does not stop."""
    for right, words in _OTHER_NAMES.get(tool, {}).items():
        for name in words.split():
            twice = document.has(right)
            if document.has(name) and name not in own and not (twice and lenient):
                what = f"`{name}` is no key of {tool}, {_DROPS[tool]}"
                change = Drop((name,)) if twice else Rename((name,), right)
                yield Hit((name,), what, "", (change,), "warning" if lenient else "error")


@training_rule("warning", "the arguments of LLaMA-Factory, Axolotl, TRL and the Trainer, 2026-08")
def misspelt_key(document: Document, setup: Setup) -> Iterator[Hit]:
    """The tool knows a similar key only, or no such block: it stops, or ignores this one."""
    own, tool = {*re.findall(r"\w+", setup.scripts)}, tool_of(document) if document.syntax != "shell" else ""
    lenient = tool != "LLaMA-Factory" or any("ALLOW_EXTRA_ARGS" in one.text for one in setup.documents)
    others = [*_names_of_others(document, own, tool, lenient=lenient)]
    yield from others
    yield from _unknown_blocks(document, own) if tool == "Axolotl" and "<<:" not in document.text else ()
    named = {hit.key[0] for hit in others}
    strange = [name for name in document.values if name not in _FRAMEWORKS | named]
    if not tool and any(map(_takes_others, setup.of("training"))):
        return  # the keys of a class that another file has
    of_these = document.syntax in ("yaml", "json") and len(strange) * _STRANGE < len(document.values)
    nears = {name: _near(str(name), _FRAMEWORKS) for name in strange if name not in own}
    if not tool and [*nears.values()].count(None) > 1:
        return  # the settings of a script of the user's own
    for name, near in nears.items() if of_these and not unread_tool(document) else ():
        if near and not document.has(near):
            sure = abs(len(near) - len(str(name))) < _LETTERS
            stops = "LLaMA-Factory, Axolotl, TRL or the Trainer, which stop at it or ignore it"
            what = f"no key `{name}` is known of {stops if lenient else f'{tool}, {_DROPS[tool]}'}"
            changes = (Rename((str(name),), near),) if sure else ()
            severity: Severity = "warning" if lenient else "error"
            yield Hit((str(name),), what, f"did you mean `{near}`?", changes, severity)


def _unknown_blocks(document: Document, own: set[str]) -> Iterator[Hit]:
    """Settings in a block that Axolotl does not have, whose keys are at the top."""
    for name, block in document.values.items():
        held = block.keys() & {*names("of_every_training")} if isinstance(block, Mapping) else ()
        if len(held) > 1 and name not in own:
            said = ", ".join(f"`{one}`" for one in block if one in _FRAMEWORKS)
            what = f"Axolotl has no block `{name}`: it ignores {said} in it"
            yield Hit((name,), what, "these keys at the top of the file, by Axolotl's names")


def _takes_others(script: Document) -> bool:
    """Whether a script's parser takes classes that another file of its own has."""
    nodes = [*ast.walk(tree_of(script))]
    known = {one.name for one in nodes if isinstance(one, ast.ClassDef)} | _imported(script) | {*_PACKAGES}
    given = (one for call in calls(script, *_PARSERS) for part in call.args for one in ast.walk(part))
    return any(isinstance(one, ast.Name) and one.id not in known for one in given)


@training_rule("error", "transformers/trainer.py: create_scheduler; axolotl/utils/schemas/validation.py")
def warmup_does_not_fit(document: Document, setup: Setup) -> Iterator[Hit]:
    """The warm-up takes all steps, or is given twice."""
    for given, line in given_to_trainers(document, setup, every=True):
        warmup, most = (given.get(name) for name in ("warmup_steps", "max_steps"))
        at = document.line(("warmup_steps",)) if document.get("warmup_steps") == warmup else line
        numbers = [one for one in (warmup, most) if isinstance(one, int | float) and one > 1]
        if len(numbers) == 2 and numbers[0] >= numbers[1]:
            what = f"warmup_steps {warmup} of max_steps {most}: training ends before the learning rate has "
            yield Hit(("warmup_steps",), what + "risen", "fewer warmup_steps", severity="warning", line=at)
        ratio, axolotls = given.get("warmup_ratio"), "base_model" in given
        if isinstance(ratio, float) and ratio > 0 and isinstance(warmup, int) and warmup > 0:
            what = "`warmup_ratio` is given too: " + ("Axolotl stops" if axolotls else "the ratio is ignored")
            severity: Severity = "error" if axolotls else "warning"
            yield Hit(("warmup_steps",), what, "keep one of the two", severity=severity, line=at)


@training_rule("error", "the model's config.json: max_position_embeddings")
def rows_longer_than_positions(document: Document, setup: Setup) -> Iterator[Hit]:
    """Rows are longer than the model was trained for."""
    if not any(name in document.text for name in _LENGTHS):
        return
    found = named_models(setup) if document.syntax == "python" else {setup.named_model or ""}
    model = next(iter(found)) if len(found) == 1 else ""
    shape = lookup(model)
    most = shape.positions if shape else None
    if not shape or not most or re.search("rope_scaling|n_positions|max_position_emb", document.text):
        return
    given = [(name, document.number(name), document.line((name,)), False) for name in _LENGTHS]
    given += [("max_length", *one) for one in _tokenized(document, setup)]
    learned = shape.model_type in LEARNED
    for name, length, line, padded in given:
        if length and length > most:
            stops = ", and a longer row stops with `index out of range`" if learned else ""
            what = f"{name} is {length:g}: {model} has {most} positions{stops}"
            yield Hit((name,), what, f"{most}", severity=None if learned and padded else "warning", line=line)


def _tokenized(document: Document, setup: Setup) -> Iterator[tuple[float, int, bool]]:
    """Lengths to which a script cuts or (True) pads rows by its tokenizer, and their lines; not if packed."""
    if document.syntax != "python" or re.search("group_texts|concatenated_ex", document.text):
        return
    known = known_values(document, setup)
    for call in within(tree_of(document)):
        given = words_of(call)
        if "max_length" in given and {"truncation", "padding"} & given.keys():
            node = known.meant(given["max_length"])
            length = known.value(node)
            if "tok" in ast.unparse(call.func).lower() and isinstance(length, int | float):
                padded = ast.unparse(given.get("padding", node)) == "'max_length'"
                yield length, getattr(node, "lineno", call.lineno), padded


@training_rule("note", "check reads files and runs nothing")
def unknown_tool(document: Document, setup: Setup) -> Iterator[Hit]:
    """The settings of some tools are not read."""
    found, name = unread_tool(document), re.escape(Path(document.name).stem)
    part = re.search(rf"^ *(from|import) [\w., ]*\b{name}\b", setup.scripts, re.MULTILINE)  # of another file
    empty = not document.values if document.syntax != "python" else not (document.values or document.uses)
    if found:
        what = f"the settings of {found} are not read: no rule judged them"
        yield Hit((), what, "a look at its own checks")
    elif empty and not part:
        yield Hit((), "no setting of this file is known to check", "name the file with the settings, too")


_NAMED = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "config_file")
_OF_TOOLS = ("deepspeed_configs/", "examples/deepspeed/", "examples/accelerate/")
_WRITES = pattern("writes").pattern  # a file of that name, or of one that only a run knows
_ABOVE = 5  # folders that a command may run in


@training_rule("error", "the file system")
def named_file_is_missing(document: Document, setup: Setup) -> Iterator[Hit]:
    """The file with the settings is not there: the training stops at the start."""
    folders = [Path(), *Path(document.name).absolute().parents[:_ABOVE]]
    given = {Path(one.name).name for one in setup.documents}
    for key in _NAMED if not re.search(r"(?m)^\s*cd\s", document.text) else ():
        name = document.get(key)
        if not isinstance(name, str) or not re.fullmatch(r"[\w./-]+\.(json|ya?ml)", name) or "..." in name:
            continue
        if name.startswith(_OF_TOOLS):  # `axolotl fetch`, and LLaMA-Factory's own folder, bring them
            continue
        there = Path(name).name in given or any(is_file(folder / name) for folder in folders)
        writes = _WRITES.replace("NAME", re.escape(Path(name).name)).replace("EXT", Path(name).suffix)
        shell = document.text if document.syntax == "shell" else ""
        if there or Path(name).is_absolute() or re.search(writes, f"{setup.scripts}\n{shell}"):
            continue
        other = (Path(name).with_suffix(one) for one in (".json", ".yaml", ".yml"))
        near = next((one for one in other if any(is_file(folder / one) for folder in folders)), None)
        sure = certainly_missing(name, document, setup)
        what = f"there is no file {name}, here or where the command may run"
        fix = f"did you mean {near}?" if near else "check the path"
        yield Hit((key,), what, fix, severity=None if sure else "warning")
