"""When tensor parallelism is faster than ZeRO-3: predictions for Llama-2-7B on four GPUs.

    python benchmarks/tensor_parallel/autotp.py [--out FILE]

Needs no GPU: nothing here is measured. Each strategy gets the micro-batch and the checkpointing (no block or
all) with which it is fastest and leaves a plan's margin free. Writes the result file and the tables of
docs/tensor-parallel.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job, Model, StrategySpec
from shardwise.planner.plan import Option
from shardwise.planner.search import MARGIN, predict, rank
from shardwise.planner.simulate import simulate
from shardwise.space.candidates import candidates
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer
from shardwise.units import GIB

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "llama-2-7b.json"
PAGE = HERE.parents[1] / "docs" / "tensor-parallel.md"
MODEL = "llama-2-7b"
LENGTHS = (2048, 8192)
ROWS = (4, 32)
"""Rows per step: one for each GPU, and eight."""
GPUS = {"H200, NVLink": "4xH200", "H200, PCIe 4.0": "4xH200@pcie4"}
CAPS = (None, 48 * GIB)
"""Memory that a process may use: all of the GPU, or 48 GiB."""
STRATEGIES = {
    "AutoTP-4 + ZeRO-1": StrategySpec(engine="deepspeed", stage=1, tensor_parallel=4),
    "AutoTP-2 + ZeRO-1": StrategySpec(engine="deepspeed", stage=1, tensor_parallel=2),
    "ZeRO-1": StrategySpec(engine="deepspeed", stage=1),
    "ZeRO-2": StrategySpec(engine="deepspeed", stage=2),
    "ZeRO-3": StrategySpec(engine="deepspeed", stage=3),
    "FSDP2": StrategySpec(engine="fsdp2"),
}


@cache
def tracer(length: int) -> Tracer:
    model = Model.model_validate({"source": MODEL, "weights": "random"})
    return Tracer(model, precision="bf16", sequence_length=length)


@cache
def trace(length: int, rows: int, checkpoint_every: int, tensor_parallel: int) -> Any:
    return tracer(length).trace(rows=rows, checkpoint_every=checkpoint_every, tensor_parallel=tensor_parallel)


def best(spec: StrategySpec, gpus: str, *, length: int, rows: int, cap: int | None) -> Option | None:
    """The strategy's fastest variant that fits; None if none does."""
    hardware = parse_hardware(gpus)
    variants: list[Strategy] = []
    for checkpointing in ("none", "full"):
        found, refused = candidates(
            Job.model_validate(
                {
                    "name": "predicted",
                    "model": {"source": MODEL, "weights": "random"},
                    "data": {"train": "text.txt"},
                    "train": {"global_batch": rows, "checkpointing": checkpointing},
                    "strategy": spec.model_dump(),
                }
            ),
            world_size=hardware.world_size,
            gpus_per_node=hardware.gpus_per_node,
        )
        assert not refused, refused
        variants += found
    options, _ = predict(
        variants,
        hardware=hardware,
        trace_for=partial(trace, length),
        simulate=partial(simulate, memory_cap_bytes=cap),
    )
    first = rank(options, "throughput", hardware)[0]
    return first if first.fit == "fits" else None


def results() -> Iterator[dict[str, Any]]:
    for length in LENGTHS:
        for name, gpus in GPUS.items():
            for rows in ROWS:
                for cap in CAPS:
                    yield {
                        "gpus": gpus,
                        "hardware": name,
                        "sequence_length": length,
                        "rows_per_step": rows,
                        "memory_cap_bytes": cap,
                        "strategies": {
                            title: _summary(best(spec, gpus, length=length, rows=rows, cap=cap))
                            for title, spec in STRATEGIES.items()
                        },
                    }


def _summary(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    time, strategy = option.prediction.time, option.strategy
    return {
        "micro_batch": strategy.micro_batch,
        "accumulation": strategy.accumulation,
        "checkpoint_every": strategy.checkpoint_every,
        "tokens_per_second_per_gpu": round(time.tokens_per_second_per_gpu, 1),
        "step_seconds": round(time.step_seconds, 4),
        "exposed_communication_fraction": round(time.exposed_communication_fraction, 4),
        "needed_bytes": option.prediction.memory.needed_bytes,
    }


def table(rows: list[dict[str, Any]], *, cap: int | None) -> str:
    """tokens/s per GPU, and the share of the step that waits for communication; the fastest in bold."""
    lines = [
        f"| row × rows a step | links | {' | '.join(STRATEGIES)} |",
        "|---|---|" + "---|" * len(STRATEGIES),
    ]
    for row in rows:
        if row["memory_cap_bytes"] != cap:
            continue
        found = row["strategies"]
        most = max(one["tokens_per_second_per_gpu"] for one in found.values() if one)
        cells = [_cell(one, most) for one in found.values()]
        links = row["hardware"].partition(", ")[2]
        lines.append(f"| {row['sequence_length']} × {row['rows_per_step']} | {links} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: dict[str, Any] | None, most: float) -> str:
    if one is None:
        return "–"
    speed = f"{one['tokens_per_second_per_gpu']:,.0f}"
    speed = f"**{speed}**" if one["tokens_per_second_per_gpu"] == most else speed
    return f"{speed} ({one['exposed_communication_fraction']:.0%})"


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with new tables between `<!-- predicted, NAME -->` and `<!-- end -->`."""
    for name, cap in ((r"\w+ GPUs", None), ("48 GiB", CAPS[1])):
        pattern = rf"(<!-- predicted, {name} -->\n).*?(<!-- end -->)"
        text = table(rows, cap=cap)
        page = re.sub(pattern, lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict tensor parallelism, ZeRO and FSDP2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    rows = list(results())
    kept = {
        "schema": 1,
        "what": "predicted by shardwise's simulator; nothing was measured",
        "model": MODEL,
        "margin_fraction": MARGIN,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "rows": rows,
    }
    out.write_text(f"{json.dumps(kept, indent=1)}\n", encoding="utf-8")
    if out == RESULTS:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
