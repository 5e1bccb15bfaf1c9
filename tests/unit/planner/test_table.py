"""The table as a person sees it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import get_args

import pytest
from rich.console import Console

from shardwise.planner.plan import Objective
from shardwise.planner.table import _name, excerpt, show, unit_of_time
from shardwise.space.candidates import Refused
from shardwise.strategy import Strategy
from shardwise.units import GIB

GOLDEN = """\
toy-1.3b · 1.3B parameters, all trained, bf16
4 × RTX 4080, 15.7 GiB to use of each · pcie4x16 through host memory
64 rows of 2048 tokens a step · fastest first · 5% spare memory

                micro × ckpt memory                      tokens/s 1B tok.  J per
  strategy       accum.         15.7 GiB│      GiB fits   per GPU    in h  token
▶ zero2           8 × 2  all ██▓▓▓▒▒░···│     11.6 fits     3,565    19.5 0.0721
  zero3-offload   4 × 4  1/2 ▒▒▒▒▒▒·····│      9.1 host?    3,341    20.8 0.0691
    -optimizer
  zero0          1 × 16  all ██▓▓▓▓▓▓▓▓▓│▓▓▓» 22.7 no       2,536    27.4  0.102

  █ weights  ▓ gradients, optimizer  ▒ activations, loss  ░ rest  │ limit
  --all shows 23 more, 19 not simulated because smaller ones fail
  host?: if the hosts have the memory; `+128GiB` behind the GPUs says how much
  error of the prediction in 48 measured runs of zero2 on H100 SXM, H200 SXM:
  0.2% in memory (worst 2.7%), 21.0% in time (worst 60.1%; the 17 that wait for
  the host as much); none ran on this GPU

▶ zero2 with micro-batch 8, accumulation 2, checkpointing every block
· the fastest of the 17 that fit: 1.07x the tokens/s of zero3-offload-optimizer,
  the next best
· 11.6 of 15.7 GiB on the fullest GPU, 26% free; the largest part: optimizer,
  3.6 GiB
· a step takes 9.19 s: computing 98%
"""


def shown(plan, width: int, *, everything: bool = False) -> str:
    console = Console(file=StringIO(), width=width)
    show(plan, console=console, everything=everything)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_table_at_80_columns(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.planner.table.ROWS", 3)
    assert shown(toy.plan("4xRTX4080", "zero0", "zero2", "zero3-offload-optimizer"), 80) == GOLDEN


def test_the_order_is_said_where_the_choice_is_not_the_fastest(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero0", "zero2")
    assert "a step · fastest first ·" in shown(plan, 140)
    slower = replace(plan, chosen=plan.alternatives[0], alternatives=(plan.chosen,))
    assert "a step · ▶ choice, then fastest first ·" in shown(slower, 140)


def test_links_that_were_measured_here_are_said_to_be(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    hardware = plan.hardware
    measured = replace(
        hardware,
        intra=replace(hardware.intra, measured=True),
        host_link=replace(hardware.host_link, measured=True),
    )
    told = "pcie4x16 through host memory (measured) · copies from the host (measured)"
    assert told in shown(replace(plan, hardware=measured), 140)
    assert "(measured)" not in shown(plan, 140)


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("gpus", ["1xRTX4080", "4xRTX4080", "2x4xRTX4090+eth100", "4x24GB"])
def test_nothing_is_cut_at_any_width(toy, width: int, gpus: str) -> None:
    plan = toy.plan(gpus)
    for everything in (False, True):
        lines = shown(plan, width, everything=everything).splitlines()
        assert max(map(len, lines)) <= width
        assert not [line for line in lines if "…" in line]
        rows = [line for line in lines if "│" in line and "GiB" not in line and "limit" not in line]
        assert len(rows) == len(plan.options if everything else excerpt(plan))


def test_wide_numbers_take_the_place_of_the_training_time(toy) -> None:
    plan = toy.plan("1xRTX4080", "zero3-offload-optimizer")
    chosen = plan.options[0]
    prediction, strategy = chosen.prediction, replace(chosen.strategy, micro_batch=1, accumulation=2048)
    memory = replace(prediction.memory, outside_allocator_bytes=1000 << 30)
    time = replace(prediction.time, step_seconds=prediction.time.tokens_per_step / 123_456)
    energy = replace(prediction.energy, joules_per_step=0.00213 * prediction.energy.tokens_per_step)
    wide = replace(prediction, memory=memory, time=time, energy=energy)
    plan = replace(
        plan, chosen=replace(chosen, fit="tight", strategy=strategy, prediction=wide), alternatives=()
    )
    text = shown(plan, 80)
    row = next(line for line in text.splitlines() if line.startswith("▶ zero3-offload"))
    assert row.split()[-4:] == [f"{memory.needed_bytes / GIB:.1f}", "tight?", "123,456", "0.00213"]
    assert "1 × 2048" in row
    assert "1B tok." in shown(plan, 100)
    assert "1B tok." not in text


def test_every_kind_is_shown_and_the_best_fill_the_rest(toy) -> None:
    plan = toy.plan("4xRTX4080")
    rows = excerpt(plan)
    assert {o.strategy.name for o in rows} == {o.strategy.name for o in plan.options}
    assert len(rows) == 12
    assert rows[0] is plan.chosen
    assert rows == [o for o in plan.options if o in rows], "the plan's order"


def test_all_shows_everything_simulated_skipped_and_refused(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero0", "zero2")
    strategy = replace(plan.options[0].strategy, tensor_parallel=2)
    refused = Refused(strategy=strategy, rule="r", reason="it trains nothing", where="strategy", fix="")
    text = shown(replace(plan, refused=(refused, refused)), 100, everything=True)
    assert text.count("not simulated") == len(plan.skipped)
    assert "refused: autotp2-zero2: it trains nothing\n" in text
    assert "--all" not in text
    assert "1 refused" in shown(replace(plan, refused=(refused, refused)), 100)


def test_what_building_the_model_left_out_stands_above_the_table(toy) -> None:
    plan = toy.plan("4x24GB")
    job = replace(plan.job, notes=("the experts get no adapter: they are not linear modules",))
    assert "\nnote: the experts get no adapter: they are not linear modules\n" in shown(
        replace(plan, job=job), 100
    )
    assert "note:" not in shown(plan, 100)


def test_what_was_assumed_stands_above_the_table(toy) -> None:
    plan = toy.plan("4x24GB")
    job = replace(plan.job, assumed=("64 rows a step",), lora_rank=16, trainable_parameters=10**7)
    text = shown(replace(plan, job=job), 100)
    assert "assumed: 64 rows a step\n" in text
    assert "4 × 24GB (assumed as fast as " in text
    assert "LoRA of rank 16 trains 10M, bf16\n" in text
    text = shown(replace(plan, job=replace(job, quantization="nf4")), 100)
    assert "LoRA of rank 16 trains 10M, bf16, base in nf4\n" in text


def test_the_time_is_that_of_the_whole_training_where_its_tokens_are_known(toy) -> None:
    plan = toy.plan("4xRTX4080")
    days = plan.chosen.seconds(10**10) / 86400
    text = shown(replace(plan, job=replace(plan.job, total_tokens=10**10)), 100)
    assert "trained" in text.splitlines()[4]
    assert "in d" in text.splitlines()[5]
    assert f" {days:.1f} " in text


def test_a_host_that_is_too_small_is_a_no_of_its_own(toy) -> None:
    toy.host_memory_bytes = 16 << 30
    assert "no host" in shown(toy.plan("4xRTX4080", "zero2-offload", "zero2"), 100)


def test_without_a_choice_there_is_no_verdict(toy) -> None:
    text = shown(toy.plan("4xRTX3060", "zero0"), 80)
    assert "▶" not in text
    assert " no " in text


@pytest.mark.parametrize("objective", get_args(Objective))
def test_the_heading_says_what_comes_first(toy, objective) -> None:
    words = {"throughput": "fastest", "memory": "leanest", "energy": "least energy"}[objective]
    assert f"{words} first" in shown(toy.plan("4xA100-SXM-80GB", objective=objective), 80)


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(90, "s"), (1200, "min"), (7300, "h"), (100_000, "h"), (200_000, "d"), (2e8, "d")],
)
def test_the_unit_of_a_time(seconds: float, unit: str) -> None:
    assert unit_of_time(seconds)[0] == unit


@pytest.mark.parametrize("tokens", [10**5, 10**7, 2 * 10**9, 4 * 10**9, 10**12])
def test_a_column_of_times_has_one_unit(toy, tokens: int) -> None:
    plan = toy.plan("4xRTX4080", "zero0", "zero2")
    times = [option.seconds(tokens) for option in plan.options]
    text = shown(replace(plan, job=replace(plan.job, total_tokens=tokens)), 100)
    unit, seconds = unit_of_time(min(times))
    assert f" in {unit}" in text.splitlines()[5]
    for time in times[:3]:
        assert f"{time / seconds:.1f} " in text or f"{time / seconds:,.0f} " in text


def test_what_hangs_on_the_hosts_memory_is_told_until_it_is_known(toy) -> None:
    unknown = toy.plan("4xRTX4080", "zero3-offload")
    text = shown(unknown, 80)
    assert " fits " not in "\n".join(line for line in text.splitlines() if "zero3" in line)
    assert "host?: if the hosts have the memory; `+128GiB` behind the GPUs says how much" in text
    assert "it fits if the host has 20.4 GiB" in " ".join(text.split()), "19.4 GiB and the margin of 5%"
    tight = shown(replace(unknown, chosen=replace(unknown.chosen, fit="tight")), 80)
    assert "tight?" in next(line for line in tight.splitlines() if line.startswith("▶ zero3-offload"))
    assert "tight?: the same, but it leaves less" in tight
    toy.host_memory_bytes = 32 << 30
    known = shown(toy.plan("4xRTX4080", "zero3-offload"), 80)
    assert "host?" not in known
    assert "32.0 GiB in each host" in " ".join(known.split())
    assert " fits " in known
    assert "host?" not in shown(toy.plan("4xRTX4080", "zero2"), 80), "nothing is kept there"


def test_the_longest_names_take_two_lines_at_80_columns() -> None:
    sharded = Strategy(engine="fsdp2", shard_group=8, reshard=False, data_parallel=16)
    offloaded = Strategy(engine="deepspeed", stage=3, offload_optimizer="cpu")
    assert _name(sharded, 80).plain.splitlines() == ["  fsdp2-hsdp8", "    -noreshard"]
    assert _name(offloaded, 80).plain.splitlines() == ["  zero3-offload", "    -optimizer"]
    assert _name(sharded, 100).plain == "  fsdp2-hsdp8-noreshard"
