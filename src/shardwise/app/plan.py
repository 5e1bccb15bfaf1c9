"""A job and a hardware to a plan."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from shardwise.app.jobs import AnyJob, Changes, hardware_of, plannable, read, size_in_bytes, texts
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import with_slot
from shardwise.job import paths
from shardwise.job.load import LoadedJob
from shardwise.planner.limits import share as share_of
from shardwise.planner.limits import with_costs, with_limits, with_pareto
from shardwise.planner.plan import Objective, Plan
from shardwise.planner.planning import Making, make_plan
from shardwise.planner.search import MARGIN
from shardwise.planner.sketch import sketch


def plan(
    job: AnyJob | None = None,
    *,
    gpus: str | Hardware | None = None,
    model: str | None = None,
    changes: Changes = (),
    objective: Objective = "throughput",
    memory_cap: str | int | None = None,
    max_slowdown: str | float | None = None,
    pareto: bool = False,
    straggler: str | float | None = None,
    documents: int | None = None,
    margin: str | float | None = None,
    nearest: bool = True,
    making: Making = nullcontext,
) -> Plan:
    """Predict memory, time and energy of every allowed strategy, and choose one. Touches no GPU.

    Args:
        job: a job file, or a job; None plans for `model` alone.
        gpus: `4xRTX4080`, `2x8xH100`, a Hardware; None: this machine's.
        model: a hub id, folder or known name.
        changes: what the command line's `--set` is for: `{"train.global_batch": 32}`, or `key=value` texts.
        objective: the metric to rank strategies by.
        memory_cap: use no more of each GPU; bytes, or `16GiB`.
        max_slowdown: with the objective `energy`, choose a power limit and the number of GPUs, too: all, or a
            half, a quarter and so on. The choice takes at most this share more time a token than the fastest;
            `5%` or 0.05.
        pareto: also list what nothing else beats in time and energy, over strategies and power limits.
        straggler: standard deviation of a GPU's step time, as a share of it; `5%` or 0.05. Each step lasts as
            long as the slowest GPU's. None: 1.5 % on several nodes, none on one.
        documents: tokens of a document, where rows hold several; None: each row is one.
        margin: share of the memory that the choice leaves free; `10%` or 0.1.
        nearest: where nothing fits, look for the nearest change that does.
        making: entered while a plan is made; a kept one is only read.

    Returns:
        The plan; `print` shows the command line's table. Its `chosen`, None where nothing fits, has the
        `strategy` and the `prediction`: `.memory.needed_bytes`, `.time.step_seconds`, `.energy`.

    Raises:
        JobError: the job is wrong, or no strategy is allowed.
        MachineError: no GPU is named, and this machine has none.
    """
    of = "the fastest time per token"
    share = None if max_slowdown is None else share_of(max_slowdown, "--max-slowdown", of)
    if share is not None and objective != "energy":
        fix = "add --objective energy, or leave --max-slowdown out"
        what = f"--max-slowdown bounds the time of the least energy, and the objective is {objective}"
        raise JobError(what, where="--max-slowdown", fix=fix)
    cap = None if memory_cap is None else size_in_bytes(memory_cap, "--memory-cap")
    free = MARGIN if margin is None else share_of(margin, "--margin", "the memory")
    if job is None and model is None:
        fix = "name a job file, or a model (--model EleutherAI/gpt-neo-2.7B); --gpus names other GPUs"
        raise JobError("there is nothing to plan", where="shardwise plan", fix=fix)
    if free >= 1:
        raise JobError("a margin of all the memory leaves none", where="--margin", fix="a smaller one: 10%")
    if documents is not None and documents < 1:
        fix = "the tokens that one has on average, or leave it out"
        raise JobError(f"documents have {documents} tokens; it takes 1 or more", where="--documents", fix=fix)
    hardware = hardware_of(gpus)
    if straggler is not None:
        spread = share_of(straggler, "--straggler", "a GPU's step time")
        hardware = replace(hardware, straggler_fraction=spread)
    loaded, assumed = _job(job, model, texts(changes), hardware)

    def plan_for(hardware: Hardware) -> Plan:
        limits: dict[str, Any] = {"memory_cap_bytes": cap, "margin": free, "nearest": nearest}
        limits["document_tokens"] = documents
        made = make_plan(loaded.job, hardware, objective=objective, **limits, making=making)
        return with_pareto(made) if pareto else made

    try:
        made = plan_for(hardware)
    except JobError as error:
        raise loaded.located(error) from None
    if share is not None:
        made = with_limits(made, share, _on_fewer(hardware, plan_for))
    made = with_costs(made, loaded.job.energy)
    slot = with_slot(gpus, hardware) if isinstance(gpus, str) else None
    offloads = made.chosen is not None and made.chosen.strategy.offloads
    if slot is not None and (hardware.world_size > 1 or offloads):
        assumed = (*assumed, f"--gpus {slot}")
    return replace(made, job=replace(made.job, assumed=(*made.job.assumed, *assumed)))


def _on_fewer(hardware: Hardware, plan_for: Callable[[Hardware], Plan]) -> Iterator[Plan]:
    """Plans for half of the nodes or GPUs, and half of those; not where the job cannot be split so."""
    while hardware.world_size > 1:
        nodes = hardware.nodes // 2
        if nodes:
            hardware = replace(hardware, nodes=nodes, inter=hardware.inter if nodes > 1 else None)
        else:
            hardware = replace(hardware, gpus_per_node=hardware.gpus_per_node // 2)
        try:
            made = plan_for(hardware)
        except JobError:
            continue
        yield made


def _job(
    job: AnyJob | None, model: str | None, changes: Sequence[str], hardware: Hardware
) -> tuple[LoadedJob, tuple[str, ...]]:
    """The job that is asked for, and the flags for what was assumed."""
    if job is not None:
        more = [] if model is None else [f"model.source={model}"]
        loaded = plannable(read(job, [*changes, *more], needs_data=False))
        absent = paths.missing_data(loaded.job.data.train)
        return loaded, tuple(f"{what}: its rows are taken as full" for what, _ in absent)
    sketched = sketch(model or "", changes, world_size=hardware.world_size)
    return LoadedJob(job=sketched.job, origins={}), sketched.assumed
