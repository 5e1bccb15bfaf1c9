"""From a strategy to a running engine: the one place that chooses between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.engine.parameters import Fill
from shardwise.engine.protocol import Engine, World
from shardwise.job import schema
from shardwise.strategy.strategy import Strategy


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
    if strategy.engine == "deepspeed":
        from shardwise.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(strategy, module, blocks, fill, optimizer, world)
    if strategy.engine == "fsdp2":
        from shardwise.engine.fsdp import FsdpEngine

        return FsdpEngine(strategy, module, blocks, fill, optimizer, world)
    from shardwise.engine.single import SingleEngine

    return SingleEngine(strategy, module, blocks, fill, optimizer, world)
