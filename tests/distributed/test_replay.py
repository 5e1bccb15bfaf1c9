"""A micro-batch that is computed twice: a flipped bit is named, and a run without one is as it would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Run, run_all
from test_background_saves import contents
from test_heartbeat import train
from test_out_of_memory import write_job
from test_whole_runs import job, losses

from shardwise.training.replay import EVERY

pytestmark = pytest.mark.slow

STRATEGIES: dict[int, dict[str, object]] = {
    1: {"single": "single"},
    2: {
        **{
            name: name for name in ("zero0", "zero1", "zero2", "zero3", "fsdp2", "zero2-offload", "ddp-zero1")
        },
        "ddp": {"engine": "ddp"},
    },
}


@pytest.mark.parametrize(("processes", "precision"), [(1, "fp32"), (2, "bf16")])
def test_a_run_with_checks_in_each_step_has_the_bits_of_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, precision: str
) -> None:
    found: list[list[Path]] = []
    for every in ("0", "1"):
        monkeypatch.setenv(EVERY, every)
        settings: dict[str, Any] = {"steps": 4, "precision": precision, "checkpointing": "full"}
        runs = [
            Run(job(tmp_path / every, name, one, **settings)) for name, one in STRATEGIES[processes].items()
        ]
        found.append(run_all(runs, processes=processes, folder=tmp_path / every))
    for without, checked in zip(*found, strict=True):
        assert losses(without) == losses(checked)
        assert contents(without) == contents(checked), without.name


@pytest.mark.parametrize(
    ("strategy", "of"),
    [("zero1", "output"), ("zero2", "gradient"), ("zero3", "gradient"), ("fsdp2", "output")],
)
def test_a_flipped_bit_ends_the_run_and_is_named(tmp_path: Path, strategy: str, of: str) -> None:
    module = "model.model.layers.1.mlp"
    write_job(tmp_path, strategy, eval_every=0)
    faults = [{"rank": 1, "step": 5, "do": "flip", "with": {"module": module, "of": of}}]
    code, err = train(tmp_path, "job.yaml", "--processes", "2", faults=faults, SHARDWISE_REPLAY_EVERY="3")
    assert code == 4, err
    prefix = "" if of == "output" else "the gradient of "
    what = f"{prefix}what {module.removeprefix('model.')} returns"
    assert f"error: computed twice, {what} has other bits on rank 1\n  at:  step 6, rank 1\n" in err
    assert "what was saved after step 3 may be wrong" in err
