"""From the strategies that are allowed to a plan: each is simulated, unless a leaner one already fails."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from functools import cache, lru_cache
from heapq import heappop, heappush
from math import ceil, inf

from shardwise.errors import JobError, Problem
from shardwise.hardware.hardware import Hardware
from shardwise.planner.changes import with_host_memory
from shardwise.planner.plan import Fit, Nearest, Objective, Option, Plan, Skipped, Workload, in_words
from shardwise.planner.progress import progress
from shardwise.planner.why import reasons, shortcoming, uses_host
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.space.candidates import Refused
from shardwise.strategy import Strategy
from shardwise.units import GIB, gib

# Share of the capacity that the choice leaves free: no more than this was ever predicted too low of what a
# process needs (tests/golden; docs/accuracy.md names the rows that do not hold to it).
MARGIN = 0.05

MOST_ACCUMULATION = 65536
"""Micro-batches of a step: what each brings to the GPU is simulated one by one."""

ALIKE = 1.005
"""Costs within this factor of the best are taken for the same: the ledger's errors of time are larger."""

HOST_SIZE = 16 * GIB
"""Memory of hosts is told in multiples of this, as it is sold: pairs of modules of at least 8 GiB."""

TraceFor = Callable[[int, int, int], StepTrace]
"""Rows of a micro-batch, `checkpoint_every` and `tensor_parallel` to their trace."""
Simulate = Callable[[StepTrace, Strategy, Hardware], Prediction]


def search(
    strategies: Sequence[Strategy],
    *,
    refused: Sequence[Refused] = (),
    hardware: Hardware,
    workload: Workload,
    objective: Objective = "throughput",
    trace_for: TraceFor,
    simulate: Simulate,
    executor: Executor | None = None,
    nearest: Callable[[], Nearest | None] = lambda: None,
    margin: float = MARGIN,
    memory_cap_bytes: int | None = None,
) -> Plan:
    """The best of `strategies` for the objective, and everything that was found out on the way.

    Chosen is what fits and leaves the margin; where nothing does, the best of what fits without it; where
    nothing fits at all, nothing, and a change that would help: more memory of the hosts where they alone are
    short, else what `nearest` finds. `simulate` knows the capacity; `memory_cap_bytes` only says in the plan
    where it comes from. `executor`: as of `predict`.

    Raises:
        JobError: no strategy is allowed; it lists the rules that refused them.
    """
    if not strategies:
        raise _all_refused(refused)
    _check_accumulation(strategies)
    options, skipped = predict(
        strategies,
        hardware=hardware,
        trace_for=trace_for,
        simulate=simulate,
        executor=executor,
        margin=margin,
    )
    ranked = rank(options, objective, hardware)
    best = ranked[0] if ranked[0].fit != "no" else None
    rest = ranked if best is None else ranked[1:]
    if best is not None:
        why = reasons(best, rest, hardware=hardware, objective=objective, margin=margin)
        best = replace(best, why=why)
    return Plan(
        hardware=hardware,
        job=workload,
        objective=objective,
        margin=margin,
        memory_cap_bytes=memory_cap_bytes,
        chosen=best,
        alternatives=tuple(
            replace(option, why=shortcoming(option, best, hardware=hardware, objective=objective))
            for option in rest
        ),
        skipped=tuple(skipped),
        refused=tuple(refused),
        nearest=(_more_host_memory(ranked, hardware, margin) or nearest()) if best is None else None,
    )


def _more_host_memory(options: Sequence[Option], hardware: Hardware, margin: float) -> Nearest | None:
    """Where something fits the GPUs and the hosts are short: what needs the least of them, and how much.

    Nothing else that a prediction says depends on how much memory a host has.
    """
    boundless = replace(hardware, host_memory_bytes=None)
    fitting = [option for option in options if fit(option.prediction, boundless, margin=margin) == "fits"]
    if not fitting or hardware.host_memory_bytes is None:
        return None
    least = min(fitting, key=lambda o: (o.prediction.memory.host_bytes, cost(o, "throughput")))
    size = ceil(least.prediction.memory.host_bytes / (1 - margin) / HOST_SIZE) * HOST_SIZE
    spec = with_host_memory(hardware, size)
    what = f"{gib(size)} of memory in each host instead of {gib(hardware.host_memory_bytes)}"
    option = replace(least, fit="fits")
    return None if spec is None else Nearest(what=what, how=f"--gpus {spec}", option=option)


def predict(
    strategies: Sequence[Strategy],
    *,
    hardware: Hardware,
    trace_for: TraceFor,
    simulate: Simulate,
    executor: Executor | None = None,
    margin: float = MARGIN,
) -> tuple[list[Option], list[Skipped]]:
    """Each strategy simulated, or skipped because a leaner one of its family cannot fit.

    Of a family the leanest comes first, and the next only when that is known; families do not wait for each
    other. Those that share a trace come together, so that it is made only where something is to be simulated.
    `executor` runs simulations in other processes, while this one goes on tracing: the result is the same.
    """
    ordered = sorted(strategies, key=_appetite)
    families: dict[Strategy, deque[int]] = defaultdict(deque)
    for place, strategy in enumerate(ordered):
        families[family(strategy)].append(place)
    options: dict[int, Option] = {}
    skipped: dict[int, Skipped] = {}
    ready: list[int] = []  # a heap

    def advance(left: deque[int], failed: Sequence[Option]) -> None:
        """Of a family: what to simulate next."""
        while left:
            place = left.popleft()
            reasons = (_hopeless(ordered[place], o, hardware) for o in failed)
            reason = next(filter(None, reasons), "")
            if not reason:
                heappush(ready, place)
                return
            skipped[place] = Skipped(strategy=ordered[place], reason=reason)

    failed: dict[Strategy, list[Option]] = defaultdict(list)
    for left in families.values():
        advance(left, ())
    start = _starter(hardware=hardware, trace_for=cache(trace_for), simulate=simulate, executor=executor)
    running: dict[Future[Prediction], int] = {}
    while ready or running:
        progress(len(options) + len(skipped), len(ordered))
        if ready:
            place = heappop(ready)
            running[start(ordered[place])] = place
        for done in wait(running, timeout=0 if ready else None, return_when=FIRST_COMPLETED).done:
            place = running.pop(done)
            strategy, prediction = ordered[place], done.result()
            option = Option(
                strategy=strategy, prediction=prediction, fit=fit(prediction, hardware, margin=margin)
            )
            options[place] = option
            kin = family(strategy)
            if option.fit == "no":
                failed[kin].append(option)
            advance(families[kin], failed[kin])
    return [options[place] for place in sorted(options)], [skipped[place] for place in sorted(skipped)]


def _starter(
    *, hardware: Hardware, trace_for: TraceFor, simulate: Simulate, executor: Executor | None
) -> Callable[[Strategy], Future[Prediction]]:
    """What begins to simulate a strategy: in the executor, or here, and is then done already."""

    @cache
    def packed(rows: int, checkpoint_every: int, tensor_parallel: int) -> bytes:
        return pickle.dumps(trace_for(rows, checkpoint_every, tensor_parallel))

    def there(strategy: Strategy) -> Future[Prediction]:
        assert executor is not None
        trace = packed(strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel)
        return executor.submit(_simulated, simulate, trace, strategy, hardware)

    def here(strategy: Strategy) -> Future[Prediction]:
        future: Future[Prediction] = Future()
        trace = trace_for(strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel)
        future.set_result(simulate(trace, strategy, hardware))
        return future

    return here if executor is None else there


def _simulated(simulate: Simulate, packed: bytes, strategy: Strategy, hardware: Hardware) -> Prediction:
    return simulate(_unpacked(packed), strategy, hardware)


@lru_cache(maxsize=4)
def _unpacked(packed: bytes) -> StepTrace:
    """In another process: a trace that many strategies share, unpacked once."""
    trace: StepTrace = pickle.loads(packed)  # noqa: S301 - packed by the process that started this one
    return trace


def leanest_that_fits(
    strategies: Sequence[Strategy],
    *,
    hardware: Hardware,
    trace_for: TraceFor,
    simulate: Simulate,
    margin: float = MARGIN,
) -> Option | None:
    """The fastest of the leanest strategies, if one fits with the margin: a quick answer from few traces."""
    lean = leanest(strategies)
    options, _ = predict(lean, hardware=hardware, trace_for=trace_for, simulate=simulate, margin=margin)
    ranked = rank(options, "throughput", hardware)
    return ranked[0] if ranked and ranked[0].fit == "fits" else None


def fit(prediction: Prediction, hardware: Hardware, *, margin: float = MARGIN) -> Fit:
    """Whether the fullest GPU, and the host where its memory is known, hold the strategy."""
    memory = prediction.memory
    host = hardware.host_memory_bytes or inf
    if not memory.fits or memory.host_bytes > host:
        return "no"
    within = memory.needed_bytes <= (1 - margin) * memory.capacity_bytes and not memory.cache_flushes
    return "fits" if within and memory.host_bytes <= (1 - margin) * host else "tight"


def rank(options: Sequence[Option], objective: Objective, hardware: Hardware) -> list[Option]:
    """Best first: what fits, what is tight, each by the objective; then the rest by how far it is off.

    Of those that are as good as the best (ALIKE) comes first what keeps all on the GPU, whose speed depends
    less on the host's, and of these the one that needs the least memory.
    """

    def key(option: Option) -> tuple[int, float, int]:
        value = excess(option, hardware) if option.fit == "no" else cost(option, objective)
        return _group(option), value, option.prediction.memory.needed_bytes

    ranked = sorted(options, key=key)
    alike = [
        o
        for o in ranked
        if o.fit != "no"
        and _group(o) == _group(ranked[0])
        and cost(o, objective) <= ALIKE * cost(ranked[0], objective)
    ]
    if alike:
        first = min(alike, key=lambda o: (uses_host(o), o.prediction.memory.needed_bytes))
        ranked.remove(first)
        ranked.insert(0, first)
    return ranked


def _group(option: Option) -> int:
    """What gives its cache back comes after all else that fits: how long that takes is not predicted."""
    flushes = option.fit == "tight" and option.prediction.memory.cache_flushes > 0
    return {"fits": 0, "tight": 2 if flushes else 1, "no": 3}[option.fit]


def excess(option: Option, hardware: Hardware) -> float:
    """What it needs as a share of what there is, of a GPU or of the host; above 1 it does not fit."""
    memory = option.prediction.memory
    of_host = memory.host_bytes / (hardware.host_memory_bytes or inf)
    return max(memory.needed_bytes / memory.capacity_bytes, of_host)


def cost(option: Option, objective: Objective) -> float:
    """What the objective makes small: seconds a token, bytes, or joules a token."""
    if objective == "throughput":
        return 1 / option.prediction.time.tokens_per_second_per_gpu
    if objective == "memory":
        return option.prediction.memory.needed_bytes
    return option.prediction.energy.joules_per_token


def family(strategy: Strategy) -> Strategy:
    """What is left of a strategy without micro-batch, accumulation and checkpointing."""
    return replace(strategy, micro_batch=1, accumulation=1, checkpoint_every=0)


def leanest(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Of each family the one that needs the least memory: enough to know whether anything fits."""
    lean: dict[Strategy, Strategy] = {}
    for strategy in sorted(strategies, key=_appetite):
        lean.setdefault(family(strategy), strategy)
    return list(lean.values())


def _appetite(strategy: Strategy) -> tuple[int, float]:
    """Ascending in memory within a family: rows at a time, then blocks that keep their activations."""
    return strategy.micro_batch, strategy.checkpoint_every or inf


def _hopeless(strategy: Strategy, failed: Option, hardware: Hardware) -> str:
    """Why `strategy` cannot fit where a leaner one of its family, `failed`, does not; empty if it might.

    More rows at a time and less checkpointing add activations and free nothing but what the allocator had in
    fragments, and what the loss took at once, which goes in parts where it is larger; a single micro-batch a
    step may also do without what accumulates gradients.
    """
    if any(more < less for more, less in zip(_appetite(strategy), _appetite(failed.strategy), strict=True)):
        return ""
    memory = failed.prediction.memory
    if hardware.host_memory_bytes is not None and memory.host_bytes > hardware.host_memory_bytes:
        return f"the host does not hold {in_words(failed.strategy)} already"
    least = memory.needed_bytes - memory.terms.fragmentation_bytes
    if strategy.micro_batch > failed.strategy.micro_batch:
        least -= memory.terms.loss_bytes
    if strategy.accumulation == 1 < failed.strategy.accumulation:
        least -= memory.terms.gradients_bytes + memory.terms.engine_buffers_bytes
    if least <= memory.capacity_bytes:
        return ""
    return f"{in_words(failed.strategy)} needs {gib(memory.needed_bytes)} already"


def _check_accumulation(strategies: Sequence[Strategy]) -> None:
    most = max(strategy.accumulation for strategy in strategies)
    if most > MOST_ACCUMULATION:
        rows = max(strategy.accumulation * strategy.micro_batch for strategy in strategies)
        raise JobError(
            f"{rows} rows a step for each GPU are up to {most} micro-batches: at most {MOST_ACCUMULATION} "
            "can be planned for",
            where="train.global_batch",
            fix="fewer rows a step, more GPUs, or a larger train.micro_batch",
        )


def _all_refused(refused: Sequence[Refused]) -> JobError:
    """What refuses every strategy; the rules that refuse some only where without it nothing would be left."""
    names: dict[str, set[str]] = defaultdict(set)
    for one in refused:
        names[one.rule].add(one.strategy.name)
    everything = set().union(*names.values())
    common = [rule for rule in names if names[rule] == everything]
    others = [rule for rule in names if rule not in common]
    if common and set().union(*(names[rule] for rule in others)) != everything:
        others = []  # mending the common ones is enough
    first = {one.rule: one for one in reversed(refused)}
    problems = [
        Problem(
            what=first[rule].reason
            if rule in common and len(everything) > 1
            else f"{first[rule].strategy.name}: {first[rule].reason}",
            where=f"{first[rule].where}, rule {rule}",
            fix=_without_processes(first[rule].fix),
        )
        for rule in [*common, *others]
    ]
    return JobError("no strategy can be used for this job", problems=problems)


def _without_processes(fix: str) -> str:
    """A rule's advice without the number of processes: a plan is for all GPUs that it was asked about."""
    return ", or ".join(part for part in fix.split(", or ") if not part.startswith("--processes "))
