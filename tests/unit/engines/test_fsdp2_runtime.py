"""What FSDP2 is told before a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.engines.fsdp2.runtime import FsdpEngine
from shardwise.strategy import Strategy


class Root:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.append((name, value))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, []),
        ({"shard_group": 2}, ["set_requires_all_reduce"]),
        ({"shard_group": 2, "reshard": False}, ["set_requires_all_reduce", "set_reshard_after_backward"]),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_groups_are_summed_over_in_the_last_micro_batch_only(
    values: dict[str, Any], told: list[str], last: bool
) -> None:
    engine = FsdpEngine.__new__(FsdpEngine)
    engine._strategy = Strategy(engine="fsdp2", data_parallel=4, **values)
    engine._root = root = Root()  # type: ignore[assignment]
    engine._begin(last=last)
    assert root.told == [(name, last) for name in told]
