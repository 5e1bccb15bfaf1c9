"""Known model shapes, for plans and random weights without a network; which jobs have no tokenizer."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.folders import packaged
from shardwise.job.paths import alike
from shardwise.job.schema import Model

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


MODEL_FILES = ("config.json",)
"""Of a folder that a job's `model.source` may name."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model's architecture and sizes."""

    name: str
    hub: str | None = None
    """Hub id of the weights; None for shapes that were never published as weights."""
    aliases: tuple[str, ...] = ()
    model_type: str
    """Hugging Face's name of the architecture."""
    config: Mapping[str, Any]
    """Hugging Face config values that differ from the architecture's defaults."""
    parameters: int
    """Exact number of parameters; tied weights count once."""

    @property
    def positions(self) -> int | None:
        """Largest row in tokens that the model allows, or was trained with; None if it has no such number."""
        return self.config.get("n_positions") or self.config.get("max_position_embeddings")

    def hf_config(self) -> dict[str, Any]:
        """The shape as the content of a config.json."""
        return {"model_type": self.model_type, **self.config}


@cache
def shapes() -> tuple[Shape, ...]:
    """All shapes of `catalog.toml`, in its order."""
    found = []
    for family in packaged("models/catalog.toml")["family"].values():
        for name, row in family["shape"].items():
            config = {**family.get("config", {}), **row["config"]}
            # TOML has no null
            config = {key: None if value == "none" else value for key, value in config.items()}
            rest = {**row, "aliases": tuple(row.get("aliases", ())), "config": config}
            found.append(Shape(name=name, model_type=family["model_type"], **rest))
    return tuple(found)


def lookup(name: str) -> Shape | None:
    """Find a shape by name, hub id or alias, ignoring case."""
    return _index().get(name.casefold())


def unknown(name: str, base: Path = Path(), files: Iterable[str] = MODEL_FILES) -> JobError | None:
    """The error for a name of no folder, no known shape and no hub id; None for one of these.

    `base`: where paths count from; `files`: of which a folder that may be meant has one.
    """
    hub_id = "/" in name and not name.startswith((".", "/", "~"))
    if hub_id or lookup(name) is not None or Path(name).is_dir():
        return None
    what = f"there is no folder and no known shape {name!r}"
    return JobError(what, where="model.source", fix=did_you_mean(name, base, files))


def did_you_mean(name: str, base: Path = Path(), files: Iterable[str] = MODEL_FILES) -> str:
    """The fix for a model that is not found: a folder nearly of that name, else shapes."""
    folder = alike(name, files, base)
    near = [f"the folder {folder}"] if folder else []
    near += nearest(name, cutoff=0.75 if folder else 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}`shardwise init --models` lists the known shapes"


def no_tokenizer(model: Model, downloaded: Path | None = None, base: Path = Path()) -> JobError | None:
    """The error of a job without a tokenizer; None where there is one, or only the hub knows."""
    name, what = model.tokenizer or model.source, ""
    shape, folder = lookup(name), downloaded or Path(name)
    if folder.is_dir():
        found = any((folder / one).is_file() for one in _TOKENIZERS)
        what = "" if found else f"{folder} has no tokenizer files"
    elif model.tokenizer is None and shape is None:
        return unknown(name, base)
    elif "/" not in name and not (shape and shape.hub):
        what = f"{name} has no tokenizer of its own" if shape else f"there is no tokenizer {name!r}"
    if not what or model.tokenizer == "train":
        return None
    train = ", or to train" if model.weights == "random" else ""
    folder_meant = alike(name, _TOKENIZERS, base)
    fix = f"did you mean the folder {folder_meant}? " if folder_meant else ""
    fix += f"set model.tokenizer to a hub id, or to a folder with {_TOKENIZERS[0]}{train}"
    return JobError(what, where="model.tokenizer" if model.tokenizer else "model.source", fix=fix)


def nearest(name: str, count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Names that look most like `name`, best first."""
    found = difflib.get_close_matches(name.casefold(), _index(), n=10, cutoff=cutoff)
    return list(dict.fromkeys(_index()[key].name for key in found))[:count]


@cache
def _index() -> dict[str, Shape]:
    names = [(s, name) for s in shapes() for name in (s.name, *s.aliases, s.hub) if name is not None]
    return {name.casefold(): shape for shape, name in names}
