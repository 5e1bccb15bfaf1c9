"""Find out what a file is from its content, and read it."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tokenize import detect_encoding

from shardwise.errors import JobError
from shardwise.job import json_schema
from shardwise.job.paths import read_bounded
from shardwise.job.source import Key
from shardwise.lint.document import Document, Kind, UnreadableError, line_at, place_in_cells
from shardwise.lint.schema import closest, deepspeed_schema, names, pattern, table
from shardwise.lint.script_text import is_python, parses, read_python
from shardwise.lint.shell_text import STARTS, is_command, read_shell
from shardwise.lint.text import read_json, read_yaml

LARGEST_FILE_BYTES = 1_000_000
_VARIABLE = re.compile(r"^\$\{?\w+\}?/")  # `$here/`: a folder that only the shell knows, usually the script's
_IMPORTS = re.compile(r"^ *(?:from|import) +([\w.]+)(?: +import +\(?([\w, ]+))?", re.MULTILINE)
_MODULE = pattern("module")  # of no launcher
_PACKAGE = re.compile(r"-|[A-Za-z][\w.-]*(\[[\w, -]*\])?\s*($|[#;@(]|[=<>~!]=|[<>])|(git\+)?https?://")
_LOADS = re.compile(r"(?m)^[^#\n]*(?:\bsource|\.|xargs)(?:[ \t]|\))")  # variables of another file
_SHELLS = (".sh", ".slurm", ".sbatch", ".bash", ".job")
LOADS_YAML = re.compile(r"yaml\.(safe_)?load\(|parse_yaml_file\(|H4ArgumentParser\(")  # own settings
# what only IPython reads, with the lines that a backslash joins: `!ls`, `%cd ..`, `x = !ls`, `pip install`
_MAGIC = pattern("of_ipython")
_PYTHON_BELOW = re.compile(r"\A%%(?:time|timeit|capture|prun)\b.*")  # what follows this first line is code
_PLACEHOLDER = re.compile(r"(?m)[=(,+] *<[A-Za-z][\w ./-]*>")
_MANIFEST = re.compile(r"(?m)^apiVersion:")  # Kubernetes', of one document or several
NO_PYTHON = "# not Python: "  # what lines of a notebook's cells begin with that nobody can run
BYTE_ORDER_MARK = "\ufeff"

_JOB = frozenset(json_schema.names_below(()))
_ACCELERATE = frozenset(names("accelerate_files"))
_TRAINING = frozenset(names("training_files"))
_TRAINERS_FSDP = {"auto_wrap_policy", "reshard_after_forward", "transformer_layer_cls_to_wrap"}
_OF_TRAINER = {"per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps"}  # of no job
_IN_BOTH = {"gradient_accumulation_steps", "bf16", "fp16"}  # keys that both DeepSpeed and the Trainer have
DEEPSPEED_YAML = "DeepSpeed keys in YAML: DeepSpeed reads JSON"
_DEEPSPEED = {"zero_optimization", "gradient_clipping", "train_micro_batch_size_per_gpu", "steps_per_print"}
_SECTIONS = {"fp16": "enabled", "bf16": "enabled", "optimizer": "params", "scheduler": "params"}
UNKNOWN = "check does not know this kind of file"
WHAT = "a DeepSpeed JSON, accelerate config, training script, its arguments or launch command, or job file"


def text_of(path: Path, command: str) -> str:
    """Return a file's text, with its byte order mark; JobError, with the command, if it cannot be read."""
    try:
        raw = read_bounded(path, LARGEST_FILE_BYTES)
    except FileNotFoundError:
        where, fix = f"{command} {path}", "check the path, which counts from the folder of the command"
        raise JobError(f"there is no file {path}", where=where, fix=fix) from None
    except IsADirectoryError:
        held = sorted(one.name for one in path.iterdir() if one.suffix in (*_SHELLS, ".py", ".json", ".yaml"))
        what = "it is a folder: the files of one training are read together"
        fix = f"name them: {', '.join(held[:6])}" if held else f"name {WHAT}"
        raise JobError(what, where=str(path), fix=fix) from None
    except OSError as error:
        raise JobError(f"it cannot be read: {error.strerror}", where=str(path), fix=f"name {WHAT}") from None
    if len(raw) > LARGEST_FILE_BYTES:
        what = f"more than {LARGEST_FILE_BYTES:,} bytes are too many for a configuration"
        raise JobError(
            what, where=str(path), fix="leave it out: check reads settings and scripts, and no data"
        )
    try:
        return raw.decode(encoding_of(raw, path))
    except (UnicodeDecodeError, LookupError):
        raise JobError("it is not UTF-8 text", where=str(path), fix=f"name {WHAT}") from None


def encoding_of(raw: bytes, path: Path) -> str:
    """The encoding that a script names in its first two lines, as Python takes it (PEP 263); else UTF-8."""
    with suppress(SyntaxError):  # of an encoding that Python has not
        return detect_encoding(BytesIO(raw * (path.suffix == ".py")).readline)[0].removesuffix("-sig")
    return "utf-8"


def read(text: str, name: str, *, other: Kind | None = None) -> Document:
    """Read a text; if it is none of the known kinds, it is of the `other` kind, else UnreadableError."""
    if text.startswith(BYTE_ORDER_MARK):
        return replace(read(text.removeprefix(BYTE_ORDER_MARK), name, other=other), marked=True)
    if name.endswith(".ipynb"):
        return _notebook(text, name)
    if other is None and (kind := _unjudged(text, name)):
        return Document(name=name, text=text, syntax="text", values={}, marks={}, kind=kind)
    start = text.lstrip()
    if re.match(r'"[^"\n]*"\s*:', start):  # copied from within a JSON: judged, and the braces are missed
        return replace(read("{" + text + "}", name), text=text, bare=True)
    if start.startswith(("{", "//", "/*")):
        document = read_json(text, name)
        kind = _kind(document, other)
    elif name.endswith(".py") or is_python(text):
        return _script(text, name)
    elif is_command(text) or name.endswith(_SHELLS) or re.match(r"#!.*\b(ba|z|k)?sh\b", text):
        return read_shell(text, name, plain=True, starts=other is None)
    elif name.endswith((".toml", ".md", ".txt")) or _MANIFEST.search(text):
        raise UnreadableError(UNKNOWN, line=1, fix=f"name {WHAT}")
    else:
        document = read_yaml(text, name)
        kind = _kind(document, other)
        both = kind == "deepspeed" or (kind == "accelerate" and other is None)  # such as Axolotl's
        if both and _TRAINING & document.values.keys():
            kind = other or "training"
        elif kind == "deepspeed" and other is None:
            fix = "write it as JSON; or name the script that reads it and gives DeepSpeed a dict, too"
            raise UnreadableError(DEEPSPEED_YAML, line=1, fix=fix)
    kind = kind or other
    if kind is None:
        fix = f"name {WHAT}; `shardwise init --from {name}` makes a job file of other settings"
        raise UnreadableError(UNKNOWN, line=1, fix=fix)
    return replace(document, kind=kind)


def lists_pins(text: str) -> bool:
    """Whether the lines of a text are packages, at least one with its version: requirements of any name."""
    rows = [row.strip() for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")]
    return all(map(_PACKAGE.match, rows)) and any(re.match(r"[\w\[\],. -]+[=<>~]=", row) for row in rows)


def _unjudged(text: str, name: str) -> Kind | None:
    """What a file is that has no settings, but versions of packages, or LLaMA-Factory's data sets."""
    mine = any(map(Path(name).match, names("requirements")))
    pins = (mine or (name.endswith(".txt") and lists_pins(text))) and "Trainer" not in text
    return "rows" if Path(name).name == "dataset_info.json" else "pins" if pins else None


def _script(text: str, name: str) -> Document:
    """A Python script; also one that a notebook's cells were exported to, with lines for the shell."""
    try:
        return read_python(text, name)
    except UnreadableError:
        if (code := _without_magic(text)) == text:
            raise
        return read_python(code, name)


def _without_magic(text: str) -> str:
    """The text with a statement that does nothing, on as many lines, for each that only IPython reads."""

    def nothing(found: re.Match[str]) -> str:
        said = f"{found[1]}{found[2]}{'None' if found[2] else 'pass'}"
        installs = "  # " + found[0].replace("\n", " ") if " install " in found[0] else ""  # for its versions
        return said + installs + "\n" * found[0].count("\n")

    return _MAGIC.sub(nothing, text)


def _notebook(text: str, name: str) -> Document:
    """The code of a notebook's cells as one script; what only IPython reads is left out."""
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(one["source"]) if one["cell_type"] == "code" else None for one in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnreadableError("it is no notebook", line=1, fix=f"name {WHAT}") from None
    parts, starts = list[str](), list[int]()
    for cell in code:
        starts.append(0 if cell is None else 1 + sum(part.count("\n") + 1 for part in parts))
        if cell is not None:
            text = _PYTHON_BELOW.sub("", cell, count=1)
            if text.startswith("%%"):
                text = "\n".join(f"# {row}" if " install " in row else "" for row in text.split("\n"))
            code_ = text if parses(text) else _without_magic(text)
            idle = _PLACEHOLDER.search(code_) and not parses(code_)  # `name = <your name>`
            parts.append(re.sub("(?m)^", NO_PYTHON, code_) if idle else code_)
    try:
        return replace(read_python("\n".join(parts), name), cells=tuple(starts))
    except UnreadableError as error:
        error.cell, error.line = place_in_cells(starts, error.line)
        raise


def _kind(document: Document, other: Kind | None) -> Kind | None:
    values = document.values
    keys = {key for key, value in values.items() if value is not None}  # `fsdp_config: null` says nothing
    theirs = any(isinstance(one, Mapping) and _OF_TRAINER & one.keys() for one in values.values())
    named = [one in json_schema.names_below((key,)) for key in keys & _JOB for one in document.section(key)]
    ours = "model" in keys and ("data" in keys or "strategy" in keys) and not theirs
    if ours and 2 * sum(named) >= len(named) and len(keys - _JOB) < len(keys & _JOB):
        return "job"
    if keys & _ACCELERATE:
        return "accelerate"
    if {str(key).removeprefix("fsdp_") for key in keys} & _TRAINERS_FSDP:
        return "training"
    known = set(deepspeed_schema().sections[()].keys)
    parts = (part in document.section(key) for key, part in _SECTIONS.items())
    if (other or document.syntax == "yaml") and not (_DEEPSPEED & values.keys() or any(parts)):
        known = set()  # settings of the user's own: `optimizer: adamw`
    if keys & (known - _IN_BOTH):
        return "deepspeed"
    if keys & _TRAINING:
        return "training"
    if any(name in known or closest(str(name), known) for name in keys):
        return "deepspeed"
    tools = table("unread_tools").values()  # of which a note says so
    return "training" if any(re.search(one, document.text, re.MULTILINE) for one in tools) else None


def referred(document: Document) -> list[str]:
    """The DeepSpeed files that an accelerate file, a script or a command names, and the command's script."""
    tables: dict[str, list[Key]] = {
        "accelerate": [("deepspeed_config", "deepspeed_config_file")],
        "training": [("deepspeed",), ("deepspeed_config",), ("deepspeed_config_file",), ("config",)],
    }
    tables["training"] += [
        key for key in document.marks if key[1:] and key[-1] == "deepspeed"
    ]  # in a section
    values = [document.get(*key) for key in tables.get(document.kind, [])]
    named = [value for value in values if isinstance(value, str) and value.endswith((".json", ".conf"))]
    if document.syntax == "shell":
        named += [document.get("script")] * document.has("script") + (document.get(STARTS) or [])
        started = document.get("module") is True or document.get("m") is True
        modules = _MODULE.findall(document.text) if started else []
        named += [f"{one.replace('.', '/')}.py" for one in modules]
        both = {"config_file", "arguments"} - document.flags  # after the script's name: not accelerate's
        if str(document.get("config")).endswith((".yaml", ".yml")):  # TrlParser's
            both.add("config")
        named += [str(document.get(name)) for name in sorted(both) if document.has(name)]
    return [_VARIABLE.sub("", value) for value in named]


def with_loaded(document: Document, files: Sequence[Path]) -> Document:
    """A launch command with the variables of the files that it loads: `source env.sh`."""
    if document.syntax != "shell" or not _LOADS.search(document.text):
        return document
    from shardwise.lint.foreign.sources import with_variables  # which imports this module

    return replace(with_variables(document, files, [], certain=True), text=document.text)


def found(files: Sequence[str], folder: Path) -> list[Path]:
    """The files that exist, relative to the working directory or to a folder."""
    paths = [next((p for p in (Path(file), folder / file) if is_file(p)), None) for file in files]
    return [path for path in paths if path is not None]


def imported(script: Document) -> dict[Path, int]:
    """The files that a script imports, as far as they are near it, and the lines that do."""
    files, folder = dict[Path, int](), Path(script.name).parent
    for one in _IMPORTS.finditer(script.text):
        modules = [one[1], *(f"{one[1]}.{name}" for name in re.findall(r"\w+", one[2] or ""))]
        names_ = [module.strip(".").replace(".", "/") + ".py" for module in modules]
        for path in (*found(names_, folder), *found(names_, folder.parent)):
            files.setdefault(path, line_at(script.text, one.start(1)))
    return files


def is_file(path: Path) -> bool:
    """Whether the file exists; False also for an invalid name."""
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False
