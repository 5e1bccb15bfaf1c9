"""A GPU by the name a person types: `rtx-4080`, `H100`, `A100_40gb`, `4090`."""

from __future__ import annotations

import difflib
import itertools
import re

from shardwise.errors import JobError
from shardwise.hardware.catalog import Gpu, gpus

_IGNORED = re.compile(r"nvidia|geforce|tesla|amd|instinct|[\s_-]+")
_SIZE = re.compile(r"(?<=\w)[\s_-]+([0-9]+) ?gb\b", re.IGNORECASE)
_MEMORY = re.compile(r"[0-9]+gb")


def resolve(text: str, where: str) -> Gpu:
    """The catalogued GPU called `text`, in any case, with spaces, dashes and underscores or without.

    Words of the name may be left out and change places, and the memory size may be added. Of several cards
    that fit it is the plain one (RTX 4070 of 4070 and 4070 Ti), or else the SXM part (H100).

    Raises:
        JobError: no card fits, or several do; `where` says what was read.
    """
    key = _normal(text)
    for gpu in gpus():
        if key == _normal(gpu.name):
            return gpu
    for gpu in gpus():
        if key in (_normal(name) for name in gpu.driver_names):
            return gpu
    found = _candidates(text)
    if not found:
        raise JobError(f"no GPU is called {text!r}", where=where, fix=_did_you_mean(key))
    if len(found) > 1:
        names = [gpu.name for gpu in found]
        what = f"{text!r} may be {_either(names[:6])}{' and others' if len(names) > 6 else ''}"
        raise JobError(what, where=where, fix=f"write more of the name, as {names[0].replace(' ', '-')}")
    return found[0]


def _candidates(text: str) -> list[Gpu]:
    """The GPUs whose words spell `text`: the plain one of them, of the size given, the SXM parts first."""
    size = _SIZE.search(text)
    key = _normal(_SIZE.sub("", text))
    spelled: dict[Gpu, frozenset[str]] = {}
    for gpu in gpus():
        words = frozenset(_normal(word) for word in gpu.name.split())
        orders = (order for n in range(len(words)) for order in itertools.permutations(words, n + 1))
        if any(any(map(_names_a_model, order)) for order in orders if "".join(order) == key):
            spelled[gpu] = frozenset(word for word in words if not _MEMORY.fullmatch(word))
    plain = [gpu for gpu, words in spelled.items() if all(words <= others for others in spelled.values())]
    found = [gpu for gpu in plain or spelled if size is None or gpu.sold_as_gb == int(size[1])]
    return [gpu for gpu in found if " SXM" in gpu.name] or found


def _names_a_model(word: str) -> bool:
    return any(letter.isdigit() for letter in word) and not _MEMORY.fullmatch(word)


def _normal(text: str) -> str:
    return re.sub(r"sxm[0-9](?![0-9]?gb)", "sxm", _IGNORED.sub("", text.casefold()))


def _did_you_mean(key: str) -> str:
    names = {_normal(gpu.name): gpu.name for gpu in gpus()}
    near = [names[found] for found in difflib.get_close_matches(key, names, n=3, cutoff=0.6)]
    asked = f"did you mean {_either(near)}? " if near else ""
    return f"{asked}Known are {known_names()}. Any other card is written by its memory: 4x24GB"


def known_names() -> str:
    """All models of the catalog in one line, their variants left out: `RTX 2080, 3060, ...; H100, ...`."""
    models: dict[str, dict[str, None]] = {}
    for gpu in gpus():
        first, *rest = gpu.name.split()
        if any(letter.isdigit() for letter in first):
            family, model = "", first
        else:
            family, model = first, " ".join(rest[:2] if rest[0] == "PRO" else rest[:1])
        models.setdefault(family, {})[model] = None
    return "; ".join(f"{family} {', '.join(names)}".strip() for family, names in models.items())


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
