"""The time of parameters in fp32 beside bf16 ones, which no engine shards, gathers or hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.prediction import Time
from shardwise.simulate.step_trace import GRADIENT, Parameter, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.roofline import table
from shardwise.simulate.time.step import predict_time
from shardwise.strategy import Strategy

HARDWARE = parse_hardware("4xH200")
BANDWIDTH = 4.8e12
BLOCKS = 8

ENGINES: list[dict[str, Any]] = [
    {"engine": "single"},
    *({"engine": "deepspeed", "stage": stage} for stage in range(4)),
    {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    {"engine": "fsdp2"},
]


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power limits nothing."""
    monkeypatch.setitem(table()["energy"], "limit", 1000.0)


def beside(trace: StepTrace, *shapes: tuple[int, ...]) -> StepTrace:
    """The trace with such parameters in fp32 in each block, whose backward pass completes their gradients."""
    parameters, units, events = list(trace.parameters), list(trace.units), list(trace.events)
    for unit in range(1, BLOCKS + 1):
        new = tuple(range(len(parameters), len(parameters) + len(shapes)))
        parameters += [Parameter(name="p", shape=s, item_bytes=4, trainable=True) for s in shapes]
        units[unit] = replace(units[unit], parameters=units[unit].parameters + new)
        place = events.index((GRADIENT, unit, 0))
        events[place:place] = [(GRADIENT, index, 0) for index in new]
    return replace(trace, parameters=tuple(parameters), units=tuple(units), events=tuple(events))


def predict(trace: StepTrace, **strategy: Any) -> Time:
    ranks = 1 if strategy["engine"] == "single" else 4
    chosen = Strategy(**{"data_parallel": ranks, **strategy})
    return predict_time(trace, chosen, HARDWARE, descriptor(chosen).play(trace, chosen, HARDWARE))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_has_no_hooks_on_them(layers, engine: dict[str, Any]) -> None:
    plain = layers(blocks=BLOCKS)
    with_three = beside(plain, (64, 16), (64,), (64,))
    for accumulation in (1, 2):
        one, other = (predict(t, accumulation=accumulation, **engine) for t in (plain, with_three))
        assert other.launch_seconds == pytest.approx(one.launch_seconds, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_their_gradients_are_summed_once_a_step_in_fp32(layers, engine: dict[str, Any]) -> None:
    plain, elements = layers(blocks=BLOCKS), BLOCKS * 4096 * 1024
    summed = communication.all_reduce(4 * elements, communication.group(HARDWARE, 4))
    for accumulation in (1, 3):
        one, other = (
            predict(t, accumulation=accumulation, **engine) for t in (plain, beside(plain, (4096, 1024)))
        )
        assert other.communication_seconds - one.communication_seconds == pytest.approx(summed)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_steps_all_of_them(layers, engine: dict[str, Any]) -> None:
    """Norm and AdamW; laid end to end and divided where an engine may have other ranks."""
    plain, elements = layers(blocks=BLOCKS), BLOCKS * 4096 * 1024
    one, other = (predict(t, **engine) for t in (plain, beside(plain, (4096, 1024))))
    shares = 4 / 0.74 + 28 / 0.85
    if engine["engine"] != "single":
        shares += 8 / 0.75 + 8 / 0.90
    more = elements * shares / BANDWIDTH
    assert other.compute_seconds - one.compute_seconds == pytest.approx(more, rel=0.02)


def test_a_second_micro_batch_adds_to_their_gradients(layers) -> None:
    plain, elements = layers(blocks=BLOCKS), BLOCKS * 8192 * 8192

    def added(accumulation: int) -> float:
        one, other = (
            predict(t, engine="fsdp2", accumulation=accumulation)
            for t in (plain, beside(plain, (8192, 8192)))
        )
        return other.compute_seconds - one.compute_seconds

    assert added(3) - added(1) == pytest.approx(2 * 12 * elements / 0.90 / BANDWIDTH, rel=0.02)


def test_in_fp32_they_are_as_all_others(layers) -> None:
    full = replace(layers(blocks=BLOCKS), precision="fp32")
    full = replace(full, parameters=tuple(replace(p, item_bytes=4) for p in full.parameters))
    hooks = predict(beside(full, (64,)), engine="deepspeed", stage=2, precision="fp32").launch_seconds
    hooks -= predict(full, engine="deepspeed", stage=2, precision="fp32").launch_seconds
    assert hooks == pytest.approx(BLOCKS * table()["host"]["zero_hook"])
