"""Steps recorded on two GPUs are usual steps, also right after an evaluation, which gathers weights.

On a single rank nothing is gathered: a graph that reads what an evaluation left is seen here alone.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes

from recorded_steps import rank_of_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"engine": "deepspeed", "stage": 1},
    "zero2": {"engine": "deepspeed", "stage": 2},
    "zero3": {"engine": "deepspeed", "stage": 3},
    "zero3-noreshard": {"engine": "deepspeed", "stage": 3, "reshard": False},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-noreshard": {"engine": "fsdp2", "reshard": False},
}


CASES = [*product(["llama-3.2-1b"], STRATEGIES), ("falcon-7b", "zero3"), ("olmoe-1b-7b", "zero3")]
"""The last two multiply by views of weights, which autograd keeps while ZeRO-3 has released them."""


@pytest.mark.parametrize(("model", "name"), CASES)
def test_steps_between_evaluations_are_usual_steps(model: str, name: str, tmp_path: Path) -> None:
    arguments = (model, STRATEGIES[name], str(tmp_path))
    processes.start_processes(rank_of_two, arguments, nprocs=2, start_method="spawn")
    recorded, usual = torch.load(tmp_path / "found")
    assert usual[-2][0] < usual[0][0] - 0.1, "a graph with weights of before would not be noticed"
    for ours, theirs in zip(recorded, usual, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
