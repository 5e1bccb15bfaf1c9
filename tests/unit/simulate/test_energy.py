"""Joules of a step, against what H200 draw and against what must hold."""

from __future__ import annotations

import pytest

from shardwise.engines import descriptor
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.energy import Draw, predict_energy
from shardwise.simulate.prediction import Energy, Time
from shardwise.simulate.step_trace import Op, StepTrace
from shardwise.simulate.time.step import predict_time
from shardwise.strategy import Strategy

HARDWARE = parse_hardware("4xH200")
H200 = Draw(HARDWARE.gpu)


def predict(trace: StepTrace, **strategy) -> tuple[Time, Energy]:
    chosen = Strategy(**{"engine": "single", **strategy})
    played = descriptor(chosen).play(trace, chosen, HARDWARE)
    time = predict_time(trace, chosen, HARDWARE, played)
    return time, predict_energy(HARDWARE.gpu, time, work_joules=played.totals.joules, gpus=chosen.world_size)


def test_large_products_run_at_the_power_limit(layers) -> None:
    """Rows of the ledger that are all products draw 683 to 706 W of 700."""
    time, energy = predict(layers(blocks=16, width=8192, tokens=8192))
    assert energy.joules_per_step / time.step_seconds == pytest.approx(690, rel=0.02)
    assert energy.at_power_limit


def test_a_gpu_that_waits_draws_little(layers) -> None:
    """Pythia-410M of 4 x 512 tokens, a third of the time busy: 280 W."""
    time, energy = predict(layers(width=256, tokens=256))
    watts = energy.joules_per_step / time.step_seconds
    assert H200.constant_watts < watts < 200
    assert not energy.at_power_limit
    assert energy.idle_joules == pytest.approx(H200.constant_watts * time.step_seconds)


def test_it_is_the_energy_of_all_gpus(layers) -> None:
    trace = layers(blocks=16, width=8192, tokens=8192)
    _, one = predict(trace)
    _, four = predict(trace, engine="deepspeed", stage=2, data_parallel=4)
    assert 3.6 < four.joules_per_step / one.joules_per_step < 4.4
    assert four.joules_per_token == pytest.approx(four.joules_per_step / (4 * 8192))


def test_checkpointing_costs_joules(layers) -> None:
    _, plain = predict(layers(width=8192, tokens=8192))
    _, again = predict(layers(width=8192, tokens=8192, checkpoint_every=1))
    assert 1.15 < again.joules_per_step / plain.joules_per_step < 1.34


def test_a_product_takes_joules_for_its_flops_and_its_bytes(product) -> None:
    """8192^3 at 788 TFLOP/s and 700 W: 0.89 pJ a FLOP, the constant draw included."""
    joules = H200.joules(product(8192, 8192, 8192))
    seconds = H200.powered_seconds(joules)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(670, rel=0.05)
    assert H200.joules(product(8192, 8192, 16384)) == pytest.approx(2 * joules, rel=0.02)


def test_wider_heads_than_asked_for_take_joules_too() -> None:
    def forward(head: int) -> Op:
        name = "_scaled_dot_product_cudnn_attention"
        shape = (1, 32, 32, 4096, 4096, head)
        flops = 2.0 * 32 * 4096**2 * head
        return Op(kind="attention", flops=flops, read_bytes=0, written_bytes=0, shape=shape, name=name)

    assert H200.joules(forward(80)) == pytest.approx(H200.joules(forward(128)))


def test_an_instruction_of_a_scan_takes_joules() -> None:
    """15.4 a channel, state and token, of 27 pJ; it is more than the bytes take."""
    shape = (1, 4096, 2048, 16)
    scan = Op(kind="scan", flops=0.0, read_bytes=0, written_bytes=0, shape=shape, name="selective_scan")
    assert H200.joules(scan) == pytest.approx(4096 * 2048 * 16 * 15.4 * 27.2e-12, rel=0.02)


def test_bytes_over_links_take_more() -> None:
    assert H200.moving(1e12) == pytest.approx(160)
    assert H200.linking(1e12) == pytest.approx(200)


def test_fp32_products_take_more(product) -> None:
    half, full = product(2048, 2048, 2048), product(2048, 2048, 2048, item_bytes=4)
    assert H200.joules(full) > 4 * H200.joules(half)


def test_a_smaller_card_draws_in_proportion() -> None:
    small = Draw(parse_hardware("1xRTX4090").gpu)
    assert small.constant_watts / 450 == pytest.approx(H200.constant_watts / 700)
    assert small.limit_watts < 450


def test_a_skinny_product_takes_joules_for_its_operands(product) -> None:
    """An adapter of rank 16 reads 256 times the bytes a FLOP that a square product reads."""
    skinny, square = product(4096, 16, 4096), product(4096, 4096, 4096)
    assert H200.joules(skinny) / skinny.flops > 5 * H200.joules(square) / square.flops
