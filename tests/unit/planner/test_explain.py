"""The explanation: memory by module, and what more memory would buy."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from shardwise.planner.explain import _needs, folded, next_better, show_explanation
from shardwise.planner.why import reasons
from shardwise.simulate.prediction import Moment


def shown(plan, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    show_explanation(plan, console=console)
    return console.file.getvalue()


def test_blocks_are_folded_and_their_peak_kept() -> None:
    moments = [
        Moment(where="embeddings forward", allocated_bytes=1),
        *(Moment(where=f"block {n} forward", allocated_bytes=10 * n) for n in range(8)),
        Moment(where="output head", allocated_bytes=99),
        *(Moment(where=f"block {n} backward", allocated_bytes=n) for n in (2, 1, 0)),
        Moment(where="optimizer", allocated_bytes=5),
    ]
    assert [(m.where, m.allocated_bytes) for m in folded(moments)] == [
        ("embeddings forward", 1),
        ("blocks 0–1 forward", 10),
        ("blocks 2–3 forward", 30),
        ("blocks 4–5 forward", 50),
        ("blocks 6–7 forward", 70),
        ("output head", 99),
        ("block 2 backward", 2),
        ("block 1 backward", 1),
        ("block 0 backward", 0),
        ("optimizer", 5),
    ]


def test_the_peak_is_marked_and_the_parts_are_shown(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    lines = shown(plan).splitlines()
    peak = max(m.allocated_bytes for m in plan.chosen.prediction.memory.timeline)
    marked = [line for line in lines if "◀ most" in line]
    assert [line.split()[:2] for line in marked] == [["output", "head"]]
    assert f"{peak / 2**30:.1f} GiB" in marked[0]
    needed, capacity = (
        plan.chosen.prediction.memory.needed_bytes / 2**30,
        plan.chosen.prediction.memory.capacity_bytes / 2**30,
    )
    together = next(line for line in lines if line.strip().startswith("together"))
    assert f"{needed:.1f} GiB  of {capacity:.1f}" in together
    step = next(line for line in lines if line.strip().startswith("the step"))
    assert f"{plan.chosen.prediction.time.step_seconds:.3g} s  100%" in step
    memory = plan.chosen.prediction.memory
    beside = (
        f"plus {memory.terms.fragmentation_bytes / 2**30:.1f} GiB of fragmentation and 0.5 GiB of CUDA "
        f"and NCCL: {needed:.1f} GiB in all"
    )
    assert beside in " ".join(" ".join(lines).split()), "the timeline is of tensors alone"
    assert all(len(line) <= 80 for line in lines)


def test_the_next_better_names_what_it_lacks(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    first = next(iter(next_better(plan, plan.chosen)))
    assert first == (
        "1.13x the tokens/s with 15.7 GiB of a GPU to use, as RTX 4090 (24GB) has: "
        "zero2 with micro-batch 2, accumulation 8, no checkpointing"
    )


@pytest.mark.parametrize(("gpus", "name"), [("4x24GB", "RTX 3090"), ("4xL4", "RTX 5000 Ada")])
def test_a_card_of_the_same_size_may_be_named_where_only_the_memory_was(toy, gpus: str, name: str) -> None:
    """22.0 GiB of `24GB` are to use, and 23.6 of an RTX 3090."""
    plan = toy.plan(gpus, "zero2")
    prediction = plan.chosen.prediction
    wanted = round(22.5 * (1 - plan.margin) * 2**30) - prediction.memory.outside_allocator_bytes
    memory = replace(prediction.memory, peak_reserved_bytes=wanted)
    larger = replace(plan.chosen, prediction=replace(prediction, memory=memory), fit="tight")
    assert _needs(larger, plan).startswith(f"with 22.5 GiB of a GPU to use, as {name} (")


@pytest.mark.parametrize(
    ("gpus", "cap", "said"),
    [
        ("4xRTX4090", 15, "with 15.7 GiB of a GPU to use and a higher --memory-cap"),
        ("4xRTX4080", 40, "with 15.7 GiB of a GPU to use, as RTX 4090 (24GB) has"),
        (
            "4xRTX4080",
            15,
            "with 15.7 GiB of a GPU to use and a higher --memory-cap, as RTX 4090 (24GB) has",
        ),
    ],
)
def test_a_cap_is_named_only_where_it_is_what_lacks(toy, gpus: str, cap: int, said: str) -> None:
    """A cap above the card is none."""
    plan = toy.plan("4xRTX4080", "zero2")
    capped = replace(plan, memory_cap_bytes=cap << 30, hardware=toy.hardware(gpus))
    assert next(iter(next_better(capped, plan.chosen))).startswith(f"1.13x the tokens/s {said}:")


def step_parts(text: str) -> dict[str, float]:
    """The parts of the step's time and their percentages."""
    lines = text[text.index("\ntime of a step\n") :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return {re.split(r" {2,}", line.strip())[0]: float(line.split()[-1].rstrip("%")) for line in lines}


@pytest.mark.parametrize("kind", ["zero2", "zero3-offload"])
def test_the_parts_of_a_step_sum_up_to_it(toy, kind: str) -> None:
    plan = toy.plan("4xRTX4080", kind)
    *parts, whole = step_parts(shown(plan, 100)).items()
    assert whole == ("the step", 100)
    assert sum(share for _, share in parts) == pytest.approx(100, abs=1.5), "each is rounded"
    assert "power limit" not in str(parts)


def test_what_the_power_limit_costs_has_a_name(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    chosen = plan.chosen
    time = replace(chosen.prediction.time, step_seconds=2 * chosen.prediction.time.compute_seconds)
    energy = replace(chosen.prediction.energy, at_power_limit=True)
    chosen = replace(chosen, prediction=replace(chosen.prediction, time=time, energy=energy))
    parts = step_parts(shown(replace(plan, chosen=chosen), 100))
    waited = 100 * time.exposed_communication_fraction
    assert parts["lower clock (power limit), waits"] == pytest.approx(50 - waited, abs=1)
    why = reasons(chosen, (), hardware=plan.hardware, objective="throughput", margin=0.05, lora=False)
    assert re.search(r"a lower clock at the power limit of 320 W and short waits \d\d%", " ".join(why))


def test_the_links_counted_with_are_told_and_what_was_assumed_of_them(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero2")
    told = "links: pcie4x16 through host memory between GPUs, 13 GB/s; pcie4x16 between host and GPU, 26 GB/s"
    assert told in " ".join(shown(plan, 100).split())
    assert "assumed" not in shown(plan, 100)
    plan = replace(plan, job=replace(plan.job, assumed=("--gpus 4xRTX4080@pcie4x16",)))
    said = "assumed slots: --gpus 4xRTX4080@pcie4x16; boards with several cards often have x8 or x4"
    assert said in " ".join(shown(plan, 100).split())


def test_the_host_can_be_what_lacks(toy) -> None:
    toy.host_memory_bytes = 20 << 30
    plan = toy.plan("4xRTX4080", "zero3-offload", "zero3")
    assert plan.chosen.strategy.name == "zero3"
    assert next(iter(next_better(plan, plan.chosen))) == (
        "1.05x the tokens/s with 20.4 GiB of memory in each host: "
        "zero3-offload with micro-batch 4, accumulation 4, no checkpointing"
    )


def test_where_memory_holds_nothing_back_it_says_so(toy) -> None:
    plan = toy.plan("4xH200")
    assert "memory does not hold the choice back" in shown(plan, 100)


def test_where_nothing_fits_the_nearest_is_explained(toy) -> None:
    text = shown(toy.plan("4xRTX3060", "zero1"))
    assert "memory in tensors over a step: zero1 with micro-batch 1" in text
    assert "with more memory" not in text


def test_what_was_not_simulated_is_not_said_to_be_worse(toy) -> None:
    plan = toy.plan("4xRTX4090", "zero2", "zero0")
    larger = sum(skipped.strategy.name == "zero2" for skipped in plan.skipped)
    assert 0 < larger < len(plan.skipped)
    told = list(next_better(replace(plan, alternatives=()), plan.chosen))
    assert told == [
        f"nothing that was simulated would be better; {larger} larger variants of zero2 were not, "
        "because smaller ones do not fit"
    ]
