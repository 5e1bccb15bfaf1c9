"""Rows of tokens in the order of training, for one rank, from any position.

Optimizer step k takes the rows k*global_batch … of the endless sequence of epochs. That sequence does not
depend on the ranks, so any number of ranks trains on the same rows in the same step. Micro-batch j of rank r
takes rows (j*data_size + r)*micro_batch … of the step; packed rows are first put in an order that gives the
ranks equal work.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from shardwise.data.batch import IGNORED, Layout, MicroBatch, StepBatch
from shardwise.data.cache import TokenDataset
from shardwise.data.packing import Indices, Rows, deal, rows_of_epoch
from shardwise.errors import DataError, JobError

ROUND = 8  # unpacked rows are as long as a multiple of this, as tensor cores need it
PREFETCH = 2  # steps that a background thread prepares ahead


class Position(NamedTuple):
    """The next row to train on: its epoch, and its number in that epoch's rows."""

    epoch: int = 0
    row: int = 0


@dataclass(eq=False)
class _Stream:
    """Rows of a dataset as one rank's micro-batches."""

    dataset: TokenDataset
    _: KW_ONLY
    sequence_length: int
    packing: bool
    pad_id: int
    micro_batch: int
    data_rank: int
    data_size: int
    pin_memory: bool = False
    pad_to_length: bool = False
    """Give rows without packing `sequence_length` tokens, too, not only as many as the longest needs."""

    def _rows(self, epoch: int, **order: Any) -> Rows:
        shape: dict[str, Any] = {"sequence_length": self.sequence_length, "packing": self.packing}
        return rows_of_epoch(self.dataset.lengths, epoch=epoch, **shape, **order)

    def _assemble(self, rows: Sequence[Indices]) -> MicroBatch:
        width = self.sequence_length if self.packing or self.pad_to_length else None
        batch = assemble(self.dataset, rows, pad_id=self.pad_id, width=width, limit=self.sequence_length)
        return batch.pinned() if self.pin_memory else batch


@dataclass(eq=False, kw_only=True)
class BatchStream(_Stream, Iterator[StepBatch]):
    """Endless iterator of optimizer steps. Its state is that of the steps handed out, not prefetched."""

    global_batch: int
    seed: int
    worst_case_first: bool

    def __post_init__(self) -> None:
        if len(self.dataset) == 0:
            raise DataError("there are no samples to train on", where="data.train")
        each = self.micro_batch * self.data_size
        if self.global_batch % each:
            what = f"{self.global_batch} rows do not divide into micro-batches of {self.micro_batch} on "
            what += f"{self.data_size} ranks"
            raise JobError(what, where="train.global_batch", fix=f"make it a multiple of {each}")
        self._consumed = self._produced = Position()
        longest_first = self.global_batch if self.worst_case_first else 0
        weights = self.dataset.weights
        plan = partial(self._rows, seed=self.seed, longest_first=longest_first, weights=weights)
        self._plan = lru_cache(maxsize=2)(plan)  # a step may lie in two epochs
        self._row_counts: dict[int, int] = {}
        self._pending: deque[Future[tuple[StepBatch, Position]]] = deque()
        # Pinning uses the thread's current GPU; a new thread starts with GPU 0, which is another rank's.
        device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if self.pin_memory else ()
        self._worker = ThreadPoolExecutor(1, "batches", *device)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        while len(self._pending) <= PREFETCH:
            self._pending.append(self._worker.submit(self._produce))
        batch, self._consumed = self._pending.popleft().result()
        self._pending.append(self._worker.submit(self._produce))
        return batch

    def state_dict(self) -> dict[str, int]:
        return self._consumed._asdict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drop_pending()
        self._consumed = self._produced = Position(state["epoch"], state["row"])

    def close(self) -> None:
        self._drop_pending()
        self._worker.shutdown()

    def rows_per_epoch(self, epoch: int) -> int:
        if epoch not in self._row_counts:
            self._row_counts[epoch] = len(self._plan(epoch))
        return self._row_counts[epoch]

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that hold `epochs` passes over the data; the last is filled from the next pass."""
        full = int(epochs)
        rows = float(sum(map(self.rows_per_epoch, range(full))))
        if epochs > full:
            rows += (epochs - full) * self.rows_per_epoch(full)
        return max(1, math.ceil(rows / self.global_batch - 1e-9))

    def _produce(self) -> tuple[StepBatch, Position]:
        first = self._settle(self._produced)
        rows, self._produced = self._take(first, self.global_batch)
        members = np.concatenate(rows)
        if self.packing:
            rows = deal(rows, self.dataset.lengths, ranks=self.data_size, micro_batch=self.micro_batch)
        micro_batches = []
        for start in range(0, self.global_batch, self.data_size * self.micro_batch):
            ends = range(start, start + (self.data_size + 1) * self.micro_batch, self.micro_batch)
            at_once = [rows[first:end] for first, end in pairwise(ends)]
            own = self._assemble(at_once[self.data_rank])
            micro_batches.append(replace(own, common=self._common(at_once)) if self.packing else own)
        batch = StepBatch(
            micro_batches=micro_batches,
            target_tokens=int(self.dataset.targets[members].sum(dtype=np.int64)),
            tokens=int(self.dataset.lengths[members].sum(dtype=np.int64)),
            epoch=first.epoch,
        )
        return batch, self._produced

    def _common(self, at_once: Sequence[Sequence[Indices]]) -> Layout:
        """Of all ranks' micro-batches: a graph with collectives is to be the same on all of them."""
        lengths, width = self.dataset.lengths, self.sequence_length
        found = [layout([lengths[row] for row in rows], width) for rows in at_once]
        borders, longest, single = zip(*found, strict=True)
        return Layout(max(borders), max(longest), min(single))

    def _take(self, position: Position, count: int) -> tuple[list[Indices], Position]:
        taken: list[Indices] = []
        while len(taken) < count:
            position = self._settle(position)
            plan = self._plan(position.epoch)
            last = min(len(plan), position.row + count - len(taken))
            taken.extend(plan[row] for row in range(position.row, last))
            position = Position(position.epoch, last)
        return taken, position

    def _settle(self, position: Position) -> Position:
        """Name the same place by the epoch that its next row belongs to."""
        if position.row < len(self._plan(position.epoch)):
            return position
        return Position(position.epoch + 1, 0)

    def _drop_pending(self) -> None:
        while self._pending:
            future = self._pending.pop()
            if not future.cancel():
                future.exception()  # wait: it may be moving `_produced`


@dataclass(eq=False)
class EvalStream(_Stream):
    """The held-out rows, in the same order every time. Every rank yields the same number of micro-batches."""

    def __post_init__(self) -> None:
        self.target_tokens = int(self.dataset.targets.sum(dtype=np.int64))
        """Predicted tokens over all ranks."""
        self._plan = self._rows(0, seed=0, shuffle=False)

    def __len__(self) -> int:
        return math.ceil(len(self._plan) / (self.micro_batch * self.data_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        empty = np.zeros(0, dtype=np.int64)
        for number in range(len(self)):
            first = (number * self.data_size + self.data_rank) * self.micro_batch
            rows = range(first, first + self.micro_batch)
            yield self._assemble([self._plan[row] if row < len(self._plan) else empty for row in rows])


def layout(rows: Sequence[npt.NDArray[Any]], width: int) -> Layout:
    """That of a micro-batch whose rows of `width` tokens have samples of these lengths (`assemble`)."""
    padding = [width - int(row.sum()) for row in rows]
    borders = 1 + sum(len(row) + (left > 0) for row, left in zip(rows, padding, strict=True))
    longest = max(*padding, *(int(row.max(initial=0)) for row in rows))
    alone = [len(row) == 1 and not left for row, left in zip(rows, padding, strict=True)]
    return Layout(borders, longest, [*alone, False].index(False))


def assemble(
    dataset: TokenDataset, rows: Sequence[Indices], *, pad_id: int, width: int | None, limit: int
) -> MicroBatch:
    """Put rows into tensors of `width` tokens, by default as many as the longest needs, at most `limit`."""
    if width is None:
        longest = max(int(dataset.lengths[row].sum()) for row in rows)
        width = min(max(ROUND, math.ceil(longest / ROUND) * ROUND), limit)
    shape = (len(rows), width)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    borders, single = [0], 0
    for line, row in enumerate(rows):
        at = 0
        for index in row.tolist():
            tokens, trained = dataset.sample(index)
            end = at + len(tokens)
            ids[line, at:end] = tokens
            labels[line, at : end - 1] = np.where(trained[1:], ids[line, at + 1 : end], IGNORED)
            positions[line, at:end] = np.arange(len(tokens))
            at = end
            borders.append(line * width + at)
        if at < width:
            positions[line, at:] = np.arange(width - at)
            borders.append((line + 1) * width)
        elif len(row) == 1 and single == line:
            single += 1
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=int(np.diff(borders).max()),
        single_segment_rows=single,
    )
