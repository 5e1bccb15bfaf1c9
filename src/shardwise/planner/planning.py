"""A job's plan: trace its model, simulate every allowed strategy."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from shardwise.engines.facts import Architecture
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.models.families import attention_of
from shardwise.planner.cache import plan_key, plan_once
from shardwise.planner.changes import Change, nearest, small_changes
from shardwise.planner.plan import Nearest, Objective, Option, Plan, Workload
from shardwise.planner.search import MARGIN, TraceFor, fit, leanest_that_fits, search
from shardwise.planner.simulate import simulate
from shardwise.simulate.time.roofline import MULTIPROCESSORS
from shardwise.space.candidates import Refused, candidates, predictable
from shardwise.strategy import Strategy

if TYPE_CHECKING:
    from shardwise.models.build import BuiltModel
    from shardwise.simulate.step_trace import StepTrace

Making = Callable[[], AbstractContextManager[object]]
"""Entered while a plan is made, not where a cached one is read."""

MOST_CORES = 8
WORTH_OTHERS = 40
"""From this many strategies on, other processes save more than the second they take to start."""


def make_plan(
    job: Job,
    hardware: Hardware,
    *,
    objective: Objective = "throughput",
    memory_cap_bytes: int | None = None,
    making: Making = nullcontext,
    **tokens: int | None,
) -> Plan:
    """The plan of a job on a hardware, made once and then kept (planner/cache.py).

    Args:
        job: what is planned.
        hardware: for which GPUs.
        objective: the metric to rank strategies by.
        memory_cap_bytes: limit per GPU for the process.
        making: see `Making`.
        tokens: `vocab_size`, rows of the embedding (None: as the job says; for a tokenizer to be learned the
            most it may have), and `epoch_tokens`, of one pass over the data (None: not known).

    Raises:
        JobError: no strategy is allowed; and what building the model raises.
    """
    key = plan_key(job, hardware, objective=objective, memory_cap_bytes=memory_cap_bytes, **tokens)

    def make() -> Plan:
        with making():
            return _make(job, hardware, objective, memory_cap_bytes, **tokens)

    plan = plan_once(key, make)
    return replace(plan, job=replace(plan.job, name=job.name))  # all that the key leaves out


def predict_strategy(
    job: Job,
    hardware: Hardware,
    strategy: Strategy,
    *,
    memory_cap_bytes: int | None = None,
    vocab_size: int | None = None,
) -> Option:
    """Simulate one strategy, whether the rules allow it or not."""
    planning = _Planning(job, hardware, vocab_size)
    trace = planning.trace(strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel)
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
    """The nearest change of the job or the hardware with which something fits, or None."""
    attempt = partial(_attempt, vocab_size=vocab_size, margin=margin)
    return nearest(small_changes(job, hardware, memory_cap_bytes), attempt)


def _make(
    job: Job,
    hardware: Hardware,
    objective: Objective,
    memory_cap_bytes: int | None,
    *,
    vocab_size: int | None = None,
    epoch_tokens: int | None = None,
) -> Plan:
    with _other_processes(job, hardware) as executor, _no_collection():
        planning = _Planning(job, hardware, vocab_size)
        strategies, refused = planning.candidates()
        return search(
            strategies,
            refused=refused,
            hardware=hardware,
            workload=Workload.of(
                job,
                parameters=planning.built.total,
                trainable_parameters=planning.built.trainable,
                epoch_tokens=epoch_tokens,
                assumed=planning.assumed,
            ),
            objective=objective,
            trace_for=planning.trace,
            simulate=partial(simulate, memory_cap_bytes=memory_cap_bytes),
            executor=executor,
            nearest=lambda: nearest_change(
                job, hardware, memory_cap_bytes=memory_cap_bytes, vocab_size=vocab_size
            ),
            memory_cap_bytes=memory_cap_bytes,
        )


@contextmanager
def _other_processes(job: Job, hardware: Hardware) -> Iterator[Executor | None]:
    """A process per core, where there is enough to simulate.

    They import the simulator while this process imports torch, and simulate while it traces.
    """
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    if cores == 1 or len(_candidates(job, hardware, None)[0]) < WORTH_OTHERS:
        yield None
        return
    # new interpreters, which import the simulator only: a fork would inherit torch's threads
    with ProcessPoolExecutor(cores, get_context("spawn"), initializer=gc.disable) as executor:
        for _ in range(cores):  # a worker starts with its first task: do not wait for a trace
            executor.submit(_capability, hardware)
        yield executor


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


def _candidates(
    job: Job, hardware: Hardware, architecture: Architecture | None
) -> tuple[list[Strategy], list[Refused]]:
    accepted, refused = candidates(
        job.strategy,
        train=job.train,
        clip_norm=job.optimizer.clip_norm,
        lora=job.model.lora is not None,
        world_size=hardware.world_size,
        gpus_per_node=hardware.gpus_per_node,
        capability=_capability(hardware),
        architecture=architecture,
    )
    return predictable(accepted, refused, architecture)


class _Planning:
    """A job's model on a hardware: its candidates, and its traces, each recorded once."""

    def __init__(self, job: Job, hardware: Hardware, vocab_size: int | None) -> None:
        with _no_collection():
            from shardwise.kernels.target import Target
            from shardwise.models.build import check_length
            from shardwise.models.tokenizer import expected_rows
            from shardwise.objective import objective_of
            from shardwise.trace.trace import Tracer

        self._job = job
        self._hardware = hardware
        # Only the shape of a published model is needed, which the catalog may know without a network.
        model = job.model.model_copy(update={"weights": "random"})
        self.assumed: tuple[str, ...] = ()
        if vocab_size is None:
            vocab_size = expected_rows(job.model)
            if vocab_size is not None and job.model.tokenizer == "train":
                self.assumed = (f"a vocabulary of {vocab_size}, fewer if the text has fewer",)
        tracer = Tracer(
            model,
            precision=job.train.precision,
            sequence_length=job.data.sequence_length,
            vocab_size=vocab_size,
            objective=objective_of(job),
            target=Target(capability=_capability(hardware), multiprocessors=MULTIPROCESSORS),
        )
        self.built: BuiltModel = tracer.built
        check_length(self.built, job.data.sequence_length)
        # Real rows hold one sample or several (packed). A micro-batch with both needs the most memory: the
        # outputs of two kernels, and their concatenation.
        self.trace: TraceFor = cache(
            lambda rows, checkpoint_every, tensor_parallel: _timed_as_unpacked(
                tracer.trace(
                    rows=rows,
                    checkpoint_every=checkpoint_every,
                    tensor_parallel=tensor_parallel,
                    single_segment_rows=max(1, rows - 1),
                )
            )
        )

    def candidates(self) -> tuple[list[Strategy], list[Refused]]:
        config = self.built.config
        flash = attention_of(config).packing == "varlen"
        architecture = Architecture.of(config.get_text_config(), flash_attention=flash)
        return _candidates(self._job, self._hardware, architecture)


def _timed_as_unpacked(trace: StepTrace) -> StepTrace:
    """The trace with the packed row's attention as fast as the unpacked rows' own kernel.

    The packed row is traced for its memory. How many rows are packed is not known, and one in each
    micro-batch would bias the speed by the size of the micro-batch.
    """
    if not any("cudnn" in op.name for op in trace.ops):
        return trace
    ops = (replace(op, name=op.name.replace(PACKED_ROWS, UNPACKED_ROWS)) for op in trace.ops)
    return replace(trace, ops=tuple(ops))


PACKED_ROWS, UNPACKED_ROWS = "_varlen_attn", "_varlen_as_cudnn_attn"
"""Names of the kernel for packed rows, and of one as fast as cuDNN's for unpacked rows."""


def _attempt(change: Change, *, vocab_size: int | None, margin: float) -> Option | None:
    try:
        planning = _Planning(change.job, change.hardware, vocab_size)
        strategies, _ = planning.candidates()
    except JobError:
        return None
    return leanest_that_fits(
        strategies,
        hardware=change.hardware,
        trace_for=planning.trace,
        simulate=partial(simulate, memory_cap_bytes=change.memory_cap_bytes),
        margin=margin,
    )


def _capability(hardware: Hardware) -> tuple[int, int]:
    """The GPU's CUDA compute capability; Ampere's where it has none or is not known."""
    major, _, minor = (hardware.gpu.compute_capability or "8.0").partition(".")
    return int(major), int(minor)
