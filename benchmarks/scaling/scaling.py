"""How speed grows with the number of GPUs, for docs/scaling.md: predicted, with what the ledger measured.

    python benchmarks/scaling/scaling.py [--page-only]

Needs no GPU. Each GPU always has the same rows of one micro-batch (weak scaling without accumulation: nothing
hides more communication). Writes results/scaling.json and the tables of the page.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.engines import parts_of
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.planner.simulate import simulate
from shardwise.strategy import Strategy
from shardwise.trace.job import JobTracer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS, PAGE = HERE / "results" / "scaling.json", ROOT / "docs" / "scaling.md"

MODELS = {"tinyllama-1.1b": 4, "llama-2-7b": 2}
"""Rows of 2048 tokens that each GPU takes."""
STRATEGIES = ("zero2", "zero3", "fsdp2")
NODES = {1: "H200", 2: "2xH200", 4: "4xH200", 8: "8xH200"}
NODES |= {8 * nodes: f"{nodes}x8xH200" for nodes in (2, 4, 8, 16, 32, 64, 128)}
NETWORKS = {
    "H200, InfiniBand of 400 Gbit/s for each GPU": ("", None),
    "the same, GPUs' times differ by 5 %": ("", 0.05),
    "the same, fabric oversubscribed 4 times": ("+ib400/4", None),
    "one Ethernet adapter of 100 Gbit/s a node": ("+eth100", None),
}
SEED = {"1 GPU, ZeRO-2": 0.95, "4 GPUs, ZeRO-2": 3.6, "4 GPUs, ZeRO-3": 3.4}
"""The table of relative speeds that this page is for; its GPUs, model and batch are not said."""
MEASURED = ("tokens/s of a GPU, measured", "predicted", "difference", "all GPUs, measured", "predicted")
CARDS = ("4xH200", "4xA100-80GB", "4xL40S", "4xRTX4090", "4xRTX4080")

Row = dict[str, Any]


@cache
def _tracer(model: str, capability: tuple[int, int]) -> JobTracer:
    job = {"name": "scaling", "model": {"source": model, "weights": "random"}}
    data = {"train": "text.txt", "sequence_length": 2048}
    return JobTracer(Job.model_validate({**job, "data": data}), vocab_size=None, capability=capability)


def tokens_per_second(model: str, name: str, gpus: str, spread: float | None = None) -> float:
    """Of one GPU."""
    hardware = replace(parse_hardware(gpus), straggler_fraction=spread)
    rows = MODELS[model]
    checkpoint_every = 0 if model.startswith("tiny") else 1
    strategy = Strategy(
        **parts_of(name),
        data_parallel=hardware.world_size,
        micro_batch=rows,
        checkpoint_every=checkpoint_every,
    )
    trace = _tracer(model, hardware.gpu.capability).trace(rows, checkpoint_every, 1)
    return simulate(trace, strategy, hardware).time.tokens_per_second_per_gpu


def predicted() -> list[Row]:
    """Relative speed for each model, network, number of GPUs and strategy: 1 is one GPU without an engine."""
    found = []
    for model in MODELS:
        for network, (suffix, spread) in NETWORKS.items():
            one = tokens_per_second(model, "single", "H200")
            for gpus, text in NODES.items():
                spelled = text + (suffix if gpus > 8 else "")
                speeds = {name: tokens_per_second(model, name, spelled, spread) / one for name in STRATEGIES}
                found.append({"model": model, "network": network, "gpus": gpus, "efficiency": speeds})
    return found


def on_cards() -> list[Row]:
    """The cases of SEED on several cards, for the small model."""
    found = []
    for cards in CARDS:
        alone = cards.partition("x")[2]
        one = tokens_per_second("tinyllama-1.1b", "single", alone)
        two = {f"4 GPUs, ZeRO-{n}": tokens_per_second("tinyllama-1.1b", f"zero{n}", cards) for n in (2, 3)}
        speeds = {name: 4 * speed / one for name, speed in two.items()}
        speeds["1 GPU, ZeRO-2"] = tokens_per_second("tinyllama-1.1b", "zero2", alone) / one
        found.append({"gpus": cards, "relative_speed": speeds})
    return found


def measured() -> list[Row]:
    """The ledger's rows of both models, all weights, rows of 2048 tokens, nothing offloaded."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "accuracy"))
    ledger = importlib.import_module("predict")
    found = []
    for row in importlib.import_module("rows").load_rows(ledger.HERE / "rows.toml"):
        one = ledger.measured_rows().get(row.id)
        plain = not (row.lora or row.memory_cap_bytes or "offload" in row.id)
        if row.model not in MODELS or row.sequence_length != 2048 or not plain or one is None:
            continue
        tokens = row.global_batch * row.sequence_length / row.gpus
        said = ledger.predict(row).time.step_seconds
        speeds = {"measured": tokens / one["step_seconds"], "predicted": tokens / said}
        found.append({"id": row.id, "gpus": row.gpus, "tokens_per_second_per_gpu": speeds})
    return sorted(found, key=lambda one: (one["id"].partition("gpu.")[0], one["id"]))


def one_machine() -> list[Row]:
    """A 1.1B model, 16 rows of 2048 tokens a GPU and step, on one and on both H100: speed of a GPU."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "accuracy"))
    ledger = importlib.import_module("predict")
    found = ledger.measured_rows(ledger.HERE / "results" / "h100.jsonl")
    rows = []
    for strategy in STRATEGIES:
        speeds: Row = {"measured": [], "predicted": []}
        for gpus in (1, 2):
            name = f"tinyllama-1.1b.{gpus}gpu.{strategy}.full.s2048.b8x2.ck0"
            row = next(
                one
                for one in importlib.import_module("rows").load_rows(ledger.HERE / "h100.toml")
                if one.id == name
            )
            said = ledger.predict(row, hardware=parse_hardware(f"{gpus}xH100")).time.step_seconds
            for side, seconds in (("measured", found[name]["step_seconds"]), ("predicted", said)):
                speeds[side].append(16 * 2048 / seconds)
        rows.append({"strategy": strategy, **speeds})
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def growth(rows: Sequence[Row], model: str) -> str:
    """GPUs against strategies: speed of all GPUs in those of one, and the share of it that each keeps."""
    parts = []
    for network in NETWORKS:
        body = [
            [
                f"{row['gpus']:,}",
                *(
                    f"{row['gpus'] * share:,.{2 if row['gpus'] < 16 else 0}f} ({share:.1%})"
                    for share in row["efficiency"].values()
                ),
            ]
            for row in rows
            if row["model"] == model and row["network"] == network
        ]
        names = [name.replace("zero", "ZeRO-").replace("fsdp", "FSDP") for name in STRATEGIES]
        parts += [f"**{network[0].upper()}{network[1:]}**", "", table(["GPUs", *names], body), ""]
    return "\n".join(parts).rstrip()


def parts(results: dict[str, Any]) -> dict[str, str]:
    """What the page shows between its marks."""
    cases = list(SEED)
    claims = [["claimed", *(f"{speed}x" for speed in SEED.values())]]
    claims += [
        [row["gpus"], *(f"{row['relative_speed'][case]:.2f}x" for case in cases)] for row in results["cards"]
    ]
    rows = []
    speeds = {one["id"]: one["tokens_per_second_per_gpu"] for one in results["measured"]}
    for one in results["measured"]:
        mine = speeds[one["id"]]
        off = mine["predicted"] / mine["measured"] - 1
        model, ckpt = one["id"].partition(f".{one['gpus']}gpu.")[0], one["id"].rpartition(".")[2]
        alone = f"{model}.1gpu.single.full.s2048.b{MODELS[model]}x1.{ckpt}"
        relative = ["", ""]
        if one["gpus"] > 1 and alone in speeds:
            relative = [f"{one['gpus'] * mine[side] / speeds[alone][side]:.2f}x" for side in mine]
        rows.append(
            [f"`{one['id']}`", *(f"{speed:,.0f}" for speed in mine.values()), f"{off:+.1%}", *relative]
        )
    pairs = []
    for one in results["one_machine"]:
        shares = (f"{two / alone:.1%}" for alone, two in (one["measured"], one["predicted"]))
        name = one["strategy"].replace("zero", "ZeRO-").replace("fsdp", "FSDP")
        pairs.append([name, *(f"{speed:,.0f}" for speed in one["measured"]), *shares])
    return {
        "pairs": table(["", "one GPU, tokens/s", "each of two", "efficiency", "predicted"], pairs),
        "seed": table(["GPUs", *cases], claims),
        "measured": table(["row", *MEASURED], rows),
        "1b": growth(results["predicted"], "tinyllama-1.1b"),
        "7b": growth(results["predicted"], "llama-2-7b"),
    }


def filled(text: str, values: dict[str, str]) -> str:
    """`text` with each part between its marks."""
    for name, value in values.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = pattern.subn(lambda match, value=value: f"{match[1]}\n{value}\n\n{match[2]}", text)
        if found != 1:
            raise ValueError(f"the page has no place for {name}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-only", action="store_true", help="only write the tables again")
    if not parser.parse_args().page_only:
        results = {"predicted": predicted(), "cards": on_cards(), "measured": measured()}
        results["one_machine"] = one_machine()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), parts(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
