"""Sizes are multiples of 512 bytes, so that what is allocated is what was asked for."""

from dataclasses import replace

import pytest

from shardwise.engines import descriptor
from shardwise.engines.deepspeed.memory import zero012
from shardwise.engines.deepspeed.memory.zero012 import Flat
from shardwise.engines.deepspeed.memory.zero012 import Zero12Memory as Partitioned
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.engine import EngineMemory, pinned
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.step_trace import Parameter, StepTrace, Unit
from shardwise.strategy import Strategy


def engine_memory(trace: StepTrace, strategy: Strategy) -> EngineMemory:
    return descriptor(strategy).memory(trace, strategy)


K = 1024
NUMEL = (8 * K, 4 * K, 4 * K)
"""Of an embedding and two blocks: on two ranks the first has the embedding, the second the blocks."""


def _trace(*, trainable: tuple[bool, ...] = (True, True, True)) -> StepTrace:
    return StepTrace(
        parameters=tuple(
            Parameter(name=f"p{i}", shape=(numel,), item_bytes=2, trainable=trained)
            for i, (numel, trained) in enumerate(zip(NUMEL, trainable, strict=True))
        ),
        buffers=(),
        units=(
            Unit(name="block", block=0, parameters=(1,)),
            Unit(name="block", block=1, parameters=(2,)),
            Unit(name="embedding", block=-1, parameters=(0,)),
        ),
        events=(),
        ops=(),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


def _strategy(stage: int, **values: object) -> Strategy:
    return replace(Strategy(engine="deepspeed", stage=stage, data_parallel=2), **values)  # type: ignore[arg-type]


def _machine() -> GpuMemory:
    return GpuMemory(CachingAllocator(capacity_bytes=1 << 40))


class Run:
    """One engine; every gradient it gets is a new allocation, in the order of a backward pass."""

    def __init__(self, engine: EngineMemory) -> None:
        self.engine = engine
        self.memory = _machine()
        engine.build(self.memory)
        self.built = self.allocated

    @property
    def allocated(self) -> int:
        return self.memory.allocator.allocated_bytes

    def backward(self, *, last: bool = True, order: tuple[int, ...] = (2, 1, 0)) -> int:
        """Bytes that are there when all gradients are, before the pass ends."""
        self.engine.begin(self.memory, 0, last=last)
        for index in order:
            self.engine.gradient(self.memory, index, self.memory.take(GRADIENTS, 2 * NUMEL[index]))
        before = self.allocated
        self.engine.end(self.memory, 0, last=last)
        return before

    def step(self) -> None:
        self.engine.step(self.memory)


def _run(stage: int, **values: object) -> Run:
    return Run(engine_memory(_trace(), _strategy(stage, **values)))


TOTAL = sum(NUMEL)
PART = TOTAL // 2
STEP_COUNT = 512


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_keeps_all_weights_and_its_part_of_masters_and_moments(stage: int) -> None:
    run = _run(stage)
    assert run.built == 2 * TOTAL + 4 * PART
    run.backward()
    run.step()
    assert run.allocated == 2 * TOTAL + 12 * PART + STEP_COUNT


def test_building_takes_the_weights_twice_or_the_masters_and_a_gradient() -> None:
    assert _run(1).memory.allocator.peak_allocated_bytes == 2 * TOTAL + 8 * PART


def test_two_buckets_are_there_during_the_backward_pass_and_gone_after_it() -> None:
    run = _run(2)
    assert run.backward() == run.built + 2 * (2 * TOTAL)
    assert run.allocated == run.built + 2 * NUMEL[1] + 2 * NUMEL[2]  # the last rank's reduced gradients


def test_stage_1_keeps_whole_gradients_and_its_buckets_from_one_micro_batch_to_the_next() -> None:
    run = _run(1, accumulation=2)
    assert run.backward(last=False) == run.built + 2 * (2 * TOTAL) + 2 * TOTAL
    assert run.allocated == run.built + 2 * (2 * TOTAL) + 2 * TOTAL
    assert run.backward() == run.built + 2 * (2 * TOTAL)
    assert run.allocated == run.built + 2 * NUMEL[1] + 2 * NUMEL[2]


def test_stage_2_adds_micro_batches_up_in_fp32_in_its_part() -> None:
    run = _run(2, accumulation=2)
    run.backward(last=False)
    assert run.allocated == run.built + 4 * PART
    run.backward()
    assert run.allocated == run.built + 4 * PART
    run.step()
    assert run.allocated == run.built + 8 * PART + STEP_COUNT


def test_a_rank_that_has_padding_only_steps_on_zeros() -> None:
    run = _run(2, data_parallel=1 << 17, accumulation=2)  # more ranks than there are values
    run.backward(last=False)
    run.backward()
    run.step()
    assert run.allocated > run.built, "moments of the padding"


def test_a_full_bucket_is_reduced_in_the_middle_of_the_backward_pass() -> None:
    run = _run(2, bucket=8 * K)
    # The last rank's gradients are the first to come: their copy is there before the pass ends.
    assert run.backward() == run.built + 2 * (2 * 8 * K) + 2 * (NUMEL[1] + NUMEL[2])


def test_without_overlap_there_is_one_bucket() -> None:
    run = _run(2, bucket=8 * K, overlap_comm=False)
    assert run.backward() == run.built + 2 * 8 * K + 2 * (NUMEL[1] + NUMEL[2])


def test_a_gradient_larger_than_a_bucket_stays_where_it_is() -> None:
    run = _run(2, bucket=4 * K)
    assert run.backward() == run.built + 2 * (2 * 4 * K) + 2 * (NUMEL[1] + NUMEL[2]) + 2 * NUMEL[0]
    run.step()
    assert run.allocated == 2 * TOTAL + 12 * PART + STEP_COUNT


def test_frozen_weights_stay_as_they_are() -> None:
    run = Run(engine_memory(_trace(trainable=(False, True, True)), _strategy(2)))
    trained = NUMEL[1] + NUMEL[2]
    assert run.built == 2 * TOTAL + 4 * (trained // 2)


def test_what_filling_the_weights_took_is_given_back() -> None:
    trace = _trace(trainable=(False, False, True))
    large = replace(trace.parameters[0], shape=(2**27,))  # drawn in fp32: 512 MiB, of which 256 stay
    run = Run(engine_memory(replace(trace, parameters=(large, *trace.parameters[1:])), _strategy(2)))
    assert run.memory.allocator.reserved_bytes < 300 * 2**20


def test_an_offloaded_optimizer_is_on_the_host() -> None:
    run = _run(2, offload_optimizer="cpu")
    assert run.built == 2 * TOTAL + 2 * NUMEL[0]  # weights, and a buffer for the largest gradient
    locked = 2 * pinned(4 * PART) + pinned(2 * PART) + pinned(2 * NUMEL[0])
    assert run.memory.host_bytes == locked + 8 * PART
    run.backward()
    run.step()
    assert run.allocated == run.built


def test_an_offloaded_gradient_is_widened_twice_on_its_way() -> None:
    run = Run(Partitioned(_trace(), _strategy(2, offload_optimizer="cpu"), rank=0))
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    during = run.backward()
    # the flat copy that is reduced is smaller than the embedding's gradient in fp64
    assert run.memory.allocator.peak_allocated_bytes == during + 8 * NUMEL[0]


def _cut() -> StepTrace:
    """Of both blocks one of two ranks has half; the embedding is whole."""
    trace = _trace()
    embedding, *blocks = trace.parameters
    halves = [replace(p, shape=(p.numel // 2,), cut_from=p.shape) for p in blocks]
    return replace(trace, parameters=(embedding, *halves), tensor_parallel=2)


CUT = (8 + 2 + 2) * K
"""Elements of them."""


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_ranks_that_see_other_rows_share_the_states_of_a_part(data_parallel: int) -> None:
    strategy = _strategy(1, tensor_parallel=2, data_parallel=data_parallel)
    run = Run(engine_memory(_cut(), strategy))
    assert run.built == 2 * CUT + 4 * CUT // data_parallel  # the part's weights, its masters
    run.engine.begin(run.memory, 0, last=True)
    for index, numel in ((2, 2 * K), (1, 2 * K), (0, 8 * K)):
        run.engine.gradient(run.memory, index, run.memory.take(GRADIENTS, 2 * numel))
    run.engine.end(run.memory, 0, last=True)
    run.step()
    assert run.allocated == 2 * CUT + 12 * CUT // data_parallel + STEP_COUNT


def test_all_weights_are_whole_before_they_are_cut() -> None:
    """The last one is drawn in fp32 while all the others are there; then a part is copied."""
    halves = [replace(p, shape=(p.numel // 2,), cut_from=p.shape) for p in _trace().parameters]
    trace = replace(_trace(), parameters=tuple(halves), tensor_parallel=2)
    run = Run(engine_memory(trace, _strategy(1, tensor_parallel=2, data_parallel=4)))
    embedding, first, second = NUMEL
    drawn = 2 * (first + second) + (4 + 2) * embedding
    assert run.memory.allocator.peak_allocated_bytes == drawn > 2 * TOTAL + 2 * first // 2


def test_a_bucket_is_as_large_as_the_whole_model_asks_for() -> None:
    """DeepSpeed's bucket size is set before the model is cut: two of them, of all elements."""
    run = Run(engine_memory(_cut(), _strategy(1, tensor_parallel=2)))
    run.engine.begin(run.memory, 0, last=True)
    run.engine.gradient(run.memory, 2, run.memory.take(GRADIENTS, 2 * 2 * K))
    assert run.allocated == run.built + 2 * 2 * TOTAL
    smaller = Run(engine_memory(_cut(), _strategy(1, tensor_parallel=2, bucket=CUT)))
    smaller.engine.gradient(smaller.memory, 2, smaller.memory.take(GRADIENTS, 2 * 2 * K))
    assert smaller.allocated == smaller.built + 2 * 2 * CUT


def test_a_norm_of_a_cut_model_takes_no_memory() -> None:
    def most(trace: StepTrace, **values: object) -> int:
        run = Run(engine_memory(trace, _strategy(1, data_parallel=1, **values)))
        run.engine.begin(run.memory, 0, last=True)
        for index in (2, 1, 0):
            numel = trace.parameters[index].numel
            run.engine.gradient(run.memory, index, run.memory.take(GRADIENTS, 2 * numel))
        run.engine.end(run.memory, 0, last=True)
        before = run.allocated
        run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
        run.engine._gradient_of_partition = lambda memory, _: memory.take(GRADIENTS, 0)  # type: ignore[attr-defined]
        run.engine._states = True  # type: ignore[attr-defined]
        run.step()
        return run.memory.allocator.peak_allocated_bytes - before

    assert most(_cut(), tensor_parallel=2) == most(_trace()) == 0


def test_stage_0_takes_a_step_with_zero_gradients_to_build_its_state() -> None:
    run = _run(0)
    states = 3 * STEP_COUNT
    assert run.built == (2 + 4 + 8) * TOTAL + states
    assert run.memory.allocator.peak_allocated_bytes == (2 + 4 + 2 + 4 + 8) * TOTAL + states
    assert run.backward() == run.built + 2 * TOTAL
    run.step()
    assert run.allocated == run.built


def test_stage_0_in_fp32_is_torchs_optimizer_alone() -> None:
    trace = _trace()
    wide = replace(trace, parameters=tuple(replace(p, item_bytes=4) for p in trace.parameters))
    run = Run(engine_memory(wide, _strategy(0, precision="fp32")))
    assert run.built == 4 * TOTAL
    run.backward()
    run.step()
    assert run.allocated == 12 * TOTAL + 3 * STEP_COUNT


def test_stage_0_reduces_several_gradients_in_a_copy_until_they_are_too_many(monkeypatch) -> None:
    monkeypatch.setattr(zero012, "REDUCED_AT_ONCE", NUMEL[0])
    run = _run(0)
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    before = run.backward()
    # the first two together, which exceed the limit, then the last one where it lies
    assert run.memory.allocator.peak_allocated_bytes == before + 2 * (NUMEL[0] + NUMEL[1])


def test_slices_are_reduced_at_once_until_they_exceed_a_bucket() -> None:
    engine = Partitioned(_trace(), _strategy(2, bucket=8 * K))
    assert engine._at_once([(1, 8 * K), (0, K), (1, K)]) == [[(1, 8 * K), (0, K)], [(1, K)]]


class TestFlat:
    def test_a_parameter_may_lie_in_several_parts(self) -> None:
        flat = Flat(_trace(), world=4)
        assert flat.partition == 4 * K
        assert flat.pieces(0) == [(0, 4 * K), (1, 4 * K)]
        assert [flat.owned(rank) for rank in range(4)] == [[0], [0], [1], [2]]

    def test_it_is_padded_to_two_elements_for_each_rank(self) -> None:
        trace = _trace()
        odd = replace(trace, parameters=(*trace.parameters, replace(trace.parameters[0], shape=(1,))))
        assert Flat(odd, world=2).numel == TOTAL + 4

    def test_stretches_of_one_rank_are_reduced_together(self) -> None:
        flat = Flat(_trace(), world=2)
        assert flat.slices([2, 1, 0], joined=True, rank=1) == [(1, 8 * K), (0, 8 * K)]
        assert flat.slices([2, 1, 0], joined=False, rank=1) == [(1, 4 * K), (1, 4 * K), (0, 8 * K)]


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192)])
def test_torch_locks_powers_of_two(size: int, taken: int) -> None:
    assert pinned(size) == taken
