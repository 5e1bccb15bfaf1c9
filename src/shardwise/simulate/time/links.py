"""Names of the links that the collectives of a step wait for."""

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.time.collectives import Group, group
from shardwise.strategy import Strategy


def slowest_links(hardware: Hardware, strategy: Strategy) -> tuple[str, str]:
    """Of data-parallel ranks and stages, or of a single GPU to its host; and of tensor parallelism."""
    to_peers = _slowest(group(hardware, strategy.tensor_parallel))
    if size := strategy.shard_group:  # weights from the group, sums over the groups
        across = group(hardware, strategy.data_parallel // size, stride=size)
        both = dict.fromkeys((_slowest(group(hardware, size)), _slowest(across)))
        return " and ".join(both), to_peers
    # Stages and data-parallel ranks together: a pipeline waits for both, over the slowest link.
    ranks = strategy.pipeline * strategy.data_parallel
    others = group(hardware, ranks, stride=strategy.tensor_parallel)
    return hardware.host_link.name if ranks == 1 else _slowest(others), to_peers


def _slowest(ranks: Group) -> str:
    """The slowest, and a network that a ring crosses at less than twice the rate of the links of a node."""
    inter, slowest = ranks.inter, ranks.slowest
    if inter is None or inter == slowest:
        return slowest.name
    close = inter.bytes_per_second * ranks.per_node < 2 * slowest.bytes_per_second
    return f"{slowest.name} and {inter.name}" if close else slowest.name
