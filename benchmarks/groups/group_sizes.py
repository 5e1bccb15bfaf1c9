"""When sharing weights within nodes is faster: predictions for Llama-3.1-8B on 2 and 16 nodes.

    python benchmarks/groups/group_sizes.py [--out FILE]

Needs no GPU: nothing here is measured. Each strategy gets the micro-batch with which it is fastest and leaves
a plan's margin free; every block is recomputed. Writes the result file and the table of docs/sharding.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job, Model, StrategySpec
from shardwise.planner.search import MARGIN, predict, rank
from shardwise.planner.simulate import simulate
from shardwise.space.candidates import candidates
from shardwise.trace.trace import Tracer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "llama-3.1-8b.json"
PAGE = HERE.parents[1] / "docs" / "sharding.md"
MODEL, LENGTH = "llama-3.1-8b", 4096
NODES = ("2x8xH100", "16x8xH100")
NETWORKS = {"eth25": "25 GbE", "ib400": "400 Gb/s"}
"""One adapter of a node, and one of each GPU."""
ROWS_A_GPU = (1, 8)
SUMS = {"reduce_dtype": "bf16"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"engine": "deepspeed", "stage": 1},
    "ZeRO-3": {"engine": "deepspeed", "stage": 3},
    "hpZ": {"engine": "deepspeed", "stage": 3, "shard_group": 8},
    "FSDP2": {"engine": "fsdp2"},
    "HSDP": {"engine": "fsdp2", "shard_group": 8},
    "FSDP2, bf16 sums": {"engine": "fsdp2", **SUMS},
    "HSDP, bf16 sums": {"engine": "fsdp2", "shard_group": 8, **SUMS},
}


@cache
def trace(rows: int, checkpoint_every: int, _tensor_parallel: int) -> Any:
    model = Model.model_validate({"source": MODEL, "weights": "random"})
    tracer = Tracer(model, precision="bf16", sequence_length=LENGTH)
    return tracer.trace(rows=rows, checkpoint_every=checkpoint_every)


def best(parts: dict[str, Any], gpus: str, rows_a_gpu: int) -> dict[str, Any] | None:
    """The strategy's fastest variant that fits; None if none does."""
    hardware = parse_hardware(gpus)
    train = {"global_batch": rows_a_gpu * hardware.world_size, "checkpointing": "full"}
    job = Job.model_validate(
        {
            "name": "predicted",
            "model": {"source": MODEL, "weights": "random"},
            "data": {"train": "text.txt"},
            "train": train,
            "strategy": StrategySpec(**parts).model_dump(),
        }
    )
    variants, refused = candidates(job, world_size=hardware.world_size, gpus_per_node=hardware.gpus_per_node)
    assert not refused, refused
    options, _ = predict(variants, hardware=hardware, trace_for=trace, simulate=simulate)
    first = rank(options, "throughput", hardware)[0]
    if first.fit != "fits":
        return None
    time, strategy = first.prediction.time, first.strategy
    return {
        "micro_batch": strategy.micro_batch,
        "accumulation": strategy.accumulation,
        "tokens_per_second_per_gpu": round(time.tokens_per_second_per_gpu, 1),
        "exposed_communication_fraction": round(time.exposed_communication_fraction, 4),
        "needed_bytes": first.prediction.memory.needed_bytes,
    }


def results() -> Iterator[dict[str, Any]]:
    for nodes in NODES:
        for network in NETWORKS:
            for rows in ROWS_A_GPU:
                found = {name: best(parts, f"{nodes}+{network}", rows) for name, parts in STRATEGIES.items()}
                yield {"gpus": nodes, "network": network, "rows_a_gpu": rows, "strategies": found}


def table(rows: list[dict[str, Any]]) -> str:
    """tokens/s a GPU, and the GiB that it needs; the fastest in bold."""
    lines = [f"| GPUs | network | rows a GPU | {' | '.join(STRATEGIES)} |"]
    lines.append("|---|---|---|" + "---|" * len(STRATEGIES))
    for row in rows:
        found = row["strategies"]
        most = max(one["tokens_per_second_per_gpu"] for one in found.values() if one)
        cells = " | ".join(_cell(one, most) for one in found.values())
        lines.append(f"| {row['gpus']} | {NETWORKS[row['network']]} | {row['rows_a_gpu']} | {cells} |")
    return "\n".join(lines)


def _cell(one: dict[str, Any] | None, most: float) -> str:
    if one is None:
        return "–"
    speed = f"{one['tokens_per_second_per_gpu']:,.0f}"
    speed = f"**{speed}**" if one["tokens_per_second_per_gpu"] == most else speed
    return f"{speed} ({one['needed_bytes'] / 1024**3:.0f})"


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with a new table between `<!-- predicted -->` and `<!-- end -->`."""
    text = table(rows)
    pattern = r"(<!-- predicted -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict HSDP, hpZ, FSDP2 and ZeRO on several nodes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    rows = list(results())
    kept = {
        "schema": 1,
        "what": "predicted by shardwise's simulator; nothing was measured",
        "model": MODEL,
        "sequence_length": LENGTH,
        "margin_fraction": MARGIN,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "rows": rows,
    }
    out.write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")
    if out == RESULTS:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
