"""The memory of gathered parameters in ZeRO-3: partitioned_param_coordinator.py of DeepSpeed 0.19.8.

When parameters are gathered and released is `policy.py`. The first forward and backward pass records which
modules are called; later passes gather ahead by that record. Units of the trace are DeepSpeed's leaf modules
(entire blocks, see runtime/engine.py) and those with parameters of their own. Other modules are called too,
and each call gathers ahead: the loss, the base model, its rotary embedding.

With hpZ (`shard_group`) each group of ranks keeps a copy of what is released. Until the optimizer's step the
parameter is gathered from that. With qwZ what is gathered is int8, scales not counted (CUDAQuantizer).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.engines.deepspeed import policy
from shardwise.simulate.memory.allocator import DeferredFree
from shardwise.simulate.memory.gpu import WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import BACKWARD, FORWARD, StepTrace
from shardwise.strategy import Strategy

GATHER = 4  # The stream on which parameters are gathered, with memory of its own (allgather_stream)

ROOT, MODEL, EMPTY = -1, -2, -3
"""Calls of modules that are no unit: the loss; the base model; one without any parameters."""

INT8, FP16 = 1, 2  # Bytes of an element

NEVER = -(10**10)  # The step of a parameter that was not fetched yet


@dataclass
class _Gathering:
    """One all-gather: each parameter into memory of its own (runtime/zero3.py), or all into one buffer."""

    parameters: list[int]
    awaited: int  # How many of them no module has waited for yet
    arriving: dict[int, Block | None] = field(default_factory=dict)
    shares: list[Block] = field(default_factory=list)  # From the host
    buffer: Block | None = None
    """Freed when a module has waited for each of the parameters."""
    done: bool = False
    """Whether the parameters have been copied out of the buffer, all at once (AllGatherCoalescedHandle)."""


def calls_of(trace: StepTrace) -> list[int]:
    """The modules called in one forward and backward pass: units, and what stands for the others."""
    forward = [event[1] for event in trace.events if event[0] == FORWARD]
    backward = [event[1] for event in trace.events if event[0] == BACKWARD]
    first = next((i for i, unit in enumerate(forward) if trace.units[unit].block >= 0), len(forward))
    calls = [ROOT, MODEL, *forward[:first], EMPTY, *forward[first:], ROOT]
    return calls + backward[:1] + [MODEL] + backward[1:]


class Held:
    """Memory that is added while module m runs, and free when m+2 begins (runtime: Released, Gradients)."""

    def __init__(self) -> None:
        self._latest: list[Block | None] = []
        self._earlier: list[Block | None] = []

    def add(self, memory: GpuMemory, *blocks: Block | None) -> None:
        self._latest += blocks

    def advance(self, memory: GpuMemory) -> None:
        """A module begins."""
        memory.give(*self._earlier)
        self._earlier, self._latest = self._latest, []

    def end(self, memory: GpuMemory) -> None:
        self.advance(memory)
        self.advance(memory)


class Marked:
    """Memory that is free when the GPU has come so far, as the allocator finds (record_stream).

    That depends on how far the host is ahead of it. Assumed is until the next module begins.
    """

    def __init__(self) -> None:
        self._frees: list[DeferredFree] = []

    def add(self, memory: GpuMemory, *blocks: Block) -> None:
        self._frees += map(memory.give_later, blocks)

    def end(self, memory: GpuMemory) -> None:
        memory.complete(*self._frees)
        self._frees = []

    advance = end


class Coordinator:
    """The parameters that are gathered at the moment, and those on their way."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._world = strategy.data_parallel
        self._groups = strategy.data_parallel // strategy.shard_group if strategy.shard_group else 0
        self._quantized = strategy.quantized_weights
        self._copies: dict[int, Block] = {}  # This rank's parts of its group's copy (ds_secondary_tensor)
        self._offload = strategy.offload_parameters != "none"
        self._joins = policy.joins(strategy)
        self._limit = policy.live_limit(strategy)
        self._numel = [parameter.numel for parameter in trace.parameters]
        self._item = [parameter.item_bytes for parameter in trace.parameters]
        self.persistent = {index for index, numel in enumerate(self._numel) if policy.persists(numel)}
        self._ids = policy.gather_order(trace)
        self._calls = calls_of(trace)
        self._uses = [(p, step) for step, call in enumerate(self._calls) for p in self._direct(call)]
        self._passes = self._step = self._live = 0
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_at: dict[int, int] = {}  # __most_recent_step_id_param_fetched_for
        self._gathered: dict[int, Block | None] = {}
        self._coming: dict[int, _Gathering] = {}
        self._released_at: dict[tuple[int, int], frozenset[int]] = {}
        self.recorded = policy.records_passes(trace, strategy)
        self._released = Held()
        ordered = self.recorded or not policy.steps_on_gpu(strategy)
        self.gradients: Held | Marked = Held() if ordered else Marked()
        self._homes = self.persistent if self.recorded else set()
        """Parameters that are gathered into memory which stays, as graphs read it."""

    def _direct(self, call: int) -> Sequence[int]:
        return sorted(self._trace.units[call].parameters, key=self._ids.__getitem__) if call >= 0 else ()

    def _below(self, call: int) -> Sequence[int]:
        """Parameters of a module and of those in it."""
        return self._direct(call) if call >= 0 or call == EMPTY else range(len(self._numel))

    @property
    def _complete(self) -> bool:
        return self._passes > 1

    def build(self, memory: GpuMemory) -> None:
        for parameter in sorted(self._homes):
            if self._world > 1:
                memory.take(WEIGHTS, self._item[parameter] * self._world * self.part(parameter))

    def end(self, memory: GpuMemory) -> None:
        """The end of a pass: what is recorded waits for all streams."""
        self.gradients.end(memory)
        if self.recorded:
            self._released.end(memory)

    def begin(self, memory: GpuMemory) -> None:
        """A forward pass begins (reset_step)."""
        self._passes += 1
        self._step = self._live = 0
        self._fetched_at = {}
        self._queue = deque(self._uses) if self._complete else deque()
        self._call_others(memory)

    def fetch(self, memory: GpuMemory, unit: int) -> None:
        """A unit's forward or backward pass begins (fetch_sub_module)."""
        self._fetch(memory, unit)
        self._call_others(memory)

    def _call_others(self, memory: GpuMemory) -> None:
        while self._step < len(self._calls) and self._calls[self._step] < 0:
            self._fetch(memory, self._calls[self._step])

    def _fetch(self, memory: GpuMemory, call: int) -> None:
        self._released.advance(memory)
        self.gradients.advance(memory)
        wanted = self._direct(call)
        self._gather(memory, wanted)
        # DeepSpeed iterates over a set, in any order. Here buffers are freed last.
        coming = [self._coming.pop(parameter) for parameter in wanted if parameter in self._coming]
        for gathering in coming:
            self._arrive(memory, gathering)
        for gathering in coming:
            gathering.awaited -= 1
            if not gathering.awaited and (len(gathering.parameters) > 1 or self._quantized):
                memory.give(gathering.buffer)
        if self._complete:
            self._forget_queued(wanted)
            self._prefetch(memory)
        self._step += 1

    def _forget_queued(self, wanted: Iterable[int]) -> None:
        new = {p for p in wanted if self._fetched_at.get(p, NEVER) < self._step}
        seen: set[int] = set()
        while self._queue and len(seen) < len(new):
            parameter, step = self._queue.popleft()
            self._fetched_at[parameter] = step
            seen.add(parameter)

    def _prefetch(self, memory: GpuMemory) -> None:
        taken, missing = policy.look_ahead(
            self._queue,
            live=self._live,
            limit=self._limit,
            numel=self._numel.__getitem__,
            available=lambda parameter: parameter in self._gathered or parameter in self._coming,
        )
        for parameter, step in taken:
            self._fetched_at[parameter] = max(self._fetched_at.get(parameter, NEVER), step)
        self._gather(memory, missing)

    def _gather(self, memory: GpuMemory, parameters: Iterable[int]) -> None:
        """Gathers what is missing (__all_gather_params); on one GPU from the host (NoGatherHandle)."""
        missing = [p for p in parameters if p not in self._gathered and p not in self._coming]
        missing.sort(key=self._ids.__getitem__)
        if not missing:
            return
        self._live += sum(self._numel[p] for p in missing)
        gathering = _Gathering(missing, len(missing))
        for parameter in missing:
            self._coming[parameter] = gathering
        (self._join if self._joins and self._world > 1 else self._gather_each)(memory, gathering)

    def _gather_each(self, memory: GpuMemory, gathering: _Gathering) -> None:
        for parameter in gathering.parameters:
            size = self._item[parameter] * self.part(parameter)
            from_host = self._offload and parameter not in self.persistent
            if from_host and self._world > 1:
                gathering.shares.append(memory.take(WEIGHTS, size, GATHER))
            stays = parameter in self._homes or (self._world == 1 and not from_host)
            arriving = None if stays else memory.take(WEIGHTS, self._world * size, GATHER)
            gathering.arriving[parameter] = arriving

    def _join(self, memory: GpuMemory, gathering: _Gathering) -> None:
        """Into one buffer (_all_gather_dtype, CUDAQuantizer)."""
        items = {p: INT8 if self._quantized else self._item[p] for p in gathering.parameters}
        size = self._world * sum(item * self.part(p) for p, item in items.items())
        gathering.buffer = memory.take(WEIGHTS, size, GATHER)
        if self._quantized:  # shares together, in fp16, in int8
            own = sum(map(self.part, items))
            source = sum(self._item[p] * self.part(p) for p in items)
            memory.scratch(WEIGHTS, source, FP16 * own, INT8 * own, stream=GATHER)
        if self._offload:  # partitions from the host, those of persistent parameters excepted
            sizes = [self._item[p] * self.part(p) for p in items if p not in self.persistent]
            memory.give(*[memory.take(WEIGHTS, size, GATHER) for size in sizes])

    def _arrive(self, memory: GpuMemory, gathering: _Gathering) -> None:
        if gathering.done:
            return
        gathering.done = True
        if gathering.arriving:
            self._gathered |= gathering.arriving
            memory.give(*gathering.shares)
            return
        unpacked: Block | None = None
        if self._quantized:
            own = sum(self.part(p) for p in gathering.parameters)
            unpacked = memory.take(WEIGHTS, FP16 * self._world * own, GATHER)
        elif len(gathering.parameters) == 1:
            self._gathered[gathering.parameters[0]] = gathering.buffer  # _all_gather_sequential
            return
        for parameter in gathering.parameters:
            size = self._item[parameter] * self._numel[parameter]
            self._gathered[parameter] = memory.take(WEIGHTS, size, GATHER)
        memory.give(unpacked)

    def part(self, parameter: int) -> int:
        """Elements of a parameter on each rank (_aligned_size)."""
        return -(-self._numel[parameter] // self._world)

    def copy_to_group(self, memory: GpuMemory, parameter: int) -> None:
        """With hpZ, before a parameter is partitioned (_partition_param_sec)."""
        if self._groups and parameter not in self._copies:
            size = self._item[parameter] * self._groups * self.part(parameter)
            self._copies[parameter] = memory.take(WEIGHTS, size)

    def release(self, memory: GpuMemory, unit: int) -> None:
        """A unit's forward or backward pass is over (release_sub_module)."""
        wanted = self._trace.units[unit].parameters
        going = self._not_needed_soon(unit) if self._complete else frozenset(wanted)
        self._drop(memory, [parameter for parameter in wanted if parameter in going])

    def _drop(self, memory: GpuMemory, parameters: Iterable[int]) -> None:
        for parameter in parameters:
            if parameter in self._gathered:
                self.copy_to_group(memory, parameter)
                self._released.add(memory, self._gathered.pop(parameter))
                self._live -= self._numel[parameter]

    def _not_needed_soon(self, unit: int) -> frozenset[int]:
        """Parameters to release: not persistent, and not used again soon (__params_to_release)."""
        key = (unit, self._step)
        if key not in self._released_at:
            mine = self._trace.units[unit].parameters
            fetched = {p for p in mine if self._fetched_at.get(p, NEVER) <= self._step}
            # A block has no direct parameters: they belong to its layers.
            uses = self._below if self._trace.units[unit].block >= 0 else self._own_of
            used = map(uses, self._calls[self._step :])
            later = ((parameters, sum(self._numel[p] for p in parameters)) for parameters in used)
            self._released_at[key] = policy.released(fetched - self.persistent, later, limit=self._limit)
        return self._released_at[key]

    def _own_of(self, call: int) -> Sequence[int]:
        return self._direct(call) if call >= 0 and self._trace.units[call].block < 0 else ()

    def release_all(self, memory: GpuMemory) -> None:
        """Before the optimizer's step (partition_all_parameters)."""
        self._drop(memory, list(self._gathered))
        self._released.end(memory)

    def end_step(self, memory: GpuMemory) -> None:
        """Gather what persists on the stream of the computation, and drop outdated copies (_post_step)."""
        for parameter in sorted(self.persistent):
            size = self._item[parameter] * self._world * self.part(parameter)
            there = self._world == 1 or parameter in self._homes
            self._gathered[parameter] = None if there else memory.take(WEIGHTS, size)
        for parameter in self._trace.trainable:
            memory.give(self._copies.pop(parameter, None))
