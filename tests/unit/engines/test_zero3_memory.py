"""Sizes are multiples of 512 bytes, so that what is allocated is what was asked for."""

from dataclasses import replace

import pytest

from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.memory import coordinator as zero_coordinator
from shardwise.engines.deepspeed.memory import zero3
from shardwise.engines.deepspeed.memory.coordinator import Coordinator, calls_of
from shardwise.engines.deepspeed.memory.zero3 import Zero3Memory as Zero3
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.engine import pinned
from shardwise.simulate.memory.gpu import GRADIENTS, Block, GpuMemory
from shardwise.simulate.step_trace import (
    ALLOC,
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    FORWARD_END,
    FREE,
    Event,
    Parameter,
    StepTrace,
    Unit,
)
from shardwise.strategy import Strategy

K = 1024
BLOCKS = 4
BLOCK = 256 * K
"""Elements of a block's one matrix, of the embedding and of the head, which are not tied."""
NORM = 1 * K
"""Elements of the norm before the head: so few that it persists."""
EMBEDDING, LAST_NORM, HEAD = BLOCKS, BLOCKS + 1, BLOCKS + 2
"""Units, and indices of their parameters; units 0 to 3 are blocks."""
HIDDEN = 4096


def _trace() -> StepTrace:
    names = [*(f"blocks.{i}" for i in range(BLOCKS)), "embedding", "norm", "head"]
    sizes = [*[BLOCK] * (BLOCKS + 1), NORM, BLOCK]
    order = [EMBEDDING, *range(BLOCKS), LAST_NORM, HEAD]
    events: list[Event] = []
    for unit in order:
        events += [(FORWARD, unit), (FORWARD_END, unit)]
    for unit in reversed(order):
        # the gradient of the unit's output is made by the unit above, and freed in this one
        events += [(BACKWARD, unit), (ALLOC, unit, HIDDEN, 0), (FREE, unit + 1), (BACKWARD_END, unit)]
    return StepTrace(
        parameters=tuple(
            Parameter(name=name, shape=(size,), item_bytes=2, trainable=True)
            for name, size in zip(names, sizes, strict=True)
        ),
        buffers=(),
        units=tuple(
            Unit(name=name, block=i if i < BLOCKS else -1, parameters=(i,)) for i, name in enumerate(names)
        ),
        events=tuple(events),
        ops=(),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


TOTAL = (BLOCKS + 2) * BLOCK + NORM
PART = TOTAL // 2
STEP_COUNT = 512


def _strategy(**values: object) -> Strategy:
    return replace(Strategy(engine="deepspeed", stage=3, data_parallel=2), **values)  # type: ignore[arg-type]


class Run:
    def __init__(self, trace: StepTrace | None = None, **values: object) -> None:
        self.trace = trace or _trace()
        self.memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
        self.engine = Zero3(self.trace, _strategy(**values))
        self.engine.build(self.memory)
        self.built = self.allocated

    @property
    def allocated(self) -> int:
        return self.memory.allocator.allocated_bytes

    def forward(self) -> list[int]:
        """Bytes above the built state while each unit runs."""
        self.engine.begin(self.memory, 0, last=True)
        during = []
        for kind, unit, *_ in self.trace.events:
            if kind == FORWARD:
                self.engine.forward(self.memory, unit)
                during.append(self.allocated - self.built)
            elif kind == FORWARD_END:
                self.engine.forward_end(self.memory, unit)
        return during

    def backward(self, *, last: bool = True) -> list[int]:
        """The same, before the gradients of a unit exist."""
        during = []
        for kind, unit, *_ in self.trace.events:
            if kind == BACKWARD:
                self.engine.backward(self.memory, unit)
                during.append(self.allocated - self.built)
                self.engine.gradient(self.memory, unit, self._gradient(unit))
            elif kind == BACKWARD_END:
                self.engine.backward_end(self.memory, unit)
        self.engine.end(self.memory, 0, last=last)
        return during

    def _gradient(self, unit: int) -> Block:
        return self.memory.take(GRADIENTS, self.trace.parameters[unit].size_bytes)

    def step(self) -> None:
        self.engine.step(self.memory)


def test_a_rank_keeps_its_part_of_everything_and_one_bucket() -> None:
    run = Run()
    bucket = 2 * TOTAL
    assert run.built == bucket + (2 + 4 + 2) * PART  # weights, masters, gradients
    run.forward()
    run.backward()
    run.step()
    persistent = 2 * NORM
    assert run.allocated == run.built + 8 * PART + STEP_COUNT + persistent


def test_gradients_of_micro_batches_are_added_up_in_fp32() -> None:
    assert Run(accumulation=2).built - Run().built == 2 * PART


def test_the_first_pass_gathers_a_unit_when_it_runs_and_keeps_its_memory_for_the_next() -> None:
    blocks = [4 * BLOCK] * BLOCKS
    assert Run().forward() == [2 * BLOCK, *blocks, 2 * BLOCK + 2 * NORM, 2 * BLOCK]


def test_later_passes_gather_ahead_each_parameter_into_its_own_memory() -> None:
    run = Run()
    run.forward()
    run.backward()
    run.step()
    run.built = run.allocated
    # All fits into what is gathered ahead, and the backward pass needs it again soon.
    whole = 2 * TOTAL - 2 * NORM
    assert run.forward() == [whole] * (BLOCKS + 3)
    during = run.backward()
    assert during[0] == whole
    assert during[-1] == 4 * BLOCK  # the embedding's, and what the first block has let go


def test_what_is_used_again_soon_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RELEASE_AT", BLOCK)
    monkeypatch.setattr(policy, "PREFETCH", 1)
    run = Run()
    run.forward()
    run.backward()
    run.step()
    run.built = run.allocated
    # Beside the unit that runs, the memory of the one before; the norm persists.
    assert run.forward() == [2 * BLOCK] + [4 * BLOCK] * BLOCKS + [4 * BLOCK, 2 * BLOCK]
    assert run.allocated - run.built == 2 * BLOCK  # the head: its backward pass comes next


def test_with_hpz_a_group_holds_a_copy_of_the_weights_until_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of two ranks: 2 bytes x parameters / 2 on each, made when the model is partitioned."""
    alone, grouped = (Run(data_parallel=4, shard_group=group) for group in (0, 2))
    assert grouped.built - alone.built == 2 * TOTAL // 2
    for run in (alone, grouped):
        run.forward()
        run.backward()
        run.step()
    assert grouped.allocated == alone.allocated, "weights have changed, and the copies are gone"
    monkeypatch.setattr(policy, "RELEASE_AT", BLOCK)
    monkeypatch.setattr(policy, "PREFETCH", 1)
    grouped, alone = Run(data_parallel=4, shard_group=2), Run(data_parallel=4)
    for run in (alone, grouped):
        run.forward()
        run.backward()
        run.step()
        run.forward()
    released = (BLOCKS + 1) * BLOCK  # not the head, whose backward pass comes next, and not the norm
    assert grouped.allocated - alone.allocated == 2 * released // 2


def test_with_hpz_copies_of_frozen_weights_stay() -> None:
    trace = _trace()
    frozen = tuple(replace(p, trainable=i > 0) for i, p in enumerate(trace.parameters))
    runs = [Run(replace(trace, parameters=frozen), data_parallel=4, shard_group=group) for group in (0, 2)]
    for run in runs:
        run.engine.begin(run.memory, 0, last=True)
        run.step()
    assert runs[1].allocated - runs[0].allocated == 2 * BLOCK // 2


def test_with_qwz_what_is_gathered_is_int8_and_unpacked_to_fp16_first() -> None:
    """First pass: the embedding alone; then the embedding's weights, its buffer freed, and block 0's."""
    run = Run(quantized_weights=True)
    run.engine.begin(run.memory, 0, last=True)
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    run.engine.forward(run.memory, EMBEDDING)
    assert run.allocated - run.built == 2 * BLOCK
    # int8, fp16 and the weights
    assert run.memory.allocator.peak_allocated_bytes - run.built == (1 + 2 + 2) * BLOCK


def test_a_blocks_gradients_wait_for_its_end() -> None:
    run = Run()
    run.forward()
    run.engine.backward(run.memory, 0)
    before = run.allocated
    run.engine.gradient(run.memory, 0, run._gradient(0))
    assert run.allocated == before + 2 * BLOCK
    run.engine.backward_end(run.memory, 0)
    assert run.allocated == before  # the gradient is gone
    run.engine.backward(run.memory, 1)
    assert run.allocated == before + 2 * BLOCK  # the gradient is gone, and weights of the next one are there
    run.engine.backward_end(run.memory, 1)
    run.engine.backward(run.memory, 2)
    assert run.allocated == before + 2 * BLOCK  # its weights went when the next but one began


def test_a_hook_keeps_the_gradient_of_a_blocks_output() -> None:
    run = Run()
    run.forward()
    run.engine.backward(run.memory, 0)
    run.engine.gradient(run.memory, 0, run._gradient(0))
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    before = run.allocated
    run.engine.backward_end(run.memory, 0)
    assert run.memory.allocator.peak_allocated_bytes == before + HIDDEN


def test_a_bucket_of_several_gradients_is_reduced_in_a_copy() -> None:
    run = Run()
    run.forward()
    run.backward()
    whole = 4 * BLOCK  # weights of the last unit that ran and of the one before
    assert run.memory.allocator.peak_allocated_bytes == run.built + 2 * TOTAL + whole


def test_gradients_are_reduced_in_fp32_from_a_copy() -> None:
    def peak(**values: object) -> int:
        run = Run(**values)
        run.forward()
        run.backward()
        return run.memory.allocator.peak_allocated_bytes - run.built

    # A copy of all gradients, twice the buffer that holds them rank by rank, and this rank's half in bf16.
    assert peak(reduce_dtype="fp32") - peak() == 4 * TOTAL + 2 * TOTAL + 2 * PART


def test_a_smaller_bucket_takes_less_before_and_during_a_step() -> None:
    def peaks(**values: object) -> tuple[int, int]:
        run = Run(**values)
        run.forward()
        run.backward()
        return run.built, run.memory.allocator.peak_allocated_bytes

    (built, peak), (less, lower) = peaks(), peaks(bucket=BLOCK)
    assert built - less == 2 * (TOTAL - BLOCK)
    assert peak - lower > built - less, "nor is there a copy of all gradients"


@pytest.mark.parametrize(("place", "kept"), [("none", 0), ("cpu", 1)])
def test_gradients_for_the_host_are_free_when_the_module_after_the_next_one_begins(
    place: str, kept: int
) -> None:
    """In whatever bucket they are: when the first block's turn comes, one is left. Others have gone."""
    run = Run(offload_optimizer=place, bucket=3 * BLOCK)
    run.forward()
    before = run.memory.accounts[GRADIENTS]
    for kind, unit, *_ in run.trace.events:
        if kind == BACKWARD:
            run.engine.backward(run.memory, unit)
            if unit == 0:
                break
            run.engine.gradient(run.memory, unit, run._gradient(unit))
        elif kind == BACKWARD_END:
            run.engine.backward_end(run.memory, unit)
    assert run.memory.accounts[GRADIENTS] - before == kept * 2 * BLOCK


def test_the_optimizer_steps_a_group_of_parameters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> int:
        run = Run()
        run.forward()
        run.backward()
        run.step()
        run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
        before = run.allocated
        run.step()
        return run.memory.allocator.peak_allocated_bytes - before

    assert peak() == (2 + 4) * PART - 2 * NORM  # the norm, whole before, is released for the step
    monkeypatch.setattr(zero3, "sub_group", lambda _: BLOCK)
    # The largest group: embedding, norm and head, of which a rank has half each.
    assert peak() == (2 + 4) * (BLOCK + NORM // 2) - 2 * NORM


@pytest.mark.parametrize(("trained", "item_bytes"), [(1, 4), (2, 2 + 4), (3, 2 + 4)])
def test_several_gradients_are_joined_before_they_are_converted(trained: int, item_bytes: int) -> None:
    """_prepare_fp32_grad_for_sub_group: flatten copies several tensors, and returns a single one as it is."""
    trace = _trace()
    frozen = tuple(replace(p, trainable=i < trained) for i, p in enumerate(trace.parameters))
    run = Run(replace(trace, parameters=frozen))
    run.forward()
    run.engine.end(run.memory, 0, last=True)
    run.step()
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    before = run.allocated - 2 * NORM  # which is released for the step
    run.step()
    part = trained * BLOCK // 2
    assert run.memory.allocator.peak_allocated_bytes - before == item_bytes * part


def test_masters_are_copied_from_converted_weights_of_which_the_last_stay(monkeypatch) -> None:
    """Two of one group at a time: the previous conversion is freed after the next one (of three groups)."""
    monkeypatch.setattr(zero3, "sub_group", lambda _: BLOCK)
    engine, memory = Zero3(_trace(), _strategy()), Run().memory
    before = memory.allocator.allocated_bytes
    memory.allocator.peak_allocated_bytes = memory.allocator.allocated_bytes
    engine._make_masters(memory)
    last = 4 * (BLOCK + NORM // 2)
    assert memory.allocator.allocated_bytes - before == 4 * PART
    assert memory.allocator.peak_allocated_bytes - before == 4 * PART + last


@pytest.mark.parametrize(
    ("last", "accumulation", "precision", "peak"),
    [
        *((False, 2, "bf16", 4), (True, 2, "bf16", 4 + 6)),  # a sum in fp32
        *((False, 2, "fp16", 2), (True, 2, "fp16", 2 + 6), (True, 1, "fp16", 2 + 6)),
        *((True, 1, "bf16", 4), (True, 1, "fp32", 0)),  # in fp32 at once
    ],
)
def test_a_norm_on_its_way_to_the_host_is_taken_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, last: bool, accumulation: int, precision: str, peak: int
) -> None:
    """In fp64, of three quarters of the gradient; its fp32 copy afterwards is smaller."""
    monkeypatch.setattr(zero3, "NORM_AT_ONCE", BLOCK * 3 // 4)
    run = Run(offload_optimizer="cpu", accumulation=accumulation, precision=precision)
    run.engine.begin(run.memory, 0, last=last)
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    run.engine._to_host(run.memory, BLOCK)
    assert run.memory.allocator.peak_allocated_bytes - run.allocated == peak * BLOCK


def test_from_nvme_parameters_come_in_a_buffer_that_the_last_one_awaited_frees() -> None:
    """The first pass gathers one by one; the second one all, and copies all out of the buffer."""
    run = Run(offload_optimizer="nvme", offload_parameters="nvme")
    run.forward()
    run.backward()
    run.step()
    run.built = run.allocated
    whole = 2 * TOTAL - 2 * NORM
    assert run.forward() == [2 * whole] * (BLOCKS + 2) + [whole]


def test_shares_from_the_host_are_freed_when_their_parameters_have_come(monkeypatch) -> None:
    monkeypatch.setattr(policy, "PREFETCH", 0)
    run = Run(offload_optimizer="cpu", offload_parameters="cpu")
    run.engine.begin(run.memory, 0, last=True)
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    run.engine.forward(run.memory, EMBEDDING)
    assert run.allocated - run.built == 2 * BLOCK
    assert run.memory.allocator.peak_allocated_bytes - run.built == 2 * BLOCK + 2 * BLOCK // 2


@pytest.mark.parametrize("joins", [False, True])
def test_what_two_parameters_were_gathered_in_is_freed(monkeypatch: pytest.MonkeyPatch, joins: bool) -> None:
    monkeypatch.setattr(policy, "PREFETCH", 2 * BLOCK)
    monkeypatch.setattr(policy, "joins", lambda _: joins)
    run = Run()
    for _ in range(3):
        run.forward()
        run.backward()
        run.step()
        run.engine._coordinator.release_all(run.memory)
    assert run.allocated == run.built + 8 * PART + STEP_COUNT


def test_an_offloaded_optimizer_leaves_weights_and_a_bucket() -> None:
    run = Run(offload_optimizer="cpu")
    assert run.built == 2 * PART + 2 * TOTAL
    assert run.memory.host_bytes == 12 * PART + pinned(4 * PART) + pinned(2 * PART)


def test_offloaded_parameters_leave_the_bucket() -> None:
    run = Run(offload_optimizer="cpu", offload_parameters="cpu")
    assert run.built == 2 * TOTAL
    parts = (BLOCKS + 2) * pinned(2 * BLOCK // 2) + pinned(2 * NORM // 2)
    optimizer = 12 * PART + pinned(4 * PART) + pinned(2 * PART)
    assert run.memory.host_bytes == parts + pinned(2 * PART) + optimizer


def test_on_one_gpu_a_gathered_parameter_is_its_partition() -> None:
    run = Run(data_parallel=1)
    assert set(run.forward()) == {0}


def test_on_one_gpu_parameters_come_from_the_host_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken when the copy begins (NoGatherCoalescedHandle), not when a module waits for it."""
    monkeypatch.setattr(policy, "RELEASE_AT", 2 * BLOCK)
    monkeypatch.setattr(policy, "PREFETCH", 1)
    run = Run(data_parallel=1, offload_optimizer="cpu", offload_parameters="cpu")
    run.forward()
    run.backward()
    run.step()
    assert run.allocated == run.built
    # A unit, the next one on its way, and the memory of the one before; the norm persists.
    assert run.forward() == [4 * BLOCK] + [6 * BLOCK] * BLOCKS + [4 * BLOCK, 4 * BLOCK]


class TestCalls:
    def test_loss_and_base_model_are_called_around_the_units(self) -> None:
        root, model, empty = zero_coordinator.ROOT, zero_coordinator.MODEL, zero_coordinator.EMPTY
        assert calls_of(_trace()) == [
            *(root, model, EMBEDDING, empty, 0, 1, 2, 3, LAST_NORM, HEAD),
            *(root, HEAD, model, LAST_NORM, 3, 2, 1, 0, EMBEDDING),
        ]

    def test_small_parameters_persist(self) -> None:
        assert Coordinator(_trace(), _strategy()).persistent == {LAST_NORM}
