"""Which micro-batches share a CUDA graph. What a graph computes is in tests/gpu/test_recorded_passes.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.data.batch import Layout, MicroBatch
from shardwise.engines.runtime.recorded import LEAST_BORDERS, RecordedPasses, padded
from shardwise.errors import JobError


def batch(*borders: int, **changes: Any) -> MicroBatch:
    rows = torch.zeros(2, borders[-1] // 2, dtype=torch.int64)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    values = {"cu_seqlens": cu_seqlens, "max_seqlen": longest, **changes}
    return MicroBatch(input_ids=rows, labels=rows, position_ids=rows, **values)


@pytest.mark.parametrize("count", [2, 16, 17, 33])
def test_segments_stay_and_further_ones_are_empty(count: int) -> None:
    given = batch(*range(0, 100 * count, 100))
    found = padded(given)
    assert found.cu_seqlens[:count].equal(given.cu_seqlens)
    assert found.cu_seqlens[count:].unique().tolist() in ([], [100 * (count - 1)])
    assert len(found.cu_seqlens) == max(LEAST_BORDERS, {17: 32, 33: 64}.get(count, count))
    assert found.cu_seqlens.dtype == torch.int32


def test_lengths_of_the_longest_segment_are_few_and_none_is_longer_than_a_row() -> None:
    lengths = {padded(batch(0, longest, 4000)).max_seqlen for longest in range(2000, 4000, 37)}
    assert lengths == {2000}
    lengths = {padded(batch(0, n, 2 * n, 3 * n, 4000)).max_seqlen for n in range(700, 1001, 10)}
    assert lengths == {1024, 2000}


def test_a_micro_batch_gets_the_kind_that_fits_all_ranks() -> None:
    own = batch(0, 100, 200, 4000, single_segment_rows=0)
    common = Layout(borders=20, longest=2000, single_segment_rows=1)
    found = padded(replace(own, common=common))
    assert (len(found.cu_seqlens), found.max_seqlen, found.single_segment_rows) == (32, 2000, 1)
    assert found.cu_seqlens[:4].equal(own.cu_seqlens)
    found = padded(replace(own, common=common._replace(longest=900)), separates=False)
    assert (found.max_seqlen, found.single_segment_rows) == (1024, 0)


def test_rows_of_one_segment_keep_their_length() -> None:
    """`varlen_attention` cuts these rows by it."""
    assert padded(batch(0, 1500, 3000, single_segment_rows=2)).max_seqlen == 1500


@pytest.mark.parametrize(
    ("ends", "found", "says"),
    [
        (torch.OutOfMemoryError("no room"), torch.OutOfMemoryError, "no room"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (
            RuntimeError("not permitted when capturing\nmore"),
            JobError,
            "CUDA graph: not permitted when capturing",
        ),
        (None, JobError, "CUDA graph: unjoined work"),
    ],
    ids=["out of memory", "interrupted", "cannot be captured", "streams not joined"],
)
def test_what_ended_a_capture_is_said_not_what_followed(
    ends: BaseException | None, found: type[BaseException], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a capture fails where streams were not joined, whatever came before."""

    @contextmanager
    def graph(*_: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("unjoined work")

    def passes(_: MicroBatch) -> torch.Tensor:
        try:
            raise KeyError("handled")
        except KeyError:
            if ends is not None:
                raise ends  # noqa: B904 - its context is another one
        return torch.zeros(())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    recorded = RecordedPasses.__new__(RecordedPasses)
    given = {"_tokens": {}, "_pool": SimpleNamespace(id=0), "_stream": None, "passes": passes}
    vars(recorded).update(given)
    with pytest.raises(found, match=says):
        recorded._record(batch(0, 100, 200))
