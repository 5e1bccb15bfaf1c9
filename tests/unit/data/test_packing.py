"""Rows: every sample exactly once, never too long, well filled, and the same for the same seed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.packing import deal, permutation, rows_of_epoch


def chat_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Log-normal with a median of 180 tokens, like instruction data, cut at the row's length."""
    lengths = np.random.default_rng(seed).lognormal(5.2, 0.9, count).astype(np.int32)
    return np.clip(lengths, 2, longest)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=300),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 5),
    packing=st.booleans(),
    shuffle=st.booleans(),
    longest_first=st.integers(0, 20),
)
def test_each_sample_is_in_exactly_one_row_and_no_row_is_too_long(
    lengths: list[int], seed: int, epoch: int, packing: bool, shuffle: bool, longest_first: int
) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    rows = rows_of_epoch(
        sizes,
        sequence_length=64,
        seed=seed,
        epoch=epoch,
        packing=packing,
        shuffle=shuffle,
        longest_first=longest_first,
    )
    members = [index for row in rows for index in row.tolist()]
    assert sorted(members) == list(range(len(lengths)))
    assert all(0 < sizes[rows[row]].sum() <= 64 for row in range(len(rows)))


@pytest.mark.parametrize(("longest", "least"), [(1024, 0.99), (4096, 0.99), (32768, 0.98)])
def test_rows_of_chat_data_are_filled(longest: int, least: float) -> None:
    lengths = chat_lengths(20_000, longest)
    rows = rows_of_epoch(lengths, sequence_length=longest, seed=1, epoch=0, packing=True)
    assert lengths.sum() / (len(rows) * longest) >= least


def test_rows_where_most_samples_fill_half_are_as_few_as_they_can_be() -> None:
    lengths = np.array([513] * 500 + [511] * 500, dtype=np.int32)
    assert len(rows_of_epoch(lengths, sequence_length=1024, seed=3, epoch=0, packing=True)) == 500


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    lengths = chat_lengths(3000, 1024)

    def order(seed: int, epoch: int) -> list[int]:
        return rows_of_epoch(
            lengths, sequence_length=1024, seed=seed, epoch=epoch, packing=True
        ).order.tolist()

    assert order(7, 0) == order(7, 0)
    assert order(7, 0) != order(7, 1)
    assert order(7, 0) != order(8, 0)


def test_what_shares_a_row_is_random_not_decided_by_length() -> None:
    """Packed over the whole data at once, long samples would always come with the same short ones."""
    lengths = chat_lengths(20_000, 1024)
    rows = rows_of_epoch(lengths, sequence_length=1024, seed=1, epoch=0, packing=True)
    longest_in_row = np.array([lengths[rows[row]].max() for row in range(len(rows))])
    half = len(rows) // 2
    assert longest_in_row[:half].mean() == pytest.approx(longest_in_row[half:].mean(), rel=0.05)


def test_the_permutation_is_the_one_of_this_release() -> None:
    """A changed permutation would silently change what a resumed run trains on."""
    assert permutation(8, 42, 0).tolist() == [0, 1, 4, 2, 6, 5, 7, 3]


def test_unpacked_epoch_zero_starts_with_the_longest_rows() -> None:
    lengths = chat_lengths(1000, 1024)
    first = rows_of_epoch(lengths, sequence_length=1024, seed=5, epoch=0, packing=False, longest_first=16)
    assert lengths[first.order[:16]].tolist() == sorted(lengths.tolist(), reverse=True)[:16]
    later = rows_of_epoch(lengths, sequence_length=1024, seed=5, epoch=1, packing=False, longest_first=16)
    assert lengths[later.order[:16]].max() < lengths.max()


def test_a_million_samples_are_packed_within_ten_seconds() -> None:
    lengths = chat_lengths(1_000_000, 4096)
    start = time.process_time()
    rows = rows_of_epoch(lengths, sequence_length=4096, seed=0, epoch=0, packing=True)
    assert time.process_time() - start < 10
    assert lengths.sum() / (len(rows) * 4096) > 0.99


def test_a_step_is_dealt_so_that_ranks_have_equal_attention_to_compute() -> None:
    rng = np.random.default_rng(5)
    lengths = np.minimum(2048, rng.lognormal(6.0, 1.2, 4000)).astype(np.int32).clip(1)
    packed = rows_of_epoch(lengths, sequence_length=2048, seed=1, epoch=0, packing=True)
    uneven, even = [], []
    for first in range(0, len(packed) - 16, 16):
        rows = [packed[row] for row in range(first, first + 16)]
        for order, worst in ((rows, uneven), (deal(rows, lengths, ranks=4, micro_batch=2), even)):
            # micro-batch j of rank r is rows (j * 4 + r) * 2 and the one after it
            work = [[(lengths[row].astype(float) ** 2).sum() for row in order[r * 2 :: 8]] for r in range(4)]
            work = [w + [(lengths[row].astype(float) ** 2).sum() for row in order[r * 2 + 1 :: 8]]
                    for r, w in enumerate(work)]  # fmt: skip
            worst.append(max(map(sum, work)) / np.mean([sum(w) for w in work]))
        dealt = deal(rows, lengths, ranks=4, micro_batch=2)
        assert sorted(row.tolist() for row in dealt) == sorted(row.tolist() for row in rows)
    assert np.mean(even) < 1 + 0.3 * (np.mean(uneven) - 1)


def test_a_micro_batch_begins_with_its_costliest_row() -> None:
    lengths = np.array([64, 10, 20, 64, 30, 5, 40, 64], dtype=np.int32)
    rows = [np.array([index]) for index in range(8)]
    dealt = deal(rows, lengths, ranks=2, micro_batch=2)
    costs = [int(lengths[row].sum()) for row in dealt]
    assert costs == [64, 30, 64, 20, 40, 5, 64, 10]


def test_each_window_has_a_random_order_of_its_own() -> None:
    """Two windows of samples of one length pack alike; only the order of their rows differs."""
    lengths = np.full(8192, 4, dtype=np.int32)
    rows = rows_of_epoch(lengths, sequence_length=16, seed=3, epoch=0, packing=True)
    place = np.argsort(permutation(8192, 3, 0))  # of each sample in the order of the epoch
    turns = [[int(place[rows[first + row][0]]) % 4096 for row in range(1024)] for first in (0, 1024)]
    assert sorted(turns[0]) == sorted(turns[1])
    assert turns[0] != turns[1]


def test_weights_say_how_often_a_sample_is_taken_and_fractions_are_spread_over_epochs() -> None:
    weights = np.repeat([1.0, 2.0, 0.25], [10, 5, 40])
    lengths = np.full(55, 4, dtype=np.int32)
    counts = np.zeros(55, dtype=int)
    for epoch in range(4):
        rows = rows_of_epoch(lengths, sequence_length=8, seed=3, epoch=epoch, packing=True, weights=weights)
        found = np.bincount(rows.order, minlength=55)
        assert (found[:10] == 1).all()
        assert (found[10:15] == 2).all()
        assert 3 <= found[15:].sum() <= 17
        counts += found
    assert (counts[15:] == 1).all(), "each quarter of the third data set has had its epoch"


def test_weights_of_one_change_nothing() -> None:
    lengths = chat_lengths(500, 64)
    shape: dict[str, Any] = {"sequence_length": 64, "seed": 1, "epoch": 2, "packing": True}
    plain = rows_of_epoch(lengths, **shape)
    weighted = rows_of_epoch(lengths, weights=np.ones(500), **shape)
    assert (plain.order == weighted.order).all()
    assert (plain.borders == weighted.borders).all()
