"""Which samples share a row, and the order of the rows: pure, without torch.

The rows of an epoch are a function of (seed, epoch, lengths, sequence_length, packing, shuffle), so a
position in the data is two numbers, and every process computes the same rows by itself.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

WINDOW_SAMPLES = 4096
WINDOW_ROWS = 128
"""A window that is packed by itself holds at least about this many rows: only its last rows stay open."""


@dataclass(frozen=True)
class Rows:
    """Rows of sample indices; row i is `order[borders[i]:borders[i + 1]]`."""

    order: Indices
    borders: Indices

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, row: int) -> Indices:
        return self.order[self.borders[row] : self.borders[row + 1]]


def permutation(size: int, *seed: int) -> Indices:
    """A permutation of range(size). It depends on the raw numbers of Philox, which numpy keeps stable."""
    numbers = np.random.Philox(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(numbers, kind="stable")


def taken(weights: npt.NDArray[np.float64], seed: int, epoch: int) -> Indices:
    """Samples of an epoch: each as often as its weight says, fractions spread over the epochs.

    With u spread evenly over [0, 1), epoch e has a sample floor((e + 1) w + u) - floor(e w + u) times.
    """
    spread = permutation(len(weights), seed) / max(len(weights), 1)
    times = np.floor((epoch + 1) * weights + spread) - np.floor(epoch * weights + spread)
    return np.repeat(np.arange(len(weights)), times.astype(np.int64))


def rows_of_epoch(
    lengths: npt.NDArray[np.int32],
    *,
    sequence_length: int,
    seed: int,
    epoch: int,
    packing: bool,
    shuffle: bool = True,
    longest_first: int = 0,
    weights: npt.NDArray[np.float64] | None = None,
) -> Rows:
    """Rows of one epoch: every sample, or those `taken`, in one row; no row over `sequence_length` tokens.

    lengths: int [samples], each in 1..sequence_length. Unpacked, a row is one sample and epoch 0 begins with
    the `longest_first` longest, which need the most memory. O(n log n) time.
    """
    samples = np.arange(len(lengths)) if weights is None else taken(weights, seed, epoch)
    order = samples[permutation(len(samples), seed, epoch)] if shuffle else samples
    if packing:
        return _pack(order, np.asarray(lengths), sequence_length, (seed, epoch) if shuffle else None)
    if epoch == 0 and longest_first:
        by_length = np.argsort(-lengths[order].astype(np.int64), kind="stable")[:longest_first]
        order = np.concatenate([order[by_length], np.delete(order, by_length)])
    return Rows(order, np.arange(len(order) + 1))


def deal(
    rows: Sequence[Indices], lengths: npt.NDArray[np.int32], *, ranks: int, micro_batch: int
) -> list[Indices]:
    """Reorder the rows of a step so that every rank computes about the same amount of attention.

    Attention costs the sum of the squared lengths of a row's samples, and a step waits for its slowest rank.
    The rows, costliest first, go to the ranks in turns that run forth and back; a rank's rows go to its
    micro-batches in turn. Micro-batch j of rank r then is rows (j*ranks + r)*micro_batch … of the result, its
    costliest row first.
    """
    costs = [int(np.square(lengths[row], dtype=np.int64).sum()) for row in rows]
    costliest_first = sorted(range(len(rows)), key=lambda row: -costs[row])
    hands: list[list[Indices]] = [[] for _ in range(ranks)]
    for place, row in enumerate(costliest_first):
        turn, seat = divmod(place, ranks)
        hands[seat if turn % 2 == 0 else ranks - 1 - seat].append(rows[row])
    accumulation = len(rows) // (ranks * micro_batch)
    return [row for start in range(accumulation) for hand in hands for row in hand[start::accumulation]]


def _pack(
    order: Indices, lengths: npt.NDArray[np.int32], capacity: int, seed: tuple[int, int] | None
) -> Rows:
    """Pack windows of the order by best-fit decreasing, so that the samples of a row stay random."""
    if not len(order):
        return Rows(order, np.zeros(1, dtype=np.int64))
    window = max(WINDOW_SAMPLES, int(WINDOW_ROWS * capacity / float(lengths.mean())))
    rows: list[list[int]] = []
    for number, start in enumerate(range(0, len(order), window)):
        members = order[start : start + window]
        packed = best_fit(lengths[members].tolist(), capacity)
        # Best fit leaves the rows sorted by their longest sample.
        turn = range(len(packed)) if seed is None else permutation(len(packed), *seed, number).tolist()
        names = members.tolist()
        rows.extend([names[place] for place in packed[row]] for row in turn)
    borders = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Rows(np.fromiter((name for row in rows for name in row), np.int64, len(order)), borders)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: each item, longest first, into the fullest bin with room for it."""
    by_length = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    smallest = lengths[by_length[-1]]
    base = len(lengths)  # at most this many bins: one sorted key holds a bin's room and its number
    bins, room = list[list[int]](), list[int]()
    for item in by_length:
        length = lengths[item]
        place = bisect_left(room, length * base)
        if place < len(room):
            left, chosen = divmod(room.pop(place), base)
            bins[chosen].append(item)
        else:
            left, chosen = capacity, len(bins)
            bins.append([item])
        if left - length >= smallest:  # nothing fits into a bin with less room
            insort(room, (left - length) * base + chosen)
    return bins
