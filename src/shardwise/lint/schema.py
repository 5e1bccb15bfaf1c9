"""The sections, keys and kinds of values of DeepSpeed and accelerate, from the TOML files."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any

from shardwise.folders import packaged
from shardwise.job.source import Key


@dataclass(frozen=True, kw_only=True)
class KeyKind:
    """The values that a key accepts."""

    kind: str  # int, float, bool, str, list, object, any, or words with `|` between
    nullable: bool
    bounds: tuple[tuple[str, float], ...]  # (comparison, limit); all hold

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.kind.split("|")) if "|" in self.kind else ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the configuration."""

    refuses: bool  # whether an unknown key stops DeepSpeed; else it is ignored
    keys: Mapping[str, KeyKind]


@dataclass(frozen=True, kw_only=True)
class Schema:
    version: str
    sections: Mapping[Key, Section]

    def homes(self, name: str) -> list[Key]:
        """The sections that have a key of this name, outermost first."""
        return sorted((key for key, section in self.sections.items() if name in section.keys), key=len)


@cache
def deepspeed_schema() -> Schema:
    """The schema of DeepSpeed 0.19.8."""
    data = packaged("lint/deepspeed_0_19.toml")
    return Schema(
        version=data["version"],
        sections={
            tuple(name.split(".")) if name else (): Section(
                refuses="unknown" not in row,
                keys={key: _kind(kind) for kind, keys in row.get("keys", {}).items() for key in keys.split()},
            )
            for name, row in data["sections"].items()
        },
    )


@cache
def accelerate_keys() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Keys of accelerate's config files: at the top level, in `deepspeed_config`, in `fsdp_config`."""
    data = packaged("lint/accelerate_1.toml")
    top, deepspeed, fsdp = (tuple(data[name].split()) for name in ("top", "deepspeed_config", "fsdp_config"))
    return top, deepspeed, fsdp


def names(table: str) -> tuple[str, ...]:
    """The words of a text of `names.toml`."""
    return tuple(packaged("lint/names.toml")[table].split())


def table(name: str) -> dict[str, Any]:
    """A table of `names.toml`."""
    return dict(packaged("lint/names.toml")[name])


def pattern(name: str) -> re.Pattern[str]:
    """A pattern of `names.toml`."""
    return re.compile(table("patterns")[name])


def by_key(name: str) -> dict[Key, Any]:
    """A table of `names.toml` whose names are keys of sections."""
    return {tuple(key.split(".")): value for key, value in table(name).items()}


def _kind(text: str) -> KeyKind:
    kind, _, bounds = text.partition(" ")
    limits = tuple((sign, float(limit)) for sign, limit in re.findall(r"([<>]=?)([-0-9.]+)", bounds))
    return KeyKind(kind=kind.removesuffix("?"), nullable=kind.endswith("?"), bounds=limits)


def closest(name: str, known: Iterable[str], *, least: float = 0.8) -> str | None:
    """The known name that is most similar to `name`, in any case; None if none is."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=least)
    return lower[found[0]] if found else None


def misspelt(name: str, known: str) -> bool:
    """Whether a name is certainly meant to be a similar one, and is no later one: `qwen-3`, not `qwen3_5`."""
    shorter, longer = sorted((name.lower(), known.lower()), key=len)
    return not longer.startswith(shorter) and re.findall(r"\d", shorter) == re.findall(r"\d", longer)


def as_number(value: Any) -> float | int | None:
    """The finite number that a value, such as text, stands for; None if there is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not isfinite(number):
        return None
    return int(number) if number == int(number) else number
