"""Which names in a job are files, and whether those files exist.

A relative path in a job file counts from the file's folder; in `--set`, in Python and in `output` from the
working directory (docs/decisions/0049). A name is a path when it starts with `.`, `/` or `~`, exists, ends
like a data file, or has more than one `/`; otherwise it is a name on a hub or in the catalog.
"""

import difflib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

LOCAL = ("model.source", "model.tokenizer", "data.train", "data.eval", "data.chat_template")
"""Keys of what is read: their values may be paths."""
RULE = "paths in a job file count from its folder, in --set from the working directory"
TEMPLATES = ("chatml", "llama-3", "alpaca")
"""Chat templates that a job may name instead of a file (data/templates/)."""
TEMPLATE_OF = {
    "chatml": ("Qwen", "Yi", "SmolLM", "InternLM2"),
    "llama-3": ("Llama-3",),
}
"""Families of models that were trained with one of them, as others may name a template."""
FILL_IN = {"model.source": "fill-in-the-model", "data.train": "fill-in-the-data.jsonl"}
"""What `shardwise init --from` writes where no file says it."""
DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
NOT_READ = (".csv", ".tsv", ".ndjson", ".arrow", ".gz", ".tgz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".7z")
"""Data as others have them: to be unpacked or converted."""


def is_local(name: str, folder: str | Path = "") -> bool:
    """Whether the name of a model or of data is a file or folder of this machine, seen from `folder`."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return True
    suffix = Path(name).suffix.lower()
    like_a_file = suffix in NOT_READ or difflib.get_close_matches(suffix, DATA_SUFFIXES, cutoff=0.8)
    return bool(like_a_file) or Path(folder, name).exists()


def seen_from(folder: Path, key: str, value: Any) -> Any:
    """The value of a key of LOCAL in a file in `folder`, as the working directory would name it."""

    def seen(name: str) -> str:
        return os.path.join(folder, name) if _is_path(key, name, folder) else name  # noqa: PTH118 - keeps `./`

    return value if folder == Path() else _each(value, seen)


def absolute(job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of a job with absolute paths: they mean the same seen from anywhere."""
    return _with_paths(job, os.path.abspath)  # links stay as they are


def below(folder: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of a job whose relative paths count from `folder`, perhaps another machine's."""
    return _with_paths(job, partial(os.path.join, folder))


def unplaced(job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values of a job with the last part of each path: the same on machines with other folders."""
    return _with_paths(job, lambda name: Path(name).name)


def _with_paths(job: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    values: dict[str, Any] = {**job}

    def changed(key: str, name: str) -> str:
        return change(name) if _is_path(key, name) else name

    for key in LOCAL:
        section, name = key.split(".")
        if values.get(section, {}).get(name) is not None:
            values[section] = {**values[section], name: _each(values[section][name], partial(changed, key))}
    return values


def _is_path(key: str, name: str, folder: Path = Path()) -> bool:
    word = (key, name) == ("model.tokenizer", "train") or (key == "data.chat_template" and name in TEMPLATES)
    return not word and (key == "data.chat_template" or is_local(name, folder))


def _each(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def nearest(path: Path) -> str:
    """The fix for a path that does not exist: a similar name next to it, or the nearest existing folder."""
    lookup = "" if path.is_absolute() else f" ({RULE}, {Path.cwd()})"
    if path.is_symlink():
        return f"it is a link to {path.readlink()}, which does not exist"
    parent = path.parent
    if parent.is_dir():
        alike = (
            child for child in parent.iterdir() if path.suffix == child.suffix or path.stem == child.stem
        )
        names = sorted(child.name for child in alike)
        similar = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
        if similar:
            return f"did you mean {parent / similar[0]}?{lookup}"
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    return f"the nearest folder that exists is {parent.resolve()}{lookup}"


def alike(name: str, files: Iterable[str], base: Path = Path()) -> str:
    """The folder below `base` that holds one of `files` and has nearly the last name of `name`; or empty."""
    folders: dict[str, Path] = {}
    for pattern in (f"{above}/{file}" for above in ("*", "*/*") for file in files):
        for path in sorted(base.glob(pattern)):
            folders.setdefault(path.parent.name, path.parent.relative_to(base))
    near = difflib.get_close_matches(Path(name).name, folders, n=1, cutoff=0.75)
    return str(folders[near[0]]) if near else ""


def missing_data(names: str | list[str] | None) -> Iterator[tuple[str, str]]:
    """Yield (what, fix) for each file or folder of training data that cannot be meant."""
    for name in [names] if isinstance(names, str) else names or []:
        if not is_local(name):
            continue
        path = Path(name)
        if path.name == FILL_IN["data.train"] and not path.exists():
            fix = "write your data: a .jsonl, .json, .parquet or .txt file, or a hub dataset such as "
            fix += "tatsu-lab/alpaca"
            yield f"{name} is the placeholder that `shardwise init --from` wrote", fix
        elif not path.exists():
            yield f"{name} does not exist", nearest(path)
        elif not path.is_file() and not path.is_dir():
            yield f"{name} is neither a file nor a folder", "write what it gives to a file, and name that"
        elif path.is_file() and path.suffix.lower() not in DATA_SUFFIXES:
            kinds = ", ".join(suffix[1:] for suffix in DATA_SUFFIXES)
            yield f"{name} is not a kind of file that can be read", f"convert it to one of {kinds}"


def missing_model(name: str) -> Iterator[tuple[str, str]]:
    """Yield (what, fix) if a local model folder is absent or is no model folder."""
    if name == FILL_IN["model.source"]:
        fix = "write a hub id such as Qwen/Qwen2.5-0.5B, a model folder, or a name of "
        fix += "`shardwise init --models`"
        yield f"{name} is the placeholder that `shardwise init --from` wrote", fix
    elif is_local(name) and not Path(name).exists():
        yield from missing(name)
    elif is_local(name) and not (Path(name) / "config.json").is_file():
        yield f"{name} is not a model folder: it has no config.json", "name the folder that holds config.json"


def missing_tokenizer(name: str | None) -> Iterator[tuple[str, str]]:
    """Yield (what, fix) if a local tokenizer folder is absent."""
    return missing(name if name and name != "train" and is_local(name) else None)


def missing(name: str | None, kind: Literal["file", "folder"] = "folder") -> Iterator[tuple[str, str]]:
    """Yield (what, fix) if a file or folder is absent."""
    if name is not None and not (Path(name).is_file() if kind == "file" else Path(name).is_dir()):
        yield f"the {kind} {name} does not exist", nearest(Path(name))


def missing_template(name: str | None) -> Iterator[tuple[str, str]]:
    """Yield (what, fix) if a chat template is neither a file nor one that is known by name."""
    for what, fix in missing(None if name in TEMPLATES else name, "file"):
        if uses := _template_of(Path(str(name)).name):
            yield f"there is no template of that name, and no file {name}", uses
        else:
            yield what, f"{fix}; or one of {', '.join(TEMPLATES)}; unset it is the tokenizer's own"


def _template_of(name: str) -> str:
    """`Qwen uses chatml` for `qwen2.5`; empty where no family begins so, or the name is a path."""
    for template, families in TEMPLATE_OF.items():
        for family in families:
            start = family.replace("-", "[-_]?") + ("(?![0-9])" if family[-1].isdigit() else "(?![a-z])")
            if re.match(start, name, re.IGNORECASE) and Path(name).suffix != ".jinja":
                return f"{family} uses {template}: data.chat_template: {template}"
    return ""


def blocked_output(output: str) -> Iterator[tuple[str, str]]:
    """Yield (what, fix) if the folder of run folders cannot be made because of a file."""
    path = Path(output)
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            yield f"{place} is a file, so no run folder can be made in it", "choose another folder"
            return


def expand_home(value: Any) -> Any:
    """Make `~/data` an absolute path, in a name or in a list of names."""
    return _each(value, lambda name: str(Path(name).expanduser()) if name.startswith("~") else name)


def open_regular(path: Path) -> BinaryIO:
    """A file to read. OSError where it is a pipe or a device: those may have no end, or never a writer."""

    def regular(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(mode := os.fstat(descriptor).st_mode) or stat.S_ISDIR(mode):  # open refuses folders
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", name)

    return open(path, "rb", opener=regular)


def read_bounded(path: Path, most: int) -> bytes:
    """The first `most + 1` bytes of a file, as `open_regular` opens it."""
    with open_regular(path) as file:
        return file.read(most + 1)
