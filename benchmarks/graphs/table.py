"""The table of docs/throughput.md, from results/documents.jsonl: `python benchmarks/graphs/table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table() -> str:
    """Of each case, steps and memory with passes as usual and recorded."""
    text = (Path(__file__).parent / "results" / "documents.jsonl").read_text(encoding="utf-8")
    by_case: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, text.splitlines()):
        model, file, quantization, *shape = row["case"]
        name = f"{model}, {quantization}, {file}, {shape[2]} x ({shape[1]} x {shape[0]})"
        by_case.setdefault(name.replace(", none", ""), {})[row["source"]] = row
    lines = ["| case | usual, s | recorded, s | usual, GiB | recorded, GiB | last loss |", f"|{'---|' * 6}"]
    for name, found in by_case.items():
        rows = found["usual"], found["recorded"]
        seconds, gib = (
            (row["step_seconds"] for row in rows),
            (row["peak_reserved_bytes"] / 2**30 for row in rows),
        )
        cells = [*(f"{value:.3f}" for value in seconds), *(f"{value:.2f}" for value in gib)]
        losses = ", ".join(f"{row['loss'][-1]:.4f}" for row in rows)
        lines.append(f"| {' | '.join([name, *cells, losses])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
