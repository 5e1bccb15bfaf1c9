"""Passes as CUDA graphs: one call issues a micro-batch, not thousands (decisions 0083, 0088 and 0103).

The first micro-batch of a kind runs as usual, the second is recorded, and from then on they are replayed.
One that fits a graph with more borders and a longer segment replays that, until its kind has come often.
Usual passes, those of evaluation too, and recorded ones share a pool of memory and a stream: what one leaves
the next one takes. Passes in which the host waits for the GPU cannot be recorded, and run as usual.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from shardwise.data.batch import Layout, MicroBatch
from shardwise.errors import JobError

LEAST_BORDERS = 16
MOST_GRAPHS = 64  # Each takes some MiB outside of torch's memory; further kinds run as usual
OFTEN = 8  # Replays of a wider graph, each some milliseconds longer, before a kind gets its own
WAITS = "called a synchronizing CUDA operation"
"""What torch warns of (c10/cuda/CUDAFunctions.cpp: warn_or_error_on_sync)."""


class Kind(NamedTuple):
    """What a graph depends on."""

    shape: torch.Size
    layout: Layout
    last: bool = False  # of a step's micro-batches, under ZeRO

    def fits(self, other: "Kind") -> bool:
        """Whether a micro-batch of this kind is one of `other`, with more empty segments."""
        own, wide = self.layout, other.layout
        longest = own.longest if own.single_segment_rows else wide.longest  # such rows are cut by it
        same = self._replace(layout=own._replace(borders=wide.borders, longest=longest)) == other
        return same and own.borders <= wide.borders and own.longest <= wide.longest


Loss = Callable[[MicroBatch], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Graph:
    replay: Callable[[], None]
    batch: MicroBatch  # What it reads
    loss: torch.Tensor  # What it leaves
    left: Any  # See `RecordedPasses.left`


_ALIVE: WeakSet["RecordedPasses"] = WeakSet()


def forget() -> None:
    """Free all graphs: NCCL leaves no group while one holds its collectives (init.cc: commDestroySync)."""
    for passes in _ALIVE:
        passes.graphs.clear()


class RecordedPasses:
    """Runs micro-batches, and leaves the gradients of `masters`."""

    def __init__(
        self,
        loss: Loss,
        masters: Sequence[torch.Tensor],
        device: torch.device,
        gradients: Sequence[torch.Tensor] = (),
        *,
        separates: bool = True,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`loss`: the summed loss of a micro-batch; its backward pass adds to the gradients of `masters`.

        `gradients`: these stay, and all micro-batches of a step add to them. Without any, a step has one
        micro-batch, whose passes allocate them where its activations were. `separates`: as the objective's.
        `end` is called after a backward pass, and recorded with it.
        """
        self._separates, self._end = separates, end
        self._loss, self._masters, self._gradients = loss, masters, [*gradients]
        self._factor = torch.ones((), device=device)
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.MemPool()  # type: ignore[no-untyped-call]
        self.graphs: dict[Kind, _Graph | None] = {}  # None: the next one is recorded
        self._tokens: dict[torch.Size, list[torch.Tensor]] = {}  # What graphs of a shape read
        self._borrowed = Counter[Kind]()  # How often a kind replayed a wider one's graph
        self.waiting: dict[Kind, str] = {}  # Kinds that cannot be recorded, and the line that waits
        _ALIVE.add(self)

    def run(self, micro_batches: Sequence[MicroBatch], factor: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, fp32 scalar; gradients are those of the losses times `factor`."""
        self._factor.copy_(factor)
        if self._gradients:
            zero(self._gradients)
            self.leave(self._gradients)
        else:
            assert len(micro_batches) == 1, "the next micro-batch would overwrite the gradients"
        total = torch.zeros_like(self._factor)
        for micro_batch in micro_batches:
            total += self.one(padded(micro_batch, separates=self._separates))
        return total

    @contextmanager
    def place(self) -> Iterator[None]:
        """Within, what this thread computes is on the stream of the passes, and its memory in their pool."""
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            yield
        outside.wait_stream(self._stream)

    def settle(self) -> None:
        """Called before the usual passes of a kind that may be recorded."""
        if not (self.graphs or self.waiting):  # what the model's construction left serves no other pool
            torch.cuda.empty_cache()

    def kind(self, batch: MicroBatch) -> Kind:
        return Kind(batch.input_ids.shape, batch.layout)

    def _wider(self, kind: Kind) -> Kind | None:
        """The kind whose graph a micro-batch of a kind without one replays; None: it runs as usual.

        torch's deterministic kernels add up in an order that depends on the number of borders.
        """
        often = self._borrowed[kind] >= OFTEN and len(self.graphs) < MOST_GRAPHS
        if often or kind in self.waiting or torch.are_deterministic_algorithms_enabled():
            return None
        fitting = [one for one, graph in self.graphs.items() if graph is not None and kind.fits(one)]
        blocks = {one: one.layout.borders * one.layout.longest for one in fitting}  # of attention
        return min(fitting, key=blocks.__getitem__, default=None)

    def one(self, batch: MicroBatch) -> torch.Tensor:
        kind = self.kind(batch)
        if kind not in self.graphs and (other := self._wider(kind)):
            self._borrowed[kind] += 1
            kind, batch = other, with_borders(batch, other.layout.borders)
        if kind not in self.graphs:
            if kind not in self.waiting:
                self.settle()
            with self.place(), _noting_waits() as lines:
                loss = self.passes(batch)
            if lines:
                self.waiting[kind] = lines[0]
            elif len(self.graphs) < MOST_GRAPHS:
                self.graphs[kind] = None
            return loss
        graph = self.graphs[kind]
        if graph is None:
            graph = self.graphs[kind] = self._record(batch)
        for name, tensor in batch.tensors().items():
            getattr(graph.batch, name).copy_(tensor)
        graph.replay()
        self.leave(graph.left)
        return graph.loss

    def left(self) -> Any:
        """What passes that were recorded leave to the step, to be left again after each replay."""
        gradients: list[torch.Tensor | None] = [master.grad for master in self._masters]
        if not self._gradients:  # their memory serves the next passes as soon as the optimizer has stepped
            gradients = [None if one is None or not one.numel() else not_owned(one) for one in gradients]
            self.leave([None] * len(gradients))
        return gradients

    def leave(self, left: Any) -> None:
        for master, gradient in zip(self._masters, left, strict=True):
            master.grad = gradient

    def passes(self, batch: MicroBatch) -> torch.Tensor:
        """The passes on this thread alone: another one's memory would not be that of the pool."""
        with torch.autograd.set_multithreading_enabled(False):
            loss = self._loss(batch)
            (loss * self._factor).backward()  # type: ignore[no-untyped-call]
            self._end()
        return loss.detach()  # a graph of autograd that is alive would prevent recording

    def _record(self, batch: MicroBatch) -> _Graph:
        shape = batch.input_ids.shape
        if shape not in self._tokens:
            tokens = (batch.input_ids, batch.labels, batch.position_ids)
            self._tokens[shape] = [tensor.clone() for tensor in tokens]
        ids, labels, positions = self._tokens[shape]
        batch = replace(batch, input_ids=ids, labels=labels, position_ids=positions)
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"  # other threads may work for the data
        early: list[BaseException] = []
        try:
            with torch.cuda.graph(graph, self._pool.id, self._stream, mode), _noting(early):  # type: ignore[arg-type]
                loss = self.passes(batch)
        except RuntimeError as error:
            # What ends the passes early leaves streams that were not joined, which is an error of its own.
            first = early[0] if early else error
            if isinstance(first, torch.OutOfMemoryError) or not isinstance(first, RuntimeError):
                raise first from None
            why, _, _ = str(first).partition("\n")
            what = f"the passes cannot be recorded as a CUDA graph: {why}"
            fix = "data.packing: false, whose micro-batches are not recorded"
            raise JobError(what, where="data.packing", fix=fix) from first
        return _Graph(replay=graph.replay, batch=batch, loss=loss, left=self.left())


def zero(tensors: Sequence[torch.Tensor]) -> None:
    """One kernel for all of a format; for several formats torch takes one for each tensor."""
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._foreach_zero_([tensor for tensor in tensors if tensor.dtype == dtype])


def not_owned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which this tensor does not keep from being used again."""
    known = {2: torch.int16, 4: torch.int32}[tensor.element_size()]  # the interface has no bf16
    memory = SimpleNamespace(__cuda_array_interface__=tensor.view(known).__cuda_array_interface__)
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)


def padded(batch: MicroBatch, *, separates: bool = True) -> MicroBatch:
    """The same segments, then empty ones: with numbers and longest segments that only few kinds have.

    All ranks have the same kind: NCCL wants a collective recorded on all of them, or on none.
    `separates`: rows of a single segment are computed otherwise than others.
    """
    rows = batch.input_ids.shape[1]
    count, longest, single = batch.common or batch.layout
    single = single if separates else 0
    if not single:
        longest = min(rows, 1 << (longest - 1).bit_length())
    batch = with_borders(batch, max(LEAST_BORDERS, 1 << (count - 1).bit_length()))
    return replace(batch, max_seqlen=longest, single_segment_rows=single)


def with_borders(batch: MicroBatch, count: int) -> MicroBatch:
    """The same segments, then empty ones."""
    last = batch.cu_seqlens[-1:].expand(count - len(batch.cu_seqlens))
    return replace(batch, cu_seqlens=torch.cat([batch.cu_seqlens, last]))


@contextmanager
def _noting(found: list[BaseException]) -> Iterator[None]:
    """What is raised within is added to `found`."""
    try:
        yield
    except BaseException as error:
        found.append(error)
        raise


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """The lines within at which the host waits for the GPU."""
    lines: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # it calls itself a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lines
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if WAITS in str(warning.message):
            lines.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
