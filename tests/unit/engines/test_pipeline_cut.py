"""The cut follows from the model alone: how far its slowest stage is from the best by simulated times."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.engines.pipeline.split import stages_of
from shardwise.engines.pipeline.stages import cut
from shardwise.engines.pipeline.time import _costs
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Model
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer

CUT_BY_FLOPS = pytest.mark.xfail(
    reason="4.6 % with eight stages: the head takes the time of 3.2 blocks, and the FLOPs of 2.6", strict=True
)
SMALL = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        pytest.param({}, 1.01, id="7b"),
        pytest.param({"vocab_size": 128256}, 1.01, id="128k", marks=CUT_BY_FLOPS),
        pytest.param(SMALL, 1.15, id="1b"),
    ],
)
def test_the_slowest_stage_is_close_to_the_best_cut(changes: dict[str, Any], bound: float) -> None:
    hardware = parse_hardware("8xH100")
    model = Model(source="llama-2-7b", weights="random", config=changes)
    trace = Tracer(model, precision="bf16", sequence_length=2048).trace(rows=1, checkpoint_every=0)
    blocks = sum(unit.block >= 0 for unit in trace.units)
    alone = Strategy(engine="pipeline", pipeline=blocks, accumulation=8)
    found = [_costs(stage, alone, hardware) for stage in stages_of(trace, blocks)]
    seconds = [
        one.forward + one.backward for one in found
    ]  # the first with embeddings, the last with the head
    head = seconds[-1] - seconds[1]
    for stages in (2, 4, 8):
        best = cut([*seconds[:-1], seconds[1]], head, stages)
        ours = [stage.blocks for stage in stages_of(trace, stages)]
        slowest = [max(sum(seconds[i] for i in part) for part in parts) for parts in (ours, best)]
        assert 1.0 - 1e-9 <= slowest[0] / slowest[1] < bound, stages
