"""Batches: the same rows at any number of ranks and from any position, targets counted exactly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.batch import IGNORED, Layout, MicroBatch, StepBatch
from shardwise.data.cache import TokenDataset
from shardwise.data.loader import BatchStream, EvalStream, assemble
from shardwise.engines.runtime.recorded import padded
from shardwise.errors import DataError, JobError

LENGTHS = np.random.default_rng(3).integers(2, 65, 83).tolist()
Numbered = Callable[[list[int]], TokenDataset]


@pytest.fixture(scope="module")
def dataset(numbered_dataset: Numbered) -> TokenDataset:
    return numbered_dataset(LENGTHS)


def stream(dataset: TokenDataset, **changes: Any) -> BatchStream:
    options: dict[str, Any] = {
        "sequence_length": 64,
        "global_batch": 8,
        "micro_batch": 2,
        "data_rank": 0,
        "data_size": 1,
        "seed": 11,
        "packing": True,
        "pad_id": 0,
        "worst_case_first": True,
    }
    return BatchStream(dataset, **(options | changes))


def rows(batch: StepBatch) -> list[list[int]]:
    """The tokens of every row without the padding (token 0 is only padding here)."""
    return [
        [token for token in row if token] for micro in batch.micro_batches for row in micro.input_ids.tolist()
    ]


def targets(micros: list[MicroBatch]) -> int:
    return sum(int((micro.labels != IGNORED).sum()) for micro in micros)


def test_ranks_know_what_fits_the_micro_batches_of_all_of_them(dataset: TokenDataset) -> None:
    """Their own counts are those of `layout`, which sees lengths only, and graphs are of one kind."""
    loaders = [stream(dataset, data_rank=rank, data_size=4, micro_batch=1) for rank in range(4)]
    kinds, differ = set(), 0
    for _ in range(12):
        for at_once in zip(*(next(loader).micro_batches for loader in loaders), strict=True):
            own = [Layout(len(one.cu_seqlens), one.max_seqlen, one.single_segment_rows) for one in at_once]
            borders, longest, single = zip(*own, strict=True)
            common = Layout(max(borders), max(longest), min(single))
            assert [one.common for one in at_once] == [common] * 4
            graphs = {(len(one.cu_seqlens), one.max_seqlen) for one in map(padded, at_once)}
            assert len(graphs) == 1
            kinds |= graphs
            differ += len(set(own)) > 1
    assert differ > 6
    assert all(one.common is None for one in next(stream(dataset, packing=False)).micro_batches)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("data_size", "micro_batch"), [(2, 2), (4, 2), (1, 8), (8, 1), (2, 1)])
def test_a_step_holds_the_same_rows_at_any_number_of_ranks(
    dataset: TokenDataset, packing: bool, data_size: int, micro_batch: int
) -> None:
    alone = stream(dataset, packing=packing)
    ranks = [
        stream(dataset, packing=packing, data_rank=rank, data_size=data_size, micro_batch=micro_batch)
        for rank in range(data_size)
    ]
    for _ in range(25):  # 83 samples unpacked: more than two epochs
        expected = next(alone)
        shares = [next(rank) for rank in ranks]
        interleaved = [
            row
            for number in range(8 // (data_size * micro_batch))
            for share in shares
            for row in rows(share)[number * micro_batch : (number + 1) * micro_batch]
        ]
        if packing:  # put in another order, so that ranks have equal work
            assert sorted(interleaved) == sorted(rows(expected))
        else:
            assert interleaved == rows(expected)
        assert {share.target_tokens for share in shares} == {expected.target_tokens}
        assert {share.tokens for share in shares} == {expected.tokens}
        assert {share.epoch for share in shares} == {expected.epoch}


@pytest.mark.parametrize("packing", [True, False])
def test_counts_are_those_of_all_ranks_together(dataset: TokenDataset, packing: bool) -> None:
    ranks = [stream(dataset, packing=packing, data_rank=rank, data_size=4) for rank in range(4)]
    for _ in range(15):
        shares = [next(rank) for rank in ranks]
        micros = [micro for share in shares for micro in share.micro_batches]
        assert shares[0].target_tokens == targets(micros)
        assert shares[0].tokens == sum(len(row) for share in shares for row in rows(share))


@pytest.mark.parametrize("packing", [True, False])
def test_every_sample_comes_once_per_epoch_also_across_the_borders_of_steps(
    dataset: TokenDataset, packing: bool
) -> None:
    batches = stream(dataset, packing=packing)
    per_epoch = [batches.rows_per_epoch(epoch) for epoch in range(3)]
    assert per_epoch[0] % 8  # a step lies across the border of two epochs
    seen: Counter[int] = Counter()
    taken = 0
    for epoch in (1, 2, 3):
        while taken < sum(per_epoch[:epoch]):
            seen.update(token for row in rows(next(batches)) for token in row)
            taken += 8
        assert {seen[token] for token in dataset.tokens.tolist()} <= {epoch, epoch + 1}


def test_the_position_is_kept_at_every_step_and_with_prefetching(dataset: TokenDataset) -> None:
    whole = stream(dataset)
    expected, states = [], [whole.state_dict()]
    for _ in range(30):
        expected.append(rows(next(whole)))
        states.append(whole.state_dict())
    for step, state in enumerate(states[:-1]):
        resumed = stream(dataset, data_size=2, data_rank=0, micro_batch=4)
        other = stream(dataset, data_size=2, data_rank=1, micro_batch=4)
        for part in (resumed, other):
            next(part)  # what was prefetched before has to be forgotten
            part.load_state_dict(state)
            assert part.state_dict() == state
        for later in range(step, min(step + 4, 30)):
            assert sorted(rows(next(resumed)) + rows(next(other))) == sorted(expected[later])
            assert resumed.state_dict() == states[later + 1]
        resumed.close()
        other.close()


def test_a_position_is_loaded_after_the_batch_that_is_being_prepared(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = stream(dataset)
    take = batches._take

    def slowly(*given: Any) -> Any:
        time.sleep(0.05)
        return take(*given)

    monkeypatch.setattr(batches, "_take", slowly)
    first = rows(next(batches))
    batches.load_state_dict({"epoch": 0, "row": 0})
    assert rows(next(batches)) == first
    batches.close()


def test_labels_are_the_next_token_of_the_same_sample_where_it_is_trained(dataset: TokenDataset) -> None:
    trained = {int(token): bool(flag) for token, flag in zip(dataset.tokens, dataset.trained, strict=True)}
    starts = {int(dataset.tokens[start]) for start in dataset.starts}
    checked = 0
    for micro in next(stream(dataset)).micro_batches:
        for ids, labels in zip(micro.input_ids.tolist(), micro.labels.tolist(), strict=True):
            for token, following, label in zip(ids, [*ids[1:], 0], labels, strict=True):
                crosses = following == 0 or following in starts
                wanted = IGNORED if crosses or token == 0 or not trained[following] else following
                assert label == wanted
                checked += label != IGNORED
    assert checked > 100


@pytest.mark.parametrize("packing", [True, False])
def test_segments_are_the_samples_and_the_padding(dataset: TokenDataset, packing: bool) -> None:
    lengths = {
        int(dataset.tokens[start]): int(length)
        for start, length in zip(dataset.starts, dataset.lengths, strict=True)
    }
    for micro in next(stream(dataset, packing=packing, micro_batch=4)).micro_batches:
        borders = micro.cu_seqlens.tolist()
        flat = micro.input_ids.flatten().tolist()
        assert borders[0] == 0
        assert borders[-1] == len(flat)
        for first, last in pairwise(borders):
            assert micro.position_ids.flatten()[first:last].tolist() == list(range(last - first))
            assert last - first == lengths[flat[first]] if flat[first] else not any(flat[first:last])
        assert micro.max_seqlen == max(b - a for a, b in pairwise(borders))
        width = micro.input_ids.shape[1]
        single = micro.single_segment_rows
        assert borders[: single + 1] == [line * width for line in range(single + 1)]
        if single < len(micro.input_ids):
            assert borders[single + 1] < (single + 1) * width or not packing


def test_rows_of_one_segment_count_only_from_the_first_row_on(numbered_dataset: Numbered) -> None:
    data = numbered_dataset([8, 8, 5])
    batches = [assemble(data, [np.array([i]) for i in rows_], pad_id=0, width=8, limit=8)
               for rows_ in ([0, 1, 2], [0, 2, 1], [2, 0, 1])]  # fmt: skip
    assert [batch.single_segment_rows for batch in batches] == [2, 1, 0]


def test_packed_rows_have_the_full_width_and_others_the_longest_in_eights(dataset: TokenDataset) -> None:
    assert {m.input_ids.shape for m in next(stream(dataset)).micro_batches} == {(2, 64)}
    batches = stream(dataset, packing=False)
    next(batches)
    micros = [micro for _ in range(6) for micro in next(batches).micro_batches]
    for micro in micros:
        longest = int((micro.input_ids != 0).sum(1).max())
        assert micro.input_ids.shape[1] == -(-longest // 8) * 8
    assert len({micro.input_ids.shape[1] for micro in micros}) > 2


def test_a_row_is_never_padded_beyond_the_sequence_length(numbered_dataset: Numbered) -> None:
    batches = stream(numbered_dataset([61, 60, 13, 7]), sequence_length=61, packing=False, micro_batch=1)
    assert max(m.input_ids.shape[1] for m in next(batches).micro_batches) == 61


def test_the_first_step_takes_the_longest_rows(dataset: TokenDataset) -> None:
    first = next(stream(dataset, packing=False))
    assert first.tokens == sum(sorted(LENGTHS)[-8:])


def test_steps_are_rounded_up_and_a_fraction_of_an_epoch_counts(
    dataset: TokenDataset, numbered_dataset: Numbered
) -> None:
    batches = stream(dataset, packing=False)
    assert [batches.steps_for(epochs) for epochs in (0.001, 0.5, 1, 2, 2.5)] == [1, 6, 11, 21, 26]
    hundred = stream(numbered_dataset([5] * 100), packing=False, global_batch=1, micro_batch=1)
    assert hundred.steps_for(0.07) == 7, "0.07 * 100 is 7.000000000000001 in floating point"
    packed = stream(dataset)
    assert packed.steps_for(2) == -(-(packed.rows_per_epoch(0) + packed.rows_per_epoch(1)) // 8)


def test_a_step_may_be_larger_than_the_data(numbered_dataset: Numbered) -> None:
    batches = stream(numbered_dataset([5, 6, 7]), packing=False)
    taken = Counter(len(row) for row in rows(next(batches)))  # two whole epochs and two rows of the third
    assert sorted(taken.values()) == [2, 3, 3]
    assert batches.state_dict() == {"epoch": 2, "row": 2}


def test_a_batch_that_does_not_divide_is_refused(dataset: TokenDataset) -> None:
    with pytest.raises(JobError, match="8 rows do not divide into micro-batches of 3 on 2 ranks"):
        stream(dataset, micro_batch=3, data_size=2)


def test_no_samples_are_refused(numbered_dataset: Numbered) -> None:
    with pytest.raises(DataError, match="no samples"):
        stream(numbered_dataset([]))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_evaluation_covers_the_data_once_with_equal_work_on_every_rank(
    dataset: TokenDataset, packing: bool, data_size: int
) -> None:
    streams = [
        EvalStream(
            dataset,
            sequence_length=64,
            packing=packing,
            pad_id=0,
            micro_batch=4,
            data_rank=rank,
            data_size=data_size,
        )
        for rank in range(data_size)
    ]
    micros = [list(part) for part in streams]
    assert {len(part) for part in micros} == {len(streams[0])}
    everything = [micro for part in micros for micro in part]
    tokens = torch.cat([micro.input_ids.flatten() for micro in everything])
    assert sorted(tokens[tokens != 0].tolist()) == dataset.tokens.tolist()
    assert streams[0].target_tokens == targets(everything) == int(dataset.targets.sum())
    assert [m.input_ids.tolist() for m in streams[0]] == [m.input_ids.tolist() for m in micros[0]]


def test_assembling_a_row_is_fast(numbered_dataset: Numbered) -> None:
    """4096 tokens in 20 segments: far less than any GPU needs for them."""
    batches = stream(numbered_dataset([204] * 4000), sequence_length=4096, micro_batch=1)
    next(batches)
    start = time.process_time()
    for _ in range(10):
        next(batches)
    assert (time.process_time() - start) / 80 < 0.002
