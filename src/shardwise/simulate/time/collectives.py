"""Seconds of collectives: latency and rate of the links, and the algorithms NCCL runs over them.

A ring of N GPUs passes each of N parts on N - 1 times, so a GPU sends (N - 1) / N of the bytes; an
all-reduce is a reduce-scatter and an all-gather (Thakur, Rabenseifner, Gropp 2005). Over several nodes NCCL
lays one ring for each network adapter: between nodes the rings share the node's adapters. For small
all-reduces NCCL takes its tree, a chain within a node and a binary tree between nodes (src/graph/tuning.cc,
ncclTopoTuneModel, NCCL 2.30). Not modelled: NVLink SHARP and other reductions in a switch.
"""

import math
from dataclasses import dataclass

from shardwise.hardware.hardware import Hardware, Link

BASE_SECONDS = 8.4e-6
"""Seconds before the first byte: tuning.cc, baseLat of the ring with the Simple protocol."""

TREE_RATE = 0.92
"""Share of the ring's rate that the tree's Simple protocol reaches: tuning.cc."""


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
        within = (self.per_node - 1) * self.nodes * self.intra.latency_seconds
        return within if self.nodes == 1 else within + (self.nodes - 1) * self._network.latency_seconds

    @property
    def tree_latency_seconds(self) -> float:
        """Up a chain within the node and a binary tree between nodes."""
        within = (self.per_node - 1) * self.intra.latency_seconds
        if self.nodes == 1:
            return within
        return within + math.ceil(math.log2(self.nodes)) * self._network.latency_seconds

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
    if group.size == 1:
        return 0.0
    share = (group.size - 1) / group.size
    return BASE_SECONDS + group.ring_latency_seconds + num_bytes * share / group.bytes_per_second


def reduce_scatter(num_bytes: float, group: Group) -> float:
    """Seconds until each member has its part of the sum of everyone's `num_bytes`: a reversed gather."""
    return all_gather(num_bytes, group)


def all_reduce(num_bytes: float, group: Group) -> float:
    """Seconds until every member has the sum of everyone's `num_bytes`, by ring or tree, the faster."""
    if group.size == 1:
        return 0.0
    rate = group.bytes_per_second
    share = (group.size - 1) / group.size
    ring = 2 * (group.ring_latency_seconds + num_bytes * share / rate)
    tree = 2 * (group.tree_latency_seconds + num_bytes / (TREE_RATE * rate))
    return BASE_SECONDS + min(ring, tree)
