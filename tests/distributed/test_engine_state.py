"""Saving, going on, and steps that are not finite."""

from __future__ import annotations

import pytest
from engine_worker import run_in_processes

from shardwise.training.nonfinite import FINITE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("processes", "count"), [(1, 12), (2, 36), (4, 9)])
def test_a_resumed_run_has_the_same_bits_and_evaluates_to_the_global_loss(
    tmp_path, processes: int, count: int
) -> None:
    """An evaluation changes nothing: only the resumed run has any."""
    results = run_in_processes("resume", processes=processes, folder=tmp_path, timeout=590)
    assert len(results) == count
    assert [name for name, found in results.items() if not found["same"]] == []
    evaluated = {name: found for name, found in results.items() if found["losses"]}
    assert len(evaluated) == count / 3
    expected = evaluated["fsdp2/fp32/full" if processes < 4 else "fsdp2-hsdp2/fp32/full"]["losses"]
    assert len(expected) == 3
    for name, found in evaluated.items():
        assert found["losses"] == pytest.approx(expected, rel=1e-6), name
        assert "model.layers.0.self_attn.q_proj.weight" in found["names"], name
        assert "lm_head.weight" in found["names"], name


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_nan_is_reported_and_never_reaches_the_weights(tmp_path, processes: int) -> None:
    results = run_in_processes("not_finite", processes=processes, folder=tmp_path)
    expected = {"skipped": 1.0, "reported": True, "untouched": True, "later_skipped": 1.0}
    assert {name: found for name, found in results.items() if found != expected} == {}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_module_the_rank_and_the_sample_of_a_nan_are_named(tmp_path, processes: int) -> None:
    results = run_in_processes("nan_is_named", processes=processes, folder=tmp_path)
    assert len(results) >= 12
    for name, ((what, rank), *others) in results.items():
        kind = name.partition("/")[2]
        assert not others, name
        if kind == "none":
            assert (what, rank) == (FINITE, "all ranks"), name
            continue
        where = {
            "output": "what model.layers.1.mlp",
            "gradient": "the gradient of what model.layers.1.mlp.down_proj",
        }
        assert what.startswith(
            f"{where[kind]} returns is not finite in micro-batch 1 of 2, row 1, from the sample that"
        ), name
        assert rank == f"rank {processes - 1}", name
