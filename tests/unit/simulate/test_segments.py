"""A trace cut into segments: which backward passes compute the forward pass again."""

from __future__ import annotations

import pytest

from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.time.roofline import Host
from shardwise.simulate.time.segments import segments


@pytest.mark.parametrize(("every", "again"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (4, [0, 4])])
def test_blocks_that_compute_again_are_the_first_of_each_n(layers, every: int, again: list[int]) -> None:
    """Their backward pass has a forward pass in it: twice the visits, and the host's time to start it."""
    trace = layers(blocks=6, checkpoint_every=every)
    found = segments(trace, parse_hardware("1xH200").gpu, 1.0)
    blocks = {trace.units[one.unit].block: one for one in found if one.backward and one.unit >= 0}
    assert sorted(block for block, one in blocks.items() if one.passes == 2) == again
    host, product = Host(1.0), trace.ops[0]
    plain = 2 * host.backward(product)
    for block in range(6):
        more = host.forward(product) + host.seconds("checkpoint") if block in again else 0.0
        assert blocks[block].host_seconds == pytest.approx(plain + more)
