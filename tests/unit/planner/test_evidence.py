"""A plan says how far predictions like its own were off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.evidence import evidence_of, kind_of
from shardwise.strategy import Strategy


def test_runs_that_wait_for_the_host_as_much_count_for_time(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    option = plan.options[0]
    busy, waiting = (
        replace(option.prediction, time=replace(option.prediction.time, launch_seconds=share))
        for share in (0.0, option.prediction.time.step_seconds)
    )
    found = [evidence_of(option.strategy, one, plan.hardware) for one in (busy, waiting)]
    assert found[0].memory == found[1].memory
    assert found[0].time.runs == 31
    assert found[1].time.runs == 17
    assert not found[0].same_gpu
    assert found[0].text().endswith("; none ran on this GPU")
    assert "(worst 8.4%; the 31 that wait for the host as much)" in found[0].text()


def test_a_strategy_that_never_ran_says_so(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    option = plan.options[0]
    cut = replace(option.strategy, engine="fsdp2", stage=0, tensor_parallel=2)
    found = evidence_of(cut, option.prediction, plan.hardware)
    assert found.text() == "error not known: no run of fsdp2 tensor-parallel was measured"


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}, "zero3 offload"),
        ({"engine": "deepspeed", "stage": 1, "tensor_parallel": 2}, "zero1 tensor-parallel"),
        ({"engine": "fsdp2", "reshard": False}, "fsdp2"),
    ],
)
def test_kinds(parts: dict, kind: str) -> None:
    assert kind_of(Strategy(**parts)) == kind
