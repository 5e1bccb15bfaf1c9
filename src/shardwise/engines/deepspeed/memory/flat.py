"""ZeRO-1 and 2's layout of parameters: one flat buffer in equal parts, one for each rank.

Modelled is one parameter group. Weight decay makes two (engines/runtime/parameters.py), laid out alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shardwise.simulate.step_trace import StepTrace

ALIGNMENT = 2
"""Elements a partition's size is a multiple of (stage_1_and_2.py: nccl_start_alignment_factor)."""


@dataclass(frozen=True)
class Flat:
    """Trainable parameters, one after the other, padded so that `world` equal partitions result."""

    trace: StepTrace
    world: int

    @cached_property
    def offsets(self) -> dict[int, int]:
        """First element of each trainable parameter."""
        offsets: dict[int, int] = {}
        end = 0
        for index in self.trace.trainable:
            offsets[index] = end
            end += self.trace.parameters[index].numel
        return offsets

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer (flatten_dense_tensors_aligned)."""
        total = sum(self.trace.parameters[index].numel for index in self.trace.trainable)
        step = ALIGNMENT * self.world
        return -(-total // step) * step

    @property
    def partition(self) -> int:
        """Elements of a rank's part."""
        return self.numel // self.world

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(rank, elements) of the partitions that a parameter lies in (initialize_gradient_partition)."""
        start = self.offsets[index]
        end = start + self.trace.parameters[index].numel
        size = self.partition
        ranks = range(start // size, (end - 1) // size + 1)
        return [(rank, min(end, (rank + 1) * size) - max(start, rank * size)) for rank in ranks]

    def owned(self, rank: int) -> list[int]:
        """Parameters that are at least partly in a rank's partition (get_partition_info)."""
        return [index for index in self.offsets if any(owner == rank for owner, _ in self.pieces(index))]

    def slices(self, bucket: Iterable[int], *, joined: bool, rank: int) -> list[tuple[int, int]]:
        """(rank, elements) of the slices of a bucket that are reduced for one rank (average_tensor).

        Args:
            bucket: parameters in the order of their gradients.
            joined: adjacent slices of `rank` are one, as those of other ranks always are.
            rank: whose memory is modelled.
        """
        found: list[tuple[int, int]] = []
        for index in bucket:
            for owner, numel in self.pieces(index):
                if found and found[-1][0] == owner and (joined or owner != rank):
                    found[-1] = (owner, found[-1][1] + numel)
                else:
                    found.append((owner, numel))
        return found
