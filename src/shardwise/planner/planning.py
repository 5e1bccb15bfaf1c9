"""A job's plan: trace its model, simulate every allowed strategy."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing import get_context
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.launch import die_with
from shardwise.planner.cache import plan_key, plan_once
from shardwise.planner.changes import Change, small_changes
from shardwise.planner.limits import at_limit
from shardwise.planner.plan import Nearest, Objective, Option, Plan, Workload
from shardwise.planner.search import MARGIN, check_allowed, fit, leanest_that_fits, search
from shardwise.planner.simulate import simulate
from shardwise.space.candidates import predictable
from shardwise.strategy import Strategy
from shardwise.units import gib

if TYPE_CHECKING:
    from shardwise.trace.job import JobTracer

Making = Callable[[], AbstractContextManager[object]]
"""Entered while a plan is made, not where a cached one is read."""

MOST_CORES = 8
_ONE_AT_A_TIME = Lock()  # tracing changes torch for the entire process


def make_plan(
    job: Job,
    hardware: Hardware,
    *,
    objective: Objective = "throughput",
    memory_cap_bytes: int | None = None,
    margin: float = MARGIN,
    nearest: bool = True,
    making: Making = nullcontext,
    **tokens: int | None,
) -> Plan:
    """The plan of a job on a hardware, made once and then kept (planner/cache.py); see app.plan.

    `tokens`: `vocab_size`, rows of the embedding (None: as the job says; for a tokenizer to be learned the
    most it may have); `epoch_tokens`, of one pass over the data (None: not known); `document_tokens`, how
    long the documents in packed rows are (None: each row is one). JobError where no strategy is allowed.
    """
    asked: dict[str, Any] = {"memory_cap_bytes": memory_cap_bytes, "margin": margin, "nearest": nearest}
    asked |= {"objective": objective, **tokens}
    key = plan_key(job, hardware, **asked)

    def make() -> Plan:
        check_allowed(*predictable(job, hardware, None))  # before seconds go into the model
        with making(), _ONE_AT_A_TIME:
            return _make(job, hardware, **asked)

    plan = plan_once(key, make)
    plan = replace(plan, job=replace(plan.job, name=job.name))  # all that the key leaves out
    return plan if job.energy.power_limit is None else at_limit(plan, job.energy.power_limit)


def predict_strategy(
    job: Job,
    hardware: Hardware,
    strategy: Strategy,
    *,
    memory_cap_bytes: int | None = None,
    vocab_size: int | None = None,
) -> Option:
    """Simulate one strategy, whether the rules allow it or not."""
    variant = strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel
    trace = _tracer(job, hardware, vocab_size).trace(*variant)
    prediction = simulate(trace, strategy, hardware, memory_cap_bytes=memory_cap_bytes)
    return Option(strategy=strategy, prediction=prediction, fit=fit(prediction, hardware))


def nearest_change(
    job: Job,
    hardware: Hardware,
    *,
    memory_cap_bytes: int | None = None,
    vocab_size: int | None = None,
    margin: float = MARGIN,
) -> Nearest | None:
    """The first of the small changes with which something fits, or None."""
    for change in small_changes(job, hardware, memory_cap_bytes):
        option = _attempt(change, vocab_size=vocab_size, margin=margin)
        if option is not None:
            return Nearest(what=change.what, how=change.how, option=option)
    return None


def _make(
    job: Job,
    hardware: Hardware,
    objective: Objective,
    memory_cap_bytes: int | None,
    *,
    margin: float = MARGIN,
    nearest: bool = True,
    vocab_size: int | None = None,
    epoch_tokens: int | None = None,
    document_tokens: int | None = None,
) -> Plan:
    with _other_processes(job) as executor, _no_collection():
        limits = dict[str, Any](memory_cap_bytes=memory_cap_bytes, margin=margin, vocab_size=vocab_size)
        tracer = _tracer(job, hardware, vocab_size, document_tokens)
        strategies, refused = predictable(job, hardware, tracer.architecture)
        made = search(
            strategies,
            refused=refused,
            hardware=hardware,
            workload=Workload.of(
                job,
                parameters=tracer.total,
                trainable_parameters=tracer.trainable,
                epoch_tokens=epoch_tokens,
                assumed=tracer.assumed,
                notes=tracer.notes,
            ),
            objective=objective,
            trace_for=tracer.trace,
            simulate=partial(simulate, memory_cap_bytes=memory_cap_bytes),
            executor=executor,
            nearest=partial(nearest_change, job, hardware, **limits) if nearest else lambda: None,
            margin=margin,
            memory_cap_bytes=memory_cap_bytes,
        )
        if made.chosen is None or not made.chosen.strategy.offloads:
            return made
        if any(option.fit != "no" and not option.strategy.offloads for option in made.options):
            return made
        changes = small_changes(job, hardware, memory_cap_bytes)
        four_bits = next((one for one in changes if one.job.model.quantization == "nf4"), None)
        asked = four_bits and partial(_attempt, four_bits, vocab_size=vocab_size, margin=margin)
        option = asked and (asked(offload=False) or asked())
        if not four_bits or not option:
            return made
        memory, how = option.prediction.memory, four_bits.how
        hint = f"without offloading {how} fits, in {gib(memory.needed_bytes)}"
        if memory.host_bytes > 0.9 * made.chosen.prediction.memory.host_bytes:
            return made  # nothing to gain
        if memory.host_bytes:
            hint = f"{how} would keep {gib(memory.host_bytes)} in each host's memory"
        why = (*made.chosen.why, f"{hint}: {four_bits.what}")
        return replace(made, chosen=replace(made.chosen, why=why))


@contextmanager
def _other_processes(job: Job) -> Iterator[Executor | None]:
    """A process per core, for the many strategies of `auto`.

    They import the simulator while this process imports torch, and simulate while it traces.
    """
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    if cores == 1 or job.strategy != "auto":
        yield None
        return
    # new interpreters, which import the simulator only: a fork would inherit torch's threads
    with ProcessPoolExecutor(cores, get_context("spawn"), _start_worker, (os.getpid(),)) as executor:
        with _nothing_to_import():
            for _ in range(cores):  # a worker starts with its first task: do not wait for a trace
                executor.submit(os.getpid)
        yield executor


@contextmanager
def _nothing_to_import() -> Iterator[None]:
    """New processes do not run the user's script again, which would plan again without a `__main__` guard."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _start_worker(planner: int) -> None:
    """In a new process: importing this module has imported the simulator."""
    gc.disable()
    die_with(planner)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: torch, transformers and traces make millions of lasting objects.

    Afterwards they count as old, so that later collections skip them; the one at exit is turned off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if enabled:
            gc.enable()
            atexit.register(gc.disable)


def _tracer(
    job: Job, hardware: Hardware, vocab_size: int | None, document_tokens: int | None = None
) -> JobTracer:
    """The job's tracer; the last one is kept: a job is often planned for several numbers of GPUs."""
    alike = job.model_copy(update={"train": job.train.model_copy(update=_NOT_TRACED), "strategy": "auto"})
    return _kept_tracer(alike.model_dump_json(), vocab_size, hardware.gpu.capability, document_tokens)


_NOT_TRACED = {"global_batch": 1, "micro_batch": None, "checkpointing": "auto"}
"""Keys of `train` that no trace depends on: a trace is asked for by micro-batch and checkpointing."""


@lru_cache(maxsize=1)
def _kept_tracer(
    job: str, vocab_size: int | None, capability: tuple[int, int], document_tokens: int | None
) -> JobTracer:
    with _no_collection():
        from shardwise.trace.job import JobTracer

        return JobTracer(
            Job.model_validate_json(job),
            vocab_size=vocab_size,
            capability=capability,
            document_tokens=document_tokens,
            flash4=None,
        )


def _attempt(change: Change, *, vocab_size: int | None, margin: float, offload: bool = True) -> Option | None:
    try:
        tracer = _tracer(change.job, change.hardware, vocab_size)
        strategies, _ = predictable(change.job, change.hardware, tracer.architecture)
    except JobError:
        return None
    return leanest_that_fits(
        [one for one in strategies if offload or not one.offloads],
        hardware=change.hardware,
        trace_for=tracer.trace,
        simulate=partial(simulate, memory_cap_bytes=change.memory_cap_bytes),
        margin=margin,
    )
