"""Small traces made by hand, as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.simulate.step_trace import (
    BACKWARD,
    FORWARD,
    FORWARD_END,
    GRADIENT,
    OP,
    Event,
    Op,
    Parameter,
    StepTrace,
    Unit,
)


def _product(m: int, n: int, k: int, *, batch: int = 1, item_bytes: int = 2) -> Op:
    """[batch, m, k] times [batch, k, n]."""
    return Op(
        kind="matmul",
        flops=2.0 * batch * m * n * k,
        read_bytes=batch * (m * k + k * n) * item_bytes,
        written_bytes=batch * m * n * item_bytes,
        item_bytes=item_bytes,
        shape=(batch, m, n, k),
        name="mm",
    )


def _layers(
    *,
    blocks: int = 8,
    width: int = 4096,
    tokens: int = 4096,
    checkpoint_every: int = 0,
    trainable: bool = True,
    tail: tuple[Op, ...] = (),
) -> StepTrace:
    """Blocks of one square matrix each, and a trainable embedding of 1024 rows outside them.

    The forward pass of a block is one product, its backward pass two, one more if it is checkpointed. `tail`:
    further operators at the beginning of each forward pass.
    """
    parameters = [Parameter(name="embedding", shape=(1024, width), item_bytes=2, trainable=True)]
    units = [Unit(name="embedding", block=-1, parameters=(0,))]
    for block in range(blocks):
        name = f"blocks.{block}"
        parameters.append(Parameter(name=name, shape=(width, width), item_bytes=2, trainable=trainable))
        units.append(Unit(name=name, block=block, parameters=(block + 1,)))
    events: list[Event] = [(FORWARD, 0), *((OP, 1 + index) for index in range(len(tail))), (FORWARD_END, 0)]
    for unit in range(1, blocks + 1):
        events += [(FORWARD, unit), (OP, 0), (FORWARD_END, unit)]
    for unit in range(blocks, 0, -1):
        again = checkpoint_every > 0 and (unit - 1) % checkpoint_every == 0
        events += [(BACKWARD, unit), *[(OP, 0)] * (3 if again else 2)]
        events += [(GRADIENT, unit, 0)] if trainable else []
    events += [(BACKWARD, 0), (GRADIENT, 0, 0)]
    return StepTrace(
        parameters=tuple(parameters),
        buffers=(),
        units=tuple(units),
        events=tuple(events),
        ops=(_product(tokens, width, width), *tail),
        rows=1,
        sequence_length=tokens,
        checkpoint_every=checkpoint_every,
        precision="bf16",
    )


@pytest.fixture
def product() -> Callable[..., Op]:
    """`product(m, n, k, batch=, item_bytes=)`: a matrix product as an operator."""
    return _product


@pytest.fixture
def layers() -> Callable[..., StepTrace]:
    """`layers(blocks=, width=, tokens=, ...)`: a trace of square matrices, see `_layers`."""
    return _layers
