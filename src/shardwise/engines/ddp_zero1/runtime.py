"""ZeRO-1 in plain PyTorch (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), for recorded passes.

Every rank has all weights. Its passes are those of a single process, recorded where these are (decision
0088), so that its GPU does not wait for Python. Gradients are reduce-scattered bucket by bucket: during the
backward pass if a step has one micro-batch, and recorded with it. Each rank steps its part of each bucket's
fp32 weights, and gathers a bucket's weights while it steps the next one's.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.data.batch import MicroBatch
from shardwise.engines.ddp_zero1.memory import aligned, buckets_of, formats, overlaps, part_of
from shardwise.engines.runtime.adamw import Stage
from shardwise.engines.runtime.base import all_gather, reduce_scatter
from shardwise.engines.runtime.parameters import Fill, trainable
from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import Part
from shardwise.engines.single.runtime import SingleEngine, add_to
from shardwise.models.structure import DTYPES


class Bucket:
    """Trained weights of one format, one after the other, and their gradients; each rank steps a part."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], world: World, *, sums: torch.dtype, sent: torch.dtype
    ) -> None:
        """Moves the weights here. Their gradients are added up in `sums`, and sent in `sent`."""
        part = part_of((weight.numel() for weight in weights.values()), world.size)
        self._sent_in, self._own = sent, slice(world.rank * part, (world.rank + 1) * part)
        some = next(iter(weights.values())).detach()
        self._weights = some.new_zeros(part * world.size)
        self._places: dict[str, tuple[torch.Size, int]] = {}
        at = 0
        for name, weight in weights.items():
            self._places[name], at = (weight.shape, at), at + aligned(weight.numel())
            weight.data = self._view(self._weights, name).copy_(weight.detach())
        self.master = self._weights[self._own].float()  # of fp32 weights the same memory
        self.rounded = None if some.dtype == torch.float32 else self._weights[self._own]
        self._sent = self._gradients = torch.zeros_like(self._weights, dtype=sums)
        self.names = self._places.keys()
        self.missing = set[str]()  # Whose gradient is not there yet in this backward pass

    def gradients(self) -> dict[str, torch.Tensor]:
        """Where each weight's gradients belong."""
        return {name: self._view(self._gradients, name) for name in self._places}

    def _view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        shape, at = self._places[name]
        return flat[at : at + shape.numel()].view(shape)

    def pieces(self, part: torch.Tensor) -> Iterator[tuple[str, Part, torch.Tensor]]:
        """What this rank's part has of each weight: its name, which elements these are, and the elements."""
        for name, (shape, at) in self._places.items():
            first, end = max(at, self._own.start), min(at + shape.numel(), self._own.stop)
            if first < end:
                own = part[first - self._own.start : end - self._own.start]
                yield name, Part(tuple(shape), begin=first - at), own

    def reset(self) -> None:
        """A backward pass begins that is the only one of its step."""
        self.missing = set(self._places)

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Copy the weight's gradient, which is complete: less to read and write than to clear and to add."""
        assert weight.grad is not None
        self._view(self._gradients, name).copy_(weight.grad)
        weight.grad = None
        self.missing.remove(name)

    def reduce(self) -> dist.Work:
        """Begin to sum the gradients over the ranks. Collective."""
        for name in self.missing:  # an expert without tokens
            self._view(self._gradients, name).zero_()
        self._sent = self._gradients.to(self._sent_in)
        work: dist.Work = reduce_scatter(self._sent[self._own], self._sent, async_op=True)
        return work

    def reduced(self) -> torch.Tensor:
        """This rank's part of the sum, as it was sent."""
        sent, self._sent = self._sent, self._gradients
        part = sent[self._own]
        return part if sent is self._gradients else part.clone()  # and frees the rest

    def publish(self) -> dist.Work:
        """Begin to give every rank the weights that all have stepped. Collective."""
        work: dist.Work = all_gather(self._weights, self._weights[self._own], async_op=True)
        return work


class DdpZero1Engine(SingleEngine):
    """A replica on each rank, and a part of the optimizer's state."""

    sharded = True

    def _prepare(
        self, blocks: Sequence[nn.Module], fill: Fill
    ) -> tuple[dict[str, torch.Tensor], Collection[str]]:
        for part in (*blocks, self.module):
            fill(part, self.world.device)
        weights = trainable(self.module)
        sizes = {name: (weight.numel(), weight.dtype) for name, weight in weights.items()}
        self._buckets = [self._bucket({name: weights[name] for name in names}) for names in buckets_of(sizes)]
        self._next, self._works = 0, list[dist.Work]()
        pieces = [piece for bucket in self._buckets for piece in bucket.pieces(bucket.master)]
        self._places = {name: part for name, part, _ in pieces}
        self._masters = {name: piece for name, _, piece in pieces}
        for master in self._masters.values():
            master.grad_dtype = None  # as it was sent
        totals = []
        for bucket in self._buckets:
            for name, total in bucket.gradients().items():
                if overlaps(self._strategy):
                    complete = partial(self._complete, bucket, name)
                    weights[name].register_post_accumulate_grad_hook(complete)
                else:
                    totals.append(add_to(total, weights[name]))
        self._record_into(totals)
        return self._masters, ()

    def _rounded(self) -> dict[str, torch.Tensor]:
        kept = [(bucket, bucket.rounded) for bucket in self._buckets if bucket.rounded is not None]
        return {name: low for bucket, own in kept for name, _, low in bucket.pieces(own)}

    def _bucket(self, weights: Mapping[str, nn.Parameter]) -> Bucket:
        item = next(iter(weights.values())).dtype.itemsize
        sums, sent = (DTYPES[one] for one in formats(item, self._strategy))
        return Bucket(weights, self.world, sums=sums, sent=sent)

    def _that_stay(self, *, recorded: bool) -> list[torch.Tensor]:
        summed = () if overlaps(self._strategy) else self._buckets
        return [total for bucket in summed for total in bucket.gradients().values()]

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        self._next = 0
        for bucket in self._buckets if overlaps(self._strategy) else ():
            bucket.reset()
        return super()._loss(micro_batch)

    def _complete(self, bucket: Bucket, name: str, weight: torch.Tensor) -> None:
        bucket.take(name, weight)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """In the same order on all ranks, whichever weights had gradients."""
        self._works.append(self._buckets[self._next].reduce())
        self._next += 1

    def _end_passes(self) -> None:
        if overlaps(self._strategy):
            while self._next < len(self._buckets):
                self._reduce_next()
            _wait(self._works)

    def _collect_gradients(self) -> None:
        self._end_passes()
        for bucket in self._buckets:
            if not overlaps(self._strategy):
                bucket.reduce().wait()
            for name, _, gradient in bucket.pieces(bucket.reduced()):
                self._masters[name].grad = gradient

    def _stages(self) -> Sequence[Stage]:
        return [Stage(bucket.names, partial(self._publish_one, bucket)) for bucket in self._buckets]

    def _publish_one(self, bucket: Bucket) -> None:
        self._works.append(bucket.publish())

    @torch.no_grad()
    def _publish(self) -> None:
        for bucket in () if self._works else self._buckets:  # after loading
            self._publish_one(bucket)
        _wait(self._works)

    def _parts(self) -> dict[str, Part]:
        return {name: self._places[name] for name in self._optimizer.parameters}

    def config(self) -> dict[str, Any]:
        reduce_dtype = self._strategy.reduced_in(self._strategy.precision)
        return {**super().config(), "reduce_dtype": reduce_dtype}


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
