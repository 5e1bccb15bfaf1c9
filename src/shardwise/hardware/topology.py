"""How the GPUs of a machine are joined, from `nvidia-smi topo -m`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

Paths = Mapping[tuple[int, int], str]
"""What joins GPU i to GPU j, for both orders: `NV12` (12 NVLinks), `PIX`, `PXB`, `PHB`, `NODE`, `SYS`."""

SWITCHED = ("PIX", "PXB")
"""Paths over PCIe switches alone. Over a host bridge (PHB, NODE, SYS) NCCL takes host memory even where GPUs
could reach each other: its default P2P level is PXB (NCCL 2.30 src/graph/paths.cc)."""

_GPU = re.compile(r"GPU(\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST_PERMUTED = 8


def read_paths(text: str) -> Paths:
    """The matrix that `nvidia-smi topo -m` prints; empty where there is none in `text`."""
    lines = [_COLOUR.sub("", line).split("\t") for line in text.splitlines()]
    header = next((line for line in lines if any(_GPU.fullmatch(cell.strip()) for cell in line)), [])
    columns = {
        place: int(found[1]) for place, cell in enumerate(header) if (found := _GPU.fullmatch(cell.strip()))
    }
    paths = {}
    for line in lines[lines.index(header) + 1 :] if header else []:
        row = _GPU.fullmatch(line[0].strip())
        if row is None:
            continue
        for place, column in columns.items():
            if place < len(line) and column != int(row[1]):
                paths[int(row[1]), column] = line[place].strip()
    return paths


def nvlinks(paths: Paths, gpus: Sequence[int], most: int | None) -> int:
    """Links of one GPU that rings over NVLink alone can use; 0 where no such ring joins all of `gpus`.

    A switch reports all links of a GPU for each peer and a mesh those to that peer, so the sum over peers is
    cut at `most`, the links a GPU has; where that is not known, at the largest number seen.
    """
    counts = {pair: int(path[2:]) for pair, path in paths.items() if re.fullmatch(r"NV\d+", path)}
    if len(gpus) < 2 or not _ring(counts, gpus):
        return 0
    of_each = [sum(counts.get((gpu, peer), 0) for peer in gpus) for gpu in gpus]
    return min(*of_each, most or max(counts.values()))


def switched(paths: Paths, gpus: Sequence[int]) -> bool:
    """Whether PCIe switches join all of `gpus` without the host between them."""
    return all(paths.get(pair) in SWITCHED for pair in itertools.permutations(gpus, 2))


def _ring(counts: Mapping[tuple[int, int], int], gpus: Sequence[int]) -> bool:
    if all(pair in counts for pair in itertools.permutations(gpus, 2)):
        return True
    if len(gpus) > _MOST_PERMUTED:  # machines of more GPUs have switches, which join every pair
        return False
    first, *others = gpus
    return any(
        all(pair in counts for pair in itertools.pairwise((first, *order, first)))
        for order in itertools.permutations(others)
    )
