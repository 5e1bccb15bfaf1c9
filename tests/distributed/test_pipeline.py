"""Stages of a pipeline train what one float64 process trains, on packed rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_set
from harness import Run, run_all
from pipeline_worker import Case
from test_whole_runs import evaluations, job, losses, weights

pytestmark = pytest.mark.slow

TWO = (
    Case(),
    Case(schedule="gpipe"),
    Case(schedule="interleaved", blocks=5),
    Case(tied=True),
    Case(kind="gpt2", schedule="gpipe"),
    Case(kind="qwen2", tied=True, schedule="interleaved", blocks=4),
    Case(checkpointing=True, tied=True),
    Case(lora=("q_proj", "v_proj")),
    Case(lora=("o_proj", "down_proj"), tied=True, checkpointing=True),
    Case(precision="bf16", tied=True),
)
FOUR = (
    Case(),
    Case(tied=True, schedule="interleaved", blocks=4),
    Case(lora=("q_proj", "down_proj")),
    Case(pipeline=4, tied=True, blocks=6),
    Case(kind="gpt2", precision="bf16"),
)


SPLIT = (
    Case(tensor_parallel=2),
    Case(kind="qwen3", tied=True, tensor_parallel=2, schedule="interleaved", blocks=4),
    Case(lora=("q_proj", "o_proj", "down_proj"), tensor_parallel=2, checkpointing=True),
    Case(precision="bf16", tied=True, tensor_parallel=2),
)
"""Pipeline 2 x tensor 2 on four processes, and x data 2 on eight."""


def results_of(scenario: str, cases: tuple[Case, ...], folder: Path, *, processes: int) -> dict[str, Any]:
    arguments = (str(folder), scenario, json.dumps([asdict(case) for case in cases]))
    run_set("pipeline_worker:main", *arguments, processes=processes, folder=folder, timeout=300)
    results: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert len(results) == len(cases)
    return results


@pytest.mark.parametrize(("processes", "cases"), [(2, TWO), (4, FOUR), (4, SPLIT), (8, SPLIT[:2])])
def test_a_pipeline_trains_what_one_process_trains(
    tmp_path: Path, processes: int, cases: tuple[Case, ...]
) -> None:
    for name, found in results_of("parity", cases, tmp_path, processes=processes).items():
        exact = "bf16" not in name
        assert found["loss_error"] < (1e-6 if exact else 1e-2), name
        # Six blocks, and GPT-2 in bf16: after four steps a single process has 1.33e-5 and 0.059.
        assert found["norm_error"] < (2e-5 if exact else 5e-2), name
        assert found["weight_error"] < (1e-3 if exact else 7e-2), name
        assert found["evaluation_error"] < (1e-5 if exact else 1e-2), name
        assert found["skipped"] == [0.0] * 3, name
        assert found["resumed"], name
        assert found["tied"], name


def test_a_nan_on_one_rank_stops_all(tmp_path: Path) -> None:
    cases = (Case(tied=True), Case(schedule="interleaved", blocks=4, precision="bf16"))
    for name, found in results_of("after_a_nan", cases, tmp_path, processes=4).items():
        assert found == {"agreed": [[1.0, 1.0, False]], "untouched": True}, name


def test_an_entire_run_is_that_of_one_process_and_resumes(tmp_path: Path) -> None:
    """Unpacked rows of different lengths, tied embeddings: losses, evaluations, weights, and after a stop."""
    train = {"steps": 6, "eval_every": 3, "checkpointing": "full", "micro_batch": 1}
    (alone,) = run_all([Run(job(tmp_path, "alone", "single", **train))], processes=1, folder=tmp_path / "one")
    strategy = {"engine": "pipeline", "pipeline": 2}
    part = job(tmp_path, "stopped", strategy, **train)
    runs = [Run(job(tmp_path, "entire", strategy, **train)), Run(part, max_steps=3), Run(part, resume=True)]
    entire, _, resumed = run_all(runs, processes=2, folder=tmp_path / "two")
    assert losses(entire) == pytest.approx(losses(alone), rel=1e-5)
    assert evaluations(entire) == pytest.approx(evaluations(alone), rel=1e-5)
    assert losses(resumed) == losses(entire)
    ours, theirs, single = (weights(run, 6) for run in (resumed, entire, alone))
    assert ours.keys() == theirs.keys() == single.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert all(torch.allclose(ours[name], single[name], atol=1e-3) for name in single)
