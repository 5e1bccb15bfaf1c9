"""Seconds of collectives: latency and rate of the links, and the algorithms NCCL runs over them.

A ring of N GPUs passes each of N parts on N - 1 times, so a GPU sends (N - 1) / N of the bytes; an
all-reduce is a reduce-scatter and an all-gather (Thakur, Rabenseifner, Gropp 2005). Over several nodes NCCL
lays one ring for each network adapter, each entering and leaving a node elsewhere: between nodes the rings
share the node's adapters. For small all-reduces NCCL takes its tree, a chain within a node and a binary tree
between nodes (src/graph/tuning.cc, ncclTopoTuneModel, NCCL 2.30). Not modelled: NVLink SHARP and other
reductions in a switch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.hardware.hardware import Hardware, Link

BASE_SECONDS = 8.4e-6
"""What a collective takes before its first byte: tuning.cc, baseLat of the ring with the Simple protocol."""

TREE_RATE = 0.92
"""Of the ring's rate: tuning.cc, what the tree's Simple protocol is held to."""

QUANTIZED_GROUP = 8000
"""Weights that share one scale: deepspeed 0.19, CUDAQuantizer.target_group_size."""

SCALE_BYTES = 4


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
        """What a ring through all members carries."""
        if self.nodes == 1:
            return self.intra.bytes_per_second
        between = self._network.bytes_per_second * self.per_node
        return between if self.per_node == 1 else min(self.intra.bytes_per_second, between)

    @property
    def slowest(self) -> Link:
        """The link that holds such a ring up."""
        between = self.per_node == 1 or self.bytes_per_second < self.intra.bytes_per_second
        return self._network if self.nodes > 1 and between else self.intra

    @property
    def ring_latency_seconds(self) -> float:
        """Of N - 1 steps, of which one less than there are nodes goes between nodes."""
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
    def within_node(self) -> Group:
        """The members of one node."""
        return Group(per_node=self.per_node, nodes=1, intra=self.intra, inter=None)

    @property
    def across_nodes(self) -> Group:
        """One member of each node."""
        return Group(per_node=1, nodes=self.nodes, intra=self.intra, inter=self.inter)

    @property
    def _network(self) -> Link:
        assert self.inter is not None
        return self.inter


def group(hardware: Hardware, size: int, *, stride: int = 1) -> Group:
    """The group of ranks 0, stride, 2 stride, ...; ranks are dealt out node by node.

    With tensor parallelism over t GPUs its groups have stride 1 and the data-parallel ones stride t. A
    machine of fewer GPUs than ranks counts as having as many nodes as it takes, over the slowest link it has.
    """
    per_node = min(size, max(1, hardware.gpus_per_node // stride))
    nodes = math.ceil(size / per_node)
    inter = hardware.inter or hardware.intra
    return Group(per_node=per_node, nodes=nodes, intra=hardware.intra, inter=inter if nodes > 1 else None)


def all_gather(num_bytes: float, group: Group) -> float:
    """Seconds until every member has `num_bytes`, of which each brought an equal part."""
    if group.size == 1:
        return 0.0
    share = (group.size - 1) / group.size
    return BASE_SECONDS + group.ring_latency_seconds + num_bytes * share / group.bytes_per_second


def reduce_scatter(num_bytes: float, group: Group) -> float:
    """Seconds until each member has its part of the sum of everyone's `num_bytes`: a gather run backwards."""
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


def reduce(num_bytes: float, group: Group) -> float:
    """Seconds until one member has the sum of everyone's `num_bytes`: a broadcast run backwards."""
    return broadcast(num_bytes, group)


def broadcast(num_bytes: float, group: Group) -> float:
    """Seconds until every member has the `num_bytes` of one, passed along the ring piece by piece."""
    if group.size == 1:
        return 0.0
    return BASE_SECONDS + group.ring_latency_seconds + num_bytes / group.bytes_per_second


def all_to_all(num_bytes: float, group: Group) -> float:
    """Seconds until each member's `num_bytes`, a part for every member, are where they belong.

    All messages are on their way together; those within a node and those between nodes take different links.
    """
    if group.size == 1:
        return 0.0
    part = num_bytes / group.size
    within = part * (group.per_node - 1) / group.intra.bytes_per_second
    if group.nodes == 1:
        return BASE_SECONDS + group.intra.latency_seconds + within
    network = group._network
    between = part * (group.size - group.per_node) / network.bytes_per_second
    return BASE_SECONDS + network.latency_seconds + max(within, between)


# ZeRO++ (Wang et al. 2023, arXiv:2306.10209) as deepspeed 0.19 does it


def quantized_all_gather(elements: float, group: Group) -> float:
    """Seconds to gather `elements` weights as int8 with their scales (qwZ, zero_quantized_weights)."""
    return all_gather(elements * (1 + SCALE_BYTES / QUANTIZED_GROUP), group)


def secondary_all_gather(num_bytes: float, group: Group) -> float:
    """Seconds to gather weights of which every node holds a whole copy (hpZ, zero_hpz_partition_size)."""
    return all_gather(num_bytes, group.within_node)


def quantized_reduce(elements: float, group: Group) -> float:
    """Seconds to sum and scatter `elements` gradients as int4 (qgZ, zero_quantized_gradients).

    Twice all-to-all: among the GPUs of a node, then each GPU's part between nodes. Scales, one for each row
    of a weight, are left out.
    """
    within = all_to_all(elements / 2, group.within_node)
    return within + all_to_all(elements / 2 / group.per_node, group.across_nodes)


# Partitions smaller than the world: MiCS (Zhang et al. 2022, arXiv:2205.00119) and FSDP's hybrid sharding


def hierarchical_all_gather(num_bytes: float, group: Group) -> float:
    """Seconds to gather in two stages (MiCS): among the GPUs of one place in each node, then within it."""
    between = all_gather(num_bytes / group.per_node, group.across_nodes)
    return between + all_gather(num_bytes, group.within_node)


def hybrid_reduce(num_bytes: float, shards: Group, replicas: Group) -> float:
    """Seconds to sum gradients over shard groups that are copies of each other.

    They are scattered within each group, then every part is all-reduced among those that hold it.
    """
    return reduce_scatter(num_bytes, shards) + all_reduce(num_bytes / shards.size, replicas)
