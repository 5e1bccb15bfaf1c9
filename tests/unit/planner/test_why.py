"""The sentences of a plan hold its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.engines import parts_of
from shardwise.errors import render
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import StrategySpec
from shardwise.planner.plan import Nearest, in_words
from shardwise.planner.why import better_with_memory, does_not_fit, gain, reasons, shortcoming, terms
from shardwise.simulate.time.step import slowest_links
from shardwise.strategy import Strategy
from shardwise.units import GIB


def test_host_memory_that_nobody_stated_is_said(toy) -> None:
    assert toy.plan("4xRTX4080").chosen.why[0] == (
        "the fastest that needs no host memory: zero3-offload with micro-batch 4, accumulation 4, no "
        "checkpointing is 5.1% ahead, but needs 19.4 GiB of host memory, which nobody has stated"
    )


def test_why_compares_with_the_best_of_another_kind(toy) -> None:
    toy.host_memory_bytes = 256 << 30
    plan = toy.plan("4xRTX4080")
    chosen = plan.chosen
    other = next(o for o in plan.alternatives if o.strategy.name != chosen.strategy.name)
    factor = (
        chosen.prediction.time.tokens_per_second_per_gpu / other.prediction.time.tokens_per_second_per_gpu
    )
    fitting = sum(o.fit == "fits" for o in plan.options)
    assert chosen.why[0] == (
        f"the fastest of the {fitting} that fit: "
        f"{factor:.2f}x the tokens/s of {other.strategy.name}, the next best"
    )


@pytest.mark.parametrize(("offloads", "cost"), [(False, "needs more memory"), (True, "offloads")])
def test_a_choice_that_another_is_a_little_ahead_of_says_so(toy, offloads: bool, cost: str) -> None:
    planned = toy.plan("4xRTX4080").chosen
    alone = replace(planned.strategy, offload_optimizer="none", offload_parameters="none")
    chosen = replace(planned, strategy=alone)
    time = replace(chosen.prediction.time, step_seconds=chosen.prediction.time.step_seconds / 1.004)
    strategy = replace(alone, offload_optimizer="cpu") if offloads else alone
    ahead = replace(chosen, strategy=strategy, prediction=replace(chosen.prediction, time=time))
    why = reasons(
        chosen, [ahead], hardware=parse_hardware("4xRTX4080"), objective="throughput", margin=0.05, lora=False
    )
    expected = f"as fast as any of the 2 that fit: {in_words(strategy)} is 0.4% ahead, but {cost}"
    assert why[0] == expected


def test_what_is_ahead_by_less_than_is_shown_is_not_told_of(toy) -> None:
    chosen = toy.plan("4xRTX4080").chosen
    time = replace(chosen.prediction.time, step_seconds=chosen.prediction.time.step_seconds / 1.0004)
    ahead = replace(chosen, prediction=replace(chosen.prediction, time=time))
    why = reasons(
        chosen, [ahead], hardware=parse_hardware("4xRTX4080"), objective="throughput", margin=0.05, lora=False
    )
    assert why[0] == "the fastest of the 2 that fit"


def test_what_rounds_to_the_same_is_told_as_the_same(toy) -> None:
    chosen = toy.plan("4xRTX4080", "zero1").chosen
    time = replace(chosen.prediction.time, step_seconds=chosen.prediction.time.step_seconds * 1.004)
    strategy = replace(chosen.strategy, offload_optimizer="cpu")
    other = replace(chosen, strategy=strategy, prediction=replace(chosen.prediction, time=time))
    about = {"hardware": parse_hardware("4xRTX4080"), "objective": "throughput"}
    why = reasons(chosen, [other], margin=0.05, lora=False, **about)
    assert why[0] == "the fastest of the 2 that fit: as fast as zero1-offload, the next best"
    assert shortcoming(other, chosen, **about) == ("as fast as the choice",)
    for objective, said in (("energy", "as frugal as the choice"), ("memory", "as lean as the choice")):
        assert shortcoming(other, chosen, hardware=about["hardware"], objective=objective) == (said,)


def test_why_tells_memory_time_and_what_bounds_them(toy) -> None:
    plan = toy.plan("4xRTX4080", "zero3-offload")
    memory, time = plan.chosen.prediction.memory, plan.chosen.prediction.time
    text = "\n".join(plan.chosen.why)
    assert f"{memory.needed_bytes / 2**30:.1f} of {memory.capacity_bytes / 2**30:.1f} GiB" in text
    assert "mostly activations, 12.8 GiB" in text
    assert (
        f"communication over pcie4x16 through host memory {time.exposed_communication_fraction:.0%}" in text
    )
    within = text[text.index("overlapping with these: ") :]
    assert f"copies to and from the host {time.copy_seconds / time.step_seconds:.0%}" in within
    assert "each host keeps 19.4 GiB in its memory: it fits if the host has 20.4 GiB" in text


def test_what_gives_its_cache_back_says_so_and_is_no_reason_for_more_memory(toy) -> None:
    plan = toy.plan("4xRTX4080")
    option = better_with_memory(plan)[0]
    memory = replace(option.prediction.memory, cache_flushes=2)
    flushing = replace(option, fit="tight", prediction=replace(option.prediction, memory=memory))
    says = "torch's allocator gives its cache back 2 times a step"
    about = {"hardware": plan.hardware, "objective": plan.objective}
    assert says in shortcoming(flushing, plan.chosen, **about)[0]
    assert any(says in why for why in reasons(flushing, [], margin=0.05, lora=False, **about))
    others = tuple(flushing if o is option else o for o in plan.alternatives)
    assert flushing not in better_with_memory(replace(plan, alternatives=others))
    slower = replace(plan.chosen, fit="tight")
    why = reasons(slower, [flushing], margin=0.05, lora=False, **about)[0]
    assert f"nothing else fits ({flushing.strategy.name} with micro-batch" in why, "its time is not known"
    assert f"but in it {says}" in why
    assert "the next best" not in why


def waits(
    toy, spec: str, tensor_parallel: int, *, peers: float = 0.0, others: float = 0.0, shard_group: int = 0
) -> str:
    """The sentence about a step that waits such shares for the two groups."""
    option, hardware = toy.plan("4xRTX4080").chosen, parse_hardware(spec)
    strategy = replace(
        option.strategy,
        tensor_parallel=tensor_parallel,
        data_parallel=hardware.world_size // tensor_parallel,
        shard_group=shard_group,
    )
    step = option.prediction.time.step_seconds
    time = replace(
        option.prediction.time,
        exposed_communication_seconds=(peers + others) * step,
        exposed_to_peers_seconds=peers * step,
        **dict(zip(("link", "link_to_peers"), slowest_links(hardware, strategy), strict=True)),
    )
    option = replace(option, strategy=strategy, prediction=replace(option.prediction, time=time))
    why = reasons(option, (), hardware=hardware, objective="throughput", margin=0.05, lora=False)
    return next(sentence for sentence in why if sentence.startswith("a step takes"))


def test_each_wait_names_the_link_of_its_group(toy) -> None:
    told = waits(toy, "2x8xH100+ib400", 8, peers=0.11, others=0.05)
    assert "waiting for communication over 8xib400 5%" in told
    assert "waiting for communication over nvlink4 11%" in told
    assert "ib400" not in waits(toy, "2x8xH100+ib400", 8, peers=0.11)
    by_node = waits(toy, "2x8xH100+ib400", 1, others=0.05, shard_group=8)
    assert "waiting for communication over nvlink4 and 8xib400 5%" in by_node
    over_nodes = waits(toy, "4x8xH100+eth25", 1, others=0.05, shard_group=16)
    assert "waiting for communication over 1xeth25 5%" in over_nodes, "one link, one name"
    alone = waits(toy, "1xRTX4080", 1, others=0.05)
    assert f"waiting for communication over {parse_hardware('1xRTX4080').host_link.name} 5%" in alone
    one_node = waits(toy, "8xH100", 4, peers=0.11, others=0.05)
    assert "waiting for communication over nvlink4 16%" in one_node, "one link, one number"


def test_waiting_for_copies_is_not_waiting_for_other_gpus(toy) -> None:
    option = toy.plan("4xRTX4080").chosen
    step = option.prediction.time.step_seconds
    time = replace(
        option.prediction.time,
        exposed_communication_seconds=0.05 * step,
        exposed_to_copies_seconds=0.25 * step,
    )
    one = replace(option, prediction=replace(option.prediction, time=time))
    why = "\n".join(
        reasons(
            one, (), hardware=parse_hardware("4xRTX4080"), objective="throughput", margin=0.05, lora=False
        )
    )
    assert "waiting for communication over pcie4x16 through host memory 5%" in why
    assert "waiting for copies to and from the host 25%" in why


def test_a_step_that_the_host_sets_the_pace_of_says_so(toy) -> None:
    option = toy.plan("4xRTX4080").chosen
    step = option.prediction.time.step_seconds

    def pace(host: float, gpu: float) -> list[str]:
        time = replace(option.prediction.time, launch_seconds=host * step, compute_seconds=gpu * step)
        one = replace(option, prediction=replace(option.prediction, time=time))
        hardware = parse_hardware("4xRTX4080")
        why = reasons(one, (), hardware=hardware, objective="throughput", margin=0.05, lora=False)
        return [sentence for sentence in why if "sets the pace" in sentence]

    assert pace(0.49, 0.4) == pace(0.7, 0.71) == []
    (said,) = pace(0.7, 0.4)
    assert said.startswith("the host is busy for 70% of the step")


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "percent"),
    [
        ("zero1", 24, None),
        ("zero1", 25, "0.5%"),
        ("zero0", 64, "0.8%"),
        ({"engine": "deepspeed", "stage": 1, "offload_optimizer": "cpu"}, 64, "0.8%"),
        ("zero2", 64, None),
        ("zero3", 64, None),
        ("ddp-zero1", 64, None),
        ("single", 64, None),
        ("ddp", 64, "0.8%"),
        ("fsdp2", 64, None),
        ({"engine": "fsdp2", "shard_group": 2, "reduce_dtype": "bf16"}, 64, "0.8%"),
        ({"engine": "fsdp2", "shard_group": 2}, 64, None),
        ({"engine": "fsdp2", "reduce_dtype": "bf16"}, 64, None),
    ],
)
def test_sums_in_bf16_are_said_where_they_cost_half_a_percent(
    toy, strategy: str | dict[str, object], micro_batches: int, percent: str | None
) -> None:
    option = toy.plan("4xRTX4080").chosen
    spec = strategy if isinstance(strategy, str) else StrategySpec.model_validate(strategy)
    parts = {"data_parallel": 4, "accumulation": micro_batches}
    one = replace(option, strategy=Strategy(**parts_of(spec), **parts))
    why = reasons(
        one, (), hardware=parse_hardware("4xRTX4080"), objective="throughput", margin=0.05, lora=False
    )
    said = [
        sentence.split("about ")[1]
        for sentence in why
        if f"adds {micro_batches} micro-batches up" in sentence
    ]
    assert said == ([] if percent is None else [f"{percent} of its norm"])


def test_a_fast_network_does_not_hold_up_a_slow_node(toy) -> None:
    told = waits(toy, "2x8xH100@pcie4+ib400", 1, others=0.2)
    assert "waiting for communication over pcie4x16 20%" in told
    assert "ib400" not in told
    told = waits(toy, "128x8xH100+8xib400", 1, others=0.2)
    assert "waiting for communication over nvlink4 and 8xib400 20%" in told, "the ring crosses both, as fast"


def test_one_gpu_waits_for_no_communication(toy) -> None:
    assert "communication" not in "\n".join(toy.plan("1xA100-SXM-80GB").chosen.why)


def test_what_checkpointing_costs_is_told(toy) -> None:
    plan = toy.plan("4xA100-SXM-80GB", objective="memory")
    chosen = plan.chosen
    assert chosen.strategy.checkpoint_every == 1
    bare = replace(chosen.strategy, checkpoint_every=0)
    without = next(o for o in plan.alternatives if o.strategy == bare)
    told = next(sentence for sentence in chosen.why if sentence.startswith("without checkpointing"))
    assert f"{gain(without, chosen, 'throughput'):.2f}x the tokens/s" in told
    assert told.endswith(f"{without.prediction.memory.needed_bytes / 2**30:.1f} GiB a GPU"), "it fits"


def test_leaving_checkpointing_out_is_no_advice_where_that_does_not_fit(toy) -> None:
    chosen = toy.plan("8xRTX4080", "zero3").chosen
    told = next(sentence for sentence in chosen.why if sentence.startswith("without checkpointing"))
    assert told.endswith("17.1 GiB a GPU, which does not fit")


def test_the_others_are_told_what_they_lack(toy) -> None:
    plan = toy.plan("4xRTX4090")
    for option in plan.alternatives:
        memory = option.prediction.memory
        if option.fit == "no":
            assert f"{(memory.needed_bytes - memory.capacity_bytes) / 2**30:.1f} GiB more" in option.why[0]
        elif option.fit == "tight":
            assert "less than the margin" in option.why[0]
        factor = f"{gain(option, plan.chosen, 'throughput'):.2f}"
        assert option.why[-1] == ("as fast as the choice" if factor == "1.00" else f"{factor}x the tokens/s")


def test_more_memory_buys_more_each_time(toy) -> None:
    plan = toy.plan("4xRTX4080")
    better = better_with_memory(plan)
    assert len(better) >= 2
    assert all(o.fit != "fits" for o in better)
    needed = [o.prediction.memory.needed_bytes for o in better]
    gains = [gain(o, plan.chosen, "throughput") for o in better]
    assert needed == sorted(needed)
    assert gains == sorted(gains)
    assert gains[0] > 1.02
    assert better_with_memory(toy.plan("4xRTX4080", objective="memory")) == []


def test_of_those_that_lack_the_same_host_memory_only_the_best_is_told(toy) -> None:
    toy.host_memory_bytes = 20 << 30
    plan = toy.plan("4xRTX3080", "zero3-offload", "zero2")
    within = (1 - plan.margin) * plan.capacity_bytes
    lacking = [
        gain(option, plan.chosen, "throughput")
        for option in plan.alternatives
        if option.fit == "tight" and option.prediction.memory.needed_bytes <= within
    ]
    assert sum(factor > 1.02 for factor in lacking) == 4
    better = better_with_memory(plan)
    told = [o for o in better if o.prediction.memory.needed_bytes <= within]
    assert [gain(o, plan.chosen, "throughput") for o in told] == [max(lacking)]


def test_a_tight_host_is_not_called_a_tight_gpu(toy) -> None:
    toy.host_memory_bytes = 20 << 30
    plan = toy.plan("4xRTX3080", "zero3-offload", "zero2")
    tight = next(option for option in plan.alternatives if option.fit == "tight")
    assert tight.why[0] == "fits, and leaves 3.1% of the host's memory free: less than the margin"


def test_a_choice_without_the_margin_says_of_what_it_leaves_less(toy) -> None:
    toy.host_memory_bytes = 20 << 30
    chosen = toy.plan("4xRTX3080", "zero3-offload").chosen
    assert chosen.fit == "tight"
    assert chosen.why[0].startswith(
        "nothing leaves the margin of 5% free: this leaves 3.1% of the host's memory, and may run out of "
        "memory; the fastest of the "
    )
    toy.host_memory_bytes = None
    chosen = toy.plan("4xRTX4080", "zero1", margin=0.30).chosen
    free = 1 - chosen.prediction.memory.needed_bytes / chosen.prediction.memory.capacity_bytes
    assert f"margin of 30% free: this leaves {free:.1%} of the GPU, and" in chosen.why[0]


def test_the_terms_sum_up_to_what_is_needed(toy) -> None:
    memory = toy.plan("4xRTX4080").chosen.prediction.memory
    assert sum(terms(memory).values()) == memory.needed_bytes


def test_the_nearest_change_says_what_it_needs_of_the_hosts(toy) -> None:
    kept = 200 * GIB
    fitting = toy.plan("4xRTX3090", "zero1").chosen
    memory = replace(fitting.prediction.memory, host_bytes=kept)
    option = replace(fitting, prediction=replace(fitting.prediction, memory=memory))
    change = Nearest(what="RTX 3090", how="--gpus 4xRTX-3090", option=option)
    plan = toy.plan("4xRTX3060", "zero1", nearest=lambda: change)
    assert "GiB, if each host has 210.5 GiB" in render(does_not_fit(plan))
    known = replace(plan, hardware=parse_hardware("4xRTX3060+512GiB"))
    assert "if each host" not in render(does_not_fit(known))


def test_the_error_names_the_nearest_change(toy) -> None:
    fitting = toy.plan("4xRTX3090", "zero1").chosen
    change = Nearest(what="RTX 3090, of 24 GB, instead of RTX 3060", how="--gpus 4xRTX-3090", option=fitting)
    error = does_not_fit(toy.plan("4xRTX3060", "zero1", nearest=lambda: change))
    assert error.exit_code == 3
    text = render(error)
    assert "needs 12.2 GiB of a GPU, 0.5 GiB more than it has" in text
    assert "at:  toy-1.3b on 4 × RTX 3060" in text
    assert "fix: --gpus 4xRTX-3090 (RTX 3090, of 24 GB, instead of RTX 3060): zero1 with" in text
    hopeless = toy.plan("4xRTX3060", "zero1")
    tried = "fix: tried shorter rows, LoRA, on a base in NF4 too, unless the weights are random, "
    tried += "more and larger GPUs;"
    assert tried in render(does_not_fit(hopeless))
    adapters = replace(hopeless, job=replace(hopeless.job, lora_rank=16))
    assert "shorter rows, a quantised base, more and larger GPUs" in render(does_not_fit(adapters))


def test_what_was_not_tried_is_not_said_to_be(toy) -> None:
    plan = toy.plan("4xRTX3060", "zero1")
    without_weights = replace(plan, job=replace(plan.job, model="gpt3-13b"))
    assert "fix: tried shorter rows, more and larger GPUs;" in render(does_not_fit(without_weights))
    capped = replace(plan, memory_cap_bytes=8 << 30)
    assert ", the GPU without --memory-cap, more GPUs;" in render(does_not_fit(capped))
    above = replace(plan, memory_cap_bytes=64 << 30)
    assert ", more and larger GPUs;" in render(does_not_fit(above))
