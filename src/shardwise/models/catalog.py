"""Known model shapes: a job can be planned, and trained from random weights, without a network."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


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
    text = resources.files("shardwise.models").joinpath("catalog.toml").read_text(encoding="utf-8")
    found = []
    for family in tomllib.loads(text)["family"].values():
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


def nearest(name: str, count: int = 3) -> list[str]:
    """Names that look most like `name`, best first."""
    found = difflib.get_close_matches(name.casefold(), _index(), n=10, cutoff=0.5)
    return list(dict.fromkeys(_index()[key].name for key in found))[:count]


@cache
def _index() -> dict[str, Shape]:
    names = [(s, name) for s in shapes() for name in (s.name, *s.aliases, s.hub) if name is not None]
    return {name.casefold(): shape for shape, name in names}
