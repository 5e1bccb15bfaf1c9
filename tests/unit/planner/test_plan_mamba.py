"""The plan of the largest Mamba on four small GPUs: what fits there, and what does not."""

from __future__ import annotations

import pytest

from shardwise.hardware.parse import parse_hardware
from shardwise.planner.planning import make_plan
from shardwise.planner.sketch import sketch


@pytest.mark.slow
def test_7b_fits_four_cards_of_24_gb_with_offloading_only() -> None:
    changes = ["data.sequence_length=4096", "train.global_batch=4", "train.micro_batch=1"]
    plan = make_plan(sketch("7b_mamba", changes, world_size=4).job, parse_hardware("4x24GB"))
    assert plan.job.parameters == 6_922_702_592
    assert plan.chosen is not None
    assert plan.chosen.strategy.offload_optimizer == "cpu"
    fits = {(o.strategy.engine, o.strategy.stage) for o in plan.options if o.fit != "no"}
    assert ("deepspeed", 3) in fits
    assert ("deepspeed", 2) not in fits, "weights and gradients of ZeRO-2 alone are more, offloaded or not"
