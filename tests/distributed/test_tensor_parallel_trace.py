"""The sums over a tensor-parallel group that a trace has, beside those of a real step of AutoTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Run, run_all, steps_of, sums_of
from test_whole_runs import job

from shardwise.job.schema import Model
from shardwise.simulate.step_trace import OP
from shardwise.trace.trace import Tracer

pytestmark = pytest.mark.slow

VOCABULARY = 512
STRATEGY = {"engine": "deepspeed", "stage": 1, "tensor_parallel": 2}
NEOX = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "llama-bf16-recomputed": ({}, {"precision": "bf16", "checkpointing": "full"}),
    "llama-half-recomputed": ({}, {"checkpointing": 2}),
    "qwen3": ({"source": "Qwen/Qwen3-0.6B", "head_dim": 16}, {}),
    "gemma3": (
        {"source": "google/gemma-3-1b-pt", "head_dim": 16},
        {"precision": "bf16", "checkpointing": "full"},
    ),
    "gpt-neox": ({"source": "EleutherAI/pythia-70m", **NEOX}, {}),
}


def named(folder: Path, name: str) -> dict[str, Any]:
    """A job of two micro-batches of two packed rows, a single step."""
    changes, train = CASES[name]
    asked = job(folder, name, STRATEGY, steps=1, eval_every=0, **train)
    model = asked["model"]
    model["source"] = changes.get("source", model["source"])
    config = NEOX if name == "gpt-neox" else {**model["config"]}
    model["config"] = {**config, **{key: value for key, value in changes.items() if key != "source"}}
    asked["data"] |= {"eval_fraction": 0.0, "packing": True}
    return asked


def traced(asked: dict[str, Any]) -> list[int]:
    """Bytes of the sums of one micro-batch, in the order of the trace."""
    model = Model.model_validate(asked["model"])
    tracer = Tracer(
        model,
        precision=asked["train"]["precision"],
        sequence_length=asked["data"]["sequence_length"],
        vocab_size=VOCABULARY,
    )
    every = {"none": 0, "auto": 0, "full": 1}.get(
        asked["train"]["checkpointing"], asked["train"]["checkpointing"]
    )
    trace = tracer.trace(rows=2, checkpoint_every=every, tensor_parallel=2)
    ops = (trace.ops[event[1]] for event in trace.events if event[0] == OP)
    return [op.written_bytes for op in ops if op.kind == "collective"]


def test_sums_are_those_of_a_real_step(tmp_path: Path) -> None:
    jobs = {name: named(tmp_path, name) for name in CASES}
    folders = run_all([Run(one) for one in jobs.values()], processes=2, folder=tmp_path, listen=True)
    for (name, asked), folder in zip(jobs.items(), folders, strict=True):
        expected = traced(asked)
        assert len(steps_of(folder)) == 1
        assert len(expected) > 7, name
        for rank in (0, 1):
            assert sums_of(folder, rank) == 2 * expected, name
