"""benchmarks/experiments: the plain loop and shardwise, which it compares, train the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import handed_over

from scripts import script


@pytest.mark.slow
def test_the_plain_loop_and_shardwise_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation: both divide by the tokens of the step, whatever the micro-batch."""
    for name, value in handed_over().items():
        monkeypatch.setenv(name, value)
    experiments = script("benchmarks/experiments/experiments.py")
    rows, (setting,) = script("benchmarks/experiments/programs.py"), experiments.ON_CPU
    plain, single = (
        rows.run(
            "plain",
            setting,
            rows.Program(name=name, strategy=parts, steps=2, warmup=1),
            rows.Place(folder=tmp_path, gpu=""),
        )["measured"]
        for name, parts in (("plain loop", None), ("single", {"engine": "single"}))
    )
    assert plain["loss"] == pytest.approx(single["loss"], abs=1e-5)
    assert plain["grad_norm"] == pytest.approx(single["grad_norm"], abs=1e-4)
    assert len(plain["loss"]) == 3
    assert plain["loss"][0] > plain["loss"][2]
