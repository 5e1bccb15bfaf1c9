"""Rows of tokens in the order of training, for one rank, from any position.

The rows of optimizer step k are the rows k*global_batch … of the endless sequence of epochs. That
sequence does not know of ranks, so another number of ranks trains on the same rows in the same step.
Micro-batch j of rank r takes rows (j*data_size + r)*micro_batch … of the step; packed rows are put in an
order first that gives the ranks equal work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch

from shardwise.data.batch import IGNORED, MicroBatch, StepBatch
from shardwise.data.cache import TokenDataset
from shardwise.data.packing import Indices, Rows, deal, rows_of_epoch
from shardwise.errors import DataError, JobError

ROUND = 8
"""Unpacked rows are as long as a multiple of this: tensor cores want it."""


@dataclass(frozen=True)
class Position:
    """The next row to train on: its epoch, and its number in that epoch's rows."""

    epoch: int = 0
    row: int = 0


class BatchStream(Iterator[StepBatch]):
    """Endless iterator of optimizer steps. Its state is that of the steps handed out, not prefetched."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        sequence_length: int,
        global_batch: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        seed: int,
        packing: bool,
        pad_id: int,
        worst_case_first: bool,
        pin_memory: bool = False,
        prefetch: int = 2,
    ) -> None:
        """`prefetch`: steps that a background thread prepares ahead; 0 prepares each when it is asked for."""
        if len(dataset) == 0:
            raise DataError("there are no samples to train on", where="data.train")
        if global_batch % (micro_batch * data_size):
            raise JobError(
                f"{global_batch} rows do not divide into micro-batches of {micro_batch} on {data_size} ranks",
                where="train.global_batch",
                fix=f"make it a multiple of {micro_batch * data_size}",
            )
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.data_rank = data_rank
        self.data_size = data_size
        self.seed = seed
        self.packing = packing
        self.pad_id = pad_id
        self.worst_case_first = worst_case_first
        self.pin_memory = pin_memory
        self.prefetch = prefetch
        self._consumed = Position()
        self._produced = Position()
        self._plan = lru_cache(maxsize=2)(self._make_plan)  # a step may lie in two epochs
        self._row_counts: dict[int, int] = {}
        self._pending: deque[Future[tuple[StepBatch, Position]]] = deque()
        self._worker = _worker(pin_memory=pin_memory) if prefetch else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        if self._worker is None:
            batch, self._consumed = self._produce()
            return batch
        while len(self._pending) <= self.prefetch:
            self._pending.append(self._worker.submit(self._produce))
        batch, self._consumed = self._pending.popleft().result()
        self._pending.append(self._worker.submit(self._produce))
        return batch

    def state_dict(self) -> dict[str, int]:
        """The position after the last step handed out."""
        return {"epoch": self._consumed.epoch, "row": self._consumed.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drop_pending()
        self._consumed = self._produced = Position(state["epoch"], state["row"])

    def close(self) -> None:
        """Stop the background thread."""
        self._drop_pending()
        if self._worker is not None:
            self._worker.shutdown()

    def rows_per_epoch(self, epoch: int) -> int:
        if epoch not in self._row_counts:
            self._row_counts[epoch] = len(self._plan(epoch)) if self.packing else len(self.dataset)
        return self._row_counts[epoch]

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that hold `epochs` passes over the data; the last is filled from the next pass."""
        whole = int(epochs)
        rows = float(sum(self.rows_per_epoch(epoch) for epoch in range(whole)))
        if epochs > whole:
            rows += (epochs - whole) * self.rows_per_epoch(whole)
        return max(1, math.ceil(rows / self.global_batch - 1e-9))

    def _produce(self) -> tuple[StepBatch, Position]:
        first = self._settle(self._produced)
        rows, self._produced = self._take(first, self.global_batch)
        members = np.concatenate(rows)
        if self.packing:
            rows = deal(rows, self.dataset.lengths, ranks=self.data_size, micro_batch=self.micro_batch)
        batch = StepBatch(
            micro_batches=[
                self._assemble(rows[start : start + self.micro_batch])
                for start in range(
                    self.data_rank * self.micro_batch, self.global_batch, self.data_size * self.micro_batch
                )
            ],
            target_tokens=int(self.dataset.targets[members].sum(dtype=np.int64)),
            tokens=int(self.dataset.lengths[members].sum(dtype=np.int64)),
            epoch=first.epoch,
        )
        return batch, self._produced

    def _assemble(self, rows: Sequence[Indices]) -> MicroBatch:
        width = self.sequence_length if self.packing else None
        batch = assemble(self.dataset, rows, pad_id=self.pad_id, width=width, limit=self.sequence_length)
        return _pinned(batch) if self.pin_memory else batch

    def _take(self, position: Position, count: int) -> tuple[list[Indices], Position]:
        """The next rows, over as many epochs as it takes."""
        taken: list[Indices] = []
        while len(taken) < count:
            position = self._settle(position)
            plan = self._plan(position.epoch)
            last = min(len(plan), position.row + count - len(taken))
            taken.extend(plan.slice(position.row, last))
            position = Position(position.epoch, last)
        return taken, position

    def _settle(self, position: Position) -> Position:
        """The same place, named by the epoch that its next row belongs to."""
        if position.row < len(self._plan(position.epoch)):
            return position
        return Position(position.epoch + 1, 0)

    def _make_plan(self, epoch: int) -> Rows:
        return rows_of_epoch(
            self.dataset.lengths,
            sequence_length=self.sequence_length,
            seed=self.seed,
            epoch=epoch,
            packing=self.packing,
            longest_first=self.global_batch if self.worst_case_first else 0,
        )

    def _drop_pending(self) -> None:
        while self._pending:
            future = self._pending.pop()
            if not future.cancel():
                future.exception()  # wait: it may be moving `_produced`


class EvalStream:
    """The held-out rows, in the same order every time. Every rank yields the same number of micro-batches."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        sequence_length: int,
        packing: bool,
        pad_id: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.packing = packing
        self.pad_id = pad_id
        self.micro_batch = micro_batch
        self.data_rank = data_rank
        self.data_size = data_size
        self.pin_memory = pin_memory
        self.target_tokens = int(dataset.targets.sum(dtype=np.int64))
        """Tokens that are predicted, over all ranks."""
        self._rows = rows_of_epoch(
            dataset.lengths, sequence_length=sequence_length, seed=0, epoch=0, packing=packing, shuffle=False
        )

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / (self.micro_batch * self.data_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        nothing = np.zeros(0, dtype=np.int64)
        for number in range(len(self)):
            first = (number * self.data_size + self.data_rank) * self.micro_batch
            rows = [
                self._rows[row] if row < len(self._rows) else nothing
                for row in range(first, first + self.micro_batch)
            ]
            width = self.sequence_length if self.packing else None
            batch = assemble(self.dataset, rows, pad_id=self.pad_id, width=width, limit=self.sequence_length)
            yield _pinned(batch) if self.pin_memory else batch


def assemble(
    dataset: TokenDataset, rows: Sequence[Indices], *, pad_id: int, width: int | None, limit: int
) -> MicroBatch:
    """The rows as tensors. `width` tokens each, or, unset, as many as the longest needs, at most `limit`."""
    if width is None:
        longest = max(int(dataset.lengths[row].sum()) for row in rows)
        width = min(max(ROUND, math.ceil(longest / ROUND) * ROUND), limit)
    shape = (len(rows), width)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    borders = [0]
    whole_rows = 0
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
        elif len(row) == 1 and whole_rows == line:
            whole_rows += 1
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=int(np.diff(borders).max()),
        single_segment_rows=whole_rows,
    )


def _worker(*, pin_memory: bool) -> ThreadPoolExecutor:
    if not pin_memory:
        return ThreadPoolExecutor(1, thread_name_prefix="batches")
    # Pinning uses the thread's current GPU; a new thread starts with GPU 0, which is another rank's.
    return ThreadPoolExecutor(
        1,
        thread_name_prefix="batches",
        initializer=torch.cuda.set_device,
        initargs=(torch.cuda.current_device(),),
    )


def _pinned(batch: MicroBatch) -> MicroBatch:
    tensors = ("input_ids", "labels", "position_ids", "cu_seqlens")
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in tensors})
