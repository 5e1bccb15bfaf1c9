"""Names and arguments that newer versions of the libraries do not have."""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from os.path import relpath
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document
from shardwise.lint.edit import Rename
from shardwise.lint.finding import Hit, Severity, training_rule
from shardwise.lint.read import is_file, lists_pins
from shardwise.lint.rules.program import calls, tree_of, values_of, walk, within
from shardwise.lint.rules.training import PLAIN, first_imports
from shardwise.lint.schema import names, pattern, table
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.setup import Setup

_OF_TRANSFORMERS = (*PLAIN, "Trainer", "Seq2SeqTrainer", "from_pretrained")
_LOADS_MODEL = re.compile(r"(?!.*(Fast|Peft)).*(Model|For[A-Z])\w*\.from_pretrained$")
_NEEDS: dict[str, str] = table("needs_of_transformers")  # the least version of a package
_NOW = {"transformers": "5.23", "trl": "1.16", "peft": "0.21", **_NEEDS}
_NAMES = "|".join(_NOW).replace("_", "[-_]")
_N = r"\s*[\"']?\d{1,6}(?:\.\d{1,6})*"
_BOUND = rf"(?:=={_N}(?:\.\*)?|(?:[<>!]=|[<>]|~=(?=\s*[\"']?\d+\.\d)){_N})"
_PINS = re.compile(  # `transformers==4.44`, `trl>=0.7,<0.9`, `transformers.git@v4.49.0`
    rf"(?<![\w.-])({_NAMES})(?:\.git(?=@)|\[[\w,-]*\])?[\"']?(?:\s*\()?((?:[\"']?,?\s*(?:{_BOUND}|@v{_N}))+)"
)
_PARSED = f"TrainingArguments|{'|'.join(names('trl_arguments'))}"
_MAJOR = pattern("major")  # `transformers = "^4.44"` of Poetry, `- transformers=4.44` of conda
_LOCKED = pattern("locked")  # a package of uv.lock and others, with its version
_LARGEST_LOCK, _LARGEST_TEXT = 5_000_000, 50_000
_NEAR = 2  # folders whose scripts install for a script: its own, and one above
_REMOVED: dict[str, str] = table("removed_imports")
_GONE = names("gone_from_transformers")
_TAKEN_OUT = re.compile(r"(?:\.pop\(|\bdel [\w.]+\[)[\"'](\w+)")  # of a dict
_ASKS = pattern("asks")  # which version is installed
_OF_TRL = re.compile(r"\btrl/(examples/)?scripts/\w+\.py$")  # its own scripts
_LEAVES_OUT = re.compile(r"allow_extra_keys\s*=\s*True")
_OWN_CODE = re.compile(r"Tokenizer\w*\.from_pretrained\([^()]*trust_remote_code\s*=\s*True")
_GIVES_IDS, _AS_IDS, _BOTH = pattern("gives_ids"), pattern("as_ids").pattern, pattern("both_kinds")


def _older(document: Document, setup: Setup, package: str = "transformers") -> str:
    """What asks for an earlier version of a package or of its time, in words; empty if nothing does."""
    installed = ""
    with suppress(PackageNotFoundError):
        installed = version("transformers")
    mine = (one for one in setup.documents if one.syntax in ("shell", "text"))
    texts, found = {one.name: one.text for one in (document, *mine)}, dict[str, str]()
    if installed.startswith(("3.", "4.")):
        found["transformers"] = f"transformers {installed} is installed here"
    for level, folder in enumerate(Path(document.name).absolute().parents[:4]):
        asking = (*names("requirements"), *((*names("installs"), "*.txt") if level < _NEAR else ()))
        for asked, path in ((name, one) for name in asking for one in folder.glob(name) if is_file(one)):
            with suppress(OSError):
                most = _LARGEST_TEXT if asked == "*.txt" else _LARGEST_LOCK
                text = read_bounded(path, most).decode(errors="replace")
                if asked == "*.txt" and not lists_pins(text):
                    continue
                texts.setdefault(relpath(path), "\n".join([text, *map("==".join, _LOCKED.findall(text))]))
        if (folder / ".git").exists():
            break
    for name, text in texts.items():
        listed = text if name == document.name else _MAJOR.sub(r"\1==\2.*", text)
        for one, pin in _PINS.findall(re.sub(r"(?m)(^|\s)#(?!.*install).*", "", listed)):
            bounds = [re.sub("[\"'\\s]", "", part) for part in re.findall(_BOUND, pin.replace("@v", "=="))]
            now = _NOW[kind := one.replace("-", "_")]
            upper = {part: Version(part.strip("=<~.*")) for part in bounds if part[0] not in ">!"}
            if any(now not in SpecifierSet(part) and upper[part] <= Version(now) for part in upper):
                refused = ", which transformers 5.23 does not take" * (kind in _NEEDS)
                found.setdefault(kind, f"{name} asks for {one}{','.join(bounds)}{refused}")
    return next((found[one] for one in (package, "transformers", *_NEEDS, "trl") if one in found), "")


def _asks_first(document: Document, line: int, name: str) -> bool:
    """Whether a condition around a line asks for the version, or a handler has another way to `name`."""
    known = values_of(document)
    for node in (one for one in ast.walk(tree_of(document)) if isinstance(one, ast.If | ast.IfExp | ast.Try)):
        if node.lineno <= line <= (node.end_lineno or 0):
            parts = node.handlers if isinstance(node, ast.Try) else [*ast.walk(node.test)]
            texts = [ast.unparse(one if isinstance(node, ast.Try) else known.meant(one)) for one in parts]
            if any(name in one if isinstance(node, ast.Try) else _ASKS.search(one) for one in texts):
                return True
    return False


@training_rule("error", "transformers 5.23, trl 1.16: the classes of arguments", versions="transformers>=5")
def argument_was_removed(document: Document, setup: Setup) -> Iterator[Hit]:
    """Newer versions of transformers and TRL stop at arguments that earlier ones had: TypeError."""
    arguments = names("removed_from_TrainingArguments")
    gone = dict.fromkeys(PLAIN, "") | table("removed_arguments")
    lines, taken_out = first_imports(document), {*_TAKEN_OUT.findall(setup.scripts)}
    every_class = [*walk(tree_of(document), ast.ClassDef)]
    classes = [one for one in every_class if "def __init__(" not in ast.unparse(one)]  # else it is not theirs
    shadowed = {one.name for one in every_class} - {one.name for one in classes}
    unsloth, trl = lines.get("unsloth"), lines.get("trl")
    moves = unsloth and (trl is None or unsloth < trl)  # Unsloth's own classes of TRL take them
    maybe = re.search(r"(?m)^\s*(from|import) unsloth\b", setup.scripts)
    for called, words in gone.items():
        of_trl = called not in _OF_TRANSFORMERS
        if of_trl and moves:
            continue
        package = "TRL 1.16" if of_trl else "transformers 5.23"
        every = (*words.split(), *(arguments if called.endswith(("Arguments", "Config")) else ()))
        now = dict(word.split("=", 1) for word in every)
        bases = {called, f"trl.{called}", f"transformers.{called}"}
        own = {one.name for one in classes if bases & {*map(ast.unparse, one.bases)}}
        ways = ((bases | own) & document.uses) - shadowed
        derived = [one for one in every_class if bases & {*map(ast.unparse, one.bases)}]
        above = {one for one in within(*derived) if ast.unparse(one.func) == "super().__init__"}
        for call in (*calls(document, called, *own), *above):
            by = ast.unparse(call.func)
            theirs = call in above or by in ways or _LOADS_MODEL.match(by)
            given = values_of(document).arguments(call) if theirs else {}
            found = [old for old in now if (old,) in given]
            found = [old for old in found if given[old,][1] != UNKNOWN or old not in taken_out]
            if found := [old for old in found if not _asks_first(document, given[old,][0], called)]:
                names_ = ", ".join(f"`{old}`" for old in found)
                older = _older(document, setup, "trl" if of_trl else "transformers")
                what = f"`{called}` of {package} has no {names_}, which earlier versions had: TypeError"
                what += f" from {package} on; {older}" if older else ""
                fix = "\n       ".join(f"{old} -> {now[old] or 'nothing: remove it'}" for old in found)
                renamed = [old for old in found if now[old].isidentifier()]
                written = {one.arg: one.lineno for one in call.keywords}
                sure = [one for one in found if one in written or given[one,][1] != UNKNOWN]
                changes = tuple(Rename((old,), now[old], written[old]) for old in renamed if old in written)
                first, fix = (sure or found)[0], f"{fix}; or an earlier version"
                severity: Severity | None = "warning" if not sure or older or (of_trl and maybe) else None
                yield Hit((first,), what, fix, changes, severity, given[first,][0])


@training_rule("error", "transformers/hf_argparser.py: parse", versions="transformers>=5")
def flag_was_removed(document: Document, setup: Setup) -> Iterator[Hit]:
    """A script's parser of TrainingArguments has the arguments of the installed version only."""
    text = setup.scripts
    parsed = re.search(r"(HfArgument|Trl)Parser\(", text) and re.search(_PARSED, text)
    by_trl = [one for one in [str(one.get("script")) for one in setup.of("training")] if _OF_TRL.search(one)]
    keys = document.flags if (parsed or by_trl) and document.syntax == "shell" else frozenset()
    of_trainer = document.syntax == "yaml" and document.has("model_name_or_path")
    factory = {*names("of_llama_factory"), "stage"} & document.values.keys()
    keys |= document.values.keys() if of_trainer and not factory else set()  # which has arguments of its own
    sft = re.search(r"TrlParser\(.*SFTConfig", text) or any(one.endswith("sft.py") for one in by_trl)
    trl = table("removed_arguments")["SFTConfig"].split() if sft else []
    for word in (*names("removed_from_TrainingArguments"), *trl):
        old, _, new = word.partition("=")
        if old in keys and not re.search(rf"\b{old}\b", text):
            shown = old if of_trainer else f"--{old}"
            package = "trl" if word in trl else "transformers"
            older, now = _older(document, setup, package), "TRL 1.16" if word in trl else "transformers 5.23"
            left = of_trainer and _LEAVES_OUT.search(text)
            does = "`allow_extra_keys` leaves it out" if left else "it stops"
            what = f"{now} has no argument `{shown}`, which earlier versions had: {does}"
            what += f" from {now} on; {older}" if older else ""
            changes = (Rename((old,), new, document.line((old,))),) if new.isidentifier() else ()
            fix = f"{shown} -> {new or 'nothing: remove it'}; or an earlier version"
            unsure = older or left or by_trl or "return_remaining" in text
            yield Hit((old,), what, fix, changes, "warning" if unsure else None)


@training_rule("error", "transformers 5.23, PEFT 0.21, TRL 1.16: import", versions="transformers>=5")
def import_was_removed(document: Document, setup: Setup) -> Iterator[Hit]:
    """Newer versions have no such name: ImportError."""
    program = tree_of(document)
    for node, path, found in _brought(program):
        package = path.partition(".")[0]
        fork = rf"sys\.path\.\w+\([^\n]*\b{re.escape(package)}\b"
        above = Path(document.name).absolute().parents[:3]
        copies = [one / part / package / "__init__.py" for one in above for part in ("", "src")]
        if ".experimental" in path or re.search(fork, document.text) or any(map(is_file, copies)):
            continue  # or a copy of its own
        module = ".".join(path.split(".")[:2])
        for name in [module.rpartition(".")[2]] if module in _REMOVED else found:
            now = _REMOVED.get(f"{package}.{name}", "nothing: remove it")
            gone = f"{package}.{name}" in _REMOVED
            gone |= package == "transformers" and any(re.fullmatch(one, name) for one in _GONE)
            if gone and not _asks_first(document, node.lineno, name):
                older = _older(document, setup, package)
                stops = "AttributeError" if isinstance(node, ast.Attribute) else "ImportError"
                what = f"{package} has no `{name}`, which earlier versions had: {stops}"
                what += f" from {package} {_NOW[package]} on; {older}" if older else ""
                inner = node not in program.body and not isinstance(node, ast.Attribute)
                severity: Severity | None = "warning" if older or inner else None
                yield Hit((), what, f"{name} -> {now}", severity=severity, line=node.lineno)


def _brought(program: ast.Module) -> Iterator[tuple[Any, str, list[str]]]:
    """What brings names of modules: an import, or `transformers.AdamW` after `import transformers`."""
    plain = {one.name for node in walk(program, ast.Import) for one in node.names}
    for node in ast.walk(program):
        match node:
            case ast.ImportFrom(module=str(path), names=given):
                yield node, path, [one.name for one in given]
            case ast.Import(names=given):
                yield from ((node, one.name, list[str]()) for one in given)
            case ast.Attribute(value=ast.Name(id=path), attr=name) if path in _NOW and path in plain:
                yield node, path, [name]


@training_rule("error", "transformers 5.23: apply_chat_template; run", versions="transformers>=5")
def chat_template_gives_a_dict(document: Document, setup: Setup) -> Iterator[Hit]:
    """`apply_chat_template` of transformers 5 returns a dict by default: what takes it as ids fails."""
    known, found = values_of(document), calls(document, "apply_chat_template")
    made = {call for call in found if _GIVES_IDS.match(ast.unparse(call)) and not _BOTH.search(document.text)}
    above = {child: node for node in ast.walk(tree_of(document)) for child in ast.iter_child_nodes(node)}
    for node in (one for one in above if made and isinstance(one, ast.Name | ast.Call)):
        by: Any = known.meant(node)
        moved = getattr(getattr(by, "func", None), "attr", "") == "to"  # which returns the same
        by = by.func.value if moved else by
        if by not in made:
            continue
        use = re.match(_AS_IDS.replace("IDS", re.escape(ast.unparse(node))), ast.unparse(above[node]))
        if use and not _asks_first(document, by.lineno, "apply_chat_template"):
            older = _older(document, setup)
            what = f"`{use[0][:60]}` takes as ids what apply_chat_template returns, a dict of ids and mask"
            what += f"; {older}" * bool(older)
            own = _OWN_CODE.search(setup.scripts)  # a tokenizer's, which may give ids
            yield Hit((), what, "return_dict=False", (), "warning" if older or own else None, by.lineno)
            made.discard(by)
