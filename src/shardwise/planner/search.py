"""From allowed strategies to a plan: each is simulated, unless a leaner one already fails."""

import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from heapq import heappop, heappush
from math import ceil, inf

from shardwise.engines import descriptor
from shardwise.errors import JobError, Problem
from shardwise.hardware.hardware import Hardware
from shardwise.planner.changes import with_host_memory
from shardwise.planner.evidence import evidence_of
from shardwise.planner.plan import Fit, Nearest, Objective, Option, Plan, Skipped, Workload, in_words
from shardwise.planner.why import ONLY, reasons, shortcoming
from shardwise.simulate.prediction import Prediction
from shardwise.simulate.step_trace import StepTrace
from shardwise.space.candidates import Refused
from shardwise.strategy import Strategy
from shardwise.units import GIB, gib


class RefusedError(JobError):
    """Rules refuse every strategy that the job leaves open."""


Report = Callable[[int, int], object]
"""Called with the number of strategies that are decided, and of all."""

# Not an argument: the tracer and the cache of plans lie between the terminal and the search, and the key of
# a cached plan must not depend on who watches.
_report: ContextVar[Report] = ContextVar("report", default=lambda *_: None)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Searches that run within call `report`."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


# Share of the capacity that the choice leaves free: no prediction was too low by more than this
# (tests/golden; docs/accuracy.md names the exceptions).
MARGIN = 0.05

MOST_ACCUMULATION = 65536  # micro-batches per step; the simulation is per micro-batch

UNMEASURED = 0.13  # Error of times where no run like it was measured: the held-out rows' (docs/accuracy.md)
TIE_FACTOR = 1.005  # costs within it count as equal to the best; the errors of predicted time are larger

HOST_SIZE = 16 * GIB  # Host memory is rounded up to a multiple of this: pairs of modules of at least 8 GiB

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
    """Simulate strategies, choose the best for the objective, and explain the rest.

    The choice fits and leaves the margin free; where nothing does, it fits without the margin. Where nothing
    fits, the plan names a change that would help: more host memory where only that is short, else what
    `nearest` finds. `simulate` knows the capacity; `memory_cap_bytes` is only recorded. `executor`: see
    `predict`.

    Raises:
        RefusedError: no strategy is allowed; it lists the rules that refused them.
    """
    check_allowed(strategies, refused)
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
        lora = workload.lora_rank is not None
        first, *why = reasons(best, rest, hardware=hardware, objective=objective, margin=margin, lora=lora)
        if {best.strategy.name} == {one.name for one in (*strategies, *(no.strategy for no in refused))}:
            first = first.replace(ONLY, f"the job names {best.strategy.name}")
        best = replace(best, why=(first, *why))
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


def check_allowed(strategies: Sequence[Strategy], refused: Sequence[Refused]) -> None:
    """RefusedError where nothing is left; JobError where a step has too many micro-batches."""
    if not strategies:
        raise _all_refused(refused)
    _check_accumulation(strategies)


def _more_host_memory(options: Sequence[Option], hardware: Hardware, margin: float) -> Nearest | None:
    """The host memory with which something fits, where only the hosts are short.

    No other part of a prediction depends on the size of host memory.
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
    """Simulate each strategy, or skip it because a leaner one of its family cannot fit.

    A family is simulated from its leanest strategy on, one after the other; families run in parallel.
    Strategies that share a trace are neighbours, so a trace is made only where it is used. `executor` runs
    simulations in other processes while this one traces; the result is the same.
    """
    ordered = sorted(strategies, key=_memory_order)
    families: dict[Strategy, deque[int]] = defaultdict(deque)
    for place, strategy in enumerate(ordered):
        families[family(strategy)].append(place)
    options: dict[int, Option] = {}
    skipped: dict[int, Skipped] = {}
    ready: list[int] = []  # a heap

    def schedule_next(left: deque[int], failed: Sequence[Option]) -> None:
        """Queue a family's next strategy; skip those that cannot fit."""
        while left:
            place = left.popleft()
            reasons = (_cannot_fit(ordered[place], o, hardware) for o in failed)
            reason = next(filter(None, reasons), "")
            if not reason:
                heappush(ready, place)
                return
            skipped[place] = Skipped(strategy=ordered[place], reason=reason)

    failed: dict[Strategy, list[Option]] = defaultdict(list)
    for left in families.values():
        schedule_next(left, ())
    start = _starter(hardware=hardware, trace_for=cache(trace_for), simulate=simulate, executor=executor)
    running: dict[Future[Prediction], int] = {}
    while ready or running:
        _report.get()(len(options) + len(skipped), len(ordered))
        if ready:
            place = heappop(ready)
            running[start(ordered[place])] = place
        for done in wait(running, timeout=0 if ready else None, return_when=FIRST_COMPLETED).done:
            place = running.pop(done)
            strategy, prediction = ordered[place], done.result()
            fits, own_family = fit(prediction, hardware, margin=margin), family(strategy)
            options[place] = Option(strategy=strategy, prediction=prediction, fit=fits)
            if fits == "no":
                failed[own_family].append(options[place])
            schedule_next(families[own_family], failed[own_family])
    return [options[place] for place in sorted(options)], [skipped[place] for place in sorted(skipped)]


def _starter(
    *, hardware: Hardware, trace_for: TraceFor, simulate: Simulate, executor: Executor | None
) -> Callable[[Strategy], Future[Prediction]]:
    """A function that starts a simulation, in the executor or in this process."""

    @cache
    def packed(rows: int, checkpoint_every: int, tensor_parallel: int) -> bytes:
        return pickle.dumps(trace_for(rows, checkpoint_every, tensor_parallel))

    def start(strategy: Strategy) -> Future[Prediction]:
        of_trace = strategy.micro_batch, strategy.checkpoint_every, strategy.tensor_parallel
        if executor is not None:
            return executor.submit(_simulated, simulate, packed(*of_trace), strategy, hardware)
        future: Future[Prediction] = Future()
        future.set_result(simulate(trace_for(*of_trace), strategy, hardware))
        return future

    return start


def _simulated(simulate: Simulate, packed: bytes, strategy: Strategy, hardware: Hardware) -> Prediction:
    return simulate(_unpacked(packed), strategy, hardware)


@lru_cache(maxsize=4)  # once per process: many strategies share a trace
def _unpacked(packed: bytes) -> StepTrace:
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
    """The fastest of the leanest strategies if it fits with the margin; needs few traces."""
    lean = leanest(strategies)
    options, _ = predict(lean, hardware=hardware, trace_for=trace_for, simulate=simulate, margin=margin)
    ranked = rank(options, "throughput", hardware)
    return ranked[0] if ranked and ranked[0].fit == "fits" else None


def fit(prediction: Prediction, hardware: Hardware, *, margin: float = MARGIN) -> Fit:
    """Whether the strategy fits the fullest GPU, and the host where its memory is known."""
    memory = prediction.memory
    host = hardware.host_memory_bytes or inf
    if not memory.fits or memory.host_bytes > host:
        return "no"
    within = memory.needed_bytes <= (1 - margin) * memory.capacity_bytes and not memory.cache_flushes
    return "fits" if within and memory.host_bytes <= (1 - margin) * host else "tight"


def rank(options: Sequence[Option], objective: Objective, hardware: Hardware) -> list[Option]:
    """Best first: what fits, then what is tight, each by the objective; then the rest by its excess.

    Among ties for the best (TIE_FACTOR) strategies without offloading come first, then those that recompute
    nothing, then those with the least memory. Within the error of the predictions, the plain process wins on
    one GPU, and what needs no host memory where nobody has stated how much there is.
    """

    def key(option: Option) -> tuple[int, float, int]:
        value = excess(option, hardware) if option.fit == "no" else cost(option, objective)
        return _group(option), value, option.prediction.memory.needed_bytes

    ranked = sorted(options, key=key)
    alike = [o for o in ranked if o.fit != "no" and _group(o) == _group(ranked[0])]
    one_gpu = hardware.world_size == 1
    lead = next(iter(alike), None)
    for surer in [_plain] * one_gpu + [_on_gpu] * (hardware.host_memory_bytes is None):
        sure = next(filter(surer, alike), None)
        if lead and sure and not surer(lead) and _within_error(sure, lead, objective, hardware):
            lead = sure
    ties = [o for o in alike if lead and cost(o, objective) <= TIE_FACTOR * cost(lead, objective)]
    if ties:
        simple = [(one_gpu and not _plain(o), not _on_gpu(o), o.strategy.checkpoint_every > 0) for o in ties]
        memory = [(*how, o.prediction.memory.needed_bytes) for how, o in zip(simple, ties, strict=True)]
        first = ties[memory.index(min(memory))]
        ranked.remove(first)
        ranked.insert(0, first)
    return ranked


def _plain(option: Option) -> bool:
    return descriptor(option.strategy).plain


def _on_gpu(option: Option) -> bool:
    return not option.strategy.offloads


def _within_error(option: Option, lead: Option, objective: Objective, hardware: Hardware) -> bool:
    """Whether it costs more than `lead` by less than either prediction is off on average."""

    def error(one: Option) -> float:
        found = evidence_of(one.strategy, one.prediction, hardware)
        if objective == "memory":
            return found.memory.mean if found.memory else 0.0
        return found.time.mean if found.time else UNMEASURED  # of energy, too: it is mostly time

    return cost(option, objective) <= (1 + max(error(option), error(lead))) * cost(lead, objective)


def _group(option: Option) -> int:
    """What flushes the allocator's cache comes last of what fits: the time for it is not predicted."""
    flushes = option.fit == "tight" and option.prediction.memory.cache_flushes > 0
    return {"fits": 0, "tight": 2 if flushes else 1, "no": 3}[option.fit]


def excess(option: Option, hardware: Hardware) -> float:
    """What is missing of a GPU and of a host, as shares of what each has; above 0 it does not fit."""
    memory = option.prediction.memory
    of_gpu, host = memory.needed_bytes / memory.capacity_bytes, hardware.host_memory_bytes or inf
    return max(0.0, of_gpu - 1) + max(0.0, memory.host_bytes / host - 1)


def cost(option: Option, objective: Objective) -> float:
    """What the objective minimizes: seconds per token, bytes, or joules per token."""
    if objective == "throughput":
        return 1 / option.prediction.time.tokens_per_second_per_gpu
    if objective == "memory":
        return option.prediction.memory.needed_bytes
    return option.prediction.energy.joules_per_token


def family(strategy: Strategy) -> Strategy:
    """A strategy with micro-batch, accumulation and checkpointing removed."""
    return replace(strategy, micro_batch=1, accumulation=1, checkpoint_every=0)


def leanest(strategies: Sequence[Strategy]) -> list[Strategy]:
    """The leanest strategy of each family: enough to know whether anything fits."""
    lean: dict[Strategy, Strategy] = {}
    for strategy in sorted(strategies, key=_memory_order):
        lean.setdefault(family(strategy), strategy)
    return list(lean.values())


def _memory_order(strategy: Strategy) -> tuple[int, float]:
    """Sort key, ascending in memory within a family: micro-batch, then blocks without recomputation."""
    return strategy.micro_batch, strategy.checkpoint_every or inf


def _cannot_fit(strategy: Strategy, failed: Option, hardware: Hardware) -> str:
    """Why `strategy` cannot fit where a leaner one of its family, `failed`, does not; empty if it might.

    A larger micro-batch and less checkpointing add activations. They can save only fragmentation, the loss's
    memory (a larger loss runs in chunks), and with one micro-batch per step the buffers for accumulation.
    """
    orders = zip(_memory_order(strategy), _memory_order(failed.strategy), strict=True)
    if any(more < less for more, less in orders):
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
        what = f"{rows} rows a step for each GPU are up to {most} micro-batches: at most {MOST_ACCUMULATION} "
        what += "can be planned for"
        fix = "fewer rows a step, more GPUs, or a larger train.micro_batch"
        raise JobError(what, where="train.global_batch", fix=fix)


def _all_refused(refused: Sequence[Refused]) -> RefusedError:
    """The rules that refuse the strategies that the fewest rules refuse, those that refuse most first."""
    rules: dict[str, dict[str, Refused]] = defaultdict(dict)
    for one in refused:
        rules[one.strategy.name].setdefault(one.rule, one)
    fewest = min(map(len, rules.values()))
    near = [found for found in rules.values() if len(found) == fewest]
    number = Counter(rule for found in near for rule in found)
    problems = []
    for rule, times in number.most_common():
        if 2 * times < max(number.values()):  # it would hide what has to be changed
            break
        one = next(found[rule] for found in near if rule in found)
        among = f" and {times - 1} more" if times > 1 else ""
        common = len(rules) > 1 and all(rule in found for found in rules.values())
        what = one.reason if common else f"{one.strategy.name}{among}: {one.reason}"
        # not --processes: a plan is for all GPUs that were named
        fixes = [part for part in one.fix.split(", or ") if not part.startswith("--processes ")]
        problems.append(Problem(what=what, where=f"{one.where}, rule {rule}", fix=", or ".join(fixes)))
    return RefusedError("no strategy can be used for this job", problems=problems)
