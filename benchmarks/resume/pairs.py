"""Every ordered pair of strategies and numbers of processes: saved under one, resumed under the other.

    python benchmarks/resume/pairs.py [--kind full] [--steps 20] [--out FILE]

On CPUs, in fp32, with the real engines and a tiny Llama whose sizes do not divide by the number of processes.
After three steps each layout is saved, and goes on: the uninterrupted run. Each of the others loads what was
saved. Then all fp32 weights, moments and step counts must have the same bits, and the losses of the steps
that follow must be those of the uninterrupted run. The full table takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("distributed", "shared")]

from forks import run_set  # noqa: E402

EVERYWHERE = ("fsdp2", "zero1", "zero2", "zero3", "zero3-offload")
LAYOUTS: dict[str, dict[int, tuple[str, ...]]] = {
    "full": {
        1: ("single", *EVERYWHERE),
        2: ("ddp", "zero0", *EVERYWHERE, "autotp2-zero1", "pp2-zero1"),
        4: (*EVERYWHERE, "fsdp2-hsdp2", "zero3-hpz2", "autotp2-zero2", "pp2-tp2-zero1"),
    },
    "tied": {1: ("single",), 2: ("zero2-offload", "pp2-zero1"), 4: ("fsdp2", "zero3")},
    "lora": {1: ("single", "zero2"), 2: ("zero3", "fsdp2-offload", "pp2-zero1"), 4: ("zero1",)},
    "nf4": {1: ("single", "fsdp2"), 2: ("zero2", "zero3", "fsdp2")},
    "mamba": {1: ("single", "zero2"), 2: ("zero3", "fsdp2", "zero1")},
    "fp16": {1: ("single", "zero2"), 2: ("zero0", "zero3", "fsdp2"), 4: ("zero1",)},
}
"""Of each kind of model, the layouts of each number of processes."""
APART = ("autotp", "zero3-hpz2", "pp2-tp2")
"""Their groups are made once in a process's life: each has processes of its own."""


def table(
    kind: str, layouts: dict[int, tuple[str, ...]], *, steps: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """A row a pair: the tensors that differ after loading, and the largest difference of a loss."""
    straight: dict[str, list[float]] = {}
    for processes, names in sets_of(layouts):
        straight |= _run(folder, processes, phase="save", kind=kind, names=names, count=steps)
    for processes, names in sets_of(layouts):
        given = {"phase": "load", "kind": kind, "names": names, "count": steps, "sources": [*straight]}
        for pair, found in _run(folder, processes, **given).items():
            source, _, target = pair.partition(" -> ")
            both = zip(straight[source], found["losses"], strict=True)
            worst = max(abs(loss / expected - 1) for expected, loss in both)
            yield {
                "saved": source,
                "resumed": target,
                "differs": found["differs"],
                "loss_error": worst,
                "same_bits": found["losses"] == straight[source],
            }


def sets_of(layouts: dict[int, tuple[str, ...]]) -> list[tuple[int, list[str]]]:
    """The layouts that one set of processes can run, and their number."""
    sets = []
    for processes, names in layouts.items():
        apart = [name for name in names if name.startswith(APART)]
        sets += [
            (processes, [name for name in names if name not in apart]),
            *((processes, [n]) for n in apart),
        ]
    return [(processes, names) for processes, names in sets if names]


def _run(folder: Path, processes: int, **what: Any) -> dict[str, Any]:
    run_set(
        "resume_worker:main", str(folder), json.dumps(what), processes=processes, folder=folder, timeout=3600
    )
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=LAYOUTS, default="full")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = [*table(asked.kind, LAYOUTS[asked.kind], steps=asked.steps, folder=Path(folder))]
    stay = [row for row in rows if row["saved"] == row["resumed"]]
    result = {
        "command": f"python benchmarks/resume/pairs.py --kind {asked.kind} --steps {asked.steps}",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "kind": asked.kind,
        "steps": asked.steps,
        "pairs": len(rows),
        "pairs_with_the_same_state": sum(not row["differs"] for row in rows),
        "largest_relative_difference_of_a_loss": max(row["loss_error"] for row in rows),
        "same_layout": len(stay),
        "same_layout_with_the_same_bits": sum(row["same_bits"] for row in stay),
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    (asked.out or HERE / "results" / f"{asked.kind}.json").write_text(_text(result))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))


def _text(result: dict[str, Any]) -> str:
    """JSON with a line for each pair."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({**result, "rows": []}, indent=1)
    return head.removesuffix("[]\n}") + f"[\n  {rows}\n ]\n}}\n"


if __name__ == "__main__":
    main()
