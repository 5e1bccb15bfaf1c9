"""Predict training runs that others published, and compare.

    python benchmarks/published/published.py [--match REGEX] [--out FILE]

Needs no GPU and no network. Each row of runs.toml becomes a job and a hardware text. It is traced and
simulated as `shardwise plan` does, with its strategy named; rows of one model and length share a tracer. Loss
and kernels are those of the authors' program, where runs.toml says so.

A difference is (predicted - published) / published.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.planner.search import fit
from shardwise.planner.simulate import simulate
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.time import roofline
from shardwise.space.candidates import predictable
from shardwise.units import GIB

HERE = Path(__file__).parent
RUNS = HERE / "runs.toml"
RESULTS = HERE / "results" / "predictions.json"

Row = dict[str, Any]


def load_runs() -> dict[str, Any]:
    """runs.toml: `models`, `table` and `left_out`."""
    return tomllib.loads(RUNS.read_text(encoding="utf-8"))


def rows_of(table: Mapping[str, Any]) -> list[Row]:
    """A table's rows with all their keys."""
    defaults = {
        "kernels": "fused",
        "quantization": "none",
        "lora": 0,
        "dropout": 0.0,
        "ran": "yes",
        "states": "fp32",
        "attention": "second",
        "adapters": "bf16",
    }
    return [
        {**defaults, **table["common"], **dict(zip(table["columns"], row, strict=True)), "table": table["id"]}
        for row in table["rows"]
    ]


def job_of(row: Row, models: Mapping[str, Any], folder: Path) -> Job:
    """The row as a job; a model that is in no catalog gets a config.json in `folder`."""
    model = dict(models.get(row["model"], {"source": row["model"]}))
    if "model_type" in model:
        source = folder / row["model"]
        source.mkdir(exist_ok=True)
        config = {"model_type": model["model_type"], **model["config"]}
        (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = {"source": str(source)}
    if row["lora"]:
        model["lora"] = {"rank": row["lora"], "targets": row["targets"], "dropout": row["dropout"]}
    model["weights"] = "random"
    degree = re.match(r"autotp(\d+)-zero(\d)", row["strategy"])
    strategy: Any = row["strategy"]
    if degree:
        strategy = {"engine": "deepspeed", "stage": int(degree[2]), "tensor_parallel": int(degree[1])}
    if row["strategy"] == "hsdp8":
        strategy = {"engine": "fsdp2", "shard_group": 8}
    ranks = parse_hardware(row["gpus"]).world_size // (int(degree[1]) if degree else 1)
    return Job.model_validate(
        {
            "name": row["id"].replace("@", "-"),
            "model": {**model, "quantization": row["quantization"]},
            "data": {"train": "text.txt", "sequence_length": row["sequence"], "packing": False},
            "train": {
                "global_batch": row["micro"] * row["accumulation"] * ranks,
                "micro_batch": row["micro"],
                "checkpointing": row["checkpointing"],
            },
            "strategy": strategy,
        }
    )


def _objective(loss: str) -> Any:
    """The loss of entire logits: what most programs compute.

    `shifted`: ForCausalLMLoss of transformers 4.45 to 4.48, which keeps the logits, their fp32 copy and that
    copy shifted by a token; `early`: before, the logits were replaced by their fp32 copy.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from shardwise.objective.causal_lm import CausalLM

    class InPlace(torch.autograd.Function):
        """Cross entropy whose gradient overwrites the logits: flash-attn's and Unsloth's kernels."""

        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            ctx.save_for_backward(logits)
            return logits.sum(dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (logits,) = ctx.saved_tensors
            return logits.mul_(gradient)

    class EntireLogits(CausalLM):
        def __init__(self, model: Any) -> None:
            super().__init__(model, packed=False)
            model.get_output_embeddings().__dict__.pop("forward", None)  # no fused loss

        def forward(self, batch: Any) -> torch.Tensor:
            labels = batch.labels
            logits = self.model(**self.inputs(batch)).logits.view(*labels.shape, -1)
            if loss == "in-place":
                return InPlace.apply(logits)  # type: ignore[no-any-return]
            wide = used = logits.float()
            if "early" in loss:
                del logits
            if "shifted" in loss:
                used, labels = wide[:, :-1].contiguous(), labels[:, 1:].contiguous()
            if "in-place" in loss:
                return InPlace.apply(used)  # type: ignore[no-any-return]
            found: torch.Tensor = cross_entropy(used.flatten(0, 1), labels.flatten(), reduction="sum")
            return found

    return EntireLogits


def _half(value: Any) -> Any:
    import torch

    return value.to(torch.bfloat16)


@cache
def _linear4bit(linear: Any, returns_half: bool) -> Any:
    """As bitsandbytes' Linear4bit: a product in half precision, and its result in the input's format."""

    class Linear4bit(linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            y = super().forward(_half(x))
            return y if returns_half else y.to(x.dtype)

    return Linear4bit


def _as_peft(model: Any, adapters: str) -> None:
    """Adapters as PEFT and transformers' Trainer have them: in fp32.

    `fp32`: a layer's input is cast for them, and they multiply in fp32. `autocast`: it is cast, too, and the
    products are in half precision. `prepared`: prepare_model_for_kbit_training makes norms, embeddings and
    the head fp32 as well, and so the hidden state; PEFT's 4-bit layers leave casts to autocast.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from torch.nn.functional import linear

    from shardwise.kernels.quantized_linear import QuantizedLinear

    class Autocast(torch.nn.Linear):
        """A product in half precision, of a weight and inputs in fp32."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear(_half(x), _half(self.weight))

    for name, module in model.named_modules():
        if ".lora_" in name or (adapters == "prepared" and not isinstance(module, QuantizedLinear)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    for name, module in model.named_modules() if adapters != "fp32" else ():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = adapters == "autocast"
        elif name.endswith("rotary_emb"):
            module.register_forward_hook(lambda _, __, found: tuple(map(_half, found)))
        elif isinstance(module, QuantizedLinear):
            # The kernel of attention casts: here the products before it do
            module.__class__ = _linear4bit(type(module), bool(re.search(r"\.[qkv]_proj", name)))
        elif type(module) is torch.nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = Autocast


@contextmanager
def as_published(row: Row) -> Iterator[None]:
    """Within, models are built, traced and timed with the authors' loss and kernels, and torch's AdamW.

    Flash Attention 1 reaches 30 to 50 % of an A100's peak forward and 25 to 35 % backward (Dao 2023, arXiv
    2307.08691, section 1).
    """
    sys.path.insert(0, str(HERE.parent / "accuracy"))
    from earlier import kernels_of

    from shardwise.trace import functions
    from shardwise.trace import job as tracing
    from shardwise.trace import trace as tracer

    with ExitStack() as stack:
        stack.enter_context(kernels_of(frozenset({"adamw"})))
        if row["loss"] != "fused":
            stack.enter_context(patch.object(tracing, "objective_of", lambda _: _objective(row["loss"])))
        if row["adapters"] != "bf16":
            build = tracer.build_model

            def built(*arguments: Any, **named: Any) -> Any:
                found = build(*arguments, **named)
                _as_peft(found.model, row["adapters"])
                return found

            stack.enter_context(patch.object(tracer, "build_model", built))
        if row["kernels"] == "plain":
            stack.enter_context(patch.object(functions, "liger_kernels", lambda _: frozenset()))
        if row["kernels"] == "plain" or row["adapters"] != "bf16":
            stack.enter_context(patch.object(functions, "fuse_adapters", lambda *_: []))
        if row["attention"] == "first":
            shares = {"forward": {"128": 0.40}, "backward": {"128": 0.30}}
            for kernel in ("flash", "ampere", "cudnn"):
                stack.enter_context(patch.dict(roofline.table()["attention"][kernel], shares))
        yield


def predict_group(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows that share a tracer, compared. The process is one of few, and ends with the last group."""
    from shardwise.trace.job import JobTracer

    models = load_runs()["models"]
    with tempfile.TemporaryDirectory() as name:
        jobs = [job_of(row, models, Path(name)) for row in rows]
        capability = parse_hardware(rows[0]["gpus"]).gpu.capability
        with as_published(rows[0]):
            tracer = JobTracer(jobs[0], vocab_size=None, capability=capability)
            return [_compared(row, job, tracer) for row, job in zip(rows, jobs, strict=True)]


def _compared(row: Row, job: Job, tracer: Any) -> dict[str, Any]:
    hardware = parse_hardware(row["gpus"])
    strategies, refused = predictable(job, hardware, tracer.architecture)
    if not strategies:
        return {"id": row["id"], "table": row["table"], "refused": refused[0].reason}
    (strategy,) = strategies
    variant = strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel
    return compare(row, simulate(tracer.trace(*variant), strategy, hardware), hardware)


def compare(row: Row, prediction: Prediction, hardware: Hardware) -> dict[str, Any]:
    """Published and predicted values of a row; None where nothing was published."""
    memory, time_ = prediction.memory, prediction.time
    pairs = {
        "tokens_per_second": (row.get("tokens_per_second"), time_.tokens_per_second_per_gpu),
        "allocated_gib": (row.get("allocated_gib"), memory.peak_allocated_bytes / GIB),
        "reserved_gib": (row.get("reserved_gib"), memory.peak_reserved_bytes / GIB),
    }
    values = {key: (published or None, predicted) for key, (published, predicted) in pairs.items()}
    return {
        "id": row["id"],
        "table": row["table"],
        "setup": {key: row[key] for key in ("model", "gpus", "strategy", "sequence", "micro")}
        | {key: row[key] for key in ("accumulation", "checkpointing", "lora", "quantization")},
        "ran": row["ran"],
        "fits": fit(prediction, hardware) if row["states"] == "fp32" else "not compared",
        "published": {key: published for key, (published, _) in values.items()},
        "predicted": {
            **{key: round(predicted, 2) for key, (_, predicted) in values.items()},
            "world_size": hardware.world_size,
        },
        "differences": {
            key: None if published is None else round(predicted / published - 1, 4)
            for key, (published, predicted) in values.items()
        },
        "shares": {
            "exposed_communication": round(time_.exposed_communication_fraction, 3),
            "host": round(time_.launch_seconds / time_.step_seconds, 3),
            "throttled": round(1 - time_.full_clock_seconds / time_.step_seconds, 3),
        },
    }


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by what a tracer needs, the largest groups first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        capability = parse_hardware(row["gpus"]).gpu.capability
        keys = ("model", "sequence", "lora", "quantization", "loss", "kernels", "attention", "dropout")
        named = (*(row[key] for key in keys), row["adapters"], str(row.get("targets")), capability)
        found.setdefault(named, []).append(row)
    return sorted(found.values(), key=len, reverse=True)


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", metavar="REGEX", help="rows whose id matches")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where the comparisons are written, as JSON"
    )
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows = [row for table in load_runs()["table"] for row in rows_of(table)]
    rows = [row for row in rows if re.search(arguments.match, row["id"])]
    order = {row["id"]: place for place, row in enumerate(rows)}
    workers = min(2, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, get_context("spawn")) as executor:
        found = [one for part in executor.map(predict_group, groups(rows)) for one in part]
    found.sort(key=lambda one: order[one["id"]])
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n", encoding="utf-8")
    print(f"{len(found)} rows in {time.perf_counter() - began:.0f} s, {workers} processes", file=sys.stderr)


if __name__ == "__main__":
    main()
