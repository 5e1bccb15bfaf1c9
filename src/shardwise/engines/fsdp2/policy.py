"""When FSDP2 gathers and releases, as `runtime.py` sets it up: read by memory.py and time.py.

The groups are `StepTrace.parts`: each block, and last the root, everything outside the blocks. A block's
parameters are asked for one block ahead (FSDPState: set_modules_to_forward_prefetch,
set_modules_to_backward_prefetch); the root stays gathered for a micro-batch.
"""

from __future__ import annotations

from shardwise.strategy import Strategy


def gathered_ahead(block: int, blocks: int, *, backward: bool) -> range:
    """The block, if any, that is asked for before `block` computes; of so many `blocks`."""
    return range(max(block - 1, 0), block) if backward else range(block + 1, min(block + 2, blocks))


def released(strategy: Strategy, *, backward: bool, last: bool) -> bool:
    """Whether a group is released after a pass of it (FSDPParamGroup: post_forward, post_backward).

    Without resharding it stays gathered until the backward pass of the last micro-batch.
    """
    return strategy.reshard or (backward and last)
