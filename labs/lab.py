"""What the labs share: this machine, a small job, committed measurements, and how plots look."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import shardwise
from shardwise import Job
from shardwise.hardware.detect import detect_hardware, gpu_count
from shardwise.simulate.prediction import Prediction

ROOT = Path(__file__).parents[1]
TEXT = resources.files("shardwise.job") / "samples" / "training.txt"
MB, GIB = 1e6, 2**30
BLUE, ORANGE, GREEN, RED, GREY = "#3b6fb6", "#e08a2e", "#4b9b6e", "#c1483f", "#9aa0a6"

warnings.filterwarnings("ignore", message="IProgress not found")
for name in ("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR"):
    os.environ.pop(name, None)  # a kernel sets them: runs would draw a progress bar that nobody sees

plt.rcParams.update(
    {
        "figure.figsize": (8.0, 3.6),
        "figure.dpi": 96,
        "figure.constrained_layout.use": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.35,
        "legend.frameon": False,
    }
)


@dataclass(frozen=True)
class Machine:
    """What the labs run on."""

    gpus: int
    name: str
    processes: int
    """Of a run on several processes: all GPUs, at most 4; without a GPU 2 processes on the CPU."""

    @property
    def text(self) -> str:
        """For `plan`: this machine, or the card that the labs plan for without a GPU."""
        return f"{max(self.gpus, 1)}x{self.name}" if self.gpus else "4xRTX4090"

    @property
    def precision(self) -> str:
        return "bf16" if self.gpus else "fp32"


def machine() -> Machine:
    """Ask this machine what it has."""
    gpus = gpu_count()
    found = detect_hardware() if gpus else None
    name = found.gpu.name if found else f"CPU with {len(os.sched_getaffinity(0))} cores"
    return Machine(gpus=gpus, name=name, processes=min(gpus, 4) if gpus > 1 else 2 - bool(gpus))


def folder() -> Path:
    """A new, empty folder for the runs of a notebook; it is deleted when the notebook's kernel ends."""
    made = Path(tempfile.mkdtemp(prefix="shardwise-lab-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


LLAMA: Mapping[str, Any] = {
    "source": "HuggingFaceTB/SmolLM2-135M",  # only the shape is used: nothing is downloaded
    "config": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}


def job(name: str, output: Path, *, model: Mapping[str, Any] = LLAMA, **sections: Any) -> Job:
    """A small job on the packaged text, from random weights; `sections` change its keys."""
    gpu = gpu_count() > 0
    values: dict[str, Any] = {
        "name": name,
        "output": str(output),
        "model": {**model, "weights": "random", "tokenizer": "train", "tokenizer_vocab": 400},
        "data": {"train": str(TEXT), "format": "text", "sequence_length": 128, "eval_fraction": 0.1},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "train": {
            "steps": 20,
            "global_batch": 8,
            "micro_batch": 2,
            "precision": "bf16" if gpu else "fp32",
            "eval_every": 0,
            "save_every": 0,
            "worst_case_first": False,
        },
        "strategy": "single",
        "tracking": [],
    }
    for key, value in sections.items():
        values[key] = {**values[key], **value} if isinstance(value, Mapping) and key in values else value
    return Job.model_validate(values)


def events(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The events of a run that other processes have started."""
    return shardwise.Run(folder=run, exit_code=0).events(kind)


def on_nodes(job: Job, nodes: int) -> list[int]:
    """Train on several nodes that are all this machine, each with one process; their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = partial(_node, job, nodes, f"127.0.0.1:{port}")
    with ProcessPoolExecutor(nodes, get_context("spawn")) as pool:
        return list(pool.map(start, range(nodes)))


def _node(job: Job, nodes: int, rendezvous: str, rank: int) -> int:
    own = str(rank) if gpu_count() >= nodes else ""  # two nodes cannot share a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = own
    found = shardwise.train(job, processes=1, nodes=nodes, node_rank=rank, rendezvous=rendezvous)
    return found.exit_code


def predict(
    model: str,
    gpus: str,
    strategy: str | Mapping[str, Any],
    *,
    rows: int,
    micro_batch: int,
    checkpointing: str = "none",
    length: int = 2048,
    config: Mapping[str, Any] | None = None,
) -> Prediction:
    """What `shardwise.plan` predicts for a job in which nothing is left open, whether it fits or not.

    `rows` of `length` tokens in a step, `micro_batch` of them at a time on each GPU. `config` changes the
    model's shape.
    """
    changes = {
        "strategy": strategy if isinstance(strategy, str) else json.dumps(strategy),
        "train.global_batch": rows,
        "train.micro_batch": micro_batch,
        "train.checkpointing": checkpointing,
        "data.sequence_length": length,
    }
    if config:
        changes |= {"model.weights": "random", "model.config": json.dumps(config)}
    texts = [f"{key}={value}" for key, value in changes.items()]
    return shardwise.plan(model=model, gpus=gpus, changes=texts).options[0].prediction


def quiet(line: str) -> None:
    """For `say`: a notebook shows results, not progress."""


def committed(path: str) -> list[dict[str, Any]]:
    """The lines of a result file of this repository; an empty list where it is not there."""
    file = ROOT / "benchmarks" / path
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def published() -> list[dict[str, Any]]:
    """Runs that others published, each with its prediction."""
    text = (ROOT / "benchmarks" / "published" / "results" / "predictions.json").read_text(encoding="utf-8")
    return list(json.loads(text))


def ledger(name: str) -> dict[str, Any]:
    """The latest measurement of a row of the accuracy ledger, all of them on H200."""
    rows = [row for row in committed("accuracy/results/measured.jsonl") if row["id"] == name]
    return rows[-1]


def predicted(name: str) -> Prediction:
    """What is predicted for a row of the accuracy ledger, whose rows are each one document without padding.

    `predict` plans for any data, as `shardwise plan` does: where a micro-batch has several rows, one of them
    holds several documents, and the outputs of two attention kernels are copied together.
    """
    sys.path.append(str(ROOT / "benchmarks" / "accuracy"))
    import predict
    from rows import load_rows

    (row,) = [row for row in load_rows(predict.HERE / "rows.toml") if row.id == name]
    return predict.predict(row, earlier=predict.earlier_kernels(ledger(name)))


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under their keys."""
    keys = list(rows[0])
    cells = [[_cell(row[key]) for key in keys] for row in rows]
    widths = [max(len(line[place]) for line in [keys, *cells]) for place in range(len(keys))]
    for line in [keys, ["-" * width for width in widths], *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def stacked(axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Bars of parts on top of each other, with their sums."""
    colours = [BLUE, ORANGE, GREEN, RED, GREY, "#7d5ba6", "#c7a83c"]
    bottom = [0.0] * len(names)
    for (label, values), colour in zip(parts.items(), colours, strict=False):
        axes.bar(names, values, bottom=bottom, label=label, color=colour, width=0.6)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.bar_label(axes.containers[-1], labels=[f"{total:.3g}" for total in bottom], padding=2)
    axes.margins(y=0.15)
