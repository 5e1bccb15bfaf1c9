"""Sizes are multiples of 512 bytes, so that what is allocated is what was asked for."""

from dataclasses import replace

import pytest

from shardwise.engines import descriptor
from shardwise.engines.fsdp2.memory import Fsdp2Memory as Fsdp2
from shardwise.engines.fsdp2.memory import _chunk_cat_bytes, shard_of, shard_part
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Model
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import GRADIENTS, WEIGHTS, GpuMemory
from shardwise.simulate.step_trace import Parameter, StepTrace, Unit
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer

BLOCKS = 3
WIDTH = 1024
ROOT = 4
"""The unit of the embedding; units 0 to 2 are blocks."""

# On four processes: the 6 rows of a block are padded to 8, the embedding has 8; 2 rows for each process.
SHARD = 2 * WIDTH * 4
WHOLE = 8 * WIDTH * 2
REDUCED = 8 * WIDTH * 4
SCALAR = 512


def _trace(*, frozen_blocks: bool = False) -> StepTrace:
    """An embedding and three blocks of one matrix each."""
    parameters = [Parameter(name="embedding", shape=(8, WIDTH), item_bytes=2, trainable=not frozen_blocks)]
    parameters += [
        Parameter(name=f"blocks.{i}", shape=(6, WIDTH), item_bytes=2, trainable=not frozen_blocks)
        for i in range(BLOCKS)
    ]
    units = [Unit(name=f"blocks.{i}", block=i, parameters=(i + 1,)) for i in range(BLOCKS)]
    if frozen_blocks:
        for i in range(BLOCKS):
            name = f"blocks.{i}.lora_A"
            parameters.append(Parameter(name=name, shape=(4, WIDTH), item_bytes=2, trainable=True))
            units[i] = replace(units[i], parameters=(i + 1, i + 1 + BLOCKS))
    return StepTrace(
        parameters=tuple(parameters),
        buffers=(),
        units=(
            *units,
            Unit(name="norm", block=-1, parameters=()),
            Unit(name="embedding", block=-1, parameters=(0,)),
        ),
        events=(),
        ops=(),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


class Run:
    """An engine and the memory of its GPU."""

    def __init__(self, trace: StepTrace, *, processes: int = 4, **strategy: object) -> None:
        self.trace = trace
        self.memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
        self.engine = Fsdp2(trace, Strategy(engine="fsdp2", data_parallel=processes, **strategy))
        self.engine.build(self.memory)
        self.built = self.allocated

    @property
    def allocated(self) -> int:
        return self.memory.allocator.allocated_bytes

    @property
    def more(self) -> int:
        """Than after building."""
        return self.allocated - self.built

    def forward(self) -> None:
        for unit in range(BLOCKS):
            self.engine.forward(self.memory, unit)
            self.engine.forward_end(self.memory, unit)

    def gradients(self, unit: int) -> None:
        for index in self.trace.units[unit].parameters:
            parameter = self.trace.parameters[index]
            if parameter.trainable:
                block = self.memory.take(GRADIENTS, parameter.size_bytes)
                self.engine.gradient(self.memory, index, block)

    def backward(self) -> None:
        for unit in reversed(range(BLOCKS)):
            self.engine.backward(self.memory, unit)
            self.gradients(unit)
        self.engine.backward(self.memory, ROOT)
        self.gradients(ROOT)

    def micro_batch(self, number: int, *, last: bool) -> None:
        self.engine.begin(self.memory, number, last=last)
        self.forward()
        self.backward()
        self.engine.end(self.memory, number, last=last)


def test_weights_and_moments_are_padded_fp32_shards() -> None:
    run = Run(_trace())
    steps, guards = BLOCKS + 1, 3
    assert run.built == 3 * (BLOCKS + 1) * SHARD + (steps + guards) * SCALAR


def test_a_block_has_its_weights_its_buffer_and_that_of_the_next() -> None:
    run = Run(_trace())
    run.engine.begin(run.memory, 0, last=True)
    assert run.more == 2 * WHOLE  # the root's
    run.engine.forward(run.memory, 0)
    assert run.more == WHOLE + 3 * WHOLE
    run.engine.forward_end(run.memory, 0)
    assert run.more == WHOLE + 2 * WHOLE
    run.engine.forward(run.memory, 1)
    assert run.more == WHOLE + 3 * WHOLE


def _with_rows(rows: int) -> StepTrace:
    """The embedding has so many rows."""
    trace = _trace()
    return replace(
        trace, parameters=(replace(trace.parameters[0], shape=(rows, WIDTH)), *trace.parameters[1:])
    )


def test_gathered_buffers_have_memory_of_their_own() -> None:
    run = Run(_with_rows(32768))
    reserved = run.memory.allocator.reserved_bytes
    whole, shard = 32768 * WIDTH * 2, 8192 * WIDTH * 2
    assert reserved - run.allocated > whole + shard  # which the default stream has left from building
    run.engine.begin(run.memory, 0, last=True)
    assert run.memory.allocator.reserved_bytes >= reserved + whole + shard


def test_in_the_backward_pass_a_block_is_reduced_before_the_one_below_is_there() -> None:
    run = Run(_trace())
    run.engine.begin(run.memory, 0, last=True)
    run.forward()
    run.engine.backward(run.memory, 2)
    assert run.more == WHOLE + 2 * WHOLE  # the root, block 2, the buffer of block 1
    run.gradients(2)
    run.engine.backward(run.memory, 1)
    # The root, block 1, the buffer of block 0; the reduction's input and this process's share of block 2.
    assert run.more == WHOLE + 2 * WHOLE + REDUCED + SHARD
    run.engine.backward_end(run.memory, 2)
    assert run.more == WHOLE + 2 * WHOLE + REDUCED + SHARD


def test_gradients_stay_as_one_fp32_shard_until_the_step() -> None:
    run = Run(_trace())
    for number in range(3):
        run.micro_batch(number, last=number == 2)
        assert run.more == (BLOCKS + 1) * SHARD
    run.engine.step(run.memory)
    assert run.more == 0


def test_without_resharding_weights_stay_whole_until_the_last_micro_batch() -> None:
    run = Run(_trace(), reshard=False)
    run.micro_batch(0, last=False)
    assert run.more == (BLOCKS + 1) * (WHOLE + SHARD)
    run.micro_batch(1, last=True)
    assert run.more == (BLOCKS + 1) * SHARD


@pytest.mark.parametrize("reshard", [True, False])
def test_a_rank_of_a_group_holds_what_one_of_that_many_ranks_would(reshard: bool) -> None:
    """Eight ranks in groups of four, two of these: states over four."""
    alone, grouped = (
        Run(_trace(), reshard=reshard),
        Run(_trace(), processes=8, shard_group=4, reshard=reshard),
    )
    assert grouped.built == alone.built == 3 * (BLOCKS + 1) * SHARD + (BLOCKS + 1 + 3) * SCALAR
    for number in range(3):
        for run in (alone, grouped):
            run.micro_batch(number, last=number == 2)
        assert grouped.more == alone.more
    peaks = [run.memory.allocator.peak_allocated_bytes for run in (alone, grouped)]
    assert peaks[0] == peaks[1]


def _while_reduced(**strategy: object) -> int:
    """Bytes above the built state after block 2 was reduced in the last micro-batch, block 1 not computed."""
    run = Run(_trace(), **strategy)
    run.engine.begin(run.memory, 0, last=True)
    run.forward()
    run.engine.backward(run.memory, 2)
    run.gradients(2)
    run.engine.backward(run.memory, 1)
    return run.more


def test_sums_in_bf16_take_half_and_become_an_fp32_shard() -> None:
    assert _while_reduced() - _while_reduced(reduce_dtype="bf16") == REDUCED // 2
    run = Run(_trace(), reduce_dtype="bf16")
    for number in range(2):
        run.micro_batch(number, last=number == 1)
        assert run.more == (BLOCKS + 1) * SHARD


def test_in_groups_micro_batches_are_summed_in_bf16_and_stay_until_the_end_of_the_backward_pass() -> None:
    strategy = {"processes": 8, "shard_group": 4, "reduce_dtype": "bf16"}
    run = Run(_trace(), **strategy)
    run.micro_batch(0, last=False)
    assert run.more == (BLOCKS + 1) * SHARD // 2
    run.micro_batch(1, last=True)
    assert run.more == (BLOCKS + 1) * SHARD
    in_flight = _while_reduced(**strategy) - _while_reduced(reduce_dtype="bf16")
    assert in_flight == SHARD // 2  # AllReduceState


@pytest.mark.parametrize("group", [0, 4])
def test_in_groups_the_last_micro_batchs_sum_is_the_one_that_stays(group: int) -> None:
    run = Run(_trace(), processes=8, shard_group=group)
    places = []
    for number in range(3):
        run.micro_batch(number, last=number == 2)
        held = run.engine._blocks[0]._reduced
        assert held is not None
        places.append(held.address)
    assert places[0] == places[1]
    assert (places[2] == places[0]) is (group == 0)


def test_frozen_weights_are_shards_in_the_computation_s_format_without_gradients() -> None:
    run = Run(_trace(frozen_blocks=True))
    frozen, adapter = SHARD // 2, 1 * WIDTH * 4
    assert run.built == (BLOCKS + 1) * frozen + BLOCKS * 3 * adapter + (BLOCKS + 3) * SCALAR
    run.micro_batch(0, last=True)
    assert run.more == BLOCKS * adapter


def test_a_frozen_first_block_is_resharded_at_the_end() -> None:
    run = Run(_trace(frozen_blocks=True))
    run.engine.begin(run.memory, 0, last=True)
    run.forward()
    for unit in reversed(range(BLOCKS)):
        run.engine.backward(run.memory, unit)
        run.gradients(unit)
    run.engine.end(run.memory, 0, last=True)  # no gradient of its input says that block 0 is done
    assert run.more == BLOCKS * WIDTH * 4


def test_one_process_copies_its_weights_without_buffers() -> None:
    run = Run(_trace(), processes=1)
    run.engine.begin(run.memory, 0, last=True)
    assert run.more == 8 * WIDTH * 2
    run.engine.forward(run.memory, 0)
    assert run.more == (8 + 6) * WIDTH * 2
    assert run.memory.allocator.peak_allocated_bytes >= run.allocated + 6 * WIDTH * 2  # the cast copy


def test_one_process_divides_its_gradients_in_a_copy() -> None:
    run = Run(_with_rows(1024), processes=1)
    run.micro_batch(0, last=True)
    # The input of the embedding's reduction, its result and the copy, and the blocks' gradients.
    reducing = 3 * 1024 * WIDTH * 4 + BLOCKS * 6 * WIDTH * 4
    assert run.memory.allocator.peak_allocated_bytes - run.built == reducing


def test_of_several_processes_the_last_gradient_stays_until_its_group_is_reduced() -> None:
    run = Run(_with_rows(32768), processes=32)
    run.micro_batch(0, last=True)
    gradient, reduced, blocks = 32768 * WIDTH * 2, 32768 * WIDTH * 4, BLOCKS * WIDTH * 4
    assert (
        run.memory.allocator.peak_allocated_bytes - run.built == gradient + reduced + reduced // 32 + blocks
    )


def test_of_a_part_that_is_sharded_the_last_parameter_stays_whole_for_a_while() -> None:
    trace = _trace()
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    weights = {index: memory.take(WEIGHTS, 6 * WIDTH * 2) for index in (1, 2)}
    shards = [shard_of(index, trace.parameters[index], 4) for index in weights]
    held = shard_part(memory, shards, weights, offload=False)
    assert memory.allocator.allocated_bytes == 2 * SHARD + 6 * WIDTH * 4
    memory.give(held)
    assert memory.allocator.allocated_bytes == 2 * SHARD


def test_a_kernel_that_concatenates_shards_gets_lists_of_them() -> None:
    """Six numbers for each of two tensors, two more, and the tensor of each block of 2048 bytes; int64."""
    shards = [shard_of(index, _trace().parameters[index], 4) for index in (0, 1)]
    assert [shard.numel for shard in shards] == [2 * WIDTH] * 2
    assert _chunk_cat_bytes(shards, 4) == 8 * (2 * 4 + 6 * 2 + 2)


def test_norms_are_summed_in_pieces_of_65536_elements() -> None:
    """For each gradient as many partial sums as the longest one needs, and a norm (torch._foreach_norm)."""
    run = Run(_with_rows(4 * 64 * 1024))  # 1024 pieces on each process
    run.micro_batch(0, last=True)
    run.memory.allocator.peak_allocated_bytes = run.memory.allocator.allocated_bytes
    before = run.allocated
    run.engine.step(run.memory)
    parameters = BLOCKS + 1
    added = parameters * 1024 * 4 + parameters * SCALAR
    assert run.memory.allocator.peak_allocated_bytes - before == added


def test_offloaded_nothing_stays_on_the_gpu() -> None:
    run = Run(_trace(), offload_parameters="cpu", offload_optimizer="cpu")
    assert run.built == 3 * SCALAR
    run.micro_batch(0, last=True)
    assert run.more == 0


def test_offloaded_shards_and_gradients_are_page_locked_in_powers_of_two() -> None:
    run = Run(_with_rows(12), offload_parameters="cpu", offload_optimizer="cpu")
    # 3 rows of the embedding for each process, as much as 4 when they are page-locked.
    pinned = 4 * WIDTH * 4 + BLOCKS * SHARD
    moments = 2 * (3 * WIDTH * 4 + BLOCKS * SHARD) + 4 * (BLOCKS + 1)
    assert run.memory.host_bytes == 2 * pinned + moments


# Runs of Llama 3.2 1B with 4 layers on two H200, recorded with torch 2.11.


@pytest.fixture(scope="module")
def recorded() -> StepTrace:
    model = Model(source="llama-3.2-1b", weights="random", config={"num_hidden_layers": 4})
    return Tracer(model, precision="bf16", sequence_length=2048).trace(rows=2, checkpoint_every=0)


def test_the_built_engine_is_as_large_as_a_recorded_one(recorded: StepTrace) -> None:
    run = Run(recorded, processes=2)
    assert run.built == 3_035_760_128
    assert run.memory.allocator.peak_reserved_bytes == 3_042_967_552


@pytest.mark.parametrize(("reshard", "peak"), [(True, 7_633_136_128), (False, 7_998_065_152)])
def test_the_peak_is_that_of_a_recorded_run(recorded: StepTrace, reshard: bool, peak: int) -> None:
    strategy = Strategy(engine="fsdp2", data_parallel=2, reshard=reshard, micro_batch=2, accumulation=2)
    hardware = parse_hardware("2xH200")
    trace = replace(recorded, one_shape=False)  # as before passes were recorded (decision 0103)
    memory = descriptor(strategy).peak_memory(
        trace, strategy, hardware, capacity_bytes=hardware.gpu.memory_bytes
    )
    assert memory.peak_allocated_bytes == pytest.approx(peak, rel=1e-5)
