"""From a strategy to a running engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.engines import descriptor
from shardwise.engines.runtime.parameters import Fill
from shardwise.engines.runtime.protocol import Engine, World
from shardwise.job import schema
from shardwise.strategy import Strategy


def build_engine(
    strategy: Strategy,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    fill: Fill,
    optimizer: schema.Optimizer,
    world: World,
) -> Engine:
    """Fills and shards `module`, and gives it an optimizer. Collective.

    `module` is on the meta device and, called with a MicroBatch, returns the summed cross entropy
    as an fp32 scalar. `blocks` are its repeated layers: they are filled and sharded one after the
    other, so that no device ever holds more than its share and one block.
    """
    return descriptor(strategy).runtime()(  # type: ignore[call-arg]
        strategy, module, blocks, fill, optimizer, world
    )
