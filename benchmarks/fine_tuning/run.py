"""Memory and speed of AdamW in 8 bits, DoRA and rsLoRA, each measured with its prediction.

    python benchmarks/fine_tuning/run.py --out benchmarks/fine_tuning/results/h200.jsonl
    python benchmarks/fine_tuning/run.py --rows benchmarks/fine_tuning/smoke.toml --cpu 1 --out smoke.jsonl

Each row runs shardwise's launcher and loop on one GPU, as the rows of the accuracy ledger do, and becomes one
line of JSON: the ledger's keys, and `predicted` for one H200 with `differences`, (predicted - measured) /
measured. Rows that the file has already are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

from assets import Assets  # noqa: E402
from predict import predict  # noqa: E402
from rows import Row, load_rows  # noqa: E402
from run import describe_machine, measure_all, summary, visible_gpus  # noqa: E402

LIMITS = {"warmup": 3, "steps": 5, "steady_seconds": 4.0, "row_seconds": 30.0, "timeout": 120.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=HERE / "rows.toml")
    parser.add_argument("--out", type=Path, required=True, help="lines are appended")
    parser.add_argument("--cpu", type=int, default=0, metavar="N", help="N processes on CPUs instead of GPUs")
    for name, value in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    arguments.budget = arguments.keep = None
    arguments.profile = False
    places = [""] * arguments.cpu if arguments.cpu else visible_gpus()[:1]
    if not places:
        sys.exit("there is no GPU; --cpu N takes N processes on CPUs instead")
    lines = arguments.out.read_text(encoding="utf-8").splitlines() if arguments.out.exists() else []
    done = {row["id"] for row in map(json.loads, lines) if row["error"] is None}
    waiting = {row.id: row for row in load_rows(arguments.rows) if row.id not in done}
    machine = describe_machine()
    machine["command"] = machine["command"].replace("accuracy/run.py", "fine_tuning/run.py")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fine-tuning-") as folder, arguments.out.open("a") as out:
        os.environ.setdefault("SHARDWISE_CACHE", f"{folder}/cache")
        for found in measure_all(
            list(waiting.values()), places, Assets(Path(folder) / "assets", []), arguments
        ):
            date = datetime.now(UTC).isoformat(timespec="seconds")
            line = {**found, **compared(waiting[found["id"]], found), "date": date, **machine}
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(summary(found), line["differences"], file=sys.stderr, flush=True)


def compared(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """The prediction, and how far it is from what was measured; None where nothing was."""
    prediction = predict(row)
    memory = prediction.memory
    predicted = {
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "outside_allocator_bytes": memory.outside_allocator_bytes,
        "optimizer_bytes": memory.terms.optimizer_bytes,
        "activations_bytes": memory.terms.activations_bytes,
        "step_seconds": prediction.time.step_seconds,
        "joules_per_step": prediction.energy.joules_per_step,
    }
    known = {name: found.get(name) for name in predicted}
    differences = {
        name: round(predicted[name] / value - 1, 4)
        for name, value in known.items()
        if value is not None and value
    }
    return {"predicted": predicted, "differences": differences}


if __name__ == "__main__":
    main()
