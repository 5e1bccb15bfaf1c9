"""Which micro-batches share a CUDA graph. What a graph computes is in tests/gpu/test_recorded_passes.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.data.batch import Layout, MicroBatch
from shardwise.engines.runtime import recorded as module
from shardwise.engines.runtime.recorded import LEAST_BORDERS, OFTEN, Kind, RecordedPasses, padded
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


class Logged(RecordedPasses):
    """Says how each micro-batch was computed, on a CPU."""

    def __init__(self) -> None:
        given = {"graphs": {}, "waiting": {}, "_borrowed": Counter(), "_masters": []}
        vars(self).update(given)
        self.log: list[str] = []

    def settle(self) -> None:
        pass

    def place(self) -> Any:
        return nullcontext()

    def passes(self, batch: MicroBatch) -> torch.Tensor:
        self.log.append("usual")
        return torch.zeros(())

    def _record(self, batch: MicroBatch) -> Any:
        def replay() -> None:
            borders = graph.batch.cu_seqlens.unique().tolist()
            self.log.append(f"{len(graph.batch.cu_seqlens)}x{batch.max_seqlen} {borders}")

        cloned = replace(batch, cu_seqlens=batch.cu_seqlens.clone())
        graph = SimpleNamespace(replay=replay, batch=cloned, loss=torch.zeros(()), left=[])
        return graph


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    monkeypatch.setattr(module, "_noting_waits", lambda: nullcontext([]))
    return Logged()


def evenly(length: int, count: int = 4000, **changes: Any) -> MicroBatch:
    return padded(batch(*range(0, count, length), count, **changes))


def test_what_fits_a_recorded_graph_replays_it_until_it_has_come_often(logged: Logged) -> None:
    wide, narrow = evenly(100), evenly(1000)
    assert [(len(one.cu_seqlens), one.max_seqlen) for one in (wide, narrow)] == [(64, 128), (16, 1024)]
    widest = replace(wide, max_seqlen=2000)
    for one in (widest, widest, narrow, widest):
        logged.one(one)
    all_of_wide = [*range(0, 4001, 100)]
    expected = ["usual", f"64x2000 {all_of_wide}", f"64x2000 {[*range(0, 4001, 1000)]}"]
    assert logged.log == [*expected, f"64x2000 {all_of_wide}"]
    for _ in range(OFTEN + 2):
        logged.one(narrow)
    assert logged.log[-3:] == ["usual", *[f"16x1024 {[*range(0, 4001, 1000)]}"] * 2]


def test_what_fits_no_graph_runs_as_usual(logged: Logged) -> None:
    """A longer segment, more borders, other rows of a single segment, and all with deterministic kernels."""
    wide, narrow = evenly(100), evenly(1000)
    for one in (narrow, narrow, evenly(2000), wide, replace(narrow, single_segment_rows=1)):
        logged.one(one)
    assert [line == "usual" for line in logged.log] == [True, False, True, True, True]


def test_rows_of_a_single_segment_replay_a_graph_of_their_length() -> None:
    shape = torch.Size([2, 2000])
    own = Kind(shape, Layout(16, 1500, 1))
    assert own.fits(Kind(shape, Layout(32, 1500, 1)))
    assert not own.fits(Kind(shape, Layout(32, 2000, 1)))


def test_deterministic_kernels_have_their_own_number_of_borders(logged: Logged) -> None:
    wide = replace(evenly(100), max_seqlen=2000)
    logged.one(wide)
    logged.one(wide)
    torch.use_deterministic_algorithms(True)
    try:
        logged.one(evenly(1000))
    finally:
        torch.use_deterministic_algorithms(False)
    assert logged.log[-1] == "usual"


def test_of_graphs_that_fit_the_least_is_replayed(logged: Logged) -> None:
    shape = torch.Size([2, 2000])
    kinds = [
        Kind(shape, Layout(64, 2000, 0)),
        Kind(shape, Layout(32, 2000, 0)),
        Kind(shape, Layout(32, 1024, 0)),
    ]
    logged.graphs = {kind: SimpleNamespace() for kind in kinds[:2]} | {kinds[2]: None}  # type: ignore[dict-item]
    own = Layout(16, 512, 0)
    assert logged._wider(Kind(shape, own)) == kinds[1]
    assert logged._wider(Kind(shape, own, last=True)) is None
    assert logged._wider(Kind(torch.Size([1, 2000]), own)) is None
