"""Seconds of collectives: latency and rate of the links, and the algorithms NCCL runs over them.

A ring of N GPUs passes each of N parts on N - 1 times, so a GPU sends (N - 1) / N of the bytes; an
all-reduce is a reduce-scatter and an all-gather (Thakur, Rabenseifner, Gropp 2005). Over several nodes NCCL
lays one ring for each network adapter: between nodes the rings share the node's adapters. For small
all-reduces NCCL takes its tree, a chain within a node and a binary tree between nodes, and for few bytes on
many GPUs a protocol with faster messages and a lower rate (src/graph/tuning.cc, ncclTopoTuneModel, NCCL
2.30). Like NCCL, the functions take what is fastest. Not modelled: reductions in a switch, as NVLink SHARP.
"""

import math
from dataclasses import dataclass

from shardwise.hardware.hardware import Hardware, Link

BASE_SECONDS = 8.4e-6
"""Seconds before the first byte: tuning.cc, baseLat of the ring with the Simple protocol."""

TREE_RATE = 0.92
"""Share of the ring's rate that the tree's Simple protocol reaches: tuning.cc."""

LL128_BASE_SECONDS, LL128_RATE = 14.0e-6, 0.92
LL128_NVLINK, LL128_NETWORK = 1.9 / 3.4, 4.0 / 14.0
"""NCCL's protocol LL128: seconds before the first byte, share of the rate, and its latencies of a step as
shares of the Simple protocol's (tuning.cc, baseLat and hwLat of the ring). NCCL has it on NVLink only."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """GPUs that run a collective together, the same number in each node.

    Where a node holds members of several such groups (tensor parallelism, replicas), all of them communicate
    at the same time, so that each member has its own share of the adapters: `inter` is the rate of one GPU.
    """

    per_node: int
    nodes: int
    intra: Link
    inter: Link | None

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    @property
    def is_pair(self) -> bool:
        """Whether it is two GPUs of one node."""
        return self.size == self.per_node == 2

    @property
    def bytes_per_second(self) -> float:
        """Rate of a ring through all members."""
        if self.nodes == 1:
            return self.intra.bytes_per_second
        between = self._network.bytes_per_second * self.per_node
        return between if self.per_node == 1 else min(self.intra.bytes_per_second, between)

    @property
    def slowest(self) -> Link:
        """The link that limits such a ring."""
        between = self.per_node == 1 or self.bytes_per_second < self.intra.bytes_per_second
        return self._network if self.nodes > 1 and between else self.intra

    @property
    def ring_latency_seconds(self) -> float:
        """N - 1 steps; one less than the number of nodes goes between nodes."""
        return self._ring_latency(1.0, 1.0)

    @property
    def ll128_latency_seconds(self) -> float | None:
        """The same under LL128; None where NCCL does not use it."""
        nvlink = self.intra.name.startswith("nvlink") and self.per_node > 1
        return self._ring_latency(LL128_NVLINK, LL128_NETWORK) if nvlink else None

    def _ring_latency(self, intra: float, inter: float) -> float:
        within = (self.per_node - 1) * self.nodes * self.intra.latency_seconds * intra
        between = self._network.latency_seconds * inter if self.nodes > 1 else 0.0
        return within + (self.nodes - 1) * between

    @property
    def tree_latency_seconds(self) -> float:
        """Up a chain within the node and a binary tree between nodes."""
        within = (self.per_node - 1) * self.intra.latency_seconds
        between = self._network.latency_seconds if self.nodes > 1 else 0.0
        return within + math.ceil(math.log2(self.nodes)) * between

    @property
    def _network(self) -> Link:
        assert self.inter is not None
        return self.inter


def group(hardware: Hardware, size: int, *, stride: int = 1) -> Group:
    """The group of ranks 0, stride, 2 stride, ...; ranks are dealt out node by node.

    With tensor parallelism over t GPUs its groups have stride 1 and the data-parallel ones stride t. Where
    there are fewer GPUs than ranks, more nodes of the same kind are assumed, over the slowest link.
    """
    per_node = min(size, max(1, hardware.gpus_per_node // stride))
    nodes = math.ceil(size / per_node)
    inter = hardware.inter or hardware.intra
    return Group(per_node=per_node, nodes=nodes, intra=hardware.intra, inter=inter if nodes > 1 else None)


def all_gather(num_bytes: float, group: Group) -> float:
    """Seconds until every member has `num_bytes`, each starting with an equal part."""
    share = group.intra.pair_gather_share if group.is_pair else 1.0
    return 0.0 if group.size == 1 else _ring(num_bytes / share, group, rounds=1)


def reduce_scatter(num_bytes: float, group: Group) -> float:
    """Seconds until each member has its part of the sum of everyone's `num_bytes`: a reversed gather."""
    return all_gather(num_bytes, group)


def all_reduce(num_bytes: float, group: Group) -> float:
    """Seconds until every member has the sum of everyone's `num_bytes`, by ring or tree, the faster."""
    if group.size == 1:
        return 0.0
    share = group.intra.pair_share if group.is_pair else 1.0
    tree = group.tree_latency_seconds + num_bytes / share / (TREE_RATE * group.bytes_per_second)
    return min(_ring(num_bytes / share, group, rounds=2), BASE_SECONDS + 2 * tree)


def _ring(num_bytes: float, group: Group, *, rounds: int) -> float:
    """`rounds` times round the ring, by the faster protocol."""
    sent = num_bytes * (group.size - 1) / group.size / group.bytes_per_second
    simple = BASE_SECONDS + rounds * (group.ring_latency_seconds + sent)
    latency = group.ll128_latency_seconds
    if latency is None:
        return simple
    return min(simple, LL128_BASE_SECONDS + rounds * (latency + sent / LL128_RATE))
