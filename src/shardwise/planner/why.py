"""Why a strategy was chosen, and why the others were not: sentences with numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from shardwise.engines import descriptor
from shardwise.errors import DoesNotFitError
from shardwise.hardware.hardware import Hardware
from shardwise.planner.changes import binds, published
from shardwise.planner.plan import Objective, Option, Plan, in_words
from shardwise.simulate.prediction import Memory, Time
from shardwise.strategy import Strategy
from shardwise.units import duration, gib

WORTH_SAYING = 0.02  # Smaller shares of a step, and smaller gains, are not mentioned

BF16_SUM_ERROR = 1e-3
"""Of the gradient's norm, by the square root of the number of micro-batches (benchmarks/accumulation)."""

MUCH_OFF = 5e-3  # About half of what bf16 passes are off there, in the trained model

ONLY = "the only one that fits"
AS_GOOD = {"throughput": "as fast", "memory": "as lean", "energy": "as frugal"}

TERMS = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "loss_bytes": "output head and loss",
    "engine_buffers_bytes": "engine buffers",
    "fragmentation_bytes": "fragmentation",
    "outside_allocator_bytes": "CUDA and NCCL",
}
"""Display names of the terms of `Memory.needed_bytes`."""


def terms(memory: Memory) -> dict[str, int]:
    """Bytes by display name, in the order of `TERMS`; they sum to `needed_bytes`."""
    values = {**asdict(memory.terms), "outside_allocator_bytes": memory.outside_allocator_bytes}
    return {name: values[key] for key, name in TERMS.items()}


def reasons(
    chosen: Option,
    rest: Sequence[Option],
    *,
    hardware: Hardware,
    objective: Objective,
    margin: float,
    lora: bool,
) -> tuple[str, ...]:
    """Why this one: compared with the next best, what it needs, what limits it."""
    return (
        _against_the_others(chosen, rest, hardware=hardware, objective=objective, margin=margin),
        _memory(chosen.prediction.memory),
        *([_flushing(chosen.prediction.memory)] if chosen.prediction.memory.cache_flushes else []),
        _step(chosen, hardware),
        *_pace(chosen.prediction.time),
        *_sums(chosen.strategy, lora=lora),
        *_checkpointing(chosen, rest),
        *_host(chosen, rest, hardware, margin, objective),
    )


def shortcoming(
    option: Option, chosen: Option | None, *, hardware: Hardware, objective: Objective
) -> tuple[str, ...]:
    """Why not this one, in at most two phrases."""
    memory, there = option.prediction.memory, hardware.host_memory_bytes
    said, lacks = [], []
    if not memory.fits:
        missing = memory.needed_bytes - memory.capacity_bytes
        lacks.append(f"{gib(memory.needed_bytes)} of a GPU, {gib(missing)} more than it has")
    if there is not None and memory.host_bytes > there:
        missing = memory.host_bytes - there
        lacks.append(f"{gib(memory.host_bytes)} of each host's memory, {gib(missing)} more than it has")
    if option.fit == "no":
        said.append(f"needs {', and '.join(lacks)}")
    elif memory.cache_flushes:
        said.append(f"fits only as {_flushing(memory)}")
    elif option.fit == "tight":
        free, where = _least_free(option, hardware)
        said.append(f"fits, and leaves {free:.1%} of {where} free: less than the margin")
    if chosen is not None:
        said.append(_compared(option, chosen, objective))
    return tuple(said)


def does_not_fit(plan: Plan) -> DoesNotFitError:
    """The error for a plan without a choice, with the nearest change that would help."""
    least, hardware, near = plan.options[0], plan.hardware, plan.nearest
    fix = f"tried {', '.join(_tried(plan))}; none of them is enough"
    if near is not None:
        needed = gib(near.option.prediction.memory.needed_bytes)
        fix = f"{near.how} ({near.what}): {in_words(near.option.strategy)} fits, in {needed}"
        of_host = needs_of_host(near.option, hardware, plan.margin)
        fix += "" if of_host is None else f", if each host has {gib(of_host)}"
    what = f"nothing fits: {in_words(least.strategy)} is nearest, and {least.why[0]}"
    where = f"{plan.job.model} on {hardware.world_size} × {hardware.gpu.name}"
    return DoesNotFitError(what, where=where, fix=fix)


def _tried(plan: Plan) -> Iterator[str]:
    """The kinds of `small_changes` that were tried."""
    yield "shorter rows"
    if plan.job.lora_rank is not None:
        yield "a quantised base"
    elif published(plan.job.model):
        yield "LoRA, on a base in NF4 too, unless the weights are random"  # a plan does not know
    if binds(plan.memory_cap_bytes, plan.hardware.gpu):
        yield "the GPU without --memory-cap"
        yield "more GPUs"
    else:
        yield "more and larger GPUs"


def better_with_memory(plan: Plan) -> list[Option]:
    """Options that would beat the choice with more GPU or host memory, the smallest need first.

    Left out is what needs at least as much of both as another one that is as good.
    """
    chosen = plan.chosen
    if chosen is None or plan.objective == "memory":
        return []
    found: list[Option] = []
    order = [(_lacking(o, plan), gain(o, chosen, plan.objective), o) for o in plan.alternatives]
    for lacks, reached, option in sorted(order, key=lambda row: (*row[0], -row[1])):
        beaten = any(
            all(less <= more for less, more in zip(_lacking(other, plan), lacks, strict=True))
            and reached < gain(other, chosen, plan.objective) + WORTH_SAYING
            for other in found
        )
        flushing = option.prediction.memory.cache_flushes > 0  # its need without flushes is not known
        if option.fit != "fits" and reached >= 1 + WORTH_SAYING and not beaten and not flushing:
            found.append(option)
    return found


def _lacking(option: Option, plan: Plan) -> tuple[int, int]:
    """Bytes needed of a GPU and of a host, each 0 where it has enough."""
    memory, known = option.prediction.memory, plan.hardware.host_memory_bytes
    of_gpu = memory.needed_bytes if memory.needed_bytes > (1 - plan.margin) * memory.capacity_bytes else 0
    of_host = memory.host_bytes if known is not None and memory.host_bytes > (1 - plan.margin) * known else 0
    return of_gpu, of_host


def gain(option: Option, than: Option, objective: Objective) -> float:
    """Ratio of tokens/s, of tokens per joule, or of inverse bytes."""
    if objective == "throughput":
        speed = option.prediction.time.tokens_per_second_per_gpu
        return speed / than.prediction.time.tokens_per_second_per_gpu
    if objective == "energy":
        return than.prediction.energy.joules_per_token / option.prediction.energy.joules_per_token
    return than.prediction.memory.needed_bytes / option.prediction.memory.needed_bytes


def _least_free(option: Option, hardware: Hardware) -> tuple[float, str]:
    """The smallest free share, and where: on the GPU or the host."""
    memory = option.prediction.memory
    free = [(1 - memory.needed_bytes / memory.capacity_bytes, "the GPU")]
    if hardware.host_memory_bytes is not None:
        free.append((1 - memory.host_bytes / hardware.host_memory_bytes, "the host's memory"))
    return min(free)


def _against_the_others(
    chosen: Option, rest: Sequence[Option], *, hardware: Hardware, objective: Objective, margin: float
) -> str:
    bests = {"throughput": "the fastest", "memory": "the least memory", "energy": "the least energy"}
    best = bests[objective]
    flushes = chosen.prediction.memory.cache_flushes > 0
    alike = [option for option in rest if option.fit == chosen.fit]
    same = [option for option in alike if (option.prediction.memory.cache_flushes > 0) == flushes]
    if chosen.fit == "tight":
        free, where = _least_free(chosen, hardware)
        leaves = f": this leaves {free:.1%} of {where}, and" if free < margin else ", and this"
        among = f"nothing leaves the margin of {margin:.0%} free{leaves} may run out of memory; {best}"
        among += f" of the {len(same) + 1} that fit without it" if same else ": nothing else fits"
    else:
        among = f"{best} of the {len(same) + 1} that fit" if same else ONLY
    nearly = max(same, key=lambda o: gain(o, chosen, objective), default=chosen)
    lead = gain(nearly, chosen, objective) - 1
    if chosen.fit == "fits" and lead >= 0.0005:  # see `rank`; less is shown as 0.0 %
        ahead = f"{in_words(nearly.strategy)} is {lead:.1%} ahead"
        cost = (
            "offloads" if nearly.strategy.offloads and not chosen.strategy.offloads else "needs more memory"
        )
        if cost == "offloads" and hardware.host_memory_bytes is None and lead > 0.005:  # no tie (`rank`)
            host = f"{gib(nearly.prediction.memory.host_bytes)} of host memory, which nobody has stated"
            return f"{best} that needs no host memory: {ahead}, but needs {host}"
        if hardware.world_size == 1 and lead > 0.005:
            return f"{best} in a plain process: {ahead}, which is within the error of such predictions"
        return f"{AS_GOOD[objective]} as any of the {len(same) + 1} that fit: {ahead}, but {cost}"
    risky = max((o for o in alike if o not in same), key=lambda o: gain(o, chosen, objective), default=None)
    if risky is not None and gain(risky, chosen, objective) > 1:
        among += f" ({in_words(risky.strategy)} has {_compared(risky, chosen, objective)}, but in it "
        among += f"{_flushing(risky.prediction.memory)})"
    other = next((o for o in same if o.strategy.name != chosen.strategy.name), None)
    if other is None:
        return among
    return f"{among}: {_compared(chosen, other, objective, other.strategy.name)}, the next best"


def _compared(option: Option, than: Option, objective: Objective, name: str = "") -> str:
    """`0.87x the tokens/s of zero3` (`name`), or `as fast as zero3` for what rounds to 1.00x."""
    better = gain(option, than, objective)
    factor = f"{better if objective == 'throughput' else 1 / better:.2f}"
    if factor == "1.00":
        return f"{AS_GOOD[objective]} as {name or 'the choice'}"
    measure = {"throughput": "tokens/s", "memory": "memory", "energy": "energy"}[objective]
    return f"{factor}x the {measure}{name and f' of {name}'}"


def _flushing(memory: Memory) -> str:
    times = "once" if memory.cache_flushes == 1 else f"{memory.cache_flushes} times"
    return f"torch's allocator gives its cache back {times} a step, which takes time that is not predicted"


def _memory(memory: Memory) -> str:
    free = 1 - memory.needed_bytes / memory.capacity_bytes
    name, most = max(terms(memory).items(), key=lambda term: term[1])
    used = gib(memory.needed_bytes).removesuffix(" GiB")
    fullest = f"{used} of {gib(memory.capacity_bytes)} on the fullest GPU, {free:.0%} free"
    share = "mostly" if most > memory.needed_bytes / 2 else "the largest part:"
    return f"{fullest}; {share} {name}, {gib(most)}"


def _step(chosen: Option, hardware: Hardware) -> str:
    """The parts of a step, with its largest waits."""
    time = chosen.prediction.time
    parts = [f"computing {_share(time.compute_seconds, time)}"]
    for link, seconds in _waits(time).items():
        if seconds >= WORTH_SAYING * time.step_seconds:
            parts.append(f"waiting for communication over {link} {_share(seconds, time)}")
    copies = time.exposed_to_copies_seconds
    if copies >= WORTH_SAYING * time.step_seconds:
        parts.append(f"waiting for copies to and from the host {_share(copies, time)}")
    if time.rest_seconds >= WORTH_SAYING * time.step_seconds:
        limit = f"the power limit of {chosen.power_limit_watts or hardware.gpu.power_watts} W"
        why = f"a lower clock at {limit} and short waits"
        if not chosen.prediction.energy.at_power_limit:
            why = "the host, slower during NCCL"
        parts.append(f"{why} {_share(time.rest_seconds, time)}")
    if time.bubble_seconds >= WORTH_SAYING * time.step_seconds:
        parts.append(f"waiting for other stages of the pipeline {_share(time.bubble_seconds, time)}")
    within = {"the optimizer": time.optimizer_seconds, "copies to and from the host": time.copy_seconds}
    worth = {name: seconds for name, seconds in within.items() if seconds >= WORTH_SAYING * time.step_seconds}
    within_step = [f"{name} {_share(seconds, time)}" for name, seconds in worth.items()]
    overlapping = f"; overlapping with these: {', '.join(within_step)}" if within_step else ""
    return f"a step takes {duration(time.step_seconds)}: {', '.join(parts)}{overlapping}"


def _pace(time: Time) -> Iterator[str]:
    """A warning where the CPU, which the plan does not know, sets the step time."""
    if time.launch_seconds >= max(time.compute_seconds, time.step_seconds / 2):
        yield (
            f"the host is busy for {_share(time.launch_seconds, time)} of the step: its processor sets "
            "the pace, and the time is less certain than that of a busy GPU"
        )


def _sums(strategy: Strategy, *, lora: bool) -> Iterator[str]:
    """What adding micro-batches up in bf16 costs, where it is much."""
    off = BF16_SUM_ERROR * strategy.accumulation**0.5
    if off >= MUCH_OFF and descriptor(strategy).sums_in_bf16(strategy, lora=lora):
        yield (
            f"adds {strategy.accumulation} micro-batches up in bf16, not in fp32: the gradient is off by "
            f"about {off:.1%} of its norm"
        )


def _waits(time: Time) -> dict[str, float]:
    """Seconds waited by link: those of each group, or a single GPU's host link."""
    waits = {time.link: time.exposed_communication_seconds - time.exposed_to_peers_seconds}
    waits[time.link_to_peers] = waits.get(time.link_to_peers, 0.0) + time.exposed_to_peers_seconds
    return waits


def _checkpointing(chosen: Option, rest: Sequence[Option]) -> Iterator[str]:
    """What recomputation costs, if the same strategy without it was simulated."""
    if chosen.strategy.checkpoint_every == 0:
        return
    for other in rest:
        same_but = other.strategy.to_json() | {"checkpoint_every": chosen.strategy.checkpoint_every}
        if other.strategy.checkpoint_every == 0 and same_but == chosen.strategy.to_json():
            speed = _compared(other, chosen, "throughput")
            verdict = {"fits": "", "tight": ", within the margin", "no": ", which does not fit"}[other.fit]
            needed = gib(other.prediction.memory.needed_bytes)
            yield f"without checkpointing: {speed}, and {needed} a GPU{verdict}"


def needs_of_host(option: Option, hardware: Hardware, margin: float) -> int | None:
    """Host memory it needs, where the hosts' memory is unknown; None where it offloads nothing."""
    kept = option.prediction.memory.host_bytes
    return round(kept / (1 - margin)) if kept and hardware.host_memory_bytes is None else None


def _host(
    chosen: Option, rest: Sequence[Option], hardware: Hardware, margin: float, objective: Objective
) -> Iterator[str]:
    kept, known = chosen.prediction.memory.host_bytes, hardware.host_memory_bytes
    needed = needs_of_host(chosen, hardware, margin)
    if needed is not None:
        yield (
            f"each host keeps {gib(kept)} in its memory: it fits if the host has {gib(needed)}, "
            "in addition to what its processes take"
        )
        yield from _without_host(chosen, rest, objective)
    elif kept and known is not None:
        yield f"each host keeps {gib(kept)} in its memory; it has {gib(known)}"


def _without_host(chosen: Option, rest: Sequence[Option], objective: Objective) -> Iterator[str]:
    """What to use where the hosts lack the memory that nobody has stated."""
    here = [o for o in rest if o.fit == "fits" and not o.strategy.offloads]
    ties = [o for o in here if gain(here[0], o, objective) <= 1.005]
    for sure in [o for o in ties if descriptor(o.strategy).plain][:1] or here[:1]:
        said = _compared(sure, chosen, objective)
        yield f"without the hosts' memory, {in_words(sure.strategy)} fits: {said}"


def _share(seconds: float, time: Time) -> str:
    return f"{seconds / time.step_seconds:.0%}"
