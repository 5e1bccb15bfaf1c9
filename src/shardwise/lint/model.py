"""Facts about a model that need no network: its config.json, else the catalog, and its blocks' classes."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.engines.facts import Architecture
from shardwise.errors import JobError
from shardwise.lint.read import is_file
from shardwise.lint.setup import ModelFacts
from shardwise.models.catalog import lookup
from shardwise.models.families import FAMILIES

_ELSEWHERE = dict.fromkeys(("glm", "phi"), ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"))
"""Modules of versions whose code is not in transformers: GLM-4-9B-Chat, Phi-3-small."""
_PART = re.compile("_(text|vision)(_model)?$")  # of a part's type, whose classes are in its model's file


def facts_of(name: str) -> ModelFacts:
    """Facts about a folder, a hub id or a known name. JobError if its config.json is broken."""
    return ModelFacts.of_config(name, _config(name))


def architecture_of(name: str) -> Architecture | None:
    """Of a model without attention; None for any other: only transformers knows how its layers are split."""
    config = _config(name)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or family.attends:
        return None
    blocks = config.get("num_hidden_layers", config.get("n_layer"))
    return Architecture(
        blocks=blocks if isinstance(blocks, int) and blocks > 0 else 1,
        key_value_heads=0,
        flash_attention=False,
        attends=False,
        fp32_parameters=family.fp32_parameters,
    )


def _config(name: str) -> Mapping[str, Any]:
    file = Path(name) / "config.json"
    if not is_file(file):
        shape = lookup(name)
        return shape.hf_config() if shape else {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise JobError("it is not a JSON object", where=str(file), fix="save the model again")
    return config


def guessed_types(name: str) -> tuple[str, ...]:
    """The types of transformers' that a model's id begins with: `t5` of `google-t5/t5-small`.

    Several where the id goes on with a number: `phi` and `phi3` of `Phi-4-mini`. The longest is the first.
    """
    package = find_spec("transformers")
    folders = [Path(place) / "models" for place in (package and package.submodule_search_locations) or ()]
    word = name.rstrip("/").rpartition("/")[2].lower().replace("-", "_")
    kinds = sorted(file.name for folder in folders if folder.is_dir() for file in folder.iterdir())
    fitting = [kind for kind in kinds if re.match(rf"{re.escape(kind)}(?![a-z])", word)]
    best = max(fitting, key=len, default="")
    versions = re.compile(rf"{re.escape(best)}_?\d")
    others = [kind for kind in kinds if versions.match(kind)] if best and versions.match(word) else []
    return (best, *others) if best else ()


@dataclass(frozen=True)
class Blocks:
    """Names of a model's classes and modules."""

    blocks: tuple[str, ...]  # of `_no_split_modules`, which FSDP wraps by default; empty if there are none
    classes: frozenset[str]  # all classes of the model's files
    parts: frozenset[str]  # attributes that these classes set, modules among them
    inputs: frozenset[str] = frozenset()  # arguments of `forward`


@cache
def blocks_of(model_types: tuple[str, ...]) -> Blocks | None:
    """The blocks of a model with these `model_type`s, found without an import; None if one is unknown."""
    blocks, classes, parts, inputs = dict[str, None](), set[str](), set[str](), set[str]()
    for model_type in model_types:
        file = _file(model_type.replace("-", "_"))
        if file is None:
            return None
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
                blocks |= dict.fromkeys(_unsplit(node))
            elif isinstance(node, ast.FunctionDef) and node.name == "forward":
                inputs |= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                parts.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.col_offset == 0:
                classes |= {alias.name for alias in node.names}
                if other := re.fullmatch(r"(\w+)\.modeling_\1", node.module or ""):
                    parts |= getattr(blocks_of((other[1],)), "parts", frozenset())
    return Blocks(tuple(blocks), *map(frozenset, (classes, parts, inputs))) if model_types else None


def blocks_for(model: ModelFacts) -> tuple[Blocks | None, str | None]:
    """The blocks of a model; and its type, where only its id suggests that."""
    known = blocks_of(model.model_types)
    if known or model.model_type:
        return known, None
    types = guessed_types(model.name)
    found = [one for kind in types if (one := blocks_of((kind,))) and "AutoModel" not in one.classes]
    if not found:
        return None, None
    made = Blocks(
        blocks=tuple(dict.fromkeys(name for one in found for name in one.blocks)),
        classes=frozenset().union(*(one.classes for one in found)),
        parts=frozenset(_ELSEWHERE.get(types[0], ())).union(*(one.parts for one in found)),
        inputs=frozenset().union(*(one.inputs for one in found)),
    )
    return made, types[0]


def _file(model_type: str) -> Path | None:
    """`transformers/models/llama/modeling_llama.py` for `llama`, and for its part `llama_text`."""
    package = find_spec("transformers") if model_type.isidentifier() else None
    for folder in (package and package.submodule_search_locations) or ():
        for name in (model_type, _PART.sub("", model_type)):
            file = Path(folder) / "models" / name / f"modeling_{name}.py"
            if file.is_file():
                return file
    return None


def _unsplit(model: ast.ClassDef) -> Iterator[str]:
    for node in model.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_no_split_modules")], value=ast.List(elts=items)):
                yield from (str(one.value) for one in items if isinstance(one, ast.Constant))
