"""DeepSpeed's AutoTP behind the engine protocol: the mathematics of one process, and whole weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_worker import run_in_processes
from harness import Run, run_all, steps_of
from test_whole_runs import evaluations, job, losses, weights

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_norms_and_weights_are_those_of_float64(tmp_path: Path, processes: int) -> None:
    """Cut in two; with four processes two such pairs see different rows."""
    results = run_in_processes("tensor_parallel", processes=processes, folder=tmp_path, timeout=590)
    assert len(results) == (16 if processes == 2 else 10)
    for name, found in results.items():
        exact = "/fp32/" in name
        assert found["loss_error"] < (1e-5 if exact else 1e-2), name
        # AdamW turns rounding into steps: a single process in fp32 is 1e-5 off after four, too.
        assert found["first_norm_error"] < (1e-6 if exact else 5e-2), name
        assert found["norm_error"] < (5e-5 if exact else 5e-2), name
        # A key's bias has no gradient where the key is not rotated, as in most of GPT-NeoX's head: AdamW
        # turns its rounding into steps, and so it does in a single process.
        assert found["weight_error"] < ((1e-2 if "gpt_neox" in name else 1e-3) if exact else 6e-2), name
        assert found["resumed"], name


def test_what_goes_wrong_is_noticed_and_what_is_exported_is_whole(tmp_path: Path) -> None:
    results = run_in_processes("tensor_parallel_checks", processes=2, folder=tmp_path)
    expected = {"skipped": 1.0, "reported": True, "untouched": True, "later_skipped": 1.0}
    assert len(results["nan"]) == 4
    assert {name: found for name, found in results["nan"].items() if found != expected} == {}
    assert results["errors"]["rows"][0] == "MachineError"
    assert "have different rows" in results["errors"]["rows"][1]
    assert results["errors"]["norms"][0] == "JobError"
    assert "layers.0.self_attn.q_norm.weight" in results["errors"]["norms"][1]
    assert results["logits"]["ours"] == pytest.approx(results["logits"]["theirs"], rel=1e-6)
    assert results["logits"]["changed"]


def test_a_whole_run_is_that_of_one_process_and_resumes(tmp_path: Path) -> None:
    """Embeddings tied, blocks computed again: the same losses, evaluations and answers, and after a stop."""
    from transformers import AutoModelForCausalLM

    train = {"steps": 20, "eval_every": 10, "checkpointing": "full"}
    (alone,) = run_all([Run(job(tmp_path, "alone", "single", **train))], processes=1, folder=tmp_path / "one")
    strategy = {"engine": "deepspeed", "stage": 1, "tensor_parallel": 2}
    part = job(tmp_path, "stopped", strategy, **train)
    runs = [Run(job(tmp_path, "whole", strategy, **train)), Run(part, max_steps=9), Run(part, resume=True)]
    whole, _, resumed = run_all(runs, processes=2, folder=tmp_path / "two")
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
    assert evaluations(whole) == pytest.approx(evaluations(alone), rel=1e-5)
    assert [e["tokens"] for e in steps_of(whole)] == [e["tokens"] for e in steps_of(alone)]
    assert losses(resumed) == losses(whole)
    ours, theirs = weights(resumed, 20), weights(whole, 20)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    ids = torch.arange(40).reshape(2, 20)
    answers = [
        AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000020" / "model")(ids).logits
        for run in (whole, alone)
    ]
    assert torch.allclose(*answers, atol=1e-3)
