"""The tracer sees where the host waits for the GPU: there no CUDA graph can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import JobError
from shardwise.job.schema import Lora, Model
from shardwise.kernels.target import HOPPER
from shardwise.models.catalog import shapes
from shardwise.models.own_attention import _falcon_heads
from shardwise.simulate.memory.recorded import own_pool
from shardwise.trace.recorder import Recorder
from shardwise.trace.trace import Tracer

WAITING = {"phimoe": "its code keeps frequencies on the CPU"}
NOT_PACKED, NOT_TRACED = {"bloom", "mpt"}, {"dbrx": "its code counts the tokens of each expert"}
FAMILIES = {shape.model_type: shape for shape in reversed(shapes())}


def computed(work: Callable[[Tensor], Any]) -> bool:
    recorder, given = Recorder(HOPPER), torch.empty(4, 6, device="meta")
    recorder.ignore(given)
    with recorder:
        work(given)
    return recorder.host_waits


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[..., [-2]],
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device="meta"),
        lambda x: torch.where(x > 0, x, torch.tensor(0.0, device="meta")),
        lambda x: bool((x > 0).all()),
    ],
    ids=["indices", "values", "a number on the GPU", "a question"],
)
def test_copies_from_the_host_and_questions_are_seen(work: Callable[[Tensor], Any]) -> None:
    assert computed(work)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[..., -2:-1] * 2.0,
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x * torch.tensor(2.0),
        lambda x: x + torch.ones(6, device="meta"),
        lambda x: x.masked_fill(x > 0, float("-inf")),
    ],
    ids=["slices", "a number", "a number on the CPU", "made on the GPU", "filled"],
)
def test_what_goes_with_a_launch_waits_for_nothing(work: Callable[[Tensor], Any]) -> None:
    assert not computed(work)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_adapters_of_every_family_can_be_recorded_but_of_these(family: str) -> None:
    shape = FAMILIES[family]
    config = {} if family in ("gpt2", "gpt_neo") else {"num_hidden_layers": 4}
    model = Model(source=shape.name, weights="random", lora=Lora(), config=config)
    tracer = Tracer(model, precision="bf16", sequence_length=64)
    if family in NOT_PACKED | NOT_TRACED.keys():
        refusal = "computed without values, modeling_dbrx.py:" if family in NOT_TRACED else "packing"
        with pytest.raises(JobError, match=refusal):
            tracer.trace(rows=2, checkpoint_every=0, single_segment_rows=1)
        return
    trace = tracer.trace(rows=2, checkpoint_every=0, single_segment_rows=1)
    assert trace.host_waits == (family in WAITING)
    assert own_pool(trace)


@pytest.mark.parametrize(
    "layout", [{"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True}]
)
def test_falcons_heads_are_transformers_heads(layout: dict[str, bool]) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "num_kv_heads": 2}
    config = AutoConfig.for_model("falcon", vocab_size=8, alibi=False, **sizes, **layout)
    module = AutoModelForCausalLM.from_config(config).transformer.h[0].self_attention
    fused = module.query_key_value(torch.randn(2, 3, 32))
    query, key, value = module._split_heads(fused)
    ours = _falcon_heads(module, fused)
    torch.testing.assert_close(ours[0], query, rtol=0, atol=0)
    for found, expected in zip(ours[1:], (key, value), strict=True):
        shared = expected.shape[2] // found.shape[2]
        torch.testing.assert_close(found.repeat_interleave(shared, 2), expected, rtol=0, atol=0)
