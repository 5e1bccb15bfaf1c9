"""The configurations of the documents that this project grew from; they are not part of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.lint.check import check
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

PLACES = [Path(__file__).parents[up] / "shared" / "seeds" for up in (4, 5)]  # of a checkout, of a worktree
SEEDS = next((place for place in PLACES if place.is_dir()), PLACES[0])
ONE, TWO, THREE, FOUR = "000", "002", "003", "004"
OWN_LOOP = {"no-pad-token", "labels-include-padding", "undefined-name"}
EXPECTED = [
    (ONE, [1], {"argument-was-removed", "device-map-and-processes", "undefined-name"}, "trainer"),
    (TWO, [4, 0], OWN_LOOP, "deepspeed"),
    (TWO, [13, 4], {"nodes-without-hostfile", *OWN_LOOP}, "deepspeed"),
    (THREE, [2, 0], {"comments-in-json", "trainer-and-file-differ"}, "trainer"),
    (FOUR, [2, 1], {"no-optimizer", "small-reduce-bucket"} | OWN_LOOP, "deepspeed"),
    (FOUR, [3, 0, 2], {"module-flag-and-file", "no-optimizer", "refused-key"} | OWN_LOOP, "deepspeed"),
    (FOUR, [7], {"unknown-launcher-flag"}, None),
]
"""The document, its blocks that are checked together, what is at least found, and the reader."""


def blocks(seed: str) -> list[str]:
    [text] = [path.read_text(encoding="utf-8") for path in SEEDS.glob(f"{seed}_*.txt")]
    found = re.findall(r"^[ \t]*```(?:python|json|bash)\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"^ {3}(?=\S| )", "", block, flags=re.MULTILINE) for block in found]


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not next to this checkout")
@pytest.mark.parametrize(("seed", "numbers", "rules", "reader"), EXPECTED)
def test_what_is_wrong_in_them_is_said(
    seed: str, numbers: list[int], rules: set[str], reader: str | None
) -> None:
    documents = tuple(read(blocks(seed)[number], f"{seed}-{number}") for number in numbers)
    checked = check(Setup(documents=documents))
    found = {one.rule for one in checked.findings if one.severity != "note"}
    assert rules <= found
    assert checked.setup.reader == reader
